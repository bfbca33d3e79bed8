"""Training with adapters: their gradients, what a step changes, and what the state holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import LoraConfig
from glm5_jax.model import glm5, lora
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.training.gradients import gradient_function
from glm5_jax.training.optimizer import OptimizerConfig, groups_of
from glm5_jax.training.schedule import TwoPhaseConfig
from glm5_jax.training.step import make_step
from tests.mesh import cases

ALL = LoraConfig(rank=3, alpha=7.5, targets=("/(attn|shared|experts)/",))
CFG = cases.small("dense", index_topk=None, indexer_types=None, lora=ALL)
STEP = dataclasses.replace(
    cases.STEP,
    index_weight=0.0,
    mtp_steps=0,
    bias_update_rate=TwoPhaseConfig(before=0.1, after=0.1),
    query_block=cases.LENGTH,
    remat="none",
)


@functools.cache
def params(cfg=CFG):
    """Weights of cases.params; the second matrix of each adapter is random, too."""
    noise = np.random.default_rng(2)

    def draw(path, x):
        return 0.1 * noise.standard_normal(x.shape, np.float32) if lora.is_adapter(path) else x

    return map_with_path(draw, cases.params(cfg))


def product_rule(path, w_gradient, weights):
    """Gradients of A and B of a target: those of W through scale * A B, in float64."""
    a, b = np.float64(weights[lora.a_path(path)]), np.float64(weights[path + lora.B])
    batch = a.ndim + b.ndim - w_gradient.ndim - 2
    stacked = a.shape[:batch]
    a_flat = a.reshape(*stacked, -1, ALL.rank)
    b_flat = b.reshape(*stacked, ALL.rank, -1)
    dw = np.float64(w_gradient).reshape(*stacked, a_flat.shape[-2], b_flat.shape[-1])
    da = ALL.scale * dw @ np.swapaxes(b_flat, -1, -2)
    db = ALL.scale * np.swapaxes(a_flat, -1, -2) @ dw
    return da.reshape(a.shape), db.reshape(b.shape)


def test_gradients_follow_the_product_rule():
    run = jax.jit(gradient_function(CFG, STEP))
    gradients = flatten(jax.device_get(run(params(), cases.batch(), cases.RATES)[2]))
    weights, want = flatten(params()), {}
    for path in [p.removesuffix(lora.B) for p in weights if p.endswith(lora.B)]:
        da, db = product_rule(path, gradients[path], weights)
        # Targets with one A add their gradients up.
        want[lora.a_path(path)] = want.get(lora.a_path(path), 0) + da
        want[path + lora.B] = db
    assert want.keys() == {p for p in weights if lora.is_adapter(p)}
    for path, gradient in want.items():
        assert np.any(gradient), path
        np.testing.assert_allclose(
            gradients[path], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=path
        )


@pytest.fixture(scope="module")
def step():
    return make_step(CFG, STEP, OptimizerConfig(weight_decay=0.0), lambda _: jnp.float32(0.01))


@pytest.fixture(scope="module")
def trained(step):
    """(state before a step, state after it, metrics)."""
    state = step.initialise(jax.random.key(0), jax.tree.map(jnp.asarray, params()))
    before = jax.device_get(state)
    return before, *jax.device_get(step.train(state, cases.batch()))


def test_changes_only_adapters(trained):
    before, after, metrics = trained
    assert not metrics["skipped"] and metrics["grad_norm"].keys() == {"adamw"}
    after = flatten(after["params"])
    for path, old in flatten(before["params"]).items():
        assert np.array_equal(old, after[path]) != lora.is_adapter(path), path


def test_has_moments_of_adapters_only(step):
    moments = flatten(step.abstract["optimizer"])
    sizes = sum(np.prod(x.shape, dtype=int) for p, x in moments.items() if "count" not in p)
    adapters = {p: x for p, x in flatten(step.abstract["params"]).items() if lora.is_adapter(p)}
    assert sizes == 2 * sum(np.prod(x.shape, dtype=int) for x in adapters.values())


def test_holds_frozen_weights_once_in_compute_dtype():
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    state = make_step(cfg, STEP, OptimizerConfig(), lambda _: 0.0).abstract
    frozen = {p: x for p, x in flatten(state["params"]).items() if not lora.is_adapter(p)}
    assert {x.dtype.name for p, x in frozen.items() if "router/" not in p} == {"bfloat16"}
    wide = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
    adapters = [x for p, x in flatten(state["params"]).items() if lora.is_adapter(p)]
    routers = [x for p, x in frozen.items() if "router/" in p]
    assert (
        sum(x.size for x in wide)
        == 3 * sum(x.size for x in adapters) + sum(x.size for x in routers) + 1
    )  # tokens seen


def test_freezes_adapters_that_match_a_frozen_pattern():
    optimizer = OptimizerConfig(frozen=("experts/.*_lora_",))
    moments = flatten(make_step(CFG, STEP, optimizer, lambda _: 0.0).abstract["optimizer"])
    assert not any("experts" in path for path in moments)
    assert any("shared" in path for path in moments)


def test_draws_only_missing_weights():
    paths = [p for p in flatten(glm5.abstract_params(CFG)) if lora.is_adapter(p)]
    drawn = flatten(glm5.init_params(CFG, jax.random.key(3), paths=paths))
    every = flatten(glm5.init_params(CFG, jax.random.key(3)))
    assert sorted(drawn) == sorted(paths)
    assert all(np.array_equal(x, every[path]) for path, x in drawn.items())


def test_groups_train_adapters_and_score_head():
    letters = {"score": {"weight": "d"}, **glm5.axis_letters(CFG)}
    groups = flatten(groups_of(OptimizerConfig(), letters))
    trained = {path for path, group in groups.items() if group != "frozen"}
    assert trained == {p for p in groups if lora.is_adapter(p)} | {"score/weight"}
