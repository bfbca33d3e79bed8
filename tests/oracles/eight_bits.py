"""Vectors in 8 bits with a scale each, in NumPy float64: int8, and float8_e4m3fn by OCP's table."""

import numpy as np

LARGEST = {"int8": 127, "fp8": 448}
SMALLEST = {"int8": 1.0, "fp8": 2.0**-9}  # step between the values next to zero


def scale_of(x, kind):
    """[...] of vectors x [... j]: maps the largest entry to the largest value; 1 for zeros. int8's has 17 bits."""
    scale = np.max(np.abs(x), axis=-1) / LARGEST[kind]
    scale = np.where(scale < np.finfo(np.float32).tiny, 1.0, scale)
    if kind == "int8":
        fraction, exponent = np.frexp(scale)
        scale = np.ldexp(np.rint(fraction * 2**17) / 2**17, exponent)
    return scale


def rounded(x, kind):
    """Rounds x to the nearest values of a kind, halves to even, and clips to the largest."""
    step = SMALLEST[kind]
    if kind == "fp8":  # four significant bits
        step = np.maximum(step, np.ldexp(1.0, np.frexp(x)[1] - 4))
    return np.clip(np.rint(x / step) * step, -LARGEST[kind], LARGEST[kind])


def quantize_dequantize(x, kind, group=None):
    """Quantizes and dequantizes x [... j]; group: entries with one scale, None for all j."""
    vectors = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    scale = scale_of(vectors, kind)[..., None]
    return (rounded(vectors / scale, kind) * scale).reshape(x.shape)


def bound(x, kind, group=None):
    """[... j]: the maximum rounding error of x [... j], half a step; fp8's steps grow with |x|."""
    vectors = np.abs(x).reshape(*x.shape[:-1], -1, group or x.shape[-1])
    half = scale_of(vectors, kind)[..., None] * SMALLEST[kind] / 2
    if kind == "fp8":
        half = np.maximum(half, vectors / 2**4)
    return np.broadcast_to(half, vectors.shape).reshape(x.shape)
