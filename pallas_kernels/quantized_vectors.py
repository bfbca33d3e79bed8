"""8-bit vectors with one scale each: index keys and their queries, and the latents of a cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.w4a8_matmul.quantize import quantize_a8

FORMATS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}  # by their names in options


class QuantizedVectors(NamedTuple):
    """Vectors [... x] as 8-bit values [... x] and one scale float32[...] each; a vector is about values * scale."""

    values: jax.Array
    scale: jax.Array


def quantize_vectors(x: Float[Array, "*batch j"], dtype) -> QuantizedVectors:
    """Quantizes vectors x [... j] to int8 (as `quantize_a8`) or float8_e4m3fn.

    Each vector has a scale, so that its largest entry becomes the largest value of dtype. A vector of zeros, or
    of numbers below the smallest normal float32, has scale 1. Raises ValueError for another dtype.
    """
    if jnp.dtype(dtype) == jnp.int8:
        return QuantizedVectors(*quantize_a8(x))
    if jnp.dtype(dtype) != jnp.float8_e4m3fn:
        raise ValueError(f"quantize_vectors: dtype {jnp.dtype(dtype)}; use int8 or float8_e4m3fn")
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / float(jnp.finfo(dtype).max)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    return QuantizedVectors((x / scale[..., None]).astype(dtype), scale)
