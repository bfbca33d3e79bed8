"""Tests of int4 training: updates of the master weights, and exported weights."""

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
    """Returns the weights before and after three steps, and the losses."""
    config = dataclasses.replace(cases.STEP, index_weight=0.0, remat="none")
    rates = ScheduleConfig(kind="constant", peak=1e-4, warmup_steps=0, total_steps=3)
    step = make_step(CFG, config, OptimizerConfig(ns_dtype="float32"), make_schedule(rates))
    state = step.initialise(jax.random.key(0), jax.tree.map(jnp.asarray, cases.params(CFG)))
    before, losses = jax.device_get(state["params"]), []
    for _ in range(3):
        state, metrics = step.train(state, cases.batch())
        losses.append(float(metrics["loss"]["total"]))
    return flatten(before), state["params"], losses


def fake_quantized(w):
    return np.asarray(jax.jit(quant.quantize_dequantize, static_argnums=1)(w, CFG.int4_group))


@pytest.mark.slow
def test_master_weights_move_below_int4_resolution(trained):
    """At this learning rate weights stored as int4 would never change."""
    before, params, losses = trained
    for path, w in flatten(params).items():
        if "/experts/" not in path:
            continue
        moved = np.abs(w - before[path])
        assert 0 < moved.max() < 1e-3, path
        assert np.any(w != fake_quantized(w)), path
        same_int4 = fake_quantized(w) == fake_quantized(before[path])
        assert 0 < same_int4.mean() < 1 and (moved[same_int4] > 0).any(), path
    assert losses[2] < losses[1] < losses[0]


def test_exported_int4_weights_equal_training_weights(tmp_path):
    params = cases.params(CFG)
    save_hf(params, tmp_path / "out", cfg=CFG)
    model = load_hf(tmp_path / "out")
    assert model.cfg == CFG
    loaded = flatten(glm5.params_of(model))
    for path, w in flatten(params).items():
        want = fake_quantized(w) if "/experts/" in path else np.asarray(w)
        assert np.asarray(loaded[path]).tobytes() == want.tobytes(), path
        if "/experts/" in path:
            assert fake_quantized(loaded[path]).tobytes() == want.tobytes(), path
    tokens = cases.batch()["token_ids"][:2]
    plain = dataclasses.replace(CFG, int4_group=None)
    run = jax.jit(lambda p, c: glm5.forward(p, tokens, c).logits, static_argnums=1)
    want = np.asarray(run(params, CFG))
    for cfg in (CFG, plain):
        assert np.asarray(run(glm5.params_of(model), cfg)).tobytes() == want.tobytes()
