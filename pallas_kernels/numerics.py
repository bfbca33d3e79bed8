"""Dtypes of the computation: float32 inside, float64 where the inputs are."""

import jax.numpy as jnp


def wide(dtype) -> jnp.dtype:
    """The dtype in which sums, norms and softmaxes run: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)
