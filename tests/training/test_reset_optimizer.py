"""An optimiser that begins anew after a push: moments go, weights and the schedule stay."""

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
from tests.training.test_optimizer import LETTERS, draw, exact
from tests.training.test_step import RATES, TOKENS, build, start

CONFIG = exact(adam_b1=0.8, adam_b2=0.9, adam_eps=1e-2, clip_norm=3.0)
OPTIMIZER = make_optimizer(CONFIG, LETTERS)


def trained(gradients):
    """The state of an optimiser after these gradients."""
    params = draw(0)
    state = {"params": params, "optimizer": OPTIMIZER.init(params), "step": jnp.int32(0)}
    for g in gradients:
        state = updated(state, g)
    return state


@jax.jit
def updated(state, g):
    """As `Step.train` does it: the rate is the step's."""
    updates, moments = OPTIMIZER.update(g, state["optimizer"], state["params"])
    rate = 0.1 / (1 + state["step"])
    params = jax.tree.map(lambda p, u: p + rate * u, state["params"], updates)
    return {"params": params, "optimizer": moments, "step": state["step"] + 1}


def test_the_first_update_is_that_of_a_fresh_optimiser_at_the_same_place_of_the_schedule():
    state = trained([draw(1), draw(2, 5.0), draw(3)])
    before = {p: np.asarray(x, np.float64) for p, x in tree.flatten(state["params"]).items()}
    state = reset_optimizer(state)
    assert int(state["step"]) == 3
    g = draw(4)
    got = tree.flatten(updated(state, g)["params"])
    want, rate = dict(before), 0.1 / 4
    g = {p: np.asarray(x, np.float64) for p, x in tree.flatten(g).items()}
    for group in (
        ["embed/weight", "final_norm", "moe_layers/attn_norm"],
        ["moe_layers/indexer/k", "moe_layers/indexer/k_norm_bias"],
    ):
        for path, clipped in zip(group, oracle.clip([g[p] for p in group], 3.0)):
            decay = 0.1 if path in ("embed/weight", "moe_layers/indexer/k") else 0.0
            zero = np.zeros_like(clipped)
            # The bias of both moments is that of a first step, so they cancel but for epsilon.
            want[path], *_ = oracle.adamw_step(
                want[path], zero, zero, 1, clipped, rate, 0.8, 0.9, 1e-2, decay=decay
            )
            sure = clipped / (np.abs(clipped) + 1e-2) + decay * before[path]
            np.testing.assert_allclose(want[path], before[path] - rate * sure, atol=1e-12)
    blocks = [("moe_layers/attn/q_b", np.s_[layer, :, n]) for layer in range(2) for n in range(3)]
    blocks += [("moe_layers/experts/down", np.s_[layer, e]) for layer in range(2) for e in range(8)]
    for path, at in blocks:
        own, zero = want[path].copy(), np.zeros_like(g[path][at])
        own[at], _ = oracle.muon_step(before[path][at], zero, g[path][at], rate)
        want[path] = own
    assert want.keys() == got.keys()
    for path, x in got.items():
        np.testing.assert_allclose(x, want[path], atol=2e-6, err_msg=path)


def test_with_the_old_moments_it_is_another_update():
    """In every group: momentum, both moments, and the counts of their bias."""
    gradients = [draw(1), draw(2), draw(3)]
    kept = trained(gradients)
    old, new = (updated(own(kept), draw(4)) for own in (lambda s: s, reset_optimizer))
    for (path, a), b in zip(tree.flatten(old["params"]).items(), jax.tree.leaves(new["params"])):
        assert np.array_equal(a, b) == path.endswith("router/bias"), path


@pytest.mark.slow
def test_all_but_the_moments_stays_and_the_next_step_is_of_its_place():
    step, batch = build(), cases.batch()
    state, _ = step.train(start(step), batch)
    state, _ = step.train(state, batch)
    kept = jax.device_get({k: v for k, v in state.items() if k != "optimizer"})
    old = state["optimizer"]
    programs = step.train._cache_size()
    state = reset_optimizer(state)
    fresh = start(step)["optimizer"]
    assert jax.tree.structure(fresh) == jax.tree.structure(state["optimizer"])
    jax.tree.map(np.testing.assert_array_equal, fresh, state["optimizer"])
    jax.tree.map(np.testing.assert_array_equal, kept, {k: state[k] for k in kept})
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert (int(kept["step"]), int(kept["tokens"])) == (2, 2 * TOKENS)
    _, metrics = step.train(state, batch)
    assert float(metrics["learning_rate"]) == float(RATES(2)) and not metrics["skipped"]
    assert step.train._cache_size() == programs


def test_new_moments_lie_where_the_old_ones_did():
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    cfg = cases.small("dense")
    rates = make_schedule(
        ScheduleConfig(kind="constant", peak=1e-3, end=0, warmup_steps=0, total_steps=1)
    )
    made = make_step(cfg, cases.STEP, exact(), rates, mesh)
    params = jax.device_put(cases.params(cfg), glm5.param_shardings(cfg, mesh))
    state = made.initialise(jax.random.key(0), params)
    wanted = jax.tree.map(lambda x: x.sharding, made.abstract["optimizer"])
    state = reset_optimizer(state)
    got = jax.tree.map(lambda x: x.sharding, state["optimizer"])
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, got, wanted))
