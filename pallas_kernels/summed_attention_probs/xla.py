"""Attention probabilities summed over heads in XLA, head by head."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.mask import visible
from pallas_kernels.numerics import accum_dtype


def forward(
    static,
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
) -> Float[Array, "b t s"]:
    """Returns the sum over heads."""
    mask = visible(start + jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), q_segments, k_segments)
    total = sum_heads(static.scale, heads_first(q), heads_first(k), heads_first(lse), k.shape[1])
    return jnp.where(mask, total.swapaxes(1, 2), 0)


def heads_first(x: Array) -> Array:
    """Returns [b n t ...] for [b t n ...]."""
    return x.swapaxes(1, 2)


def sum_heads(
    scale: float,
    q: Float[Array, "b n t x"],
    k: Float[Array, "b m keys x"],
    lse: Float[Array, "b n t"],
    s: int,
) -> Float[Array, "b s t"]:
    """Returns the unmasked sum over heads, over the first s of the keys, with keys first.

    It runs one head at a time: the tile of logits stays in the cache. For a sum over a batched product's heads
    XLA:CPU would compute every exponential again. The keys are cut here, head by head, because cutting the
    first s of all heads would copy them for every run of blocks.
    """
    b, n, t, x = q.shape
    dtype = accum_dtype(q.dtype)
    group = n // k.shape[1]

    def add(head, total):
        q_head = lax.dynamic_index_in_dim(q, head, 1, keepdims=False)
        keys = lax.dynamic_slice(k, (0, head // group, 0, 0), (b, 1, s, x))[:, 0]
        norm = lax.dynamic_index_in_dim(lse, head, 1)
        logits = jnp.einsum("bsx,btx->bst", keys, q_head, preferred_element_type=dtype)
        return total + jnp.exp(scale * logits - norm.astype(dtype))

    return lax.fori_loop(0, n, add, jnp.zeros((b, s, t), dtype))
