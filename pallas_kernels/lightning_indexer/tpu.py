"""The lightning indexer on TPU (Mosaic): scores and their selection in one pass, without scores in memory.

A program has 8 to 32 rows of queries. It walks over the keys they can see in steps of 512, which arrive in a
ring of buffers. The products with all index heads leave the matrix unit straight into the weighted sum, and
one integer per query and key goes to on-chip memory, from where `tpu_selection` takes the k largest.

Rows of 8 are a register's sublanes. In prefill they are 8 queries of one sequence, which share its keys. Over
pages a sequence has 1, 2, 4 or 8 of them, and a program takes 8 rows' worth of sequences one by one.
"""

import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.cost import estimate
from pallas_kernels.lightning_indexer import cost, tpu_selection as selection
from pallas_kernels.lightning_indexer.tpu_selection import (
    CHUNK,
    LANES,
    LEAST,
    MOST,
    SUBLANES,
    TILES,
)

# Not measured, as no TPU was at hand: by the arithmetic of on-chip memory and its latency.
STEP_TILES = 8
STEP = STEP_TILES * LANES  # keys that are scored at a time
RING = 8  # steps of keys in use or under way: 2 MiB of bfloat16, more than memory delivers in 1 us
GROUPS = 4  # of 8 rows in a program, fewer where scores and results would exceed ROOM
ROOM = 44 << 20
MEMORY = 60 << 20  # with all buffers; v5p and tpu7x have 64 MiB

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class Plan(NamedTuple):
    """Sizes of a program.

    groups: of 8 rows; sources: sequences, of `rows` rows each; one of the two is 1. queries: of a sequence;
    blocks: programs of a sequence; s: keys of a sequence; chunks: what they fill; page: keys that lie together.
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
    def chunks(self):
        """Chunks of keys on the chip."""
        return -(-self.s // CHUNK)

    @property
    def places(self):
        """Width of the result in memory."""
        return -(-min(self.k, self.s) // selection.PLACES) * selection.PLACES


def refuse(idx_q, idx_w, idx_k, k, page_table=None):
    """Why it cannot run on these arguments, or None. With a page_table, idx_k are its pages."""
    if idx_q.dtype != idx_k.dtype or idx_k.dtype.name not in DTYPES:
        return f"queries of {idx_q.dtype} and keys of {idx_k.dtype}; both must be one of {DTYPES}"
    s = idx_k.shape[1] * (1 if page_table is None else page_table.shape[1])
    if _room(1, s, k) > ROOM:
        return f"8 rows of {s} scores and {k} results are too many for on-chip memory"
    if page_table is None:
        return None
    page, least = idx_k.shape[1], 32 // idx_k.dtype.itemsize
    if page < least or STEP % page:
        return f"pages of {page} keys; it takes powers of 2 from {least} to {STEP}"
    if idx_q.shape[1] > SUBLANES:
        return f"{idx_q.shape[1]} queries per sequence over pages; it takes at most {SUBLANES}"
    return None


def select_keys(
    static, idx_q, idx_w, idx_k, k_scale, start, q_segments, k_segments, *, interpret=False
):
    """topk int32[b t k] as in `ref.select_keys`."""
    b, t = idx_q.shape[:2]
    s = idx_k.shape[1]
    start = jnp.broadcast_to(jnp.int32(start if static.start is None else static.start), b)
    groups = GROUPS
    while groups > 1 and (_room(groups, s, static.k) > ROOM or groups // 2 * SUBLANES >= t):
        groups //= 2
    blocks = -(-t // (groups * SUBLANES))
    plan = Plan(groups, 1, SUBLANES, t, blocks, s, static.k, STEP, False, interpret is False)

    @sequential_vmap
    def run(idx_q, idx_w, idx_k, start, k_scale, q_segments, k_segments):
        b, pad = idx_q.shape[0], blocks * groups * SUBLANES - t
        q, w = (_pad(x, 1, pad).reshape(-1, SUBLANES, *x.shape[2:]) for x in (idx_q, idx_w))
        own = None
        if q_segments is not None:
            own = _pad(q_segments.astype(jnp.int32), 1, pad).reshape(b * blocks, -1, 1)
            k_segments = k_segments.astype(jnp.int32)
        keys = _pad(idx_k, 1, -s % STEP)
        told = _estimate(plan, b, idx_q, static.start, k_scale)
        out = _call(plan, told, interpret, (start,), q, w, keys, None, k_scale, own, k_segments)
        return out.reshape(b, -1, plan.places)[:, :t, : min(static.k, s)]

    return run(idx_q, idx_w, idx_k, start, k_scale, q_segments, k_segments)


def select_paged_keys(
    static, idx_q, idx_w, pages, page_table, lengths, page_scales, *, interpret=False
):
    """topk int32[b t k] as in `ref.select_paged_keys`."""
    t = idx_q.shape[1]
    rows = 1
    while rows < t or rows * idx_q.shape[2] % SUBLANES:
        rows *= 2
    sources, s = SUBLANES // rows, pages.shape[1] * page_table.shape[1]
    plan = Plan(1, sources, rows, t, 1, s, static.k, pages.shape[1], True, interpret is False)

    @sequential_vmap
    def run(idx_q, idx_w, page_table, lengths, pages, page_scales):
        b = idx_q.shape[0]
        table = jnp.clip(page_table.astype(jnp.int32), 0, pages.shape[0] - 1)
        k_scale = None if page_scales is None else page_scales[table].reshape(b, s)
        more = -b % sources
        q, w = (_pad(_pad(x, 1, rows - t), 0, more) for x in (idx_q, idx_w))
        table, lengths, k_scale = (_pad(x, 0, more) for x in (table, lengths, k_scale))
        table = table.reshape(-1, 1, sources * table.shape[1])
        scalars = (lengths.astype(jnp.int32),)
        told = _estimate(plan, b, idx_q, None, k_scale)
        out = _call(plan, told, interpret, scalars, q, w, pages, table, k_scale, None, None)
        return out.reshape(-1, rows, plan.places)[:b, :t, : min(static.k, s)]

    return run(idx_q, idx_w, page_table, lengths, pages, page_scales)


def _room(groups, s, k):
    """Bytes of the scores of a program and of its results, which are double-buffered."""
    return groups * SUBLANES * 4 * (s + 2 * min(k, s))


def _pad(x, axis, amount):
    """x with zeros behind its end, or None for None."""
    if x is None or not amount:
        return x
    return jnp.pad(x, [(0, amount if d == axis else 0) for d in range(x.ndim)])


def _estimate(plan, b, idx_q, start, k_scale):
    (t, i, j), dtype = idx_q.shape[1:], idx_q.dtype.name.partition("_")[0]
    sizes = b, t, plan.s, i, j, min(plan.k, plan.s)
    return estimate(cost.select(*sizes, start, dtype, k_scale is not None))


def _call(plan, told, interpret, scalars, q, w, keys, table, k_scale, own, k_segments):
    """int32[programs 8*groups places].

    scalars: int32[b], the position of a sequence's first query, or over pages its number of keys. q [m rows i
    j] and w [m rows i], m = programs * groups * sources; keys [b s j] or pages; table int32[programs 1
    sources*pages]; k_scale float32[b s], own int32[programs 8*groups 1] and k_segments int32[b s], or None.
    """
    m, rows, heads, dim = q.shape
    parts = plan.groups * plan.sources
    programs, registers = m // parts, heads * rows // SUBLANES
    q = q.swapaxes(1, 2).reshape(programs, parts, heads * rows, dim)
    if q.dtype == jnp.float8_e4m3fn and "TPU7" not in dispatch.device_kind():
        q = q.astype(jnp.bfloat16)  # other chips have no float8 products; these are exact
    w = (w * dim**-0.5).astype(jnp.float32).swapaxes(1, 2)
    w = w.reshape(programs, parts, registers, SUBLANES).swapaxes(2, 3)
    per_key = [x for x in (k_scale, k_segments) if x is not None]
    per_key = [
        _pad(x, 1, -plan.s % STEP).reshape(-1, -(-plan.s // STEP), STEP_TILES, LANES)
        for x in per_key
    ]
    item = functools.partial(_item, programs)

    def block(x):
        trailing = (0,) * (x.ndim - 1)
        return pl.BlockSpec((1, *x.shape[1:]), lambda p, *_: (item(p), *trailing))

    in_memory = pl.BlockSpec(memory_space=pltpu.HBM)
    operands, specs = [q, w], [block(q), block(w)]
    if own is not None:
        operands, specs = [*operands, own], [*specs, block(own)]
    apart = [keys, *per_key] + ([] if table is None else [table])
    operands, specs = [*operands, *apart], [*specs, *[in_memory] * len(apart)]
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
    names = ["q", "w", *["own"] * (own is not None), "keys"]
    names += ["all_scale"] * (k_scale is not None) + ["all_segments"] * (k_segments is not None)
    names += [*["table"] * (table is not None), "out", *scratch]

    def body(scalars, *refs):
        refs = types.SimpleNamespace(scalars=scalars, **dict(zip(names, refs)))
        _program(plan, item(pl.program_id(0)), refs)

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
        cost_estimate=told,
        interpret=interpret,
        name="lightning_indexer",
    )(*scalars, *operands)


def _item(programs, p):
    """Which block the p-th program takes: every other one, as the two cores of a v5p get half of the
    programs each, and later blocks see more keys."""
    half = (programs + 1) // 2
    return jnp.where(p < half, 2 * p, 2 * (p - half) + 1)


def _program(plan, item, refs):
    """One program: all scores of its rows, then their selection."""
    _spread_weights(refs)
    steps = [_steps(plan, item, refs, source) for source in range(plan.sources)]
    total, longest = sum(steps), functools.reduce(jnp.maximum, steps)
    chunks = (longest * STEP_TILES + TILES - 1) >> (TILES.bit_length() - 1)
    for group in range(plan.groups):
        for bound, first in enumerate((MOST, LEAST, 0)):
            refs.bounds[group, bound] = jnp.full((SUBLANES, LANES), first, jnp.int32)
    # Sources write into each other's tiles, each into its own rows.
    blank = 0 if plan.sources > 1 else longest * STEP_TILES

    def clear(tile, _):
        for group in range(plan.groups):
            refs.scores[group, tile] = jnp.full((SUBLANES, LANES), LEAST, jnp.int32)
        return 0

    lax.fori_loop(blank, chunks * TILES, clear, 0)
    if plan.paged:
        copy = pltpu.make_async_copy(refs.table.at[item], refs.pages, refs.arrived.at[0])
        copy.start()
        copy.wait()

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

    def both(i, cursors):
        ahead, here = cursors
        return fetch(i + RING - 1, ahead), score(i, here)

    first = (jnp.int32(0), jnp.int32(0))
    ahead = lax.fori_loop(0, jnp.minimum(total, RING - 1), fetch, first)
    most = jnp.maximum(total - (RING - 1), 0)
    _, here = lax.fori_loop(0, most, both, (ahead, first))
    lax.fori_loop(most, total, score, here)

    def choose(group, _):
        lowest, highest, count = (refs.bounds[group, bound] for bound in range(3))
        lowest = jnp.min(lowest, axis=1, keepdims=True)
        highest = jnp.max(highest, axis=1, keepdims=True)
        count = jnp.sum(count, axis=1, keepdims=True)
        bracket = selection.kth_largest(
            refs.scores, group, chunks, lowest, highest, count, plan.k, plan.unroll
        )
        selection.write_words(refs.scores, refs.words, group, chunks, bracket, plan.unroll)
        return 0

    lax.fori_loop(0, plan.groups, choose, 0)
    selection.write_indices(refs.words, refs.before, refs.ends, refs.out.at[0], chunks, plan.unroll)


def _spread_weights(refs):
    """weights[part register]: a head's weight of each row in all lanes."""
    parts, registers = refs.weights.shape[:2]
    for part in range(parts):
        own = refs.w[0, part]
        for register in range(registers):
            column = own[:, register : register + 1]
            refs.weights[part, register] = jnp.broadcast_to(column, (SUBLANES, LANES))


def _first(plan, item, refs, source):
    """Position of a source's first query in this program."""
    if plan.paged:
        return refs.scalars[item * plan.sources + source] - plan.queries
    row = lax.div(item, plan.blocks)
    return refs.scalars[row] + (item - row * plan.blocks) * plan.groups * SUBLANES


def _rows(plan, item):
    """How many queries a source still has at the first one of this program."""
    if plan.paged:
        return plan.queries
    return plan.queries - lax.rem(item, plan.blocks) * plan.groups * SUBLANES


def _steps(plan, item, refs, source):
    """How many steps of keys the queries of a source can see, at least 1."""
    rows = jnp.minimum(_rows(plan, item), plan.groups * SUBLANES)
    end = jnp.minimum(_first(plan, item, refs, source) + rows, plan.s)
    return jnp.maximum((end + STEP - 1) >> (STEP.bit_length() - 1), 1)


def _next(plan, item, refs, cursor):
    """The (source, step) after this one."""
    source, step = cursor
    if plan.sources == 1:
        return source, step + 1
    last = step + 1 == _steps(plan, item, refs, source)
    # Behind the last source nothing is read any more, but its length is.
    following = jnp.minimum(source + 1, plan.sources - 1)
    return jnp.where(last, following, source), jnp.where(last, 0, step + 1)


def _fetch(plan, item, refs, source, step, slot):
    """Starts the copies that fill a slot of the ring."""

    def copy(come_from, go_to):
        pltpu.make_async_copy(come_from, go_to, refs.arrived.at[slot]).start()

    row = item * plan.sources + source if plan.paged else lax.div(item, plan.blocks)
    pages = STEP // plan.page
    if plan.paged:
        # The last page again instead of what is behind it: no branch interrupts the products.
        used = jnp.maximum(refs.scalars[row] + plan.page - 1, plan.page)
        last = (used >> (plan.page.bit_length() - 1)) - 1
        first = source * (refs.pages.shape[1] // plan.sources)

        def page(n, _):
            at = refs.pages[0, first + jnp.minimum(step * pages + n, last)]
            copy(refs.keys.at[at], refs.ring.at[slot, n])
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
    """Waits until a slot of the ring has as many bytes as it holds."""
    for name in ("ring", "scale", "segments"):
        if hasattr(refs, name):
            whole = getattr(refs, name).at[slot]
            pltpu.make_async_copy(whole, whole, refs.arrived.at[slot]).wait()


def _score(plan, item, refs, source, step, slot):
    """The scores of all rows of a source for the keys of a slot."""
    keys = refs.ring[slot].reshape(STEP, -1)
    if keys.dtype != refs.q.dtype:
        keys = keys.astype(refs.q.dtype)
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), d) for d in (0, 1))
    first, rows = _first(plan, item, refs, source), _rows(plan, item)
    shift = plan.rows.bit_length() - 1

    def group_scores(group, _):
        part = group + source
        dots = _dots(refs.q[0, part], keys)
        row = group * SUBLANES + (sublane & (plan.rows - 1))
        seen = ((sublane >> shift) == source) if plan.sources > 1 else True
        if hasattr(refs, "segments"):
            own = refs.own[0, pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), SUBLANES)]
            own = jnp.broadcast_to(own, (SUBLANES, LANES))
            seen = seen & (own != 0)
        last = jnp.where(seen & (row < rows), jnp.minimum(first + row, plan.s - 1), -1)
        low, high, count = (refs.bounds[group, bound] for bound in range(3))
        for tile in range(STEP_TILES):
            scores = _weigh(dots, refs.weights, part, tile, plan.rows)
            if hasattr(refs, "scale"):
                scores *= refs.scale[slot, tile : tile + 1]
            place = step * STEP_TILES + tile
            visible = place * LANES + lane <= last
            if hasattr(refs, "segments"):
                visible &= own == refs.segments[slot, tile : tile + 1]
            scores = selection.ordered(scores, visible)
            low = jnp.minimum(low, jnp.where(visible, scores, MOST))
            high = jnp.maximum(high, scores)
            count += jnp.where(visible, 1, 0)
            if plan.sources > 1:
                scores = jnp.maximum(scores, refs.scores[group, place])
            refs.scores[group, place] = scores
        for bound, value in enumerate((low, high, count)):
            refs.bounds[group, bound] = value
        return 0

    selection.repeat(plan.groups, group_scores, 0, plan.unroll)


def _dots(q, keys):
    """q [m j] with keys [s j] -> [m s] in float32, or exact int32."""
    exact = keys.dtype == jnp.int8
    return lax.dot_general(
        q,
        keys,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if exact else jnp.float32,
    )


def _weigh(dots, weights, part, tile, rows):
    """float32[8 128]: the weighted sum of ReLU(dots) over heads, of the keys of one tile."""
    sums = [jnp.zeros((SUBLANES, LANES), jnp.float32)] * 2
    for register in range(weights.shape[1]):
        own = dots[
            register * SUBLANES : (register + 1) * SUBLANES, tile * LANES : (tile + 1) * LANES
        ]
        sums[register % 2] += jnp.maximum(own, 0).astype(jnp.float32) * weights[part, register]
    total = sums[0] + sums[1]
    # A register has the rows of several heads where a source has fewer than 8.
    step = SUBLANES // 2
    while step >= rows:
        total += pltpu.roll(total, step, 0)
        step //= 2
    return total
