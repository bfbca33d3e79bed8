"""The kernels of `gpu.forward`: a block of rows against its own range of key tiles.

`attend` is for heads of up to 256 columns: two warpgroups have 64 rows each, with their sums in registers,
and meet the same tiles, which a third copies. The softmax of the one runs beside the products of the
other. `attend_wide` is for latents of up to 576: the sums of 64 rows are spread over several warpgroups.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, hopper
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_flash_attention.gpu_forward import PIECE

ROWS = 64  # of one product of a warpgroup
GROUPS = 2  # warpgroups of `attend` that have rows of their own
KEYS = 64  # of a tile: two of 64 KB, keys and values, beside 64 KB of queries
SEPARATE_KEYS = 32  # of a tile of `attend_wide`, if the values are not the keys
STAGES = 2
# Of a thread that makes weights and of one that sums, by the number of warpgroups that sum: all that a block
# starts with, 168 or 128 for each of its threads.
REGISTERS = {2: (104, 200), 3: (104, 136)}
ROW_OF, COLUMN_OF = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)  # a number per row, per column


class Seen(NamedTuple):
    """Who sees whom, as the kernels read it.

    ranges int32[l blocks 4], l: the batch or 1: the tiles [begin, end) that a block meets and, inside,
    some [whole, whole_end) of which every row sees every key. last int32[r]: the last key of each row.
    segments: () or int32[b r] and int32[b s], which never agree where a row sees nothing.
    """

    ranges: Any
    last: Any
    segments: Any


class Range(NamedTuple):
    """The four numbers of one block in `Seen.ranges`."""

    begin: Any
    end: Any
    whole: Any
    whole_end: Any

    @classmethod
    def of(cls, ranges, b, block):
        """Those of a block of batch row b."""
        one = b if ranges.shape[0] > 1 else 0
        return cls(*(ranges[one, block, i] for i in range(4)))

    def masked(self, tile, value, mask):
        """mask(value) where some keys of the tile are hidden, else value."""
        partly = (tile < self.whole) | (tile >= self.whole_end)
        return lax.cond(partly, mask, lambda x: x, value)


class Ring(NamedTuple):
    """Tiles on their way from the copy engine to the warpgroups that read them."""

    tiles: Any  # [stages . x]: the tile of step i is in stage i modulo stages
    full: Any  # a barrier per stage: the tile is there
    free: Any  # a barrier per stage: its readers are done with it; None if they say so otherwise
    beside: Any = None  # [stages .]: numbers that come with a tile

    def stage(self, i):
        """The place of tile i."""
        return lax.rem(i, jnp.int32(self.tiles.shape[0]))

    def copy(self, i, source, beside=None):
        """Copies tile i and what comes with it; its place must be free."""
        stage = self.stage(i)
        plgpu.copy_gmem_to_smem(source, self.tiles.at[stage], self.full.at[stage])
        if beside is not None:
            plgpu.copy_gmem_to_smem(beside, self.beside.at[stage], self.full.at[stage])

    def fill(self, i, source, beside=None):
        """The same, when its place is free."""

        @pl.when(i >= self.tiles.shape[0])
        def _():
            plgpu.barrier_wait(self.free.at[self.stage(i)])

        self.copy(i, source, beside)

    def wait(self, i):
        """The view of tile i, when it is there."""
        stage = self.stage(i)
        plgpu.barrier_wait(self.full.at[stage])
        return self.tiles.at[stage]

    def release(self, i):
        """Says that this warpgroup is done with tile i."""
        plgpu.barrier_arrive(self.free.at[self.stage(i)])

    def drain(self, count):
        """Waits for the readers of the last of `count` tiles: who waits for a barrier must see all of it."""

        @pl.loop(0, jnp.minimum(count, self.tiles.shape[0]))
        def _(i):
            plgpu.barrier_wait(self.free.at[self.stage(i)])


def ring(
    tile, dtype, *, readers: int = 0, stages: int = STAGES, swizzle: int = 128, beside: bool = False
) -> Ring:
    """The scratch types of a ring of tiles [. x] for so many warpgroups that say when they have read.

    beside: whether each row has a float32 number that comes with it.
    """
    return Ring(
        plgpu.SMEM((stages, *tile), dtype, transforms=hopper.tiled(dtype, swizzle)),
        plgpu.Barrier(num_barriers=stages, num_arrivals=2 if beside else 1),
        plgpu.Barrier(num_barriers=stages, num_arrivals=readers) if readers else None,
        plgpu.SMEM((stages, tile[0]), jnp.float32) if beside else None,
    )


def hidden(ops, logits, first, last, own, segments, b):
    """logits [r c] with HIDDEN for the keys, from `first` on, that a row does not see.

    last int32[r]; own int32[r] or None: segments of the rows; segments: the ref of those of all keys.
    """
    column = ops.cast(lax.broadcasted_iota(jnp.int32, logits.shape, 1))
    seen = column <= hopper.over_rows(last - first, logits.shape)
    if own is not None:
        of = ops.load(segments, (b, pl.ds(first, logits.shape[1])), layout=COLUMN_OF)
        seen = seen & (hopper.over_rows(own, logits.shape) == hopper.over_columns(of, logits.shape))
    return jnp.where(seen, logits, HIDDEN)


def softmax_step(logits, top, total):
    """(p, factor of what was summed before, top, total) with logits [r c] taken into account."""
    new = jnp.maximum(top, jnp.max(logits, axis=1))
    p = jnp.exp2(logits - hopper.over_rows(new, logits.shape))
    factor = jnp.exp2(top - new)
    return p, factor, new, total * factor + jnp.sum(p, axis=1)


def softmax_end(top, total):
    """(1 / total, lse, largest logit) of rows; 0, infinity and HIDDEN where nothing was seen."""
    seen = top > HIDDEN / 2
    largest = jnp.where(seen, top * (1 / LOG2E), HIDDEN)
    share = jnp.where(seen, 1 / total, 0.0)
    return share, jnp.where(seen, largest + jnp.log(total), jnp.inf), largest


def attend(q, k, v, seen: Seen, *, scale, interpret):
    """(out [b h r y], lse float32[b h r], largest logit float32[b h r]) of blocks of 128 rows.

    q [b h o x], k [b m s x], v [b m s y]; h is a multiple of m, and x at least y. r = 128 blocks: of the o rows, cut into
    tiles of 128, as many blocks each as `seen` has; each gives what its own range of keys makes.
    """
    (b, h, rows, x), m, y = q.shape, k.shape[1], v.shape[-1]
    size = GROUPS * ROWS
    blocks = seen.ranges.shape[1]
    cuts, parts = blocks * size // rows, h // m
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, v_ref, ranges_ref, last_ref, *refs, queries, queries_in, keys, values
    ):  # fmt: skip
        *segments, out_ref, lse_ref, top_ref = refs
        b, h, role = (lax.axis_index(name) for name in ("batch", "head", "role"))
        block = blocks - 1 - lax.axis_index("block")  # those with most keys first
        met = Range.of(ranges_ref, b, block)
        count = met.end - met.begin

        def load():
            plgpu.set_max_registers(24, action="decrease")
            head = lax.div(h, jnp.int32(parts))

            @pl.loop(0, count)
            def _(i):
                place = pl.ds((met.begin + i) * KEYS, KEYS)
                keys.fill(i, k_ref.at[b, head, place])
                values.fill(i, v_ref.at[b, head, place])

            keys.drain(count)
            values.drain(count)

        def add():
            plgpu.set_max_registers(240, action="increase")
            mine = queries.at[role]
            own_rows = pl.ds(lax.div(block, jnp.int32(cuts)) * size + role * ROWS, ROWS)
            source = q_ref.at[b, h, own_rows]
            plgpu.copy_gmem_to_smem(source, mine, queries_in.at[role])
            last = ops.load(last_ref, (own_rows,), layout=ROW_OF)
            own = ops.load(segments[0], (b, own_rows), layout=ROW_OF) if segments else None
            plgpu.barrier_wait(queries_in.at[role])

            def mask(tile, logits):
                return hidden(ops, logits, tile * KEYS, last, own, segments and segments[1], b)

            def take(i, carry):
                """What logits are of tile i, taken into account."""
                logits, acc, top, total = carry
                number = met.begin + i
                logits = logits * (scale * LOG2E)
                logits = met.masked(number, logits, lambda logits: mask(number, logits))
                p, factor, top, total = softmax_step(logits, top, total)
                acc = acc * hopper.over_rows(factor, acc.shape)
                acc = ops.dot(acc, p.astype(v.dtype), values.wait(i))
                values.release(i)
                return acc, top, total

            def step(i, carry):
                """The logits of tile i are made while those of the tile before are taken."""
                before = functools.partial(take, i - 1, carry)
                shape = ROWS, KEYS
                logits, taken = beside(ops, shape, mine, keys.wait(i), before)
                keys.release(i)
                return logits, *taken

            def first():
                logits = ops.dot(zeros, mine, keys.wait(0), b_transposed=True)
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
            last_tile = functools.partial(take, count - 1)
            acc, top, total = lax.cond(count > 0, last_tile, lambda carry: carry[1:], carry)
            share, lse, top = softmax_end(top, total)
            place = pl.ds(block * size + role * ROWS, ROWS)
            lse_ref[b, h, place] = lse
            top_ref[b, h, place] = top
            # The queries' place holds the outcome on its way out.
            send_all(acc * hopper.over_rows(share, acc.shape), mine, out_ref.at[b, h, place])

        # One branch of one choice each, or the compiler gives every role the same registers.
        lax.cond(role == GROUPS, load, add)

    tiled = hopper.tiled(q.dtype)
    kernel = hopper.kernel(
        body,
        kernel_name="flash_mla_attend",
        interpret=interpret,
        out_type=_out_type(b, h, blocks * size, y, q.dtype),
        grid=(b, h, blocks),
        grid_names=("batch", "head", "block"),
        num_threads=GROUPS + 1,
        thread_name="role",
        # Sums over a row stay within a warp: no scratch between warps.
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((GROUPS, ROWS, x), q.dtype, transforms=tiled),
            "queries_in": plgpu.Barrier(num_barriers=GROUPS),
            "keys": ring((KEYS, x), k.dtype, readers=GROUPS),
            "values": ring((KEYS, y), v.dtype, readers=GROUPS),
        },
    )
    return kernel(q, k, v, seen.ranges, seen.last, *seen.segments)


def beside(ops, shape, a, b, then):
    """(a @ b^T, then()): what `then` does is done while the product [shape] is under way."""
    if ops.emulated:
        return ops.dot(ops.zeros(shape), a, b, b_transposed=True), then()

    def run(acc):
        plgpu.wgmma(acc, a, compat.transposed(b))
        made = then()
        return acc[...], made

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def send_all(x, via, to):
    """to[...] = x [r m] from registers, through the first m columns of a shared tile `via`."""
    if x.shape != via.shape:
        return hopper.send(x, via, to, pl.ds(0, x.shape[1]))
    via[...] = x.astype(via.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(via, to)
    plgpu.wait_smem_to_gmem(0)


def _out_type(b, h, rows, y, dtype):
    numbers = jax.ShapeDtypeStruct((b, h, rows), jnp.float32)
    return jax.ShapeDtypeStruct((b, h, rows, y), dtype), numbers, numbers


def parts_of(width: int) -> int:
    """How many warpgroups share the sums of so many columns, 64 of which are one piece of a tile."""
    return max(2, -(-width // 256))


def attend_wide(q, k, v, seen: Seen, *, scale, interpret):
    """As `attend`, of blocks of 64 rows; v: None if the values are the keys, all of their columns.

    One warpgroup copies tiles into a ring of two and makes their weights, and the others each sum
    their own columns of the values: products of one tile run beside the softmax of the next.
    """
    (b, h, rows, x), m = q.shape, k.shape[1]
    shared = v is None
    y = x if shared else v.shape[-1]
    blocks = seen.ranges.shape[1]
    cuts, group = blocks * ROWS // rows, h // m
    parts = parts_of(y)
    part = y // parts
    weigher_registers, adder_registers = REGISTERS[parts]
    length = KEYS if shared else SEPARATE_KEYS
    swizzle = 2 * length  # bytes of a row of weights, over which the values are contracted
    ops = hopper.Ops(interpret)

    def body(*refs, queries, queries_in, keys, values, weights, factors, weighed, taken):
        q_ref, k_ref, *refs = refs
        v_ref, *refs = (None, *refs) if shared else refs
        ranges_ref, last_ref, *segments, out_ref, lse_ref, top_ref = refs
        b, h, role = (lax.axis_index(name) for name in ("batch", "head", "role"))
        block = blocks - 1 - lax.axis_index("block")
        met = Range.of(ranges_ref, b, block)
        count = met.end - met.begin
        place = pl.ds(block * ROWS, ROWS)

        def load(i):
            @pl.when(i < count)
            def _():
                head = lax.div(h, jnp.int32(group))
                these = pl.ds((met.begin + i) * length, length)
                keys.copy(i, k_ref.at[b, head, these])
                if not shared:
                    values.copy(i, v_ref.at[b, head, these])

        def weigh():
            plgpu.set_max_registers(weigher_registers, action="decrease")
            for i in range(STAGES):
                load(jnp.int32(i))
            own_rows = pl.ds(lax.div(block, jnp.int32(cuts)) * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[b, h, own_rows], queries, queries_in)
            last = ops.load(last_ref, (own_rows,), layout=ROW_OF)
            own = ops.load(segments[0], (b, own_rows), layout=ROW_OF) if segments else None
            plgpu.barrier_wait(queries_in)

            def mask(tile, logits):
                return hidden(ops, logits, tile * length, last, own, segments and segments[1], b)

            def step(i, carry):
                top, total = carry
                tile = keys.wait(i)
                logits = ops.dot(ops.zeros((ROWS, length)), queries, tile, b_transposed=True)
                logits = logits * (scale * LOG2E)
                number = met.begin + i
                logits = met.masked(number, logits, lambda logits: mask(number, logits))
                p, factor, top, total = softmax_step(logits, top, total)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(taken)
                    load(i - 1 + STAGES)  # whoever read this place is done with it

                weights[...] = p.astype(weights.dtype)
                factors[...] = factor
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighed)
                return top, total

            start = ops.full((ROWS,), HIDDEN, layout=ROW_OF), ops.zeros((ROWS,), layout=ROW_OF)
            top, total = lax.fori_loop(0, count, step, start)

            @pl.when(count > 0)
            def _():
                plgpu.barrier_wait(taken)

            share, lse, top = softmax_end(top, total)
            factors[...] = share
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighed)
            lse_ref[b, h, place] = lse
            top_ref[b, h, place] = top

        def add():
            plgpu.set_max_registers(adder_registers, action="increase")
            columns = pl.ds(role * part, part)

            def scaled(acc):
                return acc * hopper.over_rows(ops.load(factors, layout=ROW_OF), acc.shape)

            def step(i, acc):
                tile = (keys if shared else values).wait(i).at[:, columns]
                plgpu.barrier_wait(weighed)
                acc = ops.dot(scaled(acc), weights, tile, most=PIECE)
                plgpu.barrier_arrive(taken)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((ROWS, part)))
            plgpu.barrier_wait(weighed)
            # All logits are made: the queries' place holds the outcome on its way out.
            hopper.send(scaled(acc), queries, out_ref.at[b, h, place], columns)

        lax.cond(role == parts, weigh, add)

    tiled = hopper.tiled(q.dtype, swizzle)
    kernel = hopper.kernel(
        body,
        kernel_name="flash_mla_attend_wide",
        interpret=interpret,
        out_type=_out_type(b, h, blocks * ROWS, y, q.dtype),
        grid=(b, h, blocks),
        grid_names=("batch", "head", "block"),
        num_threads=parts + 1,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((ROWS, x), q.dtype, transforms=tiled),
            "queries_in": plgpu.Barrier(),
            "keys": ring((length, x), k.dtype, swizzle=swizzle),
            "values": None if shared else ring((length, y), v.dtype, swizzle=swizzle),
            "weights": plgpu.SMEM((ROWS, length), q.dtype, transforms=tiled),
            "factors": plgpu.SMEM((ROWS,), jnp.float32),
            "weighed": plgpu.Barrier(),
            "taken": plgpu.Barrier(num_arrivals=parts),
        },
    )
    arrays = (q, k) if shared else (q, k, v)
    return kernel(*arrays, seen.ranges, seen.last, *seen.segments)
