"""Kernel of `gpu.forward` for heads of up to 256 columns, and the shared parts of the kernels over key tiles.

Grid: (batch, head, block), the blocks with the most keys first. A block is 128 rows against its range of tiles of 64
keys. At 256 columns of bfloat16, shared memory holds the queries [2 64 256] (64 KiB) and rings of two tiles of keys and
of values [64 256] (64 KiB each).

- A loader warpgroup copies the tiles of keys and values.
- Two compute warpgroups, 64 rows each, visit the same tiles: logits, masking where the range asks for it, online
  softmax, sums of the values. The sums float32[64 256] take 128 registers per thread. The softmax of a tile runs
  during the products of the next.

The output passes through the queries' buffer. A row that sees nothing gives 0 and an infinite log-sum-exp.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import compat, hopper
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E

ROWS = 64  # rows of one product of a warpgroup
GROUPS = 2  # warpgroups of `attend` that have rows
KEYS = 64  # keys of a tile: two tiles of 64 KB, keys and values, and 64 KB of queries
STAGES = 2
# Layouts of one number per row and per column.
ROW_OF, COLUMN_OF = hopper.ROW_OF, hopper.COLUMN_OF


class KeyVisibility(NamedTuple):
    """Visibility of keys, in the form that the kernels read.

    Attributes:
      ranges: int32[l blocks 4], l: the batch or 1. Tiles [begin, end) that a block visits and, inside them, tiles
        [unmasked_begin, unmasked_end) without hidden keys.
      last: int32[r], the last key of each row.
      segments: () or int32[b r] and int32[b s], which never agree where a row sees nothing.
    """

    ranges: Any
    last: Any
    segments: Any


class KeyRange(NamedTuple):
    """The four numbers of one block in `KeyVisibility.ranges`."""

    begin: Any
    end: Any
    unmasked_begin: Any
    unmasked_end: Any

    @classmethod
    def load(cls, ranges: hopper.Ref, b, block) -> "KeyRange":
        """Loads the range of a block of batch row b."""
        row = b if ranges.shape[0] > 1 else 0
        return cls(*(ranges[row, block, i] for i in range(4)))

    def masked(self, tile, value: Array, mask: Callable) -> Array:
        """Returns mask(value) where some keys of the tile are hidden, else value."""
        partly = (tile < self.unmasked_begin) | (tile >= self.unmasked_end)
        return lax.cond(partly, mask, lambda x: x, value)


class TileRing(NamedTuple):
    """Ring of tiles that the copy engine fills and warpgroups read."""

    tiles: Any  # [stages . x]: the tile of step i is in stage i modulo stages
    full: Any  # a barrier per stage: the tile has arrived
    free: Any  # a barrier per stage: its readers have finished; None: they signal it in another way
    extras: Any = None  # [stages .]: numbers that accompany a tile

    def stage(self, i):
        """Returns the stage of tile i."""
        return lax.rem(i, jnp.int32(self.tiles.shape[0]))

    def copy(self, i, source: hopper.Ref, extras: hopper.Ref | None = None) -> None:
        """Copies tile i and its extras; the stage must be free."""
        stage = self.stage(i)
        plgpu.copy_gmem_to_smem(source, self.tiles.at[stage], self.full.at[stage])
        if extras is not None:
            plgpu.copy_gmem_to_smem(extras, self.extras.at[stage], self.full.at[stage])

    def fill(self, i, source: hopper.Ref, extras: hopper.Ref | None = None) -> None:
        """Waits until the stage of tile i is free, then copies the tile and its extras."""

        @pl.when(i >= self.tiles.shape[0])
        def _():
            plgpu.barrier_wait(self.free.at[self.stage(i)])

        self.copy(i, source, extras)

    def wait(self, i) -> hopper.Ref:
        """Waits for tile i and returns its view."""
        stage = self.stage(i)
        plgpu.barrier_wait(self.full.at[stage])
        return self.tiles.at[stage]

    def release(self, i) -> None:
        """Signals that this warpgroup has finished with tile i."""
        plgpu.barrier_arrive(self.free.at[self.stage(i)])

    def drain(self, count) -> None:
        """Waits for the readers of the last of `count` tiles; a waiting warpgroup must wait for all arrivals."""

        @pl.loop(0, jnp.minimum(count, self.tiles.shape[0]))
        def _(i):
            plgpu.barrier_wait(self.free.at[self.stage(i)])


def ring(
    tile: tuple[int, int],
    dtype: DTypeLike,
    *,
    readers: int = 0,
    stages: int = STAGES,
    swizzle: int = 128,
    has_extras: bool = False,
) -> TileRing:
    """Returns the scratch types of a ring of tiles [. x] for `readers` warpgroups that signal when they have read.

    has_extras: whether each row is accompanied by a float32 number.
    """
    return TileRing(
        tiles=plgpu.SMEM((stages, *tile), dtype, transforms=hopper.tile_transforms(dtype, swizzle)),
        full=plgpu.Barrier(num_barriers=stages, num_arrivals=2 if has_extras else 1),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=readers) if readers else None,
        extras=plgpu.SMEM((stages, tile[0]), jnp.float32) if has_extras else None,
    )


def mask_hidden(
    ops: hopper.Ops,
    logits: Float[Array, "r c"],
    first,
    last: Int32[Array, " r"],
    q_ids: Int32[Array, " r"] | None,
    segments: hopper.Ref | None,
    b,
) -> Float[Array, "r c"]:
    """Returns logits [r c] with HIDDEN for keys, from `first` on, that a row does not see.

    last: last key of each row. q_ids: segments of the rows, or None. segments: those of all keys.
    """
    column = ops.cast(lax.broadcasted_iota(jnp.int32, logits.shape, 1))
    is_visible = column <= hopper.broadcast_rows(last - first, logits.shape)
    if q_ids is not None:
        key_ids = ops.load(segments, (b, pl.ds(first, logits.shape[1])), layout=COLUMN_OF)
        is_visible = is_visible & (
            hopper.broadcast_rows(q_ids, logits.shape)
            == hopper.broadcast_columns(key_ids, logits.shape)
        )
    return jnp.where(is_visible, logits, HIDDEN)


def softmax_step(
    logits: Float[Array, "r c"], top: Float[Array, " r"], total: Float[Array, " r"]
) -> tuple[Float[Array, "r c"], Float[Array, " r"], Float[Array, " r"], Float[Array, " r"]]:
    """Adds logits [r c] to an online softmax: (p, factor of the previous sums, top, total)."""
    new_top = jnp.maximum(top, jnp.max(logits, axis=1))
    p = jnp.exp2(logits - hopper.broadcast_rows(new_top, logits.shape))
    factor = jnp.exp2(top - new_top)
    return p, factor, new_top, total * factor + jnp.sum(p, axis=1)


def softmax_end(
    top: Float[Array, " r"], total: Float[Array, " r"]
) -> tuple[Float[Array, " r"], Float[Array, " r"], Float[Array, " r"]]:
    """Returns (1 / total, lse, largest logit) of rows; 0, infinity and HIDDEN for rows without visible keys."""
    has_keys = top > HIDDEN / 2
    largest = jnp.where(has_keys, top * (1 / LOG2E), HIDDEN)
    normaliser = jnp.where(has_keys, 1 / total, 0.0)
    return normaliser, jnp.where(has_keys, largest + jnp.log(total), jnp.inf), largest


def attend(
    q: Float[Array, "b h o x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"],
    visibility: KeyVisibility,
    *,
    scale: float,
    interpret: object,
) -> tuple[Float[Array, "b h r y"], Float[Array, "b h r"], Float[Array, "b h r"]]:
    """Returns (out [b h r y], lse float32[b h r], largest logit float32[b h r]) of blocks of 128 rows.

    q [b h o x], k [b m s x], v [b m s y]. h is a multiple of m, and x at least y. r = 128 blocks: the o rows
    are cut into tiles of 128, and `visibility` has the same number of blocks for each tile. Each block covers
    its range of keys.
    """
    (b, h, rows, x), m, y = q.shape, k.shape[1], v.shape[-1]
    size = GROUPS * ROWS
    blocks = visibility.ranges.shape[1]
    cuts, parts = blocks * size // rows, h // m
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, v_ref, ranges_ref, last_ref, *refs, queries, queries_in, keys, values
    ):  # fmt: skip
        *segments, out_ref, lse_ref, top_ref = refs
        b, h, role = (lax.axis_index(name) for name in ("batch", "head", "role"))
        block = blocks - 1 - lax.axis_index("block")  # blocks with the most keys first
        key_range = KeyRange.load(ranges_ref, b, block)
        count = key_range.end - key_range.begin

        # Loader warpgroup: keys and values of the range.
        def load():
            plgpu.set_max_registers(24, action="decrease")
            head = lax.div(h, jnp.int32(parts))

            @pl.loop(0, count)
            def _(i):
                out_rows = pl.ds((key_range.begin + i) * KEYS, KEYS)
                keys.fill(i, k_ref.at[b, head, out_rows])
                values.fill(i, v_ref.at[b, head, out_rows])

            keys.drain(count)
            values.drain(count)

        # Compute warpgroups: online softmax over the range.
        def add():
            plgpu.set_max_registers(240, action="increase")
            # This warpgroup's rows, and what they see.
            my_queries = queries.at[role]
            row_slice = pl.ds(lax.div(block, jnp.int32(cuts)) * size + role * ROWS, ROWS)
            source = q_ref.at[b, h, row_slice]
            plgpu.copy_gmem_to_smem(source, my_queries, queries_in.at[role])
            last = ops.load(last_ref, (row_slice,), layout=ROW_OF)
            q_ids = ops.load(segments[0], (b, row_slice), layout=ROW_OF) if segments else None
            plgpu.barrier_wait(queries_in.at[role])

            def mask(tile, logits):
                return mask_hidden(
                    ops, logits, tile * KEYS, last, q_ids, segments and segments[1], b
                )

            def accumulate(i, carry):
                """Adds the logits of tile i to the softmax and the output sums."""
                logits, acc, top, total = carry
                number = key_range.begin + i
                logits = logits * (scale * LOG2E)
                logits = key_range.masked(number, logits, lambda logits: mask(number, logits))
                p, factor, top, total = softmax_step(logits, top, total)
                acc = acc * hopper.broadcast_rows(factor, acc.shape)
                acc = ops.dot(acc, p.astype(v.dtype), values.wait(i))
                values.release(i)
                return acc, top, total

            def step(i, carry):
                """Computes the logits of tile i while those of the previous tile are accumulated."""
                before = functools.partial(accumulate, i - 1, carry)
                shape = ROWS, KEYS
                logits, accumulated = dot_during(ops, shape, my_queries, keys.wait(i), before)
                keys.release(i)
                return logits, *accumulated

            # The first tile's logits have no softmax to overlap with, and the last tile's softmax no logits.
            def first():
                logits = ops.dot(zeros, my_queries, keys.wait(0), b_transposed=True)
                keys.release(0)
                return logits

            zeros = ops.zeros((ROWS, KEYS))
            start = (
                lax.cond(count > 0, first, lambda: zeros),
                ops.zeros((ROWS, y)),
                ops.full((ROWS,), HIDDEN, layout=ROW_OF),
                ops.zeros((ROWS,), layout=ROW_OF),
            )
            carry = lax.fori_loop(1, count, step, start)
            last_tile = functools.partial(accumulate, count - 1)
            acc, top, total = lax.cond(count > 0, last_tile, lambda carry: carry[1:], carry)
            # Normalise and store.
            normaliser, lse, top = softmax_end(top, total)
            out_rows = pl.ds(block * size + role * ROWS, ROWS)
            lse_ref[b, h, out_rows] = lse
            top_ref[b, h, out_rows] = top
            # The queries' buffer holds the output on its way to memory.
            store_tile(
                acc * hopper.broadcast_rows(normaliser, acc.shape),
                my_queries,
                out_ref.at[b, h, out_rows],
            )

        # One branch per role: otherwise the compiler gives every role the same number of registers.
        lax.cond(role == GROUPS, load, add)

    tiled = hopper.tile_transforms(q.dtype)
    # Build and call the kernel.
    kernel = hopper.kernel(
        body,
        kernel_name="flash_mla_attend",
        interpret=interpret,
        out_type=out_type(b, h, blocks * size, y, q.dtype),
        grid=(b, h, blocks),
        grid_names=("batch", "head", "block"),
        num_threads=GROUPS + 1,
        thread_name="role",
        # Sums over a row stay within a warp, so no scratch between warps is needed.
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((GROUPS, ROWS, x), q.dtype, transforms=tiled),
            "queries_in": plgpu.Barrier(num_barriers=GROUPS),
            "keys": ring((KEYS, x), k.dtype, readers=GROUPS),
            "values": ring((KEYS, y), v.dtype, readers=GROUPS),
        },
    )
    return kernel(q, k, v, visibility.ranges, visibility.last, *visibility.segments)


def dot_during(
    ops: hopper.Ops, shape: tuple[int, int], a: hopper.Ref, b: hopper.Ref, then: Callable
) -> tuple[Float[Array, "r c"], Any]:
    """Returns (a @ b^T, then()); `then` runs while the product [shape] is in flight."""
    if ops.is_emulated:
        return ops.dot(ops.zeros(shape), a, b, b_transposed=True), then()

    def run(acc):
        plgpu.wgmma(acc, a, compat.transpose_ref(b))
        result = then()
        return acc[...], result

    return pl.run_scoped(run, hopper.Accumulator(shape, jnp.float32))


def store_tile(x: Float[Array, "r m"], via: hopper.Ref, to: hopper.Ref) -> None:
    """Stores x [r m] from registers to `to`, through the first m columns of a shared tile `via`."""
    if x.shape != via.shape:
        return hopper.store_via_smem(x, via, to, pl.ds(0, x.shape[1]))
    via[...] = x.astype(via.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(via, to)
    plgpu.wait_smem_to_gmem(0)


def out_type(b: int, h: int, rows: int, y: int, dtype: DTypeLike) -> tuple:
    """Returns the shapes of (out [b h rows y], log-sum-exp and largest logit float32[b h rows])."""
    numbers = jax.ShapeDtypeStruct((b, h, rows), jnp.float32)
    return jax.ShapeDtypeStruct((b, h, rows, y), dtype), numbers, numbers
