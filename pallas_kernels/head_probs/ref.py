"""Attention probabilities summed over heads in XLA, head by head."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mask import visible
from pallas_kernels.numerics import wide


def forward(static, q, k, lse, start, q_segments, k_segments):
    """wide[b t s] of q [b t n x], k [b s m x], lse [b t n]."""
    mask = visible(start + jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), q_segments, k_segments)
    total = summed(static.scale, by_head(q), by_head(k), by_head(lse), k.shape[1])
    return jnp.where(mask, total.swapaxes(1, 2), 0)


def by_head(x):
    """[b n t ...] of [b t n ...]."""
    return x.swapaxes(1, 2)


def summed(scale, q, k, lse, s: int):
    """wide[b s t], keys first: the sum over heads of q [b n t x] over the first s of k [b m . x], not masked.

    One head at a time: the tile of logits stays in the cache, where XLA:CPU would compute every
    exponential again for a sum over a batched product's heads. The keys are cut here, head by head:
    the first s of all heads would be a copy for every run of blocks.
    """
    b, n, t, x = q.shape
    inner = wide(q.dtype)
    group = n // k.shape[1]

    def add(head, total):
        one = lax.dynamic_index_in_dim(q, head, 1, keepdims=False)
        keys = lax.dynamic_slice(k, (0, head // group, 0, 0), (b, 1, s, x))[:, 0]
        norm = lax.dynamic_index_in_dim(lse, head, 1)
        logits = jnp.einsum("bsx,btx->bst", keys, one, preferred_element_type=inner)
        return total + jnp.exp(scale * logits - norm.astype(inner))

    return lax.fori_loop(0, n, add, jnp.zeros((b, s, t), inner))
