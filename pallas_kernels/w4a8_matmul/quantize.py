"""Quantization to int4 weights and int8 activations, for training, export and the kernels.

Symmetric: x ~ q * scale with an integer q of at most 7 (weights, per group of rows and column) or 127
(activations, per row). A scale has few enough bits that q * scale is exact in float32. A dequantized value is
therefore the same on every machine, and quantizing it again gives the same bits, even where division is off by
up to three units in the last place.

Packed int4: int8[... k/2 n]. A group of rows is stored as half as many rows of bytes. Byte i of a group holds
row i in the low four bits and row i + group/2 in the high four bits, both in two's complement. Columns keep
their places. Therefore a shard or slice between groups of rows, or of columns, is a shard or slice of the
bytes. A kernel gets full rows after a shift, without an exchange between neighbours.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

GROUP = 128
WEIGHT_MAX, ACTIVATION_MAX = 7, 127


def round_w4(
    w: Float[Array, "*batch k n"], group: int = GROUP
) -> tuple[Int8[Array, "*batch k n"], Float[Array, "*batch k/group n"]]:
    """Rounds weights w [... k n] to integers int8[... k n] from -7 to 7, with scales float32[... k/group n].

    The scale is max |w| / 7 over a group of rows; halves round to even. A group of zeros, or of numbers below
    the smallest normal float32, has scale 1. NaN or infinity make their group's scale not finite. Raises
    ValueError if k is not a multiple of group, or group is odd.
    """
    _check_group(w.shape[-2], group)
    *batch_shape, k, n = w.shape
    grouped = w.astype(jnp.float32).reshape(*batch_shape, k // group, group, n)
    q, scale = _quantize(grouped, -2, WEIGHT_MAX)
    return q.reshape(w.shape), scale


def scale_w4(
    q: Int8[Array, "*batch k n"], scale: Float[Array, "*batch groups n"]
) -> Float[Array, "*batch k n"]:
    """Returns float32[... k n] for integers q [... k n] and their scales [... k/group n]."""
    return q * jnp.repeat(scale, q.shape[-2] // scale.shape[-2], axis=-2)


def quantize_w4(
    w: Float[Array, "*batch k n"], group: int = GROUP
) -> tuple[Int8[Array, "*batch k/2 n"], Float[Array, "*batch k/group n"]]:
    """Quantizes weights w [... k n] to (packed int8[... k/2 n], scale float32[... k/group n]), as `round_w4`."""
    q, scale = round_w4(w, group)
    return pack_int4(q, group), scale


def dequantize_w4(
    packed: Int8[Array, "*batch k/2 n"], scale: Float[Array, "*batch groups n"]
) -> Float[Array, "*batch k n"]:
    """Returns float32[... k n] for the result of `quantize_w4`."""
    return scale_w4(unpack_int4(packed, 2 * packed.shape[-2] // scale.shape[-2]), scale)


def quantize_a8(
    x: Float[Array, "*batch k"], sharded_axes: tuple[str, ...] = ()
) -> tuple[Int8[Array, "*batch k"], Float[Array, "*batch"]]:
    """Quantizes activations x [... k] to (int8[... k], scale float32[...]), with scale max |x| / 127 per row.

    sharded_axes: mesh axes over which a row is sharded; the row has one scale. Rounding, zeros and non-finite
    values are as in `quantize_w4`.
    """
    return _quantize(x.astype(jnp.float32), -1, ACTIVATION_MAX, sharded_axes)


def round_w8(
    w: Float[Array, "..."], axes: int | tuple[int, ...]
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """Rounds weights w to integers int8 of its shape from -127 to 127, with scales float32 without these axes.

    The scale is max |w| / 127 over the axes, which are those that a product sums over. Rounding, zeros and
    non-finite values are as in `quantize_w4`.
    """
    return _quantize(w.astype(jnp.float32), axes, ACTIVATION_MAX)


def pack_int4(q: Int[Array, "*batch k n"], group: int = GROUP) -> Int8[Array, "*batch k/2 n"]:
    """Packs integers q [... k n] from -8 to 7 into int8[... k/2 n]; see the module."""
    _check_group(q.shape[-2], group)
    *batch_shape, k, n = q.shape
    halves = q.astype(jnp.int8).reshape(*batch_shape, k // group, 2, group // 2, n)
    packed = (halves[..., 0, :, :] & 15) | (halves[..., 1, :, :] << 4)
    return packed.reshape(*batch_shape, k // 2, n)


def unpack_int4(
    packed: Int8[Array, "*batch k/2 n"], group: int = GROUP
) -> Int8[Array, "*batch k n"]:
    """Unpacks int8[... k/2 n] into int8[... k n] from -8 to 7."""
    *batch_shape, half, n = packed.shape
    _check_group(2 * half, group)
    packed = packed.reshape(*batch_shape, 2 * half // group, group // 2, n)
    return jnp.stack([(packed << 4) >> 4, packed >> 4], axis=-3).reshape(*batch_shape, 2 * half, n)


def _quantize(x, axis, max_integer: int, sharded_axes: tuple[str, ...] = ()):
    max_value = jnp.max(jnp.abs(x), axis=axis)
    max_value = lax.pmax(max_value, sharded_axes) if sharded_axes else max_value
    # Drops as many bits as the integers have, so that their product has at most 24.
    scale = lax.reduce_precision(
        max_value / max_integer, exponent_bits=8, mantissa_bits=23 - max_integer.bit_length()
    )
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    q = jnp.clip(jnp.round(x / jnp.expand_dims(scale, axis)), -max_integer, max_integer)
    return q.astype(jnp.int8), scale


def _check_group(k: int, group: int):
    if group < 2 or group % 2 or k % group:
        raise ValueError(
            f"{k} rows in groups of {group}: a group must be even and divide the rows; "
            "choose another group"
        )
