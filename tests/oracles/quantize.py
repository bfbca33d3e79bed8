"""Symmetric quantization, its packing and quantized products, in NumPy float64 and int64."""

import numpy as np


def quantize(x, max_int, axis):
    """Returns (q, scale): scale is max |x| / max_int over an axis, q the nearest integers, halves to even."""
    scale = np.max(np.abs(x), axis=axis) / max_int
    scale = np.where(scale > 0, scale, 1.0)
    return np.rint(x / np.expand_dims(scale, axis)), scale


def by_group(w, group):
    """w [k n] as [k/group group n]."""
    return w.reshape(-1, group, w.shape[-1])


def pack(q, group):
    """int8[k/2 n] of integers [k n], byte by byte: row i of a group low, row i + group/2 high."""
    k, n = q.shape
    out = np.zeros((k // 2, n), np.uint8)
    for byte in range(k // 2):
        first = byte // (group // 2) * group + byte % (group // 2)
        for column in range(n):
            low, high = int(q[first, column]), int(q[first + group // 2, column])
            out[byte, column] = (low % 16) + 16 * (high % 16)
    return out.view(np.int8)


def w4a8(x, x_scale, q, w_scale):
    """[m n] of integers x [m k], q [k n] with scales [m] and [k/group n]."""
    group = q.shape[0] // w_scale.shape[0]
    total = np.zeros((x.shape[0], q.shape[1]))
    for g, scale in enumerate(w_scale.astype(np.float64)):
        rows = slice(g * group, (g + 1) * group)
        total += scale * (x[:, rows].astype(np.int64) @ q[rows].astype(np.int64))
    return total * x_scale.astype(np.float64)[:, None]


def w8a8(x, x_scale, q, w_scale):
    """[m n] of integers x [m k], q [k n] with scales [m] and [n]."""
    total = x.astype(np.int64) @ q.astype(np.int64)
    return total * x_scale.astype(np.float64)[:, None] * w_scale.astype(np.float64)
