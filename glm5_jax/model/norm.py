"""RMSNorm and LayerNorm over the last dimension (spec: transformers' `glm_moe_dsa`)."""

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
