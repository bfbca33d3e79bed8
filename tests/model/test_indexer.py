"""The lightning indexer against the NumPy oracle, and its selection against a stable sort."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from glm5_jax import presets
from glm5_jax.config import RopeParameters
from glm5_jax.model import dsa, indexer
from glm5_jax.model.rope import rope_table
from tests.oracles import glm5 as oracle, indexer as index_oracle

CFG = dataclasses.replace(
    presets.tiny(),
    hidden_size=14,
    q_lora_rank=9,
    qk_rope_head_dim=6,
    index_n_heads=3,
    index_head_dim=10,
    rope_parameters=RopeParameters(rope_theta=50.0),
)
B, T = 2, 11


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    d, q, i, j = 14, 9, 3, 10

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    w = {
        "q_b": normal(q, i, j),
        "k": normal(d, j),
        "k_norm": 1 + 0.3 * normal(j),
        "k_norm_bias": normal(j),
        "weights": normal(d, i),
    }
    # A small scale, so that the eps of the key's LayerNorm shows.
    return w, 1e-3 * normal(B, T, d), normal(B, T, q)


def hf_weights(w):
    """Our leaves under transformers' names, [out, in]."""
    return {
        "wq_b.weight": w["q_b"].reshape(w["q_b"].shape[0], -1).T,
        "wk.weight": w["k"].T,
        "k_norm.weight": w["k_norm"],
        "k_norm.bias": w["k_norm_bias"],
        "weights_proj.weight": w["weights"].T,
    }


def ours(w, x, c_q, cfg=CFG):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    cos, sin = rope_table(cfg.rope_parameters, cfg.qk_rope_head_dim, positions, jnp.float32)
    idx_q, idx_w = indexer.index_queries(w, jnp.asarray(x), jnp.asarray(c_q), cos, sin, cfg)
    return idx_q, idx_w, indexer.index_keys(w, jnp.asarray(x), cos, sin, cfg)


def test_queries_keys_and_weights(inputs):
    w, x, c_q = inputs
    idx_q, idx_w, idx_k = ours(w, x, c_q)
    config = {name: getattr(CFG, name) for name in ("index_n_heads", "index_head_dim")}
    config |= {
        "qk_rope_head_dim": 6,
        "rope_parameters": {"rope_theta": 50.0},
        "max_position_embeddings": 64,
    }
    turns = oracle.turns_of(config, np.broadcast_to(np.arange(T), (B, T)))
    q, k, weights = oracle.index_inputs(hf_weights(w), config, x.astype(np.float64), c_q, turns)
    np.testing.assert_allclose(idx_q, q, atol=2e-5)
    np.testing.assert_allclose(idx_k, k, atol=1e-4)
    np.testing.assert_allclose(idx_w, weights * CFG.index_n_heads**-0.5, atol=1e-7)
    scores = index_oracle.index_scores(q, k, weights)
    np.testing.assert_allclose(indexer.index_scores(idx_q, idx_w, idx_k), scores, atol=1e-5)


def test_scores(inputs):
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 5, 3, 10)), rng.standard_normal((2, 7, 10))
    w = rng.standard_normal((2, 5, 3))
    args = [jnp.asarray(a, jnp.float32) for a in (q, w * 3**-0.5, k)]
    got = indexer.index_scores(*args)
    np.testing.assert_allclose(got, index_oracle.index_scores(q, k, w), atol=1e-5)
    assert (got < 0).any()  # weights are signed


def test_head_weights_are_scaled_wide(inputs):
    """In bfloat16 the scale i^-0.5 would round once more and flip selections."""
    w, x, c_q = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), inputs)
    cos, sin = rope_table(CFG.rope_parameters, 6, jnp.zeros((B, T)), jnp.bfloat16)
    _, idx_w = indexer.index_queries(w, x, c_q, cos, sin, CFG)
    product = jnp.einsum("btd,di->bti", x, w["weights"])
    assert idx_w.dtype == jnp.float32
    np.testing.assert_array_equal(idx_w, product.astype(jnp.float32) * 3**-0.5)


def select(scores, visible, k):
    return np.asarray(jax.jit(indexer.select, static_argnums=2)(scores, visible, k))


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
    expected = index_oracle.select(scores, visible, k)
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
    expected = index_oracle.select(index_oracle.index_scores(q, idx_k, w), visible, k)

    def run(start):
        return dsa.select_keys(
            *(jnp.asarray(a, jnp.float32) for a in (q, w * 3**-0.5, idx_k)),
            start,
            jnp.asarray(own),
            jnp.asarray(keys_of),
            k,
            block,
        )

    got = jax.jit(run)(5) if start == "traced" else run(start)
    np.testing.assert_array_equal(got, expected)
