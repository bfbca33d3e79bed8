"""Vectors in 8 bits with a scale each: index keys and their queries, and the latents of a cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.w4a8_matmul.quantize import quantize_a8

FORMATS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}  # by the names that options have


class Scaled(NamedTuple):
    """Vectors [... x], each close to its values times its scale: values [... x], scale float32[...]."""

    values: jax.Array
    scale: jax.Array


def quantize_vectors(x, dtype) -> Scaled:
    """x [... j] as values of dtype, int8 (as `quantize_a8`) or float8_e4m3fn.

    A scale per vector: its largest entry becomes the largest value of dtype. A vector of zeros, or of
    numbers below the smallest normal float32, has scale 1.
    """
    if jnp.dtype(dtype) == jnp.int8:
        return Scaled(*quantize_a8(x))
    if jnp.dtype(dtype) != jnp.float8_e4m3fn:
        raise ValueError(f"quantize_vectors: dtype {jnp.dtype(dtype)}; use int8 or float8_e4m3fn")
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / float(jnp.finfo(dtype).max)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    return Scaled((x / scale[..., None]).astype(dtype), scale)
