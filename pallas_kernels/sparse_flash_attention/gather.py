"""Rows of a table in global memory, named by a list, as a tile that Hopper's tensor cores read."""

import functools

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.compat import arith, ir, llvm, memref, nvvm


def gather(ops: hopper.Ops, table, rows, tile, swizzle: int = 128):
    """tile[i] = table[rows[i]], zeros where rows[i] < 0; then tensor cores and copies may read it.

    The whole warpgroup takes part and waits. table [s x] in global memory, a row's length a multiple of 16
    bytes; rows int32[m]; tile [m x] with the transforms `hopper.tiled(dtype, swizzle)`.
    """
    if ops.emulated:
        index = rows[...]
        taken = jnp.take(table[...], jnp.maximum(index, 0), axis=0)
        tile[...] = jnp.where(index[:, None] >= 0, taken, 0)
    else:
        tiled = plgpu.RefType(transforms=hopper.tiled(table.dtype, swizzle))
        types = (plgpu.RefType(), plgpu.RefType(), tiled)
        copy = functools.partial(_copy, shape=tile.shape, swizzle=swizzle)
        plgpu.inline_mgpu(arg_types=types)(copy)(table, rows, tile)
    plgpu.commit_smem()


def _copy(_, table, rows, tile, *, shape, swizzle: int):
    """The same by 16-byte copies, each thread putting its piece where the swizzle has it.

    Hopper's copy engine takes no list of rows. The emulator cannot run this function: the compiler alone
    has checked it. A tile lies as Mosaic has it: pieces of 8 rows by `swizzle` bytes, row-major, and in
    a piece the bits of an address from the fourth on, which name the 16 bytes within a row, are xored
    with those from the seventh on, which count the rows.
    """
    m, width = shape
    kind = ir.MemRefType(table.type)
    itemsize = mgpu.utils.bytewidth(kind.element_type)
    (stride, _), _ = kind.get_strides_and_offset()
    pieces = width * itemsize // swizzle
    lanes = swizzle // 16  # threads for one row of a piece
    thread = arith.remui(mgpu.thread_idx(), _number(128))
    lane, row = arith.remui(thread, _number(lanes)), arith.divui(thread, _number(lanes))

    within = arith.muli(arith.remui(row, _number(8)), _number(swizzle))
    within = arith.addi(within, arith.muli(lane, _number(16)))
    within = arith.xori(within, arith.andi(arith.shrui(within, _number(3)), _number(swizzle - 16)))
    first = arith.muli(arith.divui(row, _number(8)), _number(pieces * 8 * swizzle))
    target = _at(mgpu.utils.memref_ptr(tile), arith.addi(first, within))

    source = mgpu.utils.memref_ptr(table)
    source = llvm.addrspacecast(llvm.PointerType.get(address_space=1), source)
    source = _at(source, arith.muli(lane, _number(16)))
    step = 128 // lanes  # rows at a time
    for start in range(0, m, step):
        place = arith.index_cast(ir.IndexType.get(), arith.addi(row, _number(start)))
        index = memref.load(rows, [place])
        exists = arith.cmpi(arith.CmpIPredicate.sge, index, _number(0))
        size = arith.select(exists, _number(16), _number(0))  # bytes read; the others are zeros
        index = arith.extui(_int(64), arith.maxsi(index, _number(0)))
        begin = _at(source, arith.muli(index, _number(stride * itemsize, 64)))
        for piece in range(pieces):
            to = _at(target, (start // 8 * pieces + piece) * 8 * swizzle)
            nvvm.cp_async_shared_global(
                to,
                _at(begin, piece * swizzle),
                16,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=size,
            )
    nvvm.cp_async_commit_group()
    nvvm.cp_async_wait_group(0)


def _int(bits: int):
    return ir.IntegerType.get_signless(bits)


def _number(value: int, bits: int = 32):
    return mgpu.c(value, _int(bits))


def _at(pointer, offset):
    """The address so many bytes further; offset: a value or an int."""
    return mgpu.utils.getelementptr(pointer, [offset], _int(8))
