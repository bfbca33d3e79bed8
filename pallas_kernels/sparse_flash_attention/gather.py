"""Rows of a table in global memory, named by a list, as a tile that Hopper's tensor cores read."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.compat import arith, ir, llvm, memref, nvvm

AHEAD = 2  # lists of rows that are fetched before they are needed


def gather(ops: hopper.Ops, table, rows, tile, swizzle: int = 128):
    """tile[i] = table[rows[i]], zeros where rows[i] < 0; then tensor cores and copies may read it.

    The whole warpgroup takes part and waits. table [s x] in global memory, a row's start a multiple of 16
    bytes; rows int32[m]; tile [... x] of m rows with the transforms `hopper.tiled(dtype, swizzle)`.
    """
    if ops.emulated:
        index = rows[...]
        taken = jnp.take(table[...], jnp.maximum(index, 0), axis=0)
        tile[...] = jnp.where(index[:, None] >= 0, taken, 0).reshape(tile.shape)
    else:
        tiled = plgpu.RefType(transforms=hopper.tiled(table.dtype, swizzle))
        types = (plgpu.RefType(), plgpu.RefType(), tiled)
        copy = functools.partial(_copy, shape=tile.shape, swizzle=swizzle)
        plgpu.inline_mgpu(arg_types=types)(copy)(table, rows, tile)
    plgpu.commit_smem()


class Ring(NamedTuple):
    """Tiles on their way from one warpgroup, which gathers them, to others: refs of shared memory."""

    tiles: Any  # [stages ... x]: tile i is in stage i modulo stages
    full: Any  # a barrier per stage: the tile is there
    free: Any  # a barrier per stage: its readers are done with it
    lists: Any  # int32[AHEAD + 1, m]: row numbers, fetched before they are needed
    listed: Any  # a barrier for each of them

    def stage(self, i):
        """The place of tile i."""
        return lax.rem(i, jnp.int32(self.tiles.shape[0]))

    def wait_for_place(self, i):
        """Waits until tile i may be written, and gives its place."""
        stage = self.stage(i)

        @pl.when(i >= self.tiles.shape[0])
        def _():
            plgpu.barrier_wait(self.free.at[stage])

        return stage

    def list_rows(self, rows, i, count):
        """Starts to fetch list i of `count`: rows, a view of int32[m]."""
        slot = lax.rem(i, jnp.int32(AHEAD + 1))

        @pl.when(i < count)
        def _():
            plgpu.copy_gmem_to_smem(rows, self.lists.at[slot], self.listed.at[slot])

    def wait_for_list(self, i):
        """The view of list i, when it is there."""
        slot = lax.rem(i, jnp.int32(AHEAD + 1))
        plgpu.barrier_wait(self.listed.at[slot])
        return self.lists.at[slot]

    def drain(self, count):
        """Waits for the readers of the last of `count` tiles: who waits for a barrier must see all of it."""

        @pl.loop(0, jnp.minimum(count, self.tiles.shape[0]))
        def _(i):
            plgpu.barrier_wait(self.free.at[self.stage(i)])


def ring(tile, readers: int, dtype, *, stages: int, swizzle: int = 128, arrivals: int = 1) -> Ring:
    """The scratch types of a ring of tiles [... x] for so many warpgroups that read them.

    arrivals: at the barrier of a tile that is there.
    """
    m = math.prod(tile[:-1])
    return Ring(
        plgpu.SMEM((stages, *tile), dtype, transforms=hopper.tiled(dtype, swizzle)),
        plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals),
        plgpu.Barrier(num_barriers=stages, num_arrivals=readers),
        plgpu.SMEM((AHEAD + 1, m), jnp.int32),
        plgpu.Barrier(num_barriers=AHEAD + 1),
    )


def gather_all(ops: hopper.Ops, table, rows, ring: Ring, count, swizzle: int = 128):
    """The loader's whole part where tile i is table[rows[i m : (i + 1) m]], for i < count."""
    m = ring.lists.shape[1]
    for i in map(jnp.int32, range(AHEAD)):  # numbers of the program: list i need not exist
        ring.list_rows(rows.at[pl.ds(i * m, m)], i, count)

    @pl.loop(0, count)
    def _(i):
        ring.list_rows(rows.at[pl.ds((i + AHEAD) * m, m)], i + AHEAD, count)
        wanted = ring.wait_for_list(i)
        stage = ring.wait_for_place(i)
        gather(ops, table, wanted, ring.tiles.at[stage], swizzle)
        plgpu.barrier_arrive(ring.full.at[stage])

    ring.drain(count)


def _copy(_, table, rows, tile, *, shape, swizzle: int):
    """The same by 16-byte copies, each thread putting its piece where the swizzle has it.

    Hopper's copy engine takes no list of rows. The emulator cannot run this function: the compiler alone
    has checked it. A tile lies as Mosaic has it: pieces of 8 rows by `swizzle` bytes, row-major, and in
    a piece the bits of an address from the fourth on, which name the 16 bytes within a row, are xored
    with those from the seventh on, which count the rows.
    """
    m, width = math.prod(shape[:-1]), shape[-1]
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
