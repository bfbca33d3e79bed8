"""Dtypes of the computation: float32 for sums and statistics, float64 if the inputs are float64."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import backends
from pallas_kernels.mask import HIDDEN

# Chips only have 2**x: logits in base 2 save a product per probability.
LOG2E = math.log2(math.e)


def accum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype in which sums, norms and softmaxes run: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def as_matmul_operand(x: Array) -> Array:
    """Returns x as an operand that is contracted along an axis before its last.

    XLA:CPU fails at run time for some such bfloat16 products ("Unsupported element type for DotThunk"). It sums
    them in float32 anyway.
    """
    return x.astype(accum_dtype(x.dtype)) if backends.platform() == "cpu" else x


def join_pieces(
    out: Float[Array, "..."], lse: Float[Array, "..."], top: Float[Array, "..."], axis: int
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Merges attention results (out, lse, largest logit) of pieces of the keys, stacked along an axis.

    lse is infinite where a piece has no visible key. The pieces' outputs may have 16 bits like the merged one:
    each piece's rounding error is weighted by its share.
    """
    finite_lse = jnp.where(lse == jnp.inf, HIDDEN, lse)
    max_lse = jnp.max(finite_lse, axis, keepdims=True)
    weights = jnp.where(lse == jnp.inf, 0, jnp.exp(finite_lse - max_lse))
    total = jnp.sum(weights, axis, keepdims=True)
    has_keys = total > 0
    total = jnp.where(has_keys, total, 1)
    sums = jnp.sum((weights / total)[..., None] * out.astype(accum_dtype(out.dtype)), axis)
    lse = jnp.where(has_keys, max_lse + jnp.log(total), jnp.inf)
    return sums.astype(out.dtype), jnp.squeeze(lse, axis), jnp.max(top, axis)
