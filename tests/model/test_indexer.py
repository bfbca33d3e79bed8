"""Tests of queries, keys and weights of the lightning indexer against the NumPy oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.config import RopeParameters
from glm5_jax.model import indexer
from glm5_jax.model.rope import rope_table
from pallas_kernels.lightning_indexer import index_scores
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
    # The scale is small, so that the eps of the key's LayerNorm has an effect.
    return w, 1e-3 * normal(B, T, d), normal(B, T, q)


def hf_weights(w):
    """Returns the leaves under transformers' names, as [out, in]."""
    return {
        "wq_b.weight": w["q_b"].reshape(w["q_b"].shape[0], -1).T,
        "wk.weight": w["k"].T,
        "k_norm.weight": w["k_norm"],
        "k_norm.bias": w["k_norm_bias"],
        "weights_proj.weight": w["weights"].T,
    }


def index_arrays(w, x, c_q, cfg=CFG):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    cos, sin = rope_table(cfg.rope_parameters, cfg.qk_rope_head_dim, positions, jnp.float32)
    idx_q, idx_w = indexer.index_queries(w, jnp.asarray(x), jnp.asarray(c_q), cos, sin, cfg)
    return idx_q, idx_w, indexer.index_keys(w, jnp.asarray(x), cos, sin, cfg)


def test_index_inputs_equal_oracle(inputs):
    w, x, c_q = inputs
    idx_q, idx_w, idx_k = index_arrays(w, x, c_q)
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
    np.testing.assert_allclose(index_scores(idx_q, idx_w, idx_k), scores, atol=1e-5)


def test_scales_head_weights_in_float32(inputs):
    """In bfloat16 the scale i^-0.5 would round once more and flip selections."""
    w, x, c_q = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), inputs)
    cos, sin = rope_table(CFG.rope_parameters, 6, jnp.zeros((B, T)), jnp.bfloat16)
    _, idx_w = indexer.index_queries(w, x, c_q, cos, sin, CFG)
    product = jnp.einsum("btd,di->bti", x, w["weights"])
    assert idx_w.dtype == jnp.float32
    np.testing.assert_array_equal(idx_w, product.astype(jnp.float32) * 3**-0.5)
