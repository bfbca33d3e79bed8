"""From bytes of two int4, columns along memory, to operands of Hopper's tensor cores, rows along registers.

A warpgroup takes WIDTHS[v] columns, v = 4 or 2 in one load of a thread. Tensor cores want four neighbours along
the contraction in a register, so each thread reads v columns of four rows and turns the square. Its columns
then are rows of v / 2 left operands of 64 rows: column (warp 8 + g) v + 2 t + e, g = 0..7, is row
warp 16 + e 8 + g of operand t. What has a number per column comes in that order too, and sums leave in it.

The emulator takes the plain forms. The others only rename registers and move bytes in them, loads and
stores are Mosaic's; `tests/kernels/test_w4a8_matmul_gpu.py` runs them on numbers.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.compat import arith, ir, vector

ROWS = 64  # of bytes; each holds a row's integers and those of a row half a group further
WIDTHS = {4: 128, 2: 64}  # columns of a warpgroup by those of a thread
HIGH_HALVES = -0x0F0F0F10  # 0xF0F0F0F0


def bytes_layout(v: int):
    """Of bytes [ROWS, WIDTHS[v]]: a thread has v columns of rows 16 h + 4 lane % 4 + (0 to 3)."""
    tiling = Tiling(((16, 32 * v), (4, 8 * v), (v,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -5), vector_dim=-1)


def column_layout(v: int):
    """Of a number per column [WIDTHS[v]]."""
    tiling = Tiling(((32 * v,), (8 * v,), (v,)))
    lanes = (-2, Replicated(4))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=lanes, vector_dim=-1)


def out_layout(v: int):
    """Of sums [tokens, WIDTHS[v]]: a thread has v columns of tokens 8 j + 2 (lane % 4) + (0 or 1)."""
    tiling = Tiling(((8, 32 * v), (2, 8 * v), (v,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -5), vector_dim=-1)


def unpack(ops: hopper.Ops, tile):
    """List of v / 2 operands int8[64, 2 ROWS], sixteen times the integers, of bytes tile [ROWS, 32 v].

    Along the contraction the low integers come first, then the high ones.
    """
    v = tile.shape[1] // 32
    if ops.emulated:
        packed = tile[...].astype(jnp.int32)
        both = jnp.concatenate([packed << 4, packed & -16]).astype(jnp.int8)
        return list(_by_row(both.T, v))
    operand = plgpu.ShapeDtypeStruct((64, 2 * ROWS), jnp.int8, layout=plgpu.Layout.WGMMA_8BIT)
    run = plgpu.inline_mgpu(arg_types=(bytes_layout(v),), return_type=[operand] * (v // 2))

    def unpack(_, packed):
        return [_array(x, plgpu.Layout.WGMMA_8BIT, True) for x in to_operands(packed.registers, v)]

    return run(unpack)(ops.load(tile, (), bytes_layout(v)))


def spread(ops: hopper.Ops, numbers):
    """List of v / 2 float32[64] in rows of the operands, of float32 numbers [32 v] by column."""
    v = numbers.shape[0] // 32
    if ops.emulated:
        return list(_by_row(numbers[...], v))
    row = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=hopper.WGMMA.reduce(1))
    run = plgpu.inline_mgpu(arg_types=(column_layout(v),), return_type=[row] * (v // 2))

    def spread(_, numbers):
        return [_array(x, hopper.WGMMA.reduce(1)) for x in to_rows(numbers.registers, v)]

    return run(spread)(ops.load(numbers, (), column_layout(v)))


def join(ops: hopper.Ops, sums):
    """float32[n, 32 v] by column, of v / 2 sums [64, n] of the operands' rows."""
    v, n = 2 * len(sums), sums[0].shape[1]
    if ops.emulated:
        stacked = jnp.stack(sums).reshape(v // 2, 4, 2, 8, n)  # t, warp, e, g
        return stacked.transpose(4, 1, 3, 0, 2).reshape(n, 32 * v)
    out = plgpu.ShapeDtypeStruct((n, 32 * v), jnp.float32, layout=out_layout(v))
    run = plgpu.inline_mgpu(arg_types=([hopper.WGMMA] * (v // 2),), return_type=out)

    def join(_, sums):
        return _array(to_columns([x.registers for x in sums], (n, 32 * v)), out_layout(v))

    return run(join)(list(sums))


def _by_row(x, v: int):
    """[v / 2, 64, ...] of x [32 v, ...]."""
    x = x.reshape(4, 8, v // 2, 2, *x.shape[1:])  # warp, g, t, e
    return x.transpose(2, 0, 3, 1, *range(4, x.ndim)).reshape(v // 2, 64, *x.shape[4:])


class Mlir:
    """What happens to registers; the tests have the same on numbers."""

    def word(self, register, v: int):
        """The v bytes of a register as 32 bits, zeros above."""
        word = self.element(vector.bitcast(ir.VectorType.get((1,), _int_type(8 * v)), register), 0)
        return word if v == 4 else arith.extui(_int_type(), word)

    def bytes(self, word):
        """The four bytes of a word."""
        return vector.bitcast(ir.VectorType.get((4,), _int_type(8)), self.vector([word]))

    def permute(self, a, b, pick: int):
        """PTX's prmt.b32: bytes of a (0 to 3) and b (4 to 7) that the digits of pick name, last first."""
        return mgpu.utils.prmt(a, b, _int(pick))

    def halves(self, word):
        """Sixteen times the low and the high integers of four bytes."""
        low = arith.andi(arith.shli(word, _int(4)), _int(HIGH_HALVES))
        return low, arith.andi(word, _int(HIGH_HALVES))

    def element(self, register, i: int):
        """Number i of a register."""
        return vector.extract(register, [], [i])

    def vector(self, values):
        """A register of these numbers."""
        return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def to_operands(registers, v: int, do=Mlir()):
    """Registers of the operands as `unpack` gives them, from those of bytes in `bytes_layout`."""
    shape = plgpu.Layout.WGMMA_8BIT.to_mgpu().registers_shape((64, 2 * ROWS))
    operands = [np.empty(shape, object) for _ in range(v // 2)]
    steps = ROWS // 16
    for h in range(steps):
        rows = [do.word(registers[h, 0, 0, 0, b, 0, 0], v) for b in range(4)]
        for pair in range(v // 2):  # word by word, byte i of each row
            pick = 0x7362 if pair else 0x5140
            first, second = do.permute(*rows[:2], pick), do.permute(*rows[2:], pick)
            for e, pick in enumerate((0x5410, 0x7632)):
                low, high = do.halves(do.permute(first, second, pick))
                operands[pair][0, h, 0, 0, e, 0, 0, 0, 0] = do.bytes(low)
                operands[pair][0, steps + h, 0, 0, e, 0, 0, 0, 0] = do.bytes(high)
    return operands


def to_rows(registers, v: int, do=Mlir()):
    """Registers of a number per row of each operand, from those in `column_layout`."""
    (own,) = registers.flat
    shape = hopper.WGMMA.reduce(1).to_mgpu().registers_shape((64,))
    rows = [np.empty(shape, object) for _ in range(v // 2)]
    for i in range(v):
        rows[i // 2].flat[i % 2] = do.vector([do.element(own, i)])
    return rows


def to_columns(sums, shape, do=Mlir()):
    """Registers in `out_layout`, from those of the sums in WGMMA."""
    v, tokens = shape[1] // 32, shape[0] // 8
    columns = np.empty(out_layout(v).to_mgpu().registers_shape(shape), object)
    for j, d in np.ndindex(tokens, 2):
        own = [sums[i // 2][0, j, 0, 0, i % 2, 0, 0, 0, 0] for i in range(v)]
        columns[j, 0, 0, 0, d, 0, 0] = do.vector([do.element(x, d) for x in own])
    return columns


def _array(registers, layout, signed=None):
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def _int_type(bits: int = 32):
    return ir.IntegerType.get_signless(bits)


def _int(value: int):
    return mgpu.c(value, _int_type())
