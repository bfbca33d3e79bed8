"""Index scores and their exact selection on Hopper: two kernels over chunks of queries.

The scores of a chunk are written once, as integers that compare like them, and read once; head scores stay in
registers. Keys lie along the rows of the products, (head, query) along the columns, eight queries wide: a
thread then holds all heads of its two queries, and sums them without asking another.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.top_k.gpu import INVISIBLE, STAGE, ordered, select_rows, too_many

QUERIES = 8  # of a tile: the width of the tensor cores' smallest product
# Not measured; by shared memory, registers and the number of processors alone.
KEYS = 128  # of a tile: 64 for each of two warpgroups
HEADS = 32  # of a product: 256 columns, 128 registers of each thread
SLICE = 128  # contracted at a time
RING = 4  # tiles in flight at most
PROCESSORS = 132  # of an H100 or H200
SCORES = 128 << 20  # bytes of a chunk's scores
BUDGET = hopper.SMEM_BYTES - 1024  # of tiles: barriers and alignment take some


class Plan(NamedTuple):
    """Sizes of a call of the scoring kernel.

    A key tile takes `passes` products for as many groups of `heads` heads, each in `slices` steps of
    `width` numbers. Queries stay in shared memory if `resident`, else they come along with the keys.
    """

    heads: int
    passes: int
    width: int
    slices: int
    resident: bool
    ring: int
    chunk: int  # queries
    parts: int  # into which blocks divide the keys of a query tile
    columns: int  # of the scores


def refuse(idx_q, idx_w, idx_k, k, page_table=None):
    """Why this form cannot take such arguments, or None."""
    if page_table is not None:
        return "it reads no pages"
    kinds = (jnp.dtype("bfloat16"), jnp.dtype("float32"))
    if idx_q.dtype != idx_k.dtype or idx_q.dtype not in kinds:
        return f"queries are {idx_q.dtype} and keys {idx_k.dtype}, not both bfloat16 or float32"
    return too_many(min(k, idx_k.shape[1]))


def select_keys(
    static, idx_q, idx_w, idx_k, k_scale, start, q_segments, k_segments, *, interpret=False
):
    """topk int32[b t k] of idx_q [b t i j], idx_w [b t i] over idx_k [b s j]."""
    b, t, i, j = idx_q.shape
    start = start if static.start is None else static.start
    reach = idx_k.shape[1] if static.start is None else min(idx_k.shape[1], start + t)
    k = min(static.k, idx_k.shape[1])
    weights = (idx_w * j**-0.5).astype(jnp.float32)
    if idx_q.dtype == jnp.float32:
        idx_q, idx_k = in_parts(idx_q, LEFT), in_parts(idx_k, RIGHT)
    plan = _plan(idx_q, t, reach)
    rows, keys = _to_multiple(t, plan.chunk), _to_multiple(reach, KEYS)
    idx_q = _pad(idx_q, {1: rows, 3: plan.width * plan.slices})
    idx_k = _pad(idx_k[:, :reach], {1: keys, 2: plan.width * plan.slices})
    weights = _pad(weights, {1: rows}).reshape(b, rows // QUERIES, QUERIES, i)
    weights = weights.swapaxes(2, 3).reshape(b, rows // QUERIES, i * QUERIES)
    segments = ()
    if q_segments is not None:
        segments = _pad(q_segments, {1: rows}), _pad(k_segments[:, :reach], {1: keys})
    bounds = _bounds(b, t, rows, start, reach, *segments)
    tiles = bounds.reshape(b, rows // QUERIES, QUERIES, 2)
    first = jnp.min(jnp.where(tiles[..., 0] < tiles[..., 1], tiles[..., 0], reach), axis=-1)
    last = jnp.max(tiles[..., 1], axis=-1)
    tiles = jnp.stack([first // KEYS, pl.cdiv(last, KEYS)], axis=-1)

    def choose(where):
        batch, tile = where
        scores = _score(plan, where, tiles, idx_q, weights, idx_k, *segments, interpret=interpret)
        own = lax.dynamic_slice(bounds, (batch, tile * QUERIES, 0), (1, plan.chunk, 2))[0]
        return select_rows(scores, own, k, interpret=interpret)

    chunks = rows // plan.chunk
    chunk = jnp.arange(b * chunks, dtype=jnp.int32)
    where = jnp.stack([chunk // chunks, chunk % chunks * (plan.chunk // QUERIES)], axis=-1)
    topk = choose(where[0])[None] if b * chunks == 1 else lax.map(choose, where)
    return topk.reshape(b, rows, k)[:, :t]


# float32 as three bfloat16, of whose nine products the six largest reach float32's precision.
LEFT, RIGHT = (0, 0, 1, 0, 2, 1), (0, 1, 0, 2, 0, 1)


def in_parts(x, order):
    """bfloat16[... 6j] whose products, summed, are those of float32 x [... j]. Not of infinite ones."""
    parts = []
    for _ in range(3):
        # XLA may leave out a cast there and back.
        parts.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return jnp.concatenate([parts[n].astype(jnp.bfloat16) for n in order], axis=-1)


def _plan(idx_q, t, reach) -> Plan:
    i, j, size = *idx_q.shape[2:], idx_q.dtype.itemsize
    passes = next(n for n in range(-(-i // HEADS), i + 1) if i % n == 0)
    width = min(SLICE, _to_multiple(j, 128 // size))
    slices = -(-j // width)
    tile, queries = KEYS * width * size, i // passes * QUERIES * width * size
    left = BUDGET - passes * slices * queries
    resident = left >= 2 * tile
    ring = left // tile if resident else BUDGET // (tile + queries)
    columns = _to_multiple(reach, STAGE)
    chunk = max(QUERIES, min(_to_multiple(t, QUERIES), SCORES // columns // 4 // QUERIES * QUERIES))
    parts = max(1, min(PROCESSORS // (chunk // QUERIES), -(-reach // KEYS)))
    return Plan(
        i // passes, passes, width, slices, resident, min(RING, ring), chunk, parts, columns
    )


def _bounds(b, t, rows, start, reach, q_segments=None, k_segments=None):
    """int32[b rows 2]: the keys between which each query's visible ones lie, (0, 0) if there are none."""
    query = jnp.arange(rows, dtype=jnp.int32)
    last = jnp.where(query < t, jnp.clip(start + query + 1, 0, reach), 0)
    last = jnp.broadcast_to(last, (b, rows))
    if q_segments is None:
        return jnp.stack([jnp.zeros_like(last), last], axis=-1)
    # Tiles of keys that share no segment with a tile of queries: by the least and the largest of each.
    least_q, most_q = _extent(q_segments, QUERIES)
    least_k, most_k = _extent(k_segments, KEYS)
    meet = (least_k[:, None] <= most_q[..., None]) & (most_k[:, None] >= least_q[..., None])
    tile = jnp.arange(meet.shape[-1], dtype=jnp.int32)
    begin = jnp.min(jnp.where(meet, tile, tile.size), axis=-1) * KEYS
    end = jnp.max(jnp.where(meet, tile + 1, 0), axis=-1) * KEYS
    last = jnp.minimum(last, jnp.repeat(end, QUERIES, axis=-1))
    first = jnp.minimum(jnp.repeat(begin, QUERIES, axis=-1), last)
    return jnp.stack([first, last], axis=-1)


def _extent(segments, size):
    """The least and the largest segment of each tile of `size`, padding left out."""
    tiles = segments.reshape(segments.shape[0], -1, size)
    info = jnp.iinfo(segments.dtype)
    least = jnp.min(jnp.where(tiles == 0, info.max, tiles), axis=-1)
    return least, jnp.max(jnp.where(tiles == 0, info.min, tiles), axis=-1)


def _to_multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def _pad(x, sizes: dict[int, int]):
    """x with zeros at the end of those axes."""
    return jnp.pad(x, [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)])


def _score(plan, where, tiles, q, weights, k, *segments, interpret):
    """int32[chunk columns]: `ordered` scores of the chunk of queries at `where`, INVISIBLE in other segments.

    where: int32[2], batch and query tile. tiles int32[b, query tiles, 2]: the key tiles of each; what
    lies outside is not written. q [b t i j], k [b s j], weights float32[b, query tiles, (i query)].
    """
    columns = plan.heads * QUERIES
    held = plan.passes * columns, plan.slices * plan.width
    moving = plan.ring, columns, plan.width
    transforms = hopper.tiled(q.dtype)
    return hopper.kernel(
        functools.partial(_score_body, hopper.Ops(interpret), plan),
        interpret=interpret,
        kernel_name="score_keys",
        out_type=jax.ShapeDtypeStruct((plan.chunk, plan.columns), jnp.int32),
        grid=(plan.chunk // QUERIES, plan.parts),
        grid_names=("tile", "part"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM(held if plan.resident else moving, q.dtype, transforms=transforms),
            plgpu.SMEM((plan.ring, KEYS, plan.width), k.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=plan.passes * plan.heads),
            plgpu.Barrier(
                num_barriers=plan.ring, num_arrivals=1 if plan.resident else 1 + plan.heads
            ),
            plgpu.Barrier(num_barriers=plan.ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(where, tiles, q, weights, k, *segments)


def _score_body(ops, plan, where, tiles, q, weights, k, *refs):
    segments, (scores, q_tile, k_ring, q_ready, full, free, turn) = refs[:-7], refs[-7:]
    warpgroup, part = lax.axis_index("warpgroup"), lax.axis_index("part")
    batch, tile = where[0], where[1] + lax.axis_index("tile")
    first, last = tiles[batch, tile, 0], tiles[batch, tile, 1]
    begin = first + lax.div((last - first) * part, plan.parts)
    count = first + lax.div((last - first) * (part + 1), plan.parts) - begin
    queries = pl.ds(tile * QUERIES, QUERIES)
    columns = plan.heads * QUERIES
    steps = plan.passes * plan.slices

    @pl.when((warpgroup == 2) & (count > 0))
    def _fetch():
        plgpu.set_max_registers(40, action="decrease")
        if plan.resident:
            for head in range(plan.passes * plan.heads):
                to = q_tile.at[pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(q.at[batch, queries, head], to, q_ready)

        @pl.loop(0, count * steps)
        def _(n):
            slot, step = lax.rem(n, plan.ring), lax.rem(n, steps)
            pl.when(n >= plan.ring)(lambda: plgpu.barrier_wait(free.at[slot]))
            some = pl.ds(lax.rem(step, plan.slices) * plan.width, plan.width)
            keys = pl.ds((begin + lax.div(n, steps)) * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(k.at[batch, keys, some], k_ring.at[slot], full.at[slot])
            for head in range(0 if plan.resident else plan.heads):
                own = q.at[batch, queries, lax.div(step, plan.slices) * plan.heads + head, some]
                to = q_tile.at[slot, pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(own, to, full.at[slot])

        for slot in range(plan.ring):
            pl.when(slot < count * steps)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))

    @pl.when((warpgroup < 2) & (count > 0))
    def _sum():
        plgpu.set_max_registers(232, action="increase")
        along_rows, along_columns = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)
        weight = [
            ops.load(weights.at[batch, tile, pl.ds(n * columns, columns)], (), along_columns)
            for n in range(plan.passes)
        ]
        # The warpgroups take turns, so that one sums while the other's products run.
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        if plan.resident:
            plgpu.barrier_wait(q_ready)

        def product(n, of, part, dots):
            slot = lax.rem(n * steps + of * plan.slices + part, plan.ring)
            plgpu.barrier_wait(full.at[slot])
            rows = k_ring.at[slot, pl.ds(warpgroup * 64, 64)]
            some = pl.ds(of * columns, columns), pl.ds(part * plan.width, plan.width)
            plgpu.barrier_wait(turn.at[warpgroup])
            dots = ops.dot(
                dots,
                rows,
                q_tile.at[some] if plan.resident else q_tile.at[slot],
                b_transposed=True,
                issued=lambda: plgpu.barrier_arrive(turn.at[1 - warpgroup]),
            )
            plgpu.barrier_arrive(free.at[slot])
            return dots

        @pl.loop(0, count)
        def _(n):
            at = pl.ds((begin + n) * KEYS + warpgroup * 64, 64)
            sums = [ops.zeros((64, QUERIES))] * 2  # two chains hide the latency of adding
            for of in range(plan.passes):
                dots = ops.zeros((64, columns))
                for part in range(plan.slices):
                    dots = product(n, of, part, dots)
                each = jnp.maximum(dots, 0) * lax.broadcast_in_dim(weight[of], dots.shape, [1])
                for head in range(plan.heads):
                    some = head * QUERIES, (head + 1) * QUERIES
                    own = lax.slice(each, (0, some[0]), (64, some[1]))
                    sums[head % 2] = sums[head % 2] + own
            key = ordered(sums[0] + sums[1])
            if segments:
                own = ops.load(segments[0].at[batch, queries], (), along_columns)
                of = ops.load(segments[1].at[batch, at], (), along_rows)
                own = lax.broadcast_in_dim(own, key.shape, [1])
                same = own == lax.broadcast_in_dim(of, key.shape, [0])
                key = jnp.where(same & (own != 0), key, INVISIBLE)
            rows = pl.ds(lax.axis_index("tile") * QUERIES, QUERIES)
            ops.store_transposed(scores.at[rows, at], key)

        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
