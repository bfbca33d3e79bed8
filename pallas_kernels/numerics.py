"""Dtypes of the computation: float32 inside, float64 where the inputs are."""

import math

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.mask import HIDDEN

# Chips have 2**x alone: logits in its unit save a product per probability.
LOG2E = math.log2(math.e)


def wide(dtype) -> jnp.dtype:
    """The dtype in which sums, norms and softmaxes run: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def for_product(x):
    """x as an operand that is contracted along an axis before its last.

    XLA refuses some such products of bfloat16 on a CPU when they run ("Unsupported element type for
    DotThunk"); it sums them in float32 anyway.
    """
    return x.astype(wide(x.dtype)) if dispatch.platform() == "cpu" else x


def join_pieces(out, lse, top, axis: int):
    """(out, lse, largest logit) of attention over all keys, from those of pieces of the keys along an axis.

    lse is infinite where a piece has no visible key. The pieces' outcomes may be of 16 bits, as the
    whole's would be: an error of theirs is one of the whole's weighted by their share.
    """
    known = jnp.where(lse == jnp.inf, HIDDEN, lse)
    most = jnp.max(known, axis, keepdims=True)
    weights = jnp.where(lse == jnp.inf, 0, jnp.exp(known - most))
    total = jnp.sum(weights, axis, keepdims=True)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    sums = jnp.sum((weights / total)[..., None] * out.astype(wide(out.dtype)), axis)
    lse = jnp.where(seen, most + jnp.log(total), jnp.inf)
    return sums.astype(out.dtype), jnp.squeeze(lse, axis), jnp.max(top, axis)
