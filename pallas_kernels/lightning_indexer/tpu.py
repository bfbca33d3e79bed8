"""Lightning indexer on TPU (Mosaic): scores and their selection in one pass, without scores in HBM.

Grid: (program). A program has 8 to 32 rows of queries. It goes over their visible keys in steps of 512, which
arrive in a ring of buffers. The products with all index heads go from the matrix unit directly into the
weighted sum. One integer per query and key is stored in VMEM, from which `tpu_selection` takes the k largest.

8 rows are a register's sublanes. In prefill they are 8 queries of one sequence, which share its keys. Over pages a
sequence has 1, 2, 4 or 8 of them, and a program processes sequences with 8 rows in total one by one.
"""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32, Num

from pallas_kernels import backends
from pallas_kernels.cost import estimate
from pallas_kernels.lightning_indexer import cost, tpu_selection as selection
from pallas_kernels.lightning_indexer.tpu_selection import (
    CHUNK,
    LANES,
    MAX_INT,
    MIN_INT,
    SUBLANES,
    TILES,
)

# Not measured, because no TPU was available; chosen by the size of VMEM and memory latency.
STEP_TILES = 8
STEP = STEP_TILES * LANES  # keys that are scored per step
RING = 8  # steps of keys in use or in flight: 2 MiB of bfloat16, more than memory delivers in 1 us
GROUPS = 4  # groups of 8 rows in a program; fewer if scores and results would exceed ROOM
ROOM = 44 << 20
MEMORY = 60 << 20  # with all buffers; v5p and tpu7x have 64 MiB

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class SelectionPlan(NamedTuple):
    """Sizes of a program.

    Attributes:
      groups: groups of 8 rows. sources: sequences, of `rows` rows each. One of the two is 1.
      queries: queries of a sequence.
      blocks: programs of a sequence.
      s: keys of a sequence.
      page: contiguous keys.
    """

    groups: int
    sources: int
    rows: int
    queries: int
    blocks: int
    s: int
    k: int
    page: int
    paged: bool
    unroll: bool

    @property
    def chunks(self) -> int:
        """Chunks of keys in VMEM."""
        return -(-self.s // CHUNK)

    @property
    def places(self) -> int:
        """Width of the result in memory."""
        return -(-min(self.k, self.s) // selection.PLACES) * selection.PLACES


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
    s = idx_k.shape[1] * (1 if page_table is None else page_table.shape[1])
    if _room(1, s, k) > ROOM:
        return f"8 rows of {s} scores and {k} results do not fit VMEM"
    if page_table is None:
        return None
    page, min_page = idx_k.shape[1], 32 // idx_k.dtype.itemsize
    if page < min_page or STEP % page:
        return f"pages of {page} keys; it takes powers of 2 from {min_page} to {STEP}"
    if idx_q.shape[1] > SUBLANES:
        return f"{idx_q.shape[1]} queries per sequence over pages; it takes at most {SUBLANES}"
    return None


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
    """Returns topk int32[b t k] as `ref.select_keys`."""
    b, t = idx_q.shape[:2]
    s = idx_k.shape[1]
    start = jnp.broadcast_to(jnp.int32(start if static.start is None else static.start), b)
    groups = GROUPS
    while groups > 1 and (_room(groups, s, static.k) > ROOM or groups // 2 * SUBLANES >= t):
        groups //= 2
    blocks = -(-t // (groups * SUBLANES))
    plan = SelectionPlan(
        groups=groups,
        sources=1,
        rows=SUBLANES,
        queries=t,
        blocks=blocks,
        s=s,
        k=static.k,
        page=STEP,
        paged=False,
        unroll=interpret is False,
    )

    @sequential_vmap
    def run(idx_q, idx_w, idx_k, start, k_scale, q_segments, k_segments):
        b, pad = idx_q.shape[0], blocks * groups * SUBLANES - t
        q, w = (_pad(x, 1, pad).reshape(-1, SUBLANES, *x.shape[2:]) for x in (idx_q, idx_w))
        q_ids = None
        if q_segments is not None:
            q_ids = _pad(q_segments.astype(jnp.int32), 1, pad).reshape(b * blocks, -1, 1)
            k_segments = k_segments.astype(jnp.int32)
        keys = _pad(idx_k, 1, -s % STEP)
        cost_estimate = _estimate(plan, b, idx_q, static.start, k_scale)
        out = _call(
            plan, cost_estimate, interpret, (start,), q, w, keys, None, k_scale, q_ids, k_segments
        )
        return out.reshape(b, -1, plan.places)[:, :t, : min(static.k, s)]

    return run(idx_q, idx_w, idx_k, start, k_scale, q_segments, k_segments)


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
    """Returns topk int32[b t k] as `ref.select_paged_keys`."""
    t = idx_q.shape[1]
    rows = 1
    while rows < t or rows * idx_q.shape[2] % SUBLANES:
        rows *= 2
    sources, s = SUBLANES // rows, pages.shape[1] * page_table.shape[1]
    plan = SelectionPlan(
        groups=1,
        sources=sources,
        rows=rows,
        queries=t,
        blocks=1,
        s=s,
        k=static.k,
        page=pages.shape[1],
        paged=True,
        unroll=interpret is False,
    )

    @sequential_vmap
    def run(idx_q, idx_w, page_table, lengths, pages, page_scales):
        b = idx_q.shape[0]
        table = jnp.clip(page_table.astype(jnp.int32), 0, pages.shape[0] - 1)
        k_scale = None if page_scales is None else page_scales[table].reshape(b, s)
        padding = -b % sources
        q, w = (_pad(_pad(x, 1, rows - t), 0, padding) for x in (idx_q, idx_w))
        table, lengths, k_scale = (_pad(x, 0, padding) for x in (table, lengths, k_scale))
        table = table.reshape(-1, 1, sources * table.shape[1])
        scalars = (lengths.astype(jnp.int32),)
        cost_estimate = _estimate(plan, b, idx_q, None, k_scale)
        out = _call(
            plan, cost_estimate, interpret, scalars, q, w, pages, table, k_scale, None, None
        )
        return out.reshape(-1, rows, plan.places)[:b, :t, : min(static.k, s)]

    return run(idx_q, idx_w, page_table, lengths, pages, page_scales)


def _room(groups, s, k):
    """Returns the bytes of a program's scores and of its results, which are double-buffered."""
    return groups * SUBLANES * 4 * (s + 2 * min(k, s))


def _pad(x: Any, axis: int, amount: int) -> Any:
    """Pads x with zeros at the end, or returns None for None."""
    if x is None or not amount:
        return x
    return jnp.pad(x, [(0, amount if d == axis else 0) for d in range(x.ndim)])


def _estimate(plan, b, idx_q, start, k_scale):
    (t, i, j), dtype = idx_q.shape[1:], idx_q.dtype.name.partition("_")[0]
    sizes = b, t, plan.s, i, j, min(plan.k, plan.s)
    return estimate(cost.select(*sizes, start, dtype, k_scale is not None))


def _call(plan, cost_estimate, interpret, scalars, q, w, keys, table, k_scale, q_ids, k_segments):
    """Returns int32[programs 8*groups places].

    scalars: int32[b], the position of a sequence's first query, or over pages its number of keys. q [m rows i
    j] and w [m rows i], m = programs * groups * sources; keys [b s j] or pages; table int32[programs 1
    sources*pages]; k_scale float32[b s], q_ids int32[programs 8*groups 1] and k_segments int32[b s], or None.
    """
    # Arrange queries and weights as the programs read them.
    m, rows, heads, dim = q.shape
    parts = plan.groups * plan.sources
    programs, registers = m // parts, heads * rows // SUBLANES
    q = q.swapaxes(1, 2).reshape(programs, parts, heads * rows, dim)
    if q.dtype == jnp.float8_e4m3fn and "TPU7" not in backends.device_kind():
        q = q.astype(jnp.bfloat16)  # other chips have no float8 products; these are exact
    w = (w * dim**-0.5).astype(jnp.float32).swapaxes(1, 2)
    w = w.reshape(programs, parts, registers, SUBLANES).swapaxes(2, 3)
    per_key = [x for x in (k_scale, k_segments) if x is not None]
    per_key = [
        _pad(x, 1, -plan.s % STEP).reshape(-1, -(-plan.s // STEP), STEP_TILES, LANES)
        for x in per_key
    ]
    block_index = functools.partial(_item, programs)

    # Blocks of the operands.
    def block(x):
        trailing = (0,) * (x.ndim - 1)
        return pl.BlockSpec((1, *x.shape[1:]), lambda p, *_: (block_index(p), *trailing))

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    operands, specs = [q, w], [block(q), block(w)]
    if q_ids is not None:
        operands, specs = [*operands, q_ids], [*specs, block(q_ids)]
    hbm_operands = [keys, *per_key] + ([] if table is None else [table])
    operands, specs = [*operands, *hbm_operands], [*specs, *[hbm] * len(hbm_operands)]
    # Result and scratch memory.
    width = SUBLANES * plan.groups
    out = jax.ShapeDtypeStruct((programs, width, plan.places), jnp.int32)
    registers_of = pltpu.VMEM((plan.groups, plan.chunks, SUBLANES, LANES), jnp.int32)
    scratch = {
        "ring": pltpu.VMEM((RING, STEP // plan.page, plan.page, dim), keys.dtype),
        "arrived": pltpu.SemaphoreType.DMA((RING,)),
        "weights": pltpu.VMEM((parts, registers, SUBLANES, LANES), jnp.float32),
        "scores": pltpu.VMEM((plan.groups, plan.chunks * TILES, SUBLANES, LANES), jnp.int32),
        "bounds": pltpu.VMEM((plan.groups, 3, SUBLANES, LANES), jnp.int32),
        "words": registers_of,
        "before": registers_of,
        "ends": pltpu.VMEM((plan.groups, SUBLANES, LANES), jnp.int32),
    }
    if k_scale is not None:
        scratch["scale"] = pltpu.VMEM((RING, STEP_TILES, LANES), jnp.float32)
    if k_segments is not None:
        scratch["segments"] = pltpu.VMEM((RING, STEP_TILES, LANES), jnp.int32)
    if table is not None:
        scratch["pages"] = pltpu.SMEM((1, table.shape[2]), jnp.int32)
    # The kernel gets its refs by name.
    names = ["q", "w", *["q_ids"] * (q_ids is not None), "keys"]
    names += ["all_scale"] * (k_scale is not None) + ["all_segments"] * (k_segments is not None)
    names += [*["table"] * (table is not None), "out", *scratch]

    def body(scalars, *refs):
        refs = types.SimpleNamespace(scalars=scalars, **dict(zip(names, refs)))
        _program(plan, block_index(pl.program_id(0)), refs)

    # Call the kernel.
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(programs,),
            in_specs=specs,
            out_specs=block(out),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=MEMORY, disable_bounds_checks=True
        ),
        cost_estimate=cost_estimate,
        interpret=interpret,
        name="lightning_indexer",
    )(*scalars, *operands)


def _item(programs, p):
    """Returns the block of the p-th program: every second one.

    The two cores of a v5p get half of the programs each, and later blocks see more keys.
    """
    half = (programs + 1) // 2
    return jnp.where(p < half, 2 * p, 2 * (p - half) + 1)


def _program(plan, item, refs):
    """Runs one program: all scores of its rows, then their selection."""
    # Initialise weights, bounds, scores and the page table.
    _spread_weights(refs)
    steps = [_steps(plan, item, refs, source) for source in range(plan.sources)]
    total, longest = sum(steps), functools.reduce(jnp.maximum, steps)
    chunks = (longest * STEP_TILES + TILES - 1) >> (TILES.bit_length() - 1)
    for group in range(plan.groups):
        for bound, first in enumerate((MAX_INT, MIN_INT, 0)):
            refs.bounds[group, bound] = jnp.full((SUBLANES, LANES), first, jnp.int32)
    # Sources write to the same tiles, each to its rows.
    first_blank = 0 if plan.sources > 1 else longest * STEP_TILES

    def clear(tile, _):
        for group in range(plan.groups):
            refs.scores[group, tile] = jnp.full((SUBLANES, LANES), MIN_INT, jnp.int32)
        return 0

    lax.fori_loop(first_blank, chunks * TILES, clear, 0)
    if plan.paged:
        copy = pltpu.make_async_copy(refs.table.at[item], refs.pages, refs.arrived.at[0])
        copy.start()
        copy.wait()

    # Fetch and score all steps of keys of all sources; fetching runs ahead.
    def fetch(i, cursor):
        source, step = cursor
        _fetch(plan, item, refs, source, step, i & (RING - 1))
        return _next(plan, item, refs, cursor)

    def score(i, cursor):
        source, step = cursor
        slot = i & (RING - 1)
        _wait(refs, slot)
        _score(plan, item, refs, source, step, slot)
        return _next(plan, item, refs, cursor)

    def fetch_and_score(i, cursors):
        fetch_cursor, score_cursor = cursors
        return fetch(i + RING - 1, fetch_cursor), score(i, score_cursor)

    first = (jnp.int32(0), jnp.int32(0))
    fetch_cursor = lax.fori_loop(0, jnp.minimum(total, RING - 1), fetch, first)
    num_ahead = jnp.maximum(total - (RING - 1), 0)
    _, score_cursor = lax.fori_loop(0, num_ahead, fetch_and_score, (fetch_cursor, first))
    lax.fori_loop(num_ahead, total, score, score_cursor)

    # Select the k largest of each group, and write their indices.
    def select_group(group, _):
        lowest, highest, count = (refs.bounds[group, bound] for bound in range(3))
        lowest = jnp.min(lowest, axis=1, keepdims=True)
        highest = jnp.max(highest, axis=1, keepdims=True)
        count = jnp.sum(count, axis=1, keepdims=True)
        bracket = selection.kth_largest(
            refs.scores, group, chunks, lowest, highest, count, plan.k, plan.unroll
        )
        selection.write_words(refs.scores, refs.words, group, chunks, bracket, plan.unroll)
        return 0

    lax.fori_loop(0, plan.groups, select_group, 0)
    selection.write_indices(refs.words, refs.before, refs.ends, refs.out.at[0], chunks, plan.unroll)


def _spread_weights(refs):
    """Writes weights[part register]: a head's weight of each row in all lanes."""
    parts, registers = refs.weights.shape[:2]
    for part in range(parts):
        weights = refs.w[0, part]
        for register in range(registers):
            column = weights[:, register : register + 1]
            refs.weights[part, register] = jnp.broadcast_to(column, (SUBLANES, LANES))


def _first(plan, item, refs, source):
    """Returns the position of a source's first query in this program."""
    if plan.paged:
        return refs.scalars[item * plan.sources + source] - plan.queries
    row = lax.div(item, plan.blocks)
    return refs.scalars[row] + (item - row * plan.blocks) * plan.groups * SUBLANES


def _rows(plan, item):
    """Returns how many queries of a source remain at the first one of this program."""
    if plan.paged:
        return plan.queries
    return plan.queries - lax.rem(item, plan.blocks) * plan.groups * SUBLANES


def _steps(plan, item, refs, source):
    """Returns the number of steps of keys visible to the queries of a source, at least 1."""
    rows = jnp.minimum(_rows(plan, item), plan.groups * SUBLANES)
    end = jnp.minimum(_first(plan, item, refs, source) + rows, plan.s)
    return jnp.maximum((end + STEP - 1) >> (STEP.bit_length() - 1), 1)


def _next(plan, item, refs, cursor):
    """Returns the (source, step) after this one."""
    source, step = cursor
    if plan.sources == 1:
        return source, step + 1
    last = step + 1 == _steps(plan, item, refs, source)
    # After the last source only its length is read.
    following = jnp.minimum(source + 1, plan.sources - 1)
    return jnp.where(last, following, source), jnp.where(last, 0, step + 1)


def _fetch(plan, item, refs, source, step, slot):
    """Starts the copies that fill a slot of the ring."""

    def copy(source_ref, target_ref):
        pltpu.make_async_copy(source_ref, target_ref, refs.arrived.at[slot]).start()

    row = item * plan.sources + source if plan.paged else lax.div(item, plan.blocks)
    pages = STEP // plan.page
    if plan.paged:
        # Beyond the last page it is read again, so that no branch interrupts the products.
        used = jnp.maximum(refs.scalars[row] + plan.page - 1, plan.page)
        last = (used >> (plan.page.bit_length() - 1)) - 1
        first = source * (refs.pages.shape[1] // plan.sources)

        def page(n, _):
            page_number = refs.pages[0, first + jnp.minimum(step * pages + n, last)]
            copy(refs.keys.at[page_number], refs.ring.at[slot, n])
            return 0

        selection.repeat(pages, page, 0, plan.unroll)
    else:
        keys = pl.ds(pl.multiple_of(step * STEP, STEP), STEP)
        copy(refs.keys.at[row, keys], refs.ring.at[slot, 0])
    if hasattr(refs, "scale"):
        copy(refs.all_scale.at[row, step], refs.scale.at[slot])
    if hasattr(refs, "segments"):
        copy(refs.all_segments.at[row, step], refs.segments.at[slot])


def _wait(refs, slot):
    """Waits until a slot of the ring has received all of its bytes."""
    for name in ("ring", "scale", "segments"):
        if hasattr(refs, name):
            buffer = getattr(refs, name).at[slot]
            pltpu.make_async_copy(buffer, buffer, refs.arrived.at[slot]).wait()


def _score(plan, item, refs, source, step, slot):
    """Computes the scores of all rows of a source for the keys of a slot."""
    # Load the keys and the positions of the rows.
    keys = refs.ring[slot].reshape(STEP, -1)
    if keys.dtype != refs.q.dtype:
        keys = keys.astype(refs.q.dtype)
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), d) for d in (0, 1))
    first, rows = _first(plan, item, refs, source), _rows(plan, item)
    shift = plan.rows.bit_length() - 1

    # Scores of one group of 8 rows, tile by tile.
    def group_scores(group, _):
        part = group + source
        dots = _dots(refs.q[0, part], keys)
        row = group * SUBLANES + (sublane & (plan.rows - 1))
        is_valid = ((sublane >> shift) == source) if plan.sources > 1 else True
        if hasattr(refs, "segments"):
            q_ids = refs.q_ids[0, pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), SUBLANES)]
            q_ids = jnp.broadcast_to(q_ids, (SUBLANES, LANES))
            is_valid = is_valid & (q_ids != 0)
        last = jnp.where(is_valid & (row < rows), jnp.minimum(first + row, plan.s - 1), -1)
        low, high, count = (refs.bounds[group, bound] for bound in range(3))
        for tile in range(STEP_TILES):
            scores = _weigh(dots, refs.weights, part, tile, plan.rows)
            if hasattr(refs, "scale"):
                scores *= refs.scale[slot, tile : tile + 1]
            tile_index = step * STEP_TILES + tile
            visible = tile_index * LANES + lane <= last
            if hasattr(refs, "segments"):
                visible &= q_ids == refs.segments[slot, tile : tile + 1]
            scores = selection.ordered(scores, visible)
            low = jnp.minimum(low, jnp.where(visible, scores, MAX_INT))
            high = jnp.maximum(high, scores)
            count += jnp.where(visible, 1, 0)
            if plan.sources > 1:
                scores = jnp.maximum(scores, refs.scores[group, tile_index])
            refs.scores[group, tile_index] = scores
        for bound, value in enumerate((low, high, count)):
            refs.bounds[group, bound] = value
        return 0

    selection.repeat(plan.groups, group_scores, 0, plan.unroll)


def _dots(q, keys):
    """Returns the products of q [m j] with keys [s j], [m s] in float32, or exact int32."""
    exact = keys.dtype == jnp.int8
    return lax.dot_general(
        q,
        keys,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if exact else jnp.float32,
    )


def _weigh(dots, weights, part, tile, rows):
    """Returns float32[8 128]: the weighted sum of ReLU(dots) over heads, for the keys of one tile."""
    sums = [jnp.zeros((SUBLANES, LANES), jnp.float32)] * 2
    for register in range(weights.shape[1]):
        products = dots[
            register * SUBLANES : (register + 1) * SUBLANES, tile * LANES : (tile + 1) * LANES
        ]
        sums[register % 2] += jnp.maximum(products, 0).astype(jnp.float32) * weights[part, register]
    total = sums[0] + sums[1]
    # If a source has fewer than 8 rows, a register holds the rows of several heads.
    step = SUBLANES // 2
    while step >= rows:
        total += pltpu.roll(total, step, 0)
        step //= 2
    return total
