"""Tests of the reset of the optimizer, which clears moments and preserves weights and schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import glm5
from glm5_jax.parallel import tree
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.training.optimizer import make_optimizer
from glm5_jax.training.schedule import ScheduleConfig, make_schedule
from glm5_jax.training.step import make_step, reset_optimizer
from tests.mesh import cases
from tests.oracles import muon as oracle
from tests.training.test_optimizer import LETTERS, float32_config, random_weights
from tests.training.test_step import RATES, TOKENS, build, initial_state

CONFIG = float32_config(adam_b1=0.8, adam_b2=0.9, adam_eps=1e-2, clip_norm=3.0)
OPTIMIZER = make_optimizer(CONFIG, LETTERS)


def trained(gradients):
    """Returns the optimizer's state after these gradients."""
    params = random_weights(0)
    state = {"params": params, "optimizer": OPTIMIZER.init(params), "step": jnp.int32(0)}
    for g in gradients:
        state = train_step(state, g)
    return state


@jax.jit
def train_step(state, g):
    """Updates weights with the step's learning rate, like `Step.train`."""
    updates, moments = OPTIMIZER.update(g, state["optimizer"], state["params"])
    rate = 0.1 / (1 + state["step"])
    params = jax.tree.map(lambda p, u: p + rate * u, state["params"], updates)
    return {"params": params, "optimizer": moments, "step": state["step"] + 1}


def test_first_update_after_reset_equals_fresh_optimizer():
    state = trained([random_weights(1), random_weights(2, 5.0), random_weights(3)])
    before = {p: np.asarray(x, np.float64) for p, x in tree.flatten(state["params"]).items()}
    state = reset_optimizer(state)
    assert int(state["step"]) == 3
    g = random_weights(4)
    got = tree.flatten(train_step(state, g)["params"])
    want, rate = dict(before), 0.1 / 4
    g = {p: np.asarray(x, np.float64) for p, x in tree.flatten(g).items()}
    for group in (
        ["embed/weight", "final_norm", "moe_layers/attn_norm"],
        ["moe_layers/indexer/k", "moe_layers/indexer/k_norm_bias"],
    ):
        for path, clipped in zip(group, oracle.clip([g[p] for p in group], 3.0)):
            decay = 0.1 if path in ("embed/weight", "moe_layers/indexer/k") else 0.0
            zero = np.zeros_like(clipped)
            # Both moments have the bias of a first step, so they cancel except for epsilon.
            want[path], *_ = oracle.adamw_step(
                want[path], zero, zero, 1, clipped, rate, 0.8, 0.9, 1e-2, decay=decay
            )
            update = clipped / (np.abs(clipped) + 1e-2) + decay * before[path]
            np.testing.assert_allclose(want[path], before[path] - rate * update, atol=1e-12)
    blocks = [("moe_layers/attn/q_b", np.s_[layer, :, n]) for layer in range(2) for n in range(3)]
    blocks += [("moe_layers/experts/down", np.s_[layer, e]) for layer in range(2) for e in range(8)]
    for path, at in blocks:
        weight, zero = want[path].copy(), np.zeros_like(g[path][at])
        weight[at], _ = oracle.muon_step(before[path][at], zero, g[path][at], rate)
        want[path] = weight
    assert want.keys() == got.keys()
    for path, x in got.items():
        np.testing.assert_allclose(x, want[path], atol=2e-6, err_msg=path)


def test_old_moments_give_another_update():
    """In every group the old momentum, moments and counts have an effect."""
    gradients = [random_weights(1), random_weights(2), random_weights(3)]
    state = trained(gradients)
    old, new = (
        train_step(change(state), random_weights(4)) for change in (lambda s: s, reset_optimizer)
    )
    for (path, a), b in zip(tree.flatten(old["params"]).items(), jax.tree.leaves(new["params"])):
        assert np.array_equal(a, b) == path.endswith("router/bias"), path


@pytest.mark.slow
def test_reset_changes_moments_only():
    step, batch = build(), cases.batch()
    state, _ = step.train(initial_state(step), batch)
    state, _ = step.train(state, batch)
    others = jax.device_get({k: v for k, v in state.items() if k != "optimizer"})
    old = state["optimizer"]
    programs = step.train._cache_size()
    state = reset_optimizer(state)
    fresh = initial_state(step)["optimizer"]
    assert jax.tree.structure(fresh) == jax.tree.structure(state["optimizer"])
    jax.tree.map(np.testing.assert_array_equal, fresh, state["optimizer"])
    jax.tree.map(np.testing.assert_array_equal, others, {k: state[k] for k in others})
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert (int(others["step"]), int(others["tokens"])) == (2, 2 * TOKENS)
    _, metrics = step.train(state, batch)
    assert float(metrics["learning_rate"]) == float(RATES(2)) and not metrics["skipped"]
    assert step.train._cache_size() == programs


def test_reset_preserves_shardings():
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    cfg = cases.small("dense")
    rates = make_schedule(
        ScheduleConfig(kind="constant", peak=1e-3, end=0, warmup_steps=0, total_steps=1)
    )
    step = make_step(cfg, cases.STEP, float32_config(), rates, mesh)
    params = jax.device_put(cases.params(cfg), glm5.param_shardings(cfg, mesh))
    state = step.initialise(jax.random.key(0), params)
    wanted = jax.tree.map(lambda x: x.sharding, step.abstract["optimizer"])
    state = reset_optimizer(state)
    got = jax.tree.map(lambda x: x.sharding, state["optimizer"])
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, got, wanted))
