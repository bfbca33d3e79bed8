"""Tests of router, balance loss and balance bias against the NumPy oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model.router import balance_bias, expert_load, route, sequence_balance
from glm5_jax.parallel.mesh import Region
from tests.oracles import experts as oracle

RNG = np.random.default_rng(0)
B, T, D, E = 2, 9, 7, 12
X = RNG.standard_normal((B * T, D)).astype(np.float32)
WEIGHT = RNG.standard_normal((D, E)).astype(np.float32)
BIAS = 0.5 * RNG.standard_normal(E).astype(np.float32)
BASE = dataclasses.replace(presets.tiny(), n_routed_experts=E, num_experts_per_tok=3)
CASES = {
    "plain": {},
    "groups": {"n_group": 4, "topk_group": 2},
    "one group": {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 2},
    "not normalised": {"norm_topk_prob": False},
    "unscaled": {"routed_scaling_factor": 1.0},
    "one expert": {"num_experts_per_tok": 1},
}


jitted_route = jax.jit(route, static_argnums=2)


def route_and_oracle(cfg, x=X, weight=WEIGHT, bias=BIAS):
    ours = jitted_route({"weight": weight, "bias": bias}, x, cfg)
    logits = x.astype(np.float64) @ weight.astype(np.float64)
    theirs = oracle.route(
        logits,
        bias,
        cfg.num_experts_per_tok,
        cfg.n_group,
        cfg.topk_group,
        cfg.norm_topk_prob,
        cfg.routed_scaling_factor,
    )
    return ours, theirs, logits


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shift", [0.0, -3.0], ids=["", "negative scores"])
def test_routing_equals_oracle(name, shift):
    """With a bias of -3 all biased scores are negative, so a group mask of 0 would win."""
    cfg = dataclasses.replace(BASE, **CASES[name])
    ours, (ids, weights), logits = route_and_oracle(cfg, bias=BIAS + np.float32(shift))
    np.testing.assert_array_equal(ours.expert_ids, ids)
    np.testing.assert_allclose(ours.combine_weights, weights, rtol=1e-5)
    np.testing.assert_allclose(ours.probs, oracle.sigmoid(logits), rtol=1e-5)


def test_bias_changes_selection_only():
    bias = np.zeros(E, np.float32)
    bias[4] = 10
    ours, _, logits = route_and_oracle(dataclasses.replace(BASE, norm_topk_prob=False), bias=bias)
    assert (ours.expert_ids[:, 0] == 4).all()
    expected = oracle.sigmoid(logits[:, 4]) * BASE.routed_scaling_factor
    np.testing.assert_allclose(ours.combine_weights[:, 0], expected, rtol=1e-5)


def test_breaks_ties_by_lower_expert():
    cfg = dataclasses.replace(BASE, n_group=4, topk_group=2)
    ours, (ids, _), _ = route_and_oracle(
        cfg, weight=np.zeros_like(WEIGHT), bias=np.zeros_like(BIAS)
    )
    assert (ours.expert_ids == np.arange(3)).all() and (ids == np.arange(3)).all()


def test_weights_of_underflowing_scores_are_zero():
    """All sigmoids underflow; the 1e-20 in the denominator prevents 0/0."""
    ours, _, _ = route_and_oracle(BASE, x=-1e4 * np.ones_like(X), weight=np.ones_like(WEIGHT))
    assert (ours.combine_weights == 0).all()


def test_router_computes_in_float32():
    x, weight = jnp.asarray(X, jnp.bfloat16), jnp.asarray(WEIGHT, jnp.bfloat16)
    ours = route({"weight": weight, "bias": BIAS}, x, BASE)
    wide = route({"weight": weight.astype(jnp.float32), "bias": BIAS}, x.astype(jnp.float32), BASE)
    assert ours.combine_weights.dtype == ours.probs.dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, ours, wide)


def test_bias_has_no_gradient():
    def loss(w):
        out = route(w, jnp.asarray(X), BASE)
        return jnp.sum(out.combine_weights * jnp.arange(3.0)[None])

    grads = jax.jit(jax.grad(loss))({"weight": WEIGHT, "bias": BIAS})
    assert np.abs(grads["weight"]).max() > 1e-3
    assert not grads["bias"].any()


def balance(logits, ids, valid, cfg=BASE):
    probs = jnp.asarray(oracle.sigmoid(logits), jnp.float32)
    run = jax.jit(lambda *args: sequence_balance(*args, Region(), cfg))
    return run(probs, ids, valid)


def test_balance_loss_equals_oracle():
    _, (ids, _), logits = route_and_oracle(BASE)
    ids, logits = ids.reshape(B, T, -1), logits.reshape(B, T, E)
    valid = np.ones((B, T), bool)
    valid[0, 5:] = False
    expected = oracle.balance_loss(logits, ids, valid)
    np.testing.assert_allclose(balance(logits, ids, valid) / B, expected, rtol=1e-5)
    valid[1] = False
    expected = oracle.balance_loss(logits, ids, valid)
    np.testing.assert_allclose(balance(logits, ids, valid) / B, expected, rtol=1e-5)


def test_balance_loss_lowers_scores_of_loaded_experts():
    """Frequencies are counts, so the gradient flows through the mean scores only."""
    ids = np.zeros((1, T, 3), np.int32) + np.arange(3)
    valid = jnp.ones((1, T), bool)

    def loss(logits):
        return sequence_balance(jax.nn.sigmoid(logits), jnp.asarray(ids), valid, Region(), BASE)

    grads = jax.jit(jax.grad(loss))(jnp.zeros((1, T, E)))
    assert (grads[..., :3] > 0).all() and (grads[..., 3:] < 0).all()
    step = 1e-2
    logits = np.zeros((1, T, E))
    up, down = (oracle.balance_loss(logits + s * step, ids, np.ones((1, T), bool)) for s in (1, -1))
    assert up == pytest.approx(down)  # a common change does not change the shares
    logits[0, 2, 1] = step
    slope = (oracle.balance_loss(logits, ids, np.ones((1, T), bool)) - up) / step
    assert float(grads[0, 2, 1]) == pytest.approx(slope, rel=2e-2)


def test_load_counts_valid_tokens():
    ids = np.array([[0, 1], [1, 2], [1, 0]])
    np.testing.assert_array_equal(expert_load(ids, np.array([True, True, False]), 4), [1, 2, 1, 0])


def test_balance_bias_equals_oracle():
    bias = RNG.standard_normal((2, 4)).astype(np.float32)
    load = np.array([[3, 5, 4, 4], [0, 0, 8, 0]], np.float32)
    got = balance_bias(jnp.asarray(bias), jnp.asarray(load), 1e-3)
    expected = [oracle.moved_bias(b, n, 1e-3) for b, n in zip(bias, load)]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(
        np.asarray(got)[0, 2:], bias[0, 2:]
    )  # loads at the mean do not change the bias
    np.testing.assert_array_equal(balance_bias(jnp.asarray(bias), jnp.asarray(load), 0.0), bias)
