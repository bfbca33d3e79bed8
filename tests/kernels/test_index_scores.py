"""Tests of index scores and their gradients against the NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.index_scores import index_scores
from tests.kernels.implementations import over_implementations, over_pallas_forms, race_checked
from tests.kernels.indexer_problem import B, S, T, problem
from tests.oracles import indexer_kl as oracle

PROBLEM = problem()
INPUTS = tuple(PROBLEM[name] for name in ("idx_q", "idx_w", "idx_k"))
WIDE = tuple(x.astype(np.float64) for x in INPUTS)
DSCORES = np.random.default_rng(1).standard_normal((B, T, S)).astype(np.float32)


def scores_and_gradients(implementation, inputs=INPUTS, dscores=DSCORES):
    """Returns (scores, gradients of idx_q, idx_w, idx_k)."""

    @jax.jit
    def run(*inputs):
        scores, pull = jax.vjp(lambda *a: index_scores(*a, implementation=implementation), *inputs)
        return scores, *pull(jnp.asarray(dscores))

    return run(*inputs)


@over_implementations("index_scores")
def test_index_scores_and_gradients_equal_oracle(implementation):
    inputs, wide, dscores = INPUTS, WIDE, DSCORES
    if getattr(implementation, "name", None) == "gpu":  # its emulator is slow: 3 queries of a row
        inputs, wide = ([q[:1, :3], w[:1, :3], k[:1]] for q, w, k in (INPUTS, WIDE))
        dscores = DSCORES[:1, :3]
    got = scores_and_gradients(implementation, inputs, dscores)
    scores, _ = oracle.index_scores(*wide)
    assert (scores < 0).any()  # weights are signed
    for ours, theirs in zip(got, (scores, *oracle.pull_scores(*wide, dscores)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@over_implementations("index_scores", slow="xla gpu")
def test_index_scores_sum_bfloat16_in_float32(implementation):
    q, w, k = (jnp.asarray(x) for x in INPUTS)
    inputs = (q.astype(jnp.bfloat16), w, k.astype(jnp.bfloat16))
    got = scores_and_gradients(implementation, inputs)
    assert [g.dtype for g in got] == [jnp.float32, jnp.bfloat16, jnp.float32, jnp.bfloat16]
    wide = tuple(np.asarray(x, np.float64) for x in inputs)
    want = (oracle.index_scores(*wide)[0], *oracle.pull_scores(*wide, DSCORES))
    np.testing.assert_allclose(got[0], want[0], atol=2e-5)
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert np.abs(np.asarray(ours, np.float64) - theirs).max() < 0.01 * np.abs(theirs).max()


@pytest.mark.slow
@over_implementations("index_scores")
def test_index_scores_are_deterministic_and_vmap(implementation):
    first, second = scores_and_gradients(implementation), scores_and_gradients(implementation)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    rows = jax.vmap(lambda *a: index_scores(*a, implementation=implementation))
    got = jax.jit(rows)(*(jnp.asarray(x)[:, None] for x in INPUTS))
    np.testing.assert_allclose(got[:, 0], first[0], atol=1e-5)


@pytest.mark.slow
@over_pallas_forms("index_scores")
def test_index_scores_have_no_races(name):
    inputs, wide, dscores = (x[:1] for x in INPUTS), tuple(x[:1] for x in WIDE), DSCORES[:1]
    got = scores_and_gradients(race_checked(name), inputs, dscores)
    assert not compat.has_races(name)
    want = (oracle.index_scores(*wide)[0], *oracle.pull_scores(*wide, dscores))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
