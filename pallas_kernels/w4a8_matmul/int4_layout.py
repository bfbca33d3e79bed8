"""Register layouts that turn bytes of two int4, columns along memory, into operands of Hopper's tensor cores.

A warpgroup takes WIDTHS[v] columns; v = 4 or 2 columns are one load of a thread. Tensor cores need four
neighbours along the contraction in a register, so each thread reads v columns of four rows and transposes the
square. Its columns then are rows of v / 2 left operands of 64 rows: column (warp 8 + g) v + 2 t + e, g = 0..7,
is row warp 16 + e 8 + g of operand t. Numbers per column are reordered in the same way, and sums are stored in
that order.

The emulator uses the plain forms. The others only rename registers and move bytes within them; loads and stores
are Mosaic's. `tests/kernels/test_w4a8_matmul_gpu.py` runs them on numbers.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int8

from pallas_kernels import hopper
from pallas_kernels.compat import arith, ir, vector

ROWS = 64  # rows of bytes; each holds the integers of a row and of the row half a group later
WIDTHS = {4: 128, 2: 64}  # columns of a warpgroup by those of a thread
HIGH_HALVES = -0x0F0F0F10  # 0xF0F0F0F0


def bytes_layout(v: int):
    """Layout of bytes [ROWS, WIDTHS[v]].

    A thread has v columns of rows 16 h + 4 lane % 4 + (0 to 3).
    """
    tiling = Tiling(((16, 32 * v), (4, 8 * v), (v,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -5), vector_dim=-1)


def column_layout(v: int):
    """Layout of one number per column [WIDTHS[v]]."""
    tiling = Tiling(((32 * v,), (8 * v,), (v,)))
    lanes = (-2, Replicated(4))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=lanes, vector_dim=-1)


def out_layout(v: int):
    """Layout of sums [tokens, WIDTHS[v]].

    A thread has v columns of tokens 8 j + 2 (lane % 4) + (0 or 1).
    """
    tiling = Tiling(((8, 32 * v), (2, 8 * v), (v,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -5), vector_dim=-1)


def unpack(ops: hopper.Ops, tile: hopper.Ref) -> list[Int8[Array, "64 k"]]:
    """Returns v / 2 operands int8[64, 2 ROWS], sixteen times the integers of the bytes tile [ROWS, 32 v].

    Along the contraction the low integers come first, then the high ones.
    """
    v = tile.shape[1] // 32
    if ops.is_emulated:
        packed = tile[...].astype(jnp.int32)
        unpacked = jnp.concatenate([packed << 4, packed & -16]).astype(jnp.int8)
        return list(_by_row(unpacked.T, v))
    operand = plgpu.ShapeDtypeStruct((64, 2 * ROWS), jnp.int8, layout=plgpu.Layout.WGMMA_8BIT)
    run = plgpu.inline_mgpu(arg_types=(bytes_layout(v),), return_type=[operand] * (v // 2))

    def unpack(_, packed):
        return [_array(x, plgpu.Layout.WGMMA_8BIT, True) for x in to_operands(packed.registers, v)]

    return run(unpack)(ops.load(tile, (), bytes_layout(v)))


def spread_scales(ops: hopper.Ops, numbers: hopper.Ref) -> list[Float[Array, " 64"]]:
    """Returns v / 2 float32[64] in the order of the operands' rows, from float32 numbers [32 v] by column."""
    v = numbers.shape[0] // 32
    if ops.is_emulated:
        return list(_by_row(numbers[...], v))
    row = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=hopper.ROW_OF)
    run = plgpu.inline_mgpu(arg_types=(column_layout(v),), return_type=[row] * (v // 2))

    def spread_scales(_, numbers):
        return [_array(x, hopper.ROW_OF) for x in to_rows(numbers.registers, v)]

    return run(spread_scales)(ops.load(numbers, (), column_layout(v)))


def join_columns(ops: hopper.Ops, sums: list[Float[Array, "64 n"]]) -> Float[Array, "n columns"]:
    """Returns float32[n, 32 v] by column, from v / 2 sums [64, n] of the operands' rows."""
    v, n = 2 * len(sums), sums[0].shape[1]
    if ops.is_emulated:
        stacked = jnp.stack(sums).reshape(v // 2, 4, 2, 8, n)  # t, warp, e, g
        return stacked.transpose(4, 1, 3, 0, 2).reshape(n, 32 * v)
    out = plgpu.ShapeDtypeStruct((n, 32 * v), jnp.float32, layout=out_layout(v))
    run = plgpu.inline_mgpu(arg_types=([hopper.WGMMA] * (v // 2),), return_type=out)

    def join_columns(_, sums):
        return _array(to_columns([x.registers for x in sums], (n, 32 * v)), out_layout(v))

    return run(join_columns)(list(sums))


def _by_row(x, v: int):
    """Returns [v / 2, 64, ...] of x [32 v, ...]."""
    x = x.reshape(4, 8, v // 2, 2, *x.shape[1:])  # warp, g, t, e
    return x.transpose(2, 0, 3, 1, *range(4, x.ndim)).reshape(v // 2, 64, *x.shape[4:])


class MlirRegisters:
    """Register operations in MLIR; the tests have the same operations on numbers."""

    def word(self, register, v: int):
        """Returns the v bytes of a register as 32 bits, zeros above."""
        word = self.element(vector.bitcast(ir.VectorType.get((1,), _int_type(8 * v)), register), 0)
        return word if v == 4 else arith.extui(_int_type(), word)

    def bytes(self, word):
        """Returns the four bytes of a word."""
        return vector.bitcast(ir.VectorType.get((4,), _int_type(8)), self.vector([word]))

    def permute(self, a, b, pick: int):
        """Selects bytes of a (0 to 3) and b (4 to 7) by the digits of pick, last first: PTX's prmt.b32."""
        return mgpu.utils.prmt(a, b, _int(pick))

    def halves(self, word):
        """Returns sixteen times the low and the high integers of four bytes."""
        low = arith.andi(arith.shli(word, _int(4)), _int(HIGH_HALVES))
        return low, arith.andi(word, _int(HIGH_HALVES))

    def element(self, register, i: int):
        """Returns number i of a register."""
        return vector.extract(register, [], [i])

    def vector(self, values):
        """Returns a register of these numbers."""
        return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def to_operands(registers, v: int, do=MlirRegisters()):
    """Returns the registers of the operands of `unpack`, from those of bytes in `bytes_layout`."""
    shape = plgpu.Layout.WGMMA_8BIT.to_mgpu().registers_shape((64, 2 * ROWS))
    operands = [np.empty(shape, object) for _ in range(v // 2)]
    steps = ROWS // 16
    for h in range(steps):
        row0, row1, row2, row3 = (do.word(registers[h, 0, 0, 0, b, 0, 0], v) for b in range(4))
        for pair in range(v // 2):  # word by word, byte i of each row
            pick = 0x7362 if pair else 0x5140
            first, second = do.permute(row0, row1, pick), do.permute(row2, row3, pick)
            for e, pick in enumerate((0x5410, 0x7632)):
                low, high = do.halves(do.permute(first, second, pick))
                operands[pair][0, h, 0, 0, e, 0, 0, 0, 0] = do.bytes(low)
                operands[pair][0, steps + h, 0, 0, e, 0, 0, 0, 0] = do.bytes(high)
    return operands


def to_rows(registers, v: int, do=MlirRegisters()):
    """Returns the registers of one number per row of each operand, from those in `column_layout`."""
    (register,) = registers.flat
    shape = hopper.ROW_OF.to_mgpu().registers_shape((64,))
    rows = [np.empty(shape, object) for _ in range(v // 2)]
    for i in range(v):
        rows[i // 2].flat[i % 2] = do.vector([do.element(register, i)])
    return rows


def to_columns(sums, shape, do=MlirRegisters()):
    """Returns registers in `out_layout`, from those of the sums in WGMMA."""
    v, tokens = shape[1] // 32, shape[0] // 8
    columns = np.empty(out_layout(v).to_mgpu().registers_shape(shape), object)
    for j, d in np.ndindex(tokens, 2):
        column_registers = [sums[i // 2][0, j, 0, 0, i % 2, 0, 0, 0, 0] for i in range(v)]
        columns[j, 0, 0, 0, d, 0, 0] = do.vector([do.element(x, d) for x in column_registers])
    return columns


def _array(registers, layout, signed=None):
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def _int_type(bits: int = 32):
    return ir.IntegerType.get_signless(bits)


def _int(value: int):
    return mgpu.c(value, _int_type())
