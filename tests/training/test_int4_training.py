"""A model trained as int4: its masters learn, and its files hold what it was trained as."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_import import load_hf
from glm5_jax.model import glm5, quant
from glm5_jax.parallel.tree import flatten
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig, make_schedule
from glm5_jax.training.step import make_step
from tests.mesh import cases

CFG = cases.small("dense", int4_group=4)


@pytest.fixture(scope="module")
def trained():
    """The weights before and after three steps, and the losses."""
    config = dataclasses.replace(cases.STEP, index_weight=0.0, remat="none")
    rates = ScheduleConfig(kind="constant", peak=1e-4, warmup_steps=0, total_steps=3)
    step = make_step(CFG, config, OptimizerConfig(ns_dtype="float32"), make_schedule(rates))
    state = step.initialise(jax.random.key(0), jax.tree.map(jnp.asarray, cases.params(CFG)))
    before, losses = jax.device_get(state["params"]), []
    for _ in range(3):
        state, metrics = step.train(state, cases.batch())
        losses.append(float(metrics["loss"]["total"]))
    return flatten(before), state["params"], losses


def imitated(w):
    return np.asarray(jax.jit(quant.quantize_dequantize, static_argnums=1)(w, CFG.int4_group))


@pytest.mark.slow
def test_masters_move_by_less_than_int4_can_show_and_the_loss_falls(trained):
    """Weights that were rounded where they are stored would stay where they are at this rate."""
    before, params, losses = trained
    for path, w in flatten(params).items():
        if "/experts/" not in path:
            continue
        moved = np.abs(w - before[path])
        assert 0 < moved.max() < 1e-3, path
        assert np.any(w != imitated(w)), path
        still = imitated(w) == imitated(before[path])
        assert 0 < still.mean() < 1 and (moved[still] > 0).any(), path
    assert losses[2] < losses[1] < losses[0]


def test_files_hold_what_training_computes_with(tmp_path):
    params = cases.params(CFG)
    save_hf(params, tmp_path / "out", cfg=CFG)
    model = load_hf(tmp_path / "out")
    assert model.cfg == CFG
    loaded = flatten(glm5.params_of(model))
    for path, w in flatten(params).items():
        want = imitated(w) if "/experts/" in path else np.asarray(w)
        assert np.asarray(loaded[path]).tobytes() == want.tobytes(), path
        if "/experts/" in path:
            assert imitated(loaded[path]).tobytes() == want.tobytes(), path
    tokens = cases.batch()["token_ids"][:2]
    plain = dataclasses.replace(CFG, int4_group=None)
    run = jax.jit(lambda p, c: glm5.forward(p, tokens, c).logits, static_argnums=1)
    want = np.asarray(run(params, CFG))
    for cfg in (CFG, plain):
        assert np.asarray(run(glm5.params_of(model), cfg)).tobytes() == want.tobytes()
