"""Index scores and their exact selection on Hopper: two kernels over chunks of queries.

Scores: grid (tile of 8 queries, part of their keys). Keys lie along the rows of the products, (head, query) along the
columns, eight queries wide. A thread then holds all heads of its two queries, and sums them without communication.

Shared memory, for 32 heads of 128 in bfloat16: queries of all heads [256 128] (64 KiB), and a ring of four tiles of 128
keys (128 KiB). Queries that do not fit are loaded together with the keys. Registers: products float32[64 256] of each
compute warpgroup, 128 per thread.

- A loader warpgroup copies the queries once, then tiles of keys, contiguous or page by page.
- Two compute warpgroups, 64 keys each, take turns: one sums over heads during the products of the other. They write
  scores as integers that compare like them.

Selection: `top_k`, one row per query. The scores of a chunk of queries (at most 128 MiB) are written once and read
once; scores of single heads stay in registers.

Padding: queries to tiles of 8, keys to tiles of 128, columns to the width of a step. Bounds per query keep its
selection to keys that it sees; key tiles outside of a query tile's bounds are neither scored nor read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int32, Num

from pallas_kernels import hopper
from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.top_k.gpu import INVISIBLE, STAGE, select_rows, to_ordered_bits, unsupported_k

QUERIES = 8  # queries of a tile: the width of the tensor cores' smallest product
# Only these sizes are timed, on an H200 (2026-11-26, experiments/kernels_h200.jsonl). They follow from shared
# memory, registers and the number of processors.
KEYS = 128  # keys of a tile: 64 for each of two warpgroups
HEADS = 32  # heads of a product: 256 columns, 128 registers of each thread
SLICE = 128  # contraction per step
RING = 4  # maximum number of tiles in flight
BUDGET = hopper.SMEM_BYTES - 1024  # bytes of tiles, without barriers and alignment
PART = 1024  # minimum number of keys per block
SCORES = 128 << 20  # bytes of a chunk's scores

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class ScorePlan(NamedTuple):
    """Sizes of a call of the scoring kernel.

    A tile of keys takes `passes` products for as many groups of `heads` heads, each in `slices` steps of
    `width` numbers.
    resident: queries stay in shared memory; otherwise they are loaded together with the keys.
    """

    heads: int
    passes: int
    width: int
    slices: int
    resident: bool
    ring: int
    chunk: int  # query tiles
    parts: int  # blocks that share the keys of a query tile
    columns: int  # columns of the scores
    tiles: int  # query tiles of a sequence
    page: int  # contiguous keys; 0: all keys of a sequence
    scaled: bool
    segmented: bool

    @property
    def copies(self) -> int:
        """Copies into a slot of the ring."""
        keys = KEYS // self.page if 0 < self.page < KEYS else 1
        return keys + (0 if self.resident else self.heads)


def unsupported_reason(
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Num[Array, "b s j"],
    k: int,
    page_table: Int[Array, "b n"] | None = None,
) -> str | None:
    """Returns the reason why the arguments are not supported, or None. With a page_table, idx_k are its pages."""
    if idx_q.dtype != idx_k.dtype or idx_k.dtype.name not in DTYPES:
        return f"queries of {idx_q.dtype} and keys of {idx_k.dtype}; both must be one of {DTYPES}"
    if page_table is None:
        return unsupported_k(min(k, idx_k.shape[1]))
    page = idx_k.shape[1]
    if page % 8 or (KEYS % page and page % KEYS):
        return f"pages of {page} keys; it takes 8, 16, 32, 64 and multiples of {KEYS}"
    if idx_q.shape[1] > QUERIES:
        return f"{idx_q.shape[1]} queries per sequence over pages; it takes at most {QUERIES}"
    return unsupported_k(min(k, page * page_table.shape[1]))


def select_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Num[Array, "b s j"],
    k_scale: Float[Array, "b s"] | None,
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    *,
    interpret: object = False,
) -> Int32[Array, "b t k"]:
    """Returns topk int32[b t k] of idx_q [b t i j], idx_w [b t i] over idx_k [b s j]."""
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
    return _select(idx_q, idx_w, idx_k, None, scale, segments, bounds, reach, k, interpret)


def select_paged_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    pages: Num[Array, "p z j"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    page_scales: Float[Array, "p z"] | None,
    *,
    interpret: object = False,
) -> Int32[Array, "b t k"]:
    """Returns topk int32[b t k] of the last t tokens of sequences of `lengths` keys in pages [p z j]."""
    t, (p, page) = idx_q.shape[1], pages.shape[:2]
    reach = page_table.shape[1] * page
    table = _pad(page_table, {1: _to_multiple(reach, KEYS) // page})
    table = jnp.clip(table, 0, p - 1).astype(jnp.int32)
    scale = None if page_scales is None else page_scales[table].reshape(len(table), -1)
    last = jnp.clip(lengths[:, None] - t + 1 + jnp.arange(t), 0, reach).astype(jnp.int32)
    bounds = _bounds(_pad(last, {1: QUERIES}), None)
    k = min(static.k, reach)
    return _select(idx_q, idx_w, pages, table, scale, None, bounds, reach, k, interpret)


def _select(q, w, keys, table, scale, segments, bounds, reach, k, interpret):
    """Returns topk int32[b t k].

    bounds int32[b rows 2] cover full tiles of rows. keys [b s j], or pages and their table.
    """
    # Plan, and pad queries, keys and weights to tiles.
    b, t, i, j = q.shape
    rows = bounds.shape[1]
    w = _pad((w * j**-0.5).astype(jnp.float32), {1: rows})
    if q.dtype == jnp.float32:
        q, keys = split_float32(q, LEFT_PARTS), split_float32(keys, RIGHT_PARTS)
    page = 0 if table is None else keys.shape[1]
    plan = _plan(q, b * rows // QUERIES, reach)._replace(
        tiles=rows // QUERIES, page=page, scaled=scale is not None, segmented=segments is not None
    )
    total = _to_multiple(b * rows, plan.chunk * QUERIES)
    q = _pad(_pad(q, {1: rows}).reshape(b * rows, i, -1), {0: total, 2: plan.width * plan.slices})
    keys = _pad(keys, {2: plan.width * plan.slices})
    # The weights of a tile are in the order of its products' columns.
    w = w.reshape(-1, QUERIES, i).swapaxes(1, 2).reshape(-1, i * QUERIES)
    w = _pad(w, {0: total // QUERIES})
    # Range of key tiles of each query tile.
    bounds = _pad(bounds.reshape(-1, 2), {0: total})
    tiles = bounds.reshape(-1, QUERIES, 2)
    first = jnp.min(jnp.where(tiles[..., 0] < tiles[..., 1], tiles[..., 0], reach), axis=1)
    last = jnp.max(tiles[..., 1], axis=1)
    tiles = jnp.stack([first // KEYS, pl.cdiv(last, KEYS)], axis=1)
    extras = [x for x in (table, scale) if x is not None]
    if segments is not None:
        extras += [_pad(segments[0].reshape(-1), {0: total}), segments[1]]

    queries_per_tile = min(t, QUERIES)  # queries of a tile

    # Score and select one chunk of queries at a time.
    def select_chunk(tile):
        scores = _score(plan, tile, tiles, q, w, keys, *extras, interpret=interpret)
        chunk_bounds = lax.dynamic_slice_in_dim(bounds, tile[0] * QUERIES, plan.chunk * QUERIES)
        return select_rows(
            scores, chunk_bounds, k, (queries_per_tile, QUERIES), interpret=interpret
        )

    chunks = total // QUERIES // plan.chunk
    tile = jnp.arange(chunks, dtype=jnp.int32)[:, None] * plan.chunk
    topk = select_chunk(tile[0]) if chunks == 1 else lax.map(select_chunk, tile)
    tiles = b * plan.tiles
    topk = topk.reshape(total // QUERIES, queries_per_tile, k)[:tiles]
    return topk.reshape(b, plan.tiles * queries_per_tile, k)[:, :t]


# float32 as three bfloat16: the six largest of their nine products reach float32's precision.
LEFT_PARTS, RIGHT_PARTS = (0, 0, 1, 0, 2, 1), (0, 1, 0, 2, 0, 1)


def split_float32(x: Float[Array, "... j"], order: tuple[int, ...]) -> Array:
    """Splits float32 x [... j] into bfloat16[... 6j], whose product with the other order's is that of x."""
    parts, remainder = [], x
    for _ in range(3):
        # Not by a cast to bfloat16 and back, which XLA may drop.
        parts.append(lax.reduce_precision(remainder, exponent_bits=8, mantissa_bits=7))
        remainder = remainder - parts[-1]
    # Non-finite numbers count once; otherwise they would be multiplied by zero.
    parts = [parts[0], *(jnp.where(jnp.isfinite(parts[0]), part, 0) for part in parts)]
    ordered_parts = [parts[0], *(parts[1 + n] for n in order[1:])]
    return jnp.concatenate([part.astype(jnp.bfloat16) for part in ordered_parts], axis=-1)


def _plan(q, tiles, reach) -> ScorePlan:
    i, j, size = *q.shape[2:], q.dtype.itemsize
    passes = [n for n in range(-(-i // HEADS), i + 1) if i % n == 0]
    if q.dtype == jnp.int8:  # for int8, tensor cores take no odd multiple of 8 above 24
        passes = [n for n in passes if i // n < 4 or i // n % 2 == 0]
    passes = passes[0]
    width = min(SLICE, _to_multiple(j, 128 // size))
    slices = -(-j // width)
    tile, queries = KEYS * width * size, i // passes * QUERIES * width * size
    free_bytes = BUDGET - passes * slices * queries
    resident = free_bytes >= 2 * tile
    ring = min(RING, free_bytes // tile if resident else BUDGET // (tile + queries))
    columns = _to_multiple(reach, STAGE)
    max_chunk = max(1, SCORES // (4 * QUERIES * columns))
    chunk = -(-tiles // -(-tiles // max_chunk))
    parts = max(1, min(MULTIPROCESSORS // chunk, -(-reach // PART)))
    return ScorePlan(
        heads=i // passes,
        passes=passes,
        width=width,
        slices=slices,
        resident=resident,
        ring=ring,
        chunk=chunk,
        parts=parts,
        columns=columns,
        tiles=0,
        page=0,
        scaled=False,
        segmented=False,
    )


def _bounds(last, segments):
    """Returns int32[b rows 2]: begin and end (exclusive) of the keys that contain each query's visible ones."""
    if segments is None:
        return jnp.stack([jnp.zeros_like(last), last], axis=-1)
    # Tiles of keys and of queries that cannot share a segment: by the smallest and the largest segment of each.
    q_low, q_high = _extent(segments[0], QUERIES)
    k_low, k_high = _extent(segments[1], KEYS)
    may_share = (k_low[:, None] <= q_high[..., None]) & (k_high[:, None] >= q_low[..., None])
    tile = jnp.arange(may_share.shape[-1], dtype=jnp.int32)
    begin = jnp.min(jnp.where(may_share, tile, tile.size), axis=-1) * KEYS
    end = jnp.max(jnp.where(may_share, tile + 1, 0), axis=-1) * KEYS
    last = jnp.minimum(last, jnp.repeat(end, QUERIES, axis=-1))
    first = jnp.minimum(jnp.repeat(begin, QUERIES, axis=-1), last)
    return jnp.stack([first, last], axis=-1)


def _extent(segments, size):
    """Returns the smallest and the largest segment of each tile of `size`, without padding."""
    tiles = segments.reshape(segments.shape[0], -1, size)
    info = jnp.iinfo(segments.dtype)
    low = jnp.min(jnp.where(tiles == 0, info.max, tiles), axis=-1)
    return low, jnp.max(jnp.where(tiles == 0, info.min, tiles), axis=-1)


def _to_multiple(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pad(x, sizes: dict[int, int]):
    """Pads those axes of x with zeros at the end."""
    return jnp.pad(x, [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)])


def _score(plan, tile, tiles, q, w, keys, *extras, interpret):
    """Returns int32[rows columns]: ordered scores of a chunk of query tiles, INVISIBLE in other segments.

    tile int32[1]: first tile of the chunk. tiles int32[n 2]: key tiles of each query tile; other key tiles are
    not written. q [rows i j], w float32[n (i query)], keys [b s j] or [p z j]. extras as planned: table int32[b
    n], scale float32[b s], segments int32[rows] and int32[b s].
    """
    columns = plan.heads * QUERIES
    resident_shape = plan.passes * columns, plan.slices * plan.width
    ring_shape = plan.ring, columns, plan.width
    transforms = hopper.tile_transforms(q.dtype)
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
            plgpu.SMEM(
                resident_shape if plan.resident else ring_shape, q.dtype, transforms=transforms
            ),
            plgpu.SMEM((plan.ring, KEYS, plan.width), q.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=plan.passes * plan.heads),
            plgpu.Barrier(num_barriers=plan.ring, num_arrivals=plan.copies),
            plgpu.Barrier(num_barriers=plan.ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(tile, tiles, q, w, keys, *extras)


def _score_body(ops, plan, chunk, tiles, q, w, keys, *refs):
    refs = list(refs)
    table: Any = refs.pop(0) if plan.page else None
    scale: Any = refs.pop(0) if plan.scaled else None
    q_segments: Any = refs.pop(0) if plan.segmented else None
    k_segments: Any = refs.pop(0) if plan.segmented else None
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

    # Copies a tile of keys, from pages or not.
    def copy_keys(number, depth_slice, slot):
        target, first_key = k_ring.at[slot], number * KEYS
        if not plan.page:
            plgpu.copy_gmem_to_smem(
                keys.at[batch, pl.ds(first_key, KEYS), depth_slice], target, full.at[slot]
            )
        elif plan.page >= KEYS:
            page, inside = (
                table[batch, lax.div(first_key, plan.page)],
                pl.ds(lax.rem(first_key, plan.page), KEYS),
            )
            plgpu.copy_gmem_to_smem(keys.at[page, inside, depth_slice], target, full.at[slot])
        else:
            for n in range(KEYS // plan.page):
                page = table[batch, number * (KEYS // plan.page) + n]
                target_rows = k_ring.at[slot, pl.ds(n * plan.page, plan.page)]
                plgpu.copy_gmem_to_smem(keys.at[page, :, depth_slice], target_rows, full.at[slot])

    # Loader warpgroup.
    def fetch():
        plgpu.set_max_registers(40, action="decrease")
        if plan.resident:
            for head in range(plan.passes * plan.heads):
                target = q_tile.at[pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(q.at[queries, head], target, q_ready)

        @pl.loop(0, count * steps)
        def _(n):
            slot, step = lax.rem(n, plan.ring), lax.rem(n, steps)
            pl.when(n >= plan.ring)(lambda: plgpu.barrier_wait(free.at[slot]))
            depth_slice = pl.ds(lax.rem(step, plan.slices) * plan.width, plan.width)
            copy_keys(begin + lax.div(n, steps), depth_slice, slot)
            for head in range(0 if plan.resident else plan.heads):
                source = q.at[queries, lax.div(step, plan.slices) * plan.heads + head, depth_slice]
                target = q_tile.at[slot, pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

        for slot in range(plan.ring):
            pl.when(slot < count * steps)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))

    # Compute warpgroups: scores of 64 keys each.
    def add():
        plgpu.set_max_registers(232, action="increase")
        along_rows, along_columns = hopper.ROW_OF, hopper.COLUMN_OF
        weights = [
            ops.load(w.at[tile, pl.ds(n * columns, columns)], (), along_columns)
            for n in range(plan.passes)
        ]
        # The warpgroups take turns: one sums during the products of the other.
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        if plan.resident:
            plgpu.barrier_wait(q_ready)

        def product(n, group, part, dots):
            slot = lax.rem(n * steps + group * plan.slices + part, plan.ring)
            plgpu.barrier_wait(full.at[slot])
            rows = k_ring.at[slot, pl.ds(warpgroup * 64, 64)]
            depth_slice = pl.ds(group * columns, columns), pl.ds(part * plan.width, plan.width)
            plgpu.barrier_wait(turn.at[warpgroup])
            dots = ops.dot(
                dots,
                rows,
                q_tile.at[depth_slice] if plan.resident else q_tile.at[slot],
                b_transposed=True,
                on_issued=lambda: plgpu.barrier_arrive(turn.at[1 - warpgroup]),
            )
            plgpu.barrier_arrive(free.at[slot])
            return dots

        @pl.loop(0, count)
        def _(n):
            key_slice = pl.ds((begin + n) * KEYS + warpgroup * 64, 64)
            sums = [ops.zeros((64, QUERIES))] * 2  # two chains hide the latency of adding
            for group in range(plan.passes):
                dots = ops.zeros((64, columns), jnp.int32 if q.dtype == jnp.int8 else jnp.float32)
                for part in range(plan.slices):
                    dots = product(n, group, part, dots)
                # Tensor cores add float8 products with fewer bits than float32 has.
                weighted = jnp.maximum(dots.astype(jnp.float32), 0)
                weighted *= hopper.broadcast_columns(weights[group], dots.shape)
                for head in range(plan.heads):
                    bounds = head * QUERIES, (head + 1) * QUERIES
                    head_scores = lax.slice(weighted, (0, bounds[0]), (64, bounds[1]))
                    sums[head % 2] = sums[head % 2] + head_scores
            score = sums[0] + sums[1]
            if plan.scaled:
                factor = ops.load(scale.at[batch, key_slice], (), along_rows)
                score *= hopper.broadcast_rows(factor, score.shape)
            key = to_ordered_bits(score)
            if plan.segmented:
                q_ids = ops.load(q_segments.at[queries], (), along_columns)
                k_ids = ops.load(k_segments.at[batch, key_slice], (), along_rows)
                q_ids = hopper.broadcast_columns(q_ids, key.shape)
                same = q_ids == hopper.broadcast_rows(k_ids, key.shape)
                key = jnp.where(same & (q_ids != 0), key, INVISIBLE)
            rows = pl.ds(lax.axis_index("tile") * QUERIES, QUERIES)
            ops.store_transposed(scores.at[rows, key_slice], key)

        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    # One branch per role: otherwise the compiler gives every role the same number of registers.
    pl.when(count > 0)(lambda: lax.cond(warpgroup == 2, fetch, add))
