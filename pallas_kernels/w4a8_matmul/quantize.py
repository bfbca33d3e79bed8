"""Int4 weights and int8 activations: what training imitates, what is exported, what the kernels read.

Symmetric, x ~ q * scale with an integer q of at most 7 (weights, per group of rows and column) or 127
(activations, per row). A scale keeps so few bits that q * scale is exact in float32: a dequantised value
is the same on every machine, and quantising it again gives the same bits, also where division is off by
up to three units in the last place.

Packed int4: int8[... k/2 n]. A group of rows is half as many rows of bytes; byte i of a group holds its
row i in the low four bits and its row i + group/2 in the high four, both in two's complement. Columns
stay where they are. So a shard or a slice between groups of rows, or of columns, is one of the bytes,
and a kernel has whole rows at once after a shift, without an exchange between neighbours.
"""

import jax.numpy as jnp
from jax import lax

GROUP = 128
WEIGHT_MAX, ACTIVATION_MAX = 7, 127


def round_w4(w, group: int = GROUP):
    """(integers int8[... k n] from -7 to 7, scale float32[... k/group n]) of weights w [... k n].

    The scale is max |w| / 7 over a group of rows, and halves round to even. A group of zeros, or of
    numbers below the smallest normal float32, has scale 1. NaN or infinity make their group's scale not
    finite. ValueError if k is not a multiple of group, or group is odd.
    """
    _check_group(w.shape[-2], group)
    *lead, k, n = w.shape
    grouped = w.astype(jnp.float32).reshape(*lead, k // group, group, n)
    q, scale = _quantize(grouped, -2, WEIGHT_MAX)
    return q.reshape(w.shape), scale


def scale_w4(q, scale):
    """float32[... k n] that integers q [... k n] and their scale [... k/group n] stand for."""
    return q * jnp.repeat(scale, q.shape[-2] // scale.shape[-2], axis=-2)


def quantize_w4(w, group: int = GROUP):
    """(packed int8[... k/2 n], scale float32[... k/group n]) of weights w [... k n], as `round_w4`."""
    q, scale = round_w4(w, group)
    return pack_int4(q, group), scale


def dequantize_w4(packed, scale):
    """float32[... k n] that quantize_w4 stands for."""
    return scale_w4(unpack_int4(packed, 2 * packed.shape[-2] // scale.shape[-2]), scale)


def quantize_a8(x, cut: tuple[str, ...] = ()):
    """(int8[... k], scale float32[...]) of activations x [... k], scale max |x| / 127 over a row.

    cut: mesh axes whose devices have a part of each row, which has one scale. Rounding, zeros and what is not
    finite are as in `quantize_w4`.
    """
    return _quantize(x.astype(jnp.float32), -1, ACTIVATION_MAX, cut)


def round_w8(w, axes):
    """(integers int8 of w's shape from -127 to 127, scale float32 without these axes) of weights w.

    The scale is max |w| / 127 over the axes, those that a product sums over. Rounding, zeros and what is not
    finite are as in `quantize_w4`.
    """
    return _quantize(w.astype(jnp.float32), axes, ACTIVATION_MAX)


def pack_int4(q, group: int = GROUP):
    """int8[... k/2 n] of integers q [... k n] from -8 to 7, as the module says."""
    _check_group(q.shape[-2], group)
    *lead, k, n = q.shape
    halves = q.astype(jnp.int8).reshape(*lead, k // group, 2, group // 2, n)
    packed = (halves[..., 0, :, :] & 15) | (halves[..., 1, :, :] << 4)
    return packed.reshape(*lead, k // 2, n)


def unpack_int4(packed, group: int = GROUP):
    """int8[... k n] from -8 to 7 of packed int8[... k/2 n]."""
    *lead, half, n = packed.shape
    _check_group(2 * half, group)
    packed = packed.reshape(*lead, 2 * half // group, group // 2, n)
    return jnp.stack([(packed << 4) >> 4, packed >> 4], axis=-3).reshape(*lead, 2 * half, n)


def _quantize(x, axis, most: int, cut: tuple[str, ...] = ()):
    top = jnp.max(jnp.abs(x), axis=axis)
    top = lax.pmax(top, cut) if cut else top
    # Without as many bits as the integers have, so that their product has at most 24.
    scale = lax.reduce_precision(top / most, exponent_bits=8, mantissa_bits=23 - most.bit_length())
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    q = jnp.clip(jnp.round(x / jnp.expand_dims(scale, axis)), -most, most)
    return q.astype(jnp.int8), scale


def _check_group(k: int, group: int):
    if group < 2 or group % 2 or k % group:
        raise ValueError(
            f"{k} rows in groups of {group}: a group must be even and divide the rows; "
            "choose another group"
        )
