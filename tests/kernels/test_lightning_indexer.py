"""Index scores against the NumPy oracle, and their selection against a stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels.lightning_indexer import index_scores, lightning_indexer, select as exact_select
from tests.oracles import indexer as oracle


def test_scores():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 5, 3, 10)), rng.standard_normal((2, 7, 10))
    w = rng.standard_normal((2, 5, 3))
    args = [jnp.asarray(a, jnp.float32) for a in (q, w * 3**-0.5, k)]
    got = index_scores(*args)
    np.testing.assert_allclose(got, oracle.index_scores(q, k, w), atol=1e-5)
    assert (got < 0).any()  # weights are signed


def select(scores, visible, k):
    return np.asarray(jax.jit(exact_select, static_argnums=2)(scores, visible, k))


def row(scores, k, visible=None):
    scores = np.asarray(scores, np.float32)[None, None]
    visible = np.ones(scores.shape, bool) if visible is None else np.asarray(visible)[None, None]
    return select(scores, visible, k)[0, 0].tolist()


def test_select_is_ascending_and_takes_the_best():
    assert row([3, 9, 1, 7, 5], 3) == [1, 3, 4]


def test_select_gives_ties_to_the_lower_index():
    assert row([1, 2, 2, 2, 0], 2) == [1, 2]


def test_select_does_not_tell_zeros_apart():
    assert row([-0.0, 0.0, -0.0, 0.0, -1], 2) == [0, 1]
    assert row([0.0, -0.0, 5.0, -0.0, 0.0], 3) == [0, 1, 2]


def test_select_ends_in_minus_one_where_few_keys_are_visible():
    assert row([9, 1, 9, 2, 9], 4, [False, True, False, True, False]) == [1, 3, -1, -1]
    assert row([9, 1, 9, 2, 9], 2, [False] * 5) == [-1, -1]


def test_select_ranks_nan_and_minus_infinity_last_among_visible_keys():
    assert row([np.nan, 1, -5, np.nan, 2], 3) == [1, 2, 4]
    assert row([np.nan, 1, -5, -np.inf, 2], 4) == [0, 1, 2, 4]
    assert row([np.inf, -np.inf, np.nan], 3, [True, True, False]) == [0, 1, -1]


def test_select_of_more_keys_than_there_are():
    assert row([3, 1, 2], 9) == [0, 1, 2]


SPECIAL = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf")]
SCORES = arrays.arrays(
    np.float32,
    (2, 3, 8),
    elements=st.one_of(st.sampled_from(SPECIAL), st.floats(-4, 4, width=16)),
)


@given(SCORES, arrays.arrays(np.bool_, (2, 3, 8)), st.sampled_from([1, 3, 8]))
def test_select_is_a_stable_descending_sort(scores, visible, k):
    expected = oracle.select(scores, visible, k)
    np.testing.assert_array_equal(select(scores, visible, k), expected)


@pytest.mark.parametrize("start,block", [(0, 4), (5, 4), (5, 64), ("traced", 4)])
def test_selection_in_blocks(start, block):
    """Whole documents, cut anywhere, at any offset into the keys."""
    rng = np.random.default_rng(2)
    t, s, k = 11, 16, 5
    first = 5 if start == "traced" else start
    q, idx_k = rng.standard_normal((2, t, 3, 10)), rng.standard_normal((2, s, 10))
    w = rng.standard_normal((2, t, 3))
    keys_of = np.repeat([[0, 1, 2], [3, 3, 4]], [3, 6, 7], axis=1)
    own = keys_of[:, first : first + t]
    causal = np.arange(s) <= first + np.arange(t)[:, None]
    visible = causal & (own[:, :, None] == keys_of[:, None]) & (own != 0)[..., None]
    expected = oracle.select(oracle.index_scores(q, idx_k, w), visible, k)

    def run(start):
        return lightning_indexer(
            *(jnp.asarray(a, jnp.float32) for a in (q, w * 3**-0.5, idx_k)),
            k,
            start=start,
            q_segments=jnp.asarray(own),
            k_segments=jnp.asarray(keys_of),
            block=block,
        )

    got = jax.jit(run)(5) if start == "traced" else run(start)
    np.testing.assert_array_equal(got, expected)


LONG_ROWS = {
    "distinct": lambda rng, shape: rng.standard_normal(shape),
    "all equal": lambda rng, shape: np.zeros(shape),
    "zeros of both signs": lambda rng, shape: rng.choice([0.0, -0.0, -1.0], shape),
    "few values": lambda rng, shape: rng.integers(-2, 3, shape),
    # Of 16 groups, so for k = 8 the filter lets too many through.
    "two groups hold the best": lambda rng, shape: np.where(
        np.arange(shape[-1]) % 16 < 2, 9.0 + rng.random(shape), rng.standard_normal(shape)
    ),
    "nan and infinity": lambda rng, shape: rng.choice(SPECIAL, shape),
    "growing": lambda rng, shape: np.broadcast_to(np.arange(shape[-1]), shape),
}


@pytest.mark.parametrize("visible", ["all", "some", "few", "the last"])
@pytest.mark.parametrize("name", LONG_ROWS)
@pytest.mark.parametrize("k", [1, 8, 40])
def test_long_rows_are_filtered_before_the_choice(name, visible, k):
    rng = np.random.default_rng(7)
    shape = (1, 3, 405)
    scores = LONG_ROWS[name](rng, shape).astype(np.float32)
    mask = {
        "all": np.ones(shape, bool),
        "some": rng.random(shape) < 0.5,
        "few": rng.random(shape) < 0.02,
        "the last": np.broadcast_to(np.arange(405) >= 395, shape),
    }[visible]
    np.testing.assert_array_equal(select(scores, mask, k), oracle.select(scores, mask, k))
