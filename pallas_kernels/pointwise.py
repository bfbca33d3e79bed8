"""Norms and the rotation of positions, which the model and its kernels share."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import wide


def rms_norm(x, weight, eps: float):
    """weight * x / sqrt(mean(x^2) + eps); the statistics are wide, the product is in x's dtype."""
    y = x.astype(wide(x.dtype))
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def layer_norm(x, weight, bias, eps: float):
    """weight * (x - mean) / sqrt(var + eps) + bias, all wide; returns x's dtype."""
    y = x.astype(wide(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(y.dtype) + bias.astype(y.dtype)).astype(x.dtype)


def rotate(x, cos, sin):
    """Rotates the pairs (2i, 2i+1) of x [b t ... dim] by [b t dim/2].

    The result is stored de-interleaved (first members of the pairs, then second members), as
    transformers stores it; queries and keys agree, so dot products are those of the plain rotation.
    """
    shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
