"""Block-wise FP8 in NumPy float64: weights [in heads, in, out heads, out] and rows [m, in heads, in]."""

import itertools

import numpy as np

from tests.oracles.eight_bits import LARGEST, rounded


def scale_of(x):
    """Returns the scale of numbers: the largest over 448, with 20 significant bits; 1 for zeros."""
    scale = np.max(np.abs(x)) / LARGEST["fp8"]
    if scale < np.finfo(np.float32).tiny:
        return 1.0
    fraction, exponent = np.frexp(scale)
    return np.ldexp(np.rint(fraction * 2**20) / 2**20, exponent)


def dequantized(x):
    """Quantizes and dequantizes numbers that share a scale."""
    scale = scale_of(x)
    return rounded(x / scale, "fp8") * scale


def slices(n, block):
    """Returns the ranges of a dimension's blocks; the last may be shorter."""
    return [slice(start, min(start + block, n)) for start in range(0, n, block)]


def quantize_weight(w, block):
    """Quantizes and dequantizes a weight [heads in heads out] in blocks."""
    out = np.zeros_like(w, dtype=np.float64)
    heads = itertools.product(range(w.shape[0]), range(w.shape[2]))
    for (i, o), rows, columns in itertools.product(
        heads, slices(w.shape[1], block), slices(w.shape[3], block)
    ):
        out[i, rows, o, columns] = dequantized(w[i, rows, o, columns])
    return out


def quantize_rows(x, block):
    """Quantizes and dequantizes rows [m heads in] in groups."""
    out = np.zeros_like(x, dtype=np.float64)
    for m, i in np.ndindex(*x.shape[:2]):
        for part in slices(x.shape[2], block):
            out[m, i, part] = dequantized(x[m, i, part])
    return out


def product(x, w, block):
    """Returns rows [m heads in] times a weight [heads in heads out], both quantized: [m heads out]."""
    return np.einsum("mhi,hijo->mjo", quantize_rows(x, block), quantize_weight(w, block))
