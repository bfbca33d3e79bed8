"""Gather of table rows from global memory, by a list, into a tile that Hopper's tensor cores read."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.compat import arith, ir, llvm, memref, nvvm

PREFETCH_LISTS = 2  # lists of rows that are fetched in advance


def gather(
    ops: hopper.Ops, table: hopper.Ref, rows: hopper.Ref, tile: hopper.Ref, swizzle: int = 128
) -> None:
    """Sets tile[i] = table[rows[i]], zeros where rows[i] < 0; afterwards tensor cores and copies may read it.

    All threads of the warpgroup take part and wait. table [s x] in global memory, with rows that start at
    multiples of 16 bytes; rows int32[m]; tile [... x] of m rows with the transforms
    `hopper.tile_transforms(dtype, swizzle)`.
    """
    if ops.is_emulated:
        index = rows[...]
        values = jnp.take(table[...], jnp.maximum(index, 0), axis=0)
        tile[...] = jnp.where(index[:, None] >= 0, values, 0).reshape(tile.shape)
    else:
        tiled = plgpu.RefType(transforms=hopper.tile_transforms(table.dtype, swizzle))
        types = (plgpu.RefType(), plgpu.RefType(), tiled)
        copy = functools.partial(_copy, shape=tile.shape, swizzle=swizzle)
        plgpu.inline_mgpu(arg_types=types)(copy)(table, rows, tile)
    plgpu.commit_smem()


class GatherRing(NamedTuple):
    """Ring of tiles in shared memory that one warpgroup gathers and others read."""

    tiles: Any  # [stages ... x]: tile i is in stage i modulo stages
    full: Any  # a barrier per stage: the tile has arrived
    free: Any  # a barrier per stage: its readers have finished
    lists: Any  # int32[PREFETCH_LISTS + 1, m]: row numbers, fetched in advance
    lists_ready: Any  # a barrier per list

    def stage(self, i):
        """Returns the stage of tile i."""
        return lax.rem(i, jnp.int32(self.tiles.shape[0]))

    def wait_for_stage(self, i):
        """Waits until tile i may be written, and returns its stage."""
        stage = self.stage(i)

        @pl.when(i >= self.tiles.shape[0])
        def _():
            plgpu.barrier_wait(self.free.at[stage])

        return stage

    def list_rows(self, rows: hopper.Ref, i, count) -> None:
        """Starts to fetch list i of `count`; rows: a view of int32[m]."""
        slot = lax.rem(i, jnp.int32(PREFETCH_LISTS + 1))

        @pl.when(i < count)
        def _():
            plgpu.copy_gmem_to_smem(rows, self.lists.at[slot], self.lists_ready.at[slot])

    def wait_for_list(self, i) -> hopper.Ref:
        """Waits for list i and returns its view."""
        slot = lax.rem(i, jnp.int32(PREFETCH_LISTS + 1))
        plgpu.barrier_wait(self.lists_ready.at[slot])
        return self.lists.at[slot]

    def drain(self, count) -> None:
        """Waits for the readers of the last of `count` tiles; a waiting warpgroup must wait for all arrivals."""

        @pl.loop(0, jnp.minimum(count, self.tiles.shape[0]))
        def _(i):
            plgpu.barrier_wait(self.free.at[self.stage(i)])


def ring(
    tile: tuple[int, ...],
    readers: int,
    dtype: DTypeLike,
    *,
    stages: int,
    swizzle: int = 128,
    arrivals: int = 1,
) -> GatherRing:
    """Returns the scratch types of a ring of tiles [... x] for `readers` warpgroups.

    arrivals: number of arrivals at the barrier of a full tile.
    """
    m = math.prod(tile[:-1])
    return GatherRing(
        tiles=plgpu.SMEM((stages, *tile), dtype, transforms=hopper.tile_transforms(dtype, swizzle)),
        full=plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=readers),
        lists=plgpu.SMEM((PREFETCH_LISTS + 1, m), jnp.int32),
        lists_ready=plgpu.Barrier(num_barriers=PREFETCH_LISTS + 1),
    )


def gather_all(
    ops: hopper.Ops,
    table: hopper.Ref,
    rows: hopper.Ref,
    ring: GatherRing,
    count,
    swizzle: int = 128,
) -> None:
    """Runs the loader: tile i is table[rows[i m : (i + 1) m]], for i < count."""
    m = ring.lists.shape[1]
    for i in map(jnp.int32, range(PREFETCH_LISTS)):  # traced numbers, because list i need not exist
        ring.list_rows(rows.at[pl.ds(i * m, m)], i, count)

    @pl.loop(0, count)
    def _(i):
        ring.list_rows(rows.at[pl.ds((i + PREFETCH_LISTS) * m, m)], i + PREFETCH_LISTS, count)
        row_list = ring.wait_for_list(i)
        stage = ring.wait_for_stage(i)
        gather(ops, table, row_list, ring.tiles.at[stage], swizzle)
        plgpu.barrier_arrive(ring.full.at[stage])

    ring.drain(count)


def _copy(_, table, rows, tile, *, shape, swizzle: int):
    """Gathers by 16-byte copies; each thread puts its piece at its swizzled address.

    Hopper's copy engine takes no list of rows. The emulator cannot run this function; only the compiler has
    checked it. A tile has Mosaic's memory layout: pieces of 8 rows by `swizzle` bytes, row-major. Within a
    piece, the address bits from the fourth on, which number the 16 bytes within a row, are xored with those
    from the seventh on, which count the rows.
    """
    # Sizes, and this thread's place.
    m, width = math.prod(shape[:-1]), shape[-1]
    kind = ir.MemRefType(table.type)
    itemsize = mgpu.utils.bytewidth(kind.element_type)
    (stride, _), _ = kind.get_strides_and_offset()
    pieces = width * itemsize // swizzle
    lanes = swizzle // 16  # threads for one row of a piece
    thread = arith.remui(mgpu.thread_idx(), _number(128))
    lane, row = arith.remui(thread, _number(lanes)), arith.divui(thread, _number(lanes))

    # Swizzled target address of the thread.
    swizzled = arith.muli(arith.remui(row, _number(8)), _number(swizzle))
    swizzled = arith.addi(swizzled, arith.muli(lane, _number(16)))
    swizzled = arith.xori(
        swizzled, arith.andi(arith.shrui(swizzled, _number(3)), _number(swizzle - 16))
    )
    piece_offset = arith.muli(arith.divui(row, _number(8)), _number(pieces * 8 * swizzle))
    target = _at(mgpu.utils.memref_ptr(tile), arith.addi(piece_offset, swizzled))

    # Copy rows, 128 // lanes per iteration.
    source = mgpu.utils.memref_ptr(table)
    source = llvm.addrspacecast(llvm.PointerType.get(address_space=1), source)
    source = _at(source, arith.muli(lane, _number(16)))
    step = 128 // lanes  # rows per iteration
    for start in range(0, m, step):
        position = arith.index_cast(ir.IndexType.get(), arith.addi(row, _number(start)))
        index = memref.load(rows, [position])
        exists = arith.cmpi(arith.CmpIPredicate.sge, index, _number(0))
        num_bytes = arith.select(
            exists, _number(16), _number(0)
        )  # bytes read; the rest becomes zeros
        index = arith.extui(_int(64), arith.maxsi(index, _number(0)))
        row_start = _at(source, arith.muli(index, _number(stride * itemsize, 64)))
        for piece in range(pieces):
            piece_target = _at(target, (start // 8 * pieces + piece) * 8 * swizzle)
            nvvm.cp_async_shared_global(
                piece_target,
                _at(row_start, piece * swizzle),
                16,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=num_bytes,
            )
    nvvm.cp_async_commit_group()
    nvvm.cp_async_wait_group(0)


def _int(bits: int):
    return ir.IntegerType.get_signless(bits)


def _number(value: int, bits: int = 32):
    return mgpu.c(value, _int(bits))


def _at(pointer, offset):
    """Returns the address `offset` bytes further; offset: a value or an int."""
    return mgpu.utils.getelementptr(pointer, [offset], _int(8))
