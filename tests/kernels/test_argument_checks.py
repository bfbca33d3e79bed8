"""Tests that kernels reject arguments whose shapes do not match, with an error that names them."""

import jax.numpy as jnp
import pytest

from pallas_kernels.flash_mla import flash_mla
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.sparse_flash_attention import sparse_flash_attention
from pallas_kernels.summed_attention_probs import summed_attention_probs

B, T, S, N, X = 2, 3, 5, 4, 8
Q, K, LSE = jnp.ones((B, T, N, X)), jnp.ones((B, S, N, X)), jnp.ones((B, T, N))
INDEX = jnp.ones((B, T, 2, X)), jnp.ones((B, T, 2)), jnp.ones((B, S, X))
CALLS = {
    "flash_mla": lambda **segments: flash_mla(Q, K, K, scale=1.0, **segments),
    "indexer_kl": lambda **segments: indexer_kl(*INDEX, Q, K, LSE, scale=1.0, **segments),
    "lightning_indexer": lambda **segments: lightning_indexer(*INDEX, 2, **segments),
    "summed_attention_probs": lambda **segments: summed_attention_probs(
        Q, K, LSE, scale=1.0, **segments
    ),
}
SEGMENTS = {  # of queries, of keys
    "keys only": (None, jnp.ones((B, S), jnp.int32)),
    "queries only": (jnp.ones((B, T), jnp.int32), None),
    "other number of keys": (jnp.ones((B, T), jnp.int32), jnp.ones((B, T), jnp.int32)),
}


@pytest.mark.parametrize("kernel", CALLS)
@pytest.mark.parametrize("name", SEGMENTS)
def test_rejects_segments_that_do_not_match(kernel, name):
    q_segments, k_segments = SEGMENTS[name]
    with pytest.raises(ValueError, match=f"{kernel}: segments of queries .* None for both"):
        CALLS[kernel](q_segments=q_segments, k_segments=k_segments)


@pytest.mark.parametrize(
    ("k", "v"), [(K[:1], K[:1]), (K[..., :4], K), (K, K[:, :4])], ids=["batch", "width", "length"]
)
def test_rejects_keys_that_do_not_match_queries(k, v):
    with pytest.raises(ValueError, match="flash_mla: queries .* it takes"):
        flash_mla(Q, k, v, scale=1.0)


@pytest.mark.parametrize(
    ("latents", "topk_shape", "value_dim"),
    [
        (K[:, :, 0], (1, T, 2), X),
        (K[:1, :, 0], (B, T, 2), X),
        (K[:, :, 0, :4], (B, T, 2), 4),
        (K[:, :, 0], (B, T, 2), X + 1),
    ],
    ids=["batch of topk", "batch of latents", "width", "value width"],
)
def test_rejects_latents_that_do_not_match_queries(latents, topk_shape, value_dim):
    topk = jnp.zeros(topk_shape, jnp.int32)
    with pytest.raises(ValueError, match="sparse_flash_attention: q .* it takes"):
        sparse_flash_attention(Q, latents, topk, scale=1.0, value_dim=value_dim)
