"""Attention probabilities summed over heads: the meaning of the kernel, with all heads at once."""

import jax.numpy as jnp
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
    """Returns the sum over heads; each key head serves n / m neighbouring heads."""
    dtype = accum_dtype(q.dtype)
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = static.scale * jnp.einsum("btnx,bsnx->btsn", q, keys, preferred_element_type=dtype)
    total = jnp.sum(jnp.exp(logits - lse[:, :, None].astype(dtype)), axis=-1)
    mask = visible(start + jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), q_segments, k_segments)
    return jnp.where(mask, total, 0)
