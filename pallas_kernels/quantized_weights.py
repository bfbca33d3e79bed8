"""Weights made of several arrays in a parameter tree, and the einsum that takes plain or quantized weights.

    Int8    weight for int8 rows, one scale per output channel (W8A8)
    Int4    routed experts' weights for int8 rows, one scale per group and output channel (W4A8)
    Fp8     weight for FP8 rows, one scale per block (`fp8_blocks`)

Rows of activations are quantized when they are used: to int8 with one scale per token (`quantize_a8`), to FP8 with one
per token and group.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import fp8_blocks
from pallas_kernels.w4a8_matmul.quantize import quantize_a8


class CompositeWeight:
    """Leaf of a parameter tree made of several arrays, with the shape of the weight they represent.

    By default this is the shape of the first array. In a stack of layers each array has the leading `l`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the represented weight."""
        return jax.tree.leaves(self)[0].shape

    @property
    def dtype(self):
        """Dtype of the first array. For a quantized weight it differs from any plain weight's dtype."""
        return jax.tree.leaves(self)[0].dtype

    def astype(self, dtype) -> Self:
        """Returns itself: quantized arrays keep their dtypes whatever the compute dtype is."""
        del dtype
        return self

    def map_arrays(self, function: Callable, letters: str, shape: tuple[int, ...]) -> Self:
        """Returns an object of this class with function(letters, sizes) in place of each array.

        letters and shape: dimensions of the full weight ("l d f"; a stack begins with l); this object may be a
        shard of it.
        function receives the letters and sizes of one array. Its sizes count units that sharding must not split.
        """
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Int8(CompositeWeight):
    """Weight [... in out]: integers int8 of its shape times scale float32[... out].

    `in` and `out` may be several dimensions each.
    """

    q: jax.Array
    scale: jax.Array

    def map_arrays(self, function, letters, shape) -> "Int8":
        names = letters.split()
        lead = int(names[0] == "l")
        outputs = lead + len(self.q.shape) - len(self.scale.shape)
        rest = " ".join(names[:lead] + names[outputs:]), shape[:lead] + shape[outputs:]
        return Int8(function(letters, shape), function(*rest))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Int4(CompositeWeight):
    """Weights [... k n] in the form of `w4a8_matmul`: packed int8[... k/2 n], scale float32[... k/group n]."""

    packed: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, half, n = self.packed.shape
        return (*lead, 2 * half, n)

    @property
    def group(self) -> int:
        """Number of weight rows that share a scale."""
        return self.shape[-2] // self.scale.shape[-2]

    def map_arrays(self, function, letters, shape) -> "Int4":
        sizes = (*shape[:-2], shape[-2] // self.group, shape[-1])
        return Int4(function(letters, sizes), function(letters, sizes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Fp8(CompositeWeight):
    """Weight [... in out]: values float8_e4m3fn of its shape times float32 scales of its blocks.

    `in` and `out` may be several dimensions each. The last of each has blocks; the scales have the same dimensions, with
    blocks in these two.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def group(self) -> int:
        """Side of a block."""
        return fp8_blocks.block_of(self.values.shape, self.scale.shape)

    def map_arrays(self, function, letters, shape) -> "Fp8":
        sizes = tuple(map(self._num_units, shape, self.values.shape, self.scale.shape))
        return Fp8(function(letters, sizes), function(letters, sizes))

    def _num_units(self, size: int, n: int, blocks: int) -> int:
        """Returns the parts of a dimension of this size that sharding must not split. n, blocks: of this shard."""
        if n == blocks:  # of layers, experts or heads
            return size
        return size // self.group if size % self.group == 0 else 1


def quantized_einsum(
    equation: str, x: Array, w: Array | Int8 | Fp8, sharded_axes: tuple[str, ...] = ()
) -> Array:
    """Returns jnp.einsum(equation, x, w) for x [... in] and a plain, `Int8` or `Fp8` weight w [in out].

    `in` and `out` may be several dimensions each, in the same order in both operands. sharded_axes: mesh axes
    over which `in` is sharded; the caller sums over them.

    With `Int8`, x becomes int8 with one scale per row [in], and the exact integer sums are scaled in float32:
    y[.. o] = (q_x . q_w[:, o]) scale_x scale_w[o], in the dtype of x. With `Fp8`, x becomes FP8 with one scale per row
    and group of the last dimension of `in`, and the sums of each group are scaled and added in float32.
    """
    if isinstance(w, Fp8):
        operands, _, result = equation.replace("...", "").partition("->")
        inputs = set(operands.partition(",")[2]) - set(result)
        return _multiply_fp8(x, w, len(inputs))
    if not isinstance(w, Int8):
        return jnp.einsum(equation, x, w)
    batch_shape = x.shape[: x.ndim - (w.q.ndim - w.scale.ndim)]
    rows, row_scale = quantize_a8(x.reshape(*batch_shape, -1), sharded_axes)
    sums = jnp.matmul(
        rows, w.q.reshape(rows.shape[-1], -1), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    y = sums * row_scale[..., None] * w.scale.reshape(-1)
    return y.astype(x.dtype).reshape(*batch_shape, *w.scale.shape)


def _multiply_fp8(x: Array, w: Fp8, num_inputs: int) -> Array:
    """Returns x [... in] times w [in out]. num_inputs: dimensions of `in`."""
    block, outputs = w.group, w.shape[num_inputs:]
    rows = fp8_blocks.split_dim(x, x.ndim - 1, block)  # [... in, groups, group]
    batch_shape = x.shape[: x.ndim - num_inputs]
    rows = rows.reshape(*batch_shape, -1, rows.shape[-1])
    values, row_scale = fp8_blocks.quantize_groups(rows)
    weights = fp8_blocks.split_dim(w.values, num_inputs - 1, block)
    weights = weights.reshape(*rows.shape[-2:], math.prod(outputs))
    scale = fp8_blocks.spread_scale(w.scale, outputs[-1], block).reshape(rows.shape[-2], -1)
    num_rows = math.prod(batch_shape)
    y = fp8_blocks.multiply_groups(
        values.reshape(num_rows, *rows.shape[-2:]),
        row_scale.reshape(num_rows, -1),
        weights,
        scale,
        x.dtype,
    )
    return y.reshape(*batch_shape, *outputs)
