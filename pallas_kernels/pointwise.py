"""Norms and the rotation of positions, shared by the model and its kernels."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.numerics import accum_dtype


def rms_norm(
    x: Float[Array, "*batch d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "*batch d"]:
    """Returns weight * x / sqrt(mean(x^2) + eps).

    The statistics have the accumulation dtype, the product has x's dtype.
    """
    y = x.astype(accum_dtype(x.dtype))
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*batch d"], weight: Float[Array, " d"], bias: Float[Array, " d"], eps: float
) -> Float[Array, "*batch d"]:
    """Returns weight * (x - mean) / sqrt(var + eps) + bias in x's dtype, computed in the accumulation dtype."""
    y = x.astype(accum_dtype(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(y.dtype) + bias.astype(y.dtype)).astype(x.dtype)


def rotate(
    x: Float[Array, "b t *heads r"], cos: Float[Array, "b t r/2"], sin: Float[Array, "b t r/2"]
) -> Float[Array, "b t *heads r"]:
    """Rotates the pairs (2i, 2i+1) of x by the angles in cos and sin.

    The result is de-interleaved as in transformers: first members of the pairs, then second members. Queries
    and keys agree, so dot products are those of the plain rotation.
    """
    shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
