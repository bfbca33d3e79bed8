"""Dtypes of the computation: float32 inside, float64 where the inputs are."""

import jax.numpy as jnp

from pallas_kernels import dispatch


def wide(dtype) -> jnp.dtype:
    """The dtype in which sums, norms and softmaxes run: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def for_product(x):
    """x as an operand that is contracted along an axis before its last.

    XLA refuses some such products of bfloat16 on a CPU when they run ("Unsupported element type for
    DotThunk"); it sums them in float32 anyway.
    """
    return x.astype(wide(x.dtype)) if dispatch.platform() == "cpu" else x
