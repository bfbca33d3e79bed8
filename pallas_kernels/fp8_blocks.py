"""Block-wise FP8: weights with a scale for each block, rows with one for each group, and their products in XLA.

    x ~ values * scale, values in float8_e4m3fn, scale = max |x| / 448 of a block or group

A weight has blocks of 128 x 128: one dimension is its last input, the other its last output. A row of
activations has groups of 128 inputs (GLM-5 3.6.2; DeepSeek-V3 3.3). Heads are no part of a block. A dimension that is no
multiple of the block ends with a partial block.

A scale has few enough bits that values * scale is exact in float32. Quantizing a dequantized weight again therefore gives
the same bits. Products of values are exact in bfloat16 and in float32: chips multiply them in bfloat16, a CPU in float32.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Int

from pallas_kernels import backends
from pallas_kernels.grouped_matmul.xla import ExpertRows, spans

BLOCK = 128
DTYPE = jnp.float8_e4m3fn
MAX = float(jnp.finfo(DTYPE).max)
_SIGNIFICANT_BITS = 4  # of a value


def quantize_blocks(
    w: Float[Array, "..."], dims: tuple[int, int], block: int = BLOCK
) -> tuple[Float8e4m3fn[Array, "..."], Float[Array, "..."]]:
    """Quantizes a weight to (values of its shape, float32 scales of its shape with blocks in these two dimensions).

    A block of zeros, or of numbers below the smallest normal float32, has scale 1. NaN or infinity make their block's
    scale not finite. Raises ValueError if the block is no power of two, because `block_of` could not find it.
    """
    if block < 1 or block & (block - 1):
        raise ValueError(f"blocks of {block} x {block}: the side must be a power of two")
    x, positions = w.astype(jnp.float32), []
    for dim in sorted(dim % w.ndim for dim in dims):
        dim += len(positions)  # each dimension before it has become two
        x = split_dim(x, dim, block)
        positions.append(dim + 1)
    values, scale = _quantize(x, tuple(positions))
    for dim in reversed(positions):
        shape = (*values.shape[: dim - 1], -1, *values.shape[dim + 1 :])
        values = values.reshape(shape)
    return values[tuple(slice(0, n) for n in w.shape)], scale


def quantize_groups(
    x: Float[Array, "*batch groups group"],
) -> tuple[Float[Array, "*batch groups group"], Float[Array, "*batch groups"]]:
    """Quantizes groups of a row. Returns (values in the dtype of `operand_dtype`, scales float32)."""
    values, scale = _quantize(x.astype(jnp.float32), (x.ndim - 1,))
    return values.astype(operand_dtype()), scale


def block_of(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> int:
    """Returns the side of the blocks of a weight: a power of two that follows from its shape and that of its scales."""
    return max(1 << (-(-n // blocks) - 1).bit_length() for n, blocks in zip(shape, scale_shape))


def split_dim(x: Array, dim: int, block: int) -> Array:
    """Returns x with a dimension split into (blocks, block), zeros at the end of a partial block.

    A dimension of less than a block is one block of its size.
    """
    n = x.shape[dim]
    count, size = -(-n // block), min(block, n)
    if count * size != n:
        x = jnp.pad(x, [(0, count * size - n if i == dim else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])


def spread_scale(scale: Float[Array, "..."], n: int, block: int) -> Float[Array, "..."]:
    """Returns the scale of each of the n outputs, from those of the blocks of the last dimension."""
    return jnp.repeat(scale, min(block, n), axis=-1)[..., :n]


def operand_dtype() -> jnp.dtype:
    """Returns the dtype in which values are multiplied."""
    return jnp.dtype(jnp.float32 if backends.platform() == "cpu" else jnp.bfloat16)


def multiply_groups(
    x: Float[Array, "*batch m groups group"],
    x_scale: Float[Array, "*batch m groups"],
    w: Float8e4m3fn[Array, "*batch groups group n"],
    w_scale: Float[Array, "*batch groups n"],
    out_dtype: DTypeLike,
) -> Float[Array, "*batch m n"]:
    """Returns sum over groups g of x_scale[m, g] w_scale[g, n] (x[m, g] . w[g, :, n]), summed in float32."""
    groups = w.shape[-3]

    def add(g, total):
        rows = lax.dynamic_index_in_dim(x, g, axis=-2 % x.ndim, keepdims=False)
        row_scale = lax.dynamic_index_in_dim(x_scale, g, axis=x_scale.ndim - 1)
        weights = lax.dynamic_index_in_dim(w, g, axis=-3 % w.ndim, keepdims=False)
        scale = lax.dynamic_index_in_dim(w_scale, g, axis=-2 % w_scale.ndim)
        sums = jnp.matmul(rows, weights.astype(x.dtype), preferred_element_type=jnp.float32)
        return total + sums * row_scale * scale

    shape = (*x.shape[:-2], w.shape[-1])
    total = lax.fori_loop(0, groups, add, jnp.zeros(shape, jnp.float32))
    return total.astype(out_dtype)


def fp8_grouped_matmul(
    x: Float[Array, "m k"],
    w: Float8e4m3fn[Array, "e k n"],
    w_scale: Float[Array, "e groups blocks"],
    group_sizes: Int[Array, " e"],
    *,
    expected_rows: int | None = None,
) -> Float[Array, "m n"]:
    """Multiplies rows that are sorted by expert with their experts' weights. Returns the dtype of x.

    The rows are quantized. group_sizes: rows per expert; rows beyond their sum give zero. expected_rows: expected number
    of filled rows; None: m. It does not change the result. Not differentiable.
    """
    block, n = block_of(w.shape[1:], w_scale.shape[1:]), w.shape[-1]
    values, scale = quantize_groups(split_dim(x, 1, block))
    weights = split_dim(w, 1, block), spread_scale(w_scale, n, block)

    def multiply(rows, row_scale, w, w_scale):
        rows = rows.reshape(*row_scale.shape, -1)
        return (multiply_groups(rows, row_scale, w, w_scale, x.dtype),)

    mean = -(-(expected_rows or len(x)) // len(w))
    experts = ExpertRows(spans(mean), group_sizes, len(x))
    return experts.map(multiply, (values.reshape(len(x), -1), scale), weights)[0]


def _quantize(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns (values, scales without these axes)."""
    scale = lax.reduce_precision(
        jnp.max(jnp.abs(x), axis=axes) / MAX,
        exponent_bits=8,
        mantissa_bits=23 - _SIGNIFICANT_BITS,
    )
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    # A number above the maximum would become NaN.
    values = jnp.clip(x / jnp.expand_dims(scale, axes), -MAX, MAX)
    return values.astype(DTYPE), scale
