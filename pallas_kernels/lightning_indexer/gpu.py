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
from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.top_k.gpu import INVISIBLE, STAGE, ordered, select_rows, too_many

QUERIES = 8  # of a tile: the width of the tensor cores' smallest product
# Timed on an H200 (2026-11-26, experiments/kernels_h200.jsonl), other sizes were not; chosen by shared
# memory, registers and the number of processors.
KEYS = 128  # of a tile: 64 for each of two warpgroups
HEADS = 32  # of a product: 256 columns, 128 registers of each thread
SLICE = 128  # contracted at a time
RING = 4  # tiles in flight at most
BUDGET = hopper.SMEM_BYTES - 1024  # bytes of tiles: barriers and alignment take some
PART = 1024  # keys that are worth a block
SCORES = 128 << 20  # bytes of a chunk's scores

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class Plan(NamedTuple):
    """Sizes of a call of the scoring kernel.

    A tile of keys takes `passes` products for as many groups of `heads` heads, each in `slices` steps of
    `width` numbers. Queries stay in shared memory if `resident`, else they come along with the keys.
    """

    heads: int
    passes: int
    width: int
    slices: int
    resident: bool
    ring: int
    chunk: int  # query tiles
    parts: int  # into which blocks divide the keys of a query tile
    columns: int  # of the scores
    tiles: int  # query tiles of a sequence
    page: int  # keys that lie together; 0: all of a sequence
    scaled: bool
    segmented: bool

    @property
    def copies(self) -> int:
        """Into a slot of the ring."""
        keys = KEYS // self.page if 0 < self.page < KEYS else 1
        return keys + (0 if self.resident else self.heads)


def refuse(idx_q, idx_w, idx_k, k, page_table=None):
    """Why this form cannot take such arguments, or None. With a page_table, idx_k are its pages."""
    if idx_q.dtype != idx_k.dtype or idx_k.dtype.name not in DTYPES:
        return f"queries of {idx_q.dtype} and keys of {idx_k.dtype}; both must be one of {DTYPES}"
    if page_table is None:
        return too_many(min(k, idx_k.shape[1]))
    page = idx_k.shape[1]
    if page % 8 or (KEYS % page and page % KEYS):
        return f"pages of {page} keys; it takes 8, 16, 32, 64 and multiples of {KEYS}"
    if idx_q.shape[1] > QUERIES:
        return f"{idx_q.shape[1]} queries per sequence over pages; it takes at most {QUERIES}"
    return too_many(min(k, page * page_table.shape[1]))


def select_keys(
    static, idx_q, idx_w, idx_k, k_scale, start, q_segments, k_segments, *, interpret=False
):
    """topk int32[b t k] of idx_q [b t i j], idx_w [b t i] over idx_k [b s j]."""
    b, t = idx_q.shape[:2]
    start = start if static.start is None else static.start
    reach = idx_k.shape[1] if static.start is None else min(idx_k.shape[1], start + t)
    k = min(static.k, idx_k.shape[1])
    rows, keys = _to_multiple(t, QUERIES), _to_multiple(idx_k.shape[1], KEYS)
    idx_k = _pad(idx_k, {1: keys})
    scale = None if k_scale is None else _pad(k_scale, {1: keys})
    segments = None
    if q_segments is not None:
        segments = _pad(q_segments, {1: rows}), _pad(k_segments, {1: keys})
    query = jnp.arange(t, dtype=jnp.int32)
    last = jnp.broadcast_to(jnp.clip(start + query + 1, 0, reach), (b, t))
    bounds = _bounds(_pad(last, {1: rows}), segments)
    return _chosen(idx_q, idx_w, idx_k, None, scale, segments, bounds, reach, k, interpret)


def select_paged_keys(
    static, idx_q, idx_w, pages, page_table, lengths, page_scales, *, interpret=False
):
    """topk int32[b t k] of the last t tokens of sequences of `lengths` keys in pages [p z j]."""
    t, (p, page) = idx_q.shape[1], pages.shape[:2]
    reach = page_table.shape[1] * page
    table = _pad(page_table, {1: _to_multiple(reach, KEYS) // page})
    table = jnp.clip(table, 0, p - 1).astype(jnp.int32)
    scale = None if page_scales is None else page_scales[table].reshape(len(table), -1)
    last = jnp.clip(lengths[:, None] - t + 1 + jnp.arange(t), 0, reach).astype(jnp.int32)
    bounds = _bounds(_pad(last, {1: QUERIES}), None)
    k = min(static.k, reach)
    return _chosen(idx_q, idx_w, pages, table, scale, None, bounds, reach, k, interpret)


def _chosen(q, w, keys, table, scale, segments, bounds, reach, k, interpret):
    """topk int32[b t k]. bounds int32[b rows 2], whole tiles of rows. keys [b s j], or pages and their table."""
    b, t, i, j = q.shape
    rows = bounds.shape[1]
    w = _pad((w * j**-0.5).astype(jnp.float32), {1: rows})
    if q.dtype == jnp.float32:
        q, keys = in_parts(q, LEFT), in_parts(keys, RIGHT)
    page = 0 if table is None else keys.shape[1]
    plan = _plan(q, b * rows // QUERIES, reach)._replace(
        tiles=rows // QUERIES, page=page, scaled=scale is not None, segmented=segments is not None
    )
    total = _to_multiple(b * rows, plan.chunk * QUERIES)
    q = _pad(_pad(q, {1: rows}).reshape(b * rows, i, -1), {0: total, 2: plan.width * plan.slices})
    keys = _pad(keys, {2: plan.width * plan.slices})
    # A tile's weights lie as the columns of its products do.
    w = w.reshape(-1, QUERIES, i).swapaxes(1, 2).reshape(-1, i * QUERIES)
    w = _pad(w, {0: total // QUERIES})
    bounds = _pad(bounds.reshape(-1, 2), {0: total})
    tiles = bounds.reshape(-1, QUERIES, 2)
    first = jnp.min(jnp.where(tiles[..., 0] < tiles[..., 1], tiles[..., 0], reach), axis=1)
    last = jnp.max(tiles[..., 1], axis=1)
    tiles = jnp.stack([first // KEYS, pl.cdiv(last, KEYS)], axis=1)
    extras = [x for x in (table, scale) if x is not None]
    if segments is not None:
        extras += [_pad(segments[0].reshape(-1), {0: total}), segments[1]]

    used = min(t, QUERIES)  # queries of a tile

    def choose(tile):
        scores = _score(plan, tile, tiles, q, w, keys, *extras, interpret=interpret)
        own = lax.dynamic_slice_in_dim(bounds, tile[0] * QUERIES, plan.chunk * QUERIES)
        return select_rows(scores, own, k, (used, QUERIES), interpret=interpret)

    chunks = total // QUERIES // plan.chunk
    tile = jnp.arange(chunks, dtype=jnp.int32)[:, None] * plan.chunk
    topk = choose(tile[0]) if chunks == 1 else lax.map(choose, tile)
    tiles = b * plan.tiles
    topk = topk.reshape(total // QUERIES, used, k)[:tiles]
    return topk.reshape(b, plan.tiles * used, k)[:, :t]


# float32 as three bfloat16, of whose nine products the six largest reach float32's precision.
LEFT, RIGHT = (0, 0, 1, 0, 2, 1), (0, 1, 0, 2, 0, 1)


def in_parts(x, order):
    """bfloat16[... 6j]: with the other order's, its products are those of float32 x [... j]."""
    parts, rest = [], x
    for _ in range(3):
        # Not by a cast there and back, which XLA may leave out.
        parts.append(lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - parts[-1]
    # What is not finite counts once, or it would meet a zero.
    parts = [parts[0], *(jnp.where(jnp.isfinite(parts[0]), part, 0) for part in parts)]
    kept = [parts[0], *(parts[1 + n] for n in order[1:])]
    return jnp.concatenate([part.astype(jnp.bfloat16) for part in kept], axis=-1)


def _plan(q, tiles, reach) -> Plan:
    i, j, size = *q.shape[2:], q.dtype.itemsize
    passes = [n for n in range(-(-i // HEADS), i + 1) if i % n == 0]
    if q.dtype == jnp.int8:  # tensor cores take no odd number of eights of it above 24
        passes = [n for n in passes if i // n < 4 or i // n % 2 == 0]
    passes = passes[0]
    width = min(SLICE, _to_multiple(j, 128 // size))
    slices = -(-j // width)
    tile, queries = KEYS * width * size, i // passes * QUERIES * width * size
    left = BUDGET - passes * slices * queries
    resident = left >= 2 * tile
    ring = min(RING, left // tile if resident else BUDGET // (tile + queries))
    columns = _to_multiple(reach, STAGE)
    most = max(1, SCORES // (4 * QUERIES * columns))
    chunk = -(-tiles // -(-tiles // most))
    parts = max(1, min(MULTIPROCESSORS // chunk, -(-reach // PART)))
    return Plan(
        i // passes,
        passes,
        width,
        slices,
        resident,
        ring,
        chunk,
        parts,
        columns,
        0,
        0,
        False,
        False,
    )


def _bounds(last, segments):
    """int32[b rows 2]: the keys between which each query's visible ones lie, of which it sees none from last on."""
    if segments is None:
        return jnp.stack([jnp.zeros_like(last), last], axis=-1)
    # Tiles of keys that share no segment with a tile of queries: by the least and the largest of each.
    least_q, most_q = _extent(segments[0], QUERIES)
    least_k, most_k = _extent(segments[1], KEYS)
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


def _score(plan, tile, tiles, q, w, keys, *extras, interpret):
    """int32[rows columns]: `ordered` scores of a chunk of query tiles, INVISIBLE in other segments.

    tile int32[1]: its first. tiles int32[n 2]: the key tiles of each; what lies outside is not written.
    q [rows i j], w float32[n (i query)], keys [b s j] or [p z j]; extras as the plan has them: table int32[b n],
    scale float32[b s], segments int32[rows] and int32[b s].
    """
    columns = plan.heads * QUERIES
    held = plan.passes * columns, plan.slices * plan.width
    moving = plan.ring, columns, plan.width
    transforms = hopper.tiled(q.dtype)
    return hopper.kernel(
        functools.partial(_score_body, hopper.Ops(interpret), plan),
        interpret=interpret,
        kernel_name="score_keys",
        out_type=jax.ShapeDtypeStruct((plan.chunk * QUERIES, plan.columns), jnp.int32),
        grid=(plan.chunk, plan.parts),
        grid_names=("tile", "part"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM(held if plan.resident else moving, q.dtype, transforms=transforms),
            plgpu.SMEM((plan.ring, KEYS, plan.width), q.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=plan.passes * plan.heads),
            plgpu.Barrier(num_barriers=plan.ring, num_arrivals=plan.copies),
            plgpu.Barrier(num_barriers=plan.ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(tile, tiles, q, w, keys, *extras)


def _score_body(ops, plan, chunk, tiles, q, w, keys, *refs):
    refs = list(refs)
    table = refs.pop(0) if plan.page else None
    scale = refs.pop(0) if plan.scaled else None
    own_segments, segments = (refs.pop(0), refs.pop(0)) if plan.segmented else (None, None)
    scores, q_tile, k_ring, q_ready, full, free, turn = refs
    warpgroup, part = lax.axis_index("warpgroup"), lax.axis_index("part")
    tile = chunk[0] + lax.axis_index("tile")
    batch = lax.div(tile, plan.tiles)
    first, last = tiles[tile, 0], tiles[tile, 1]
    begin = first + lax.div((last - first) * part, plan.parts)
    count = first + lax.div((last - first) * (part + 1), plan.parts) - begin
    queries = pl.ds(tile * QUERIES, QUERIES)
    columns = plan.heads * QUERIES
    steps = plan.passes * plan.slices

    def copy_keys(number, some, slot):
        into, at = k_ring.at[slot], number * KEYS
        if not plan.page:
            plgpu.copy_gmem_to_smem(keys.at[batch, pl.ds(at, KEYS), some], into, full.at[slot])
        elif plan.page >= KEYS:
            page, inside = table[batch, lax.div(at, plan.page)], pl.ds(lax.rem(at, plan.page), KEYS)
            plgpu.copy_gmem_to_smem(keys.at[page, inside, some], into, full.at[slot])
        else:
            for n in range(KEYS // plan.page):
                page = table[batch, number * (KEYS // plan.page) + n]
                to = k_ring.at[slot, pl.ds(n * plan.page, plan.page)]
                plgpu.copy_gmem_to_smem(keys.at[page, :, some], to, full.at[slot])

    def fetch():
        plgpu.set_max_registers(40, action="decrease")
        if plan.resident:
            for head in range(plan.passes * plan.heads):
                to = q_tile.at[pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(q.at[queries, head], to, q_ready)

        @pl.loop(0, count * steps)
        def _(n):
            slot, step = lax.rem(n, plan.ring), lax.rem(n, steps)
            pl.when(n >= plan.ring)(lambda: plgpu.barrier_wait(free.at[slot]))
            some = pl.ds(lax.rem(step, plan.slices) * plan.width, plan.width)
            copy_keys(begin + lax.div(n, steps), some, slot)
            for head in range(0 if plan.resident else plan.heads):
                own = q.at[queries, lax.div(step, plan.slices) * plan.heads + head, some]
                to = q_tile.at[slot, pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(own, to, full.at[slot])

        for slot in range(plan.ring):
            pl.when(slot < count * steps)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))

    def add():
        plgpu.set_max_registers(232, action="increase")
        along_rows, along_columns = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)
        weights = [
            ops.load(w.at[tile, pl.ds(n * columns, columns)], (), along_columns)
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
                dots = ops.zeros((64, columns), jnp.int32 if q.dtype == jnp.int8 else jnp.float32)
                for part in range(plan.slices):
                    dots = product(n, of, part, dots)
                # Float8 products are added with fewer bits than float32 has, by the tensor cores.
                each = jnp.maximum(dots.astype(jnp.float32), 0)
                each *= hopper.over_columns(weights[of], dots.shape)
                for head in range(plan.heads):
                    some = head * QUERIES, (head + 1) * QUERIES
                    own = lax.slice(each, (0, some[0]), (64, some[1]))
                    sums[head % 2] = sums[head % 2] + own
            score = sums[0] + sums[1]
            if plan.scaled:
                factor = ops.load(scale.at[batch, at], (), along_rows)
                score *= hopper.over_rows(factor, score.shape)
            key = ordered(score)
            if plan.segmented:
                own = ops.load(own_segments.at[queries], (), along_columns)
                of = ops.load(segments.at[batch, at], (), along_rows)
                own = hopper.over_columns(own, key.shape)
                same = own == hopper.over_rows(of, key.shape)
                key = jnp.where(same & (own != 0), key, INVISIBLE)
            rows = pl.ds(lax.axis_index("tile") * QUERIES, QUERIES)
            ops.store_transposed(scores.at[rows, at], key)

        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    # One branch of one choice each, or the compiler gives every role the same registers.
    pl.when(count > 0)(lambda: lax.cond(warpgroup == 2, fetch, add))
