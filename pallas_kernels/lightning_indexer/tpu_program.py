"""Program of the TPU indexer: scores of some rows of queries over their keys, then the k largest of each.

Keys arrive in a ring of buffers, 1024 per step: contiguous ones by one copy, pages by one copy each. Products with all
heads go from the matrix unit directly into the weighted sum, so the scores of single heads are never stored. VMEM
holds one integer per row and key, which compares like the score.

Phases of a program:

1. Spread the weights over lanes, reset the bounds, hide the tiles after the last step, load the page table.
2. Fetch and score all steps of all sequences (`sources`), the fetch `ring - 1` steps ahead. Each step also updates the
   smallest and largest score and the count of visible keys of each row, by lane.
3. Per group of 8 rows: bracket the k-th largest score, and mark the selected keys as bits (`tpu_selection`).
4. Write the indices of the bits, ascending.

Over pages, sequences write to the same tiles of scores one after the other, each to its rows: the maximum of old and
new scores keeps the rows of the others.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.lightning_indexer import tpu_selection as selection
from pallas_kernels.lightning_indexer.tpu_selection import (
    CHUNK,
    LANES,
    MAX_INT,
    MIN_INT,
    SUBLANES,
    TILES,
)


class SelectionPlan(NamedTuple):
    """Sizes of a program.

    Attributes:
      groups: groups of 8 rows. sources: sequences, of `rows` rows each. One of the two is 1.
      queries: queries of a sequence.
      blocks: programs of a sequence.
      s: keys of a sequence.
      page: contiguous keys.
      paged: whether keys are in pages of a table.
      unroll: whether short loops are unrolled.
      step_tiles: tiles of LANES keys that are scored per step, a power of two.
      ring: steps of keys in use or in flight, a power of two.
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
    step_tiles: int
    ring: int

    @property
    def step(self) -> int:
        """Keys that are scored per step."""
        return self.step_tiles * LANES

    @property
    def chunks(self) -> int:
        """Chunks of keys in VMEM."""
        return -(-self.s // CHUNK)

    @property
    def places(self) -> int:
        """Width of the result in memory."""
        return -(-min(self.k, self.s) // selection.PLACES) * selection.PLACES


def run_program(plan: SelectionPlan, item, refs) -> None:
    """Runs one program: all scores of its rows, then their selection.

    item: block of the program. refs: the kernel's refs by name, see `tpu`.
    """
    # Initialise weights, bounds, scores and the page table.
    _spread_weights(refs)
    steps = [_steps(plan, item, refs, source) for source in range(plan.sources)]
    total, longest = sum(steps), functools.reduce(jnp.maximum, steps)
    chunks = (longest * plan.step_tiles + TILES - 1) >> (TILES.bit_length() - 1)
    for group in range(plan.groups):
        for bound, first in enumerate((MAX_INT, MIN_INT, 0)):
            refs.bounds[group, bound] = jnp.full((SUBLANES, LANES), first, jnp.int32)
    # Sources write to the same tiles, each to its rows.
    first_blank = 0 if plan.sources > 1 else longest * plan.step_tiles

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
        _fetch(plan, item, refs, source, step, i & (plan.ring - 1))
        return _next(plan, item, refs, cursor)

    def score(i, cursor):
        source, step = cursor
        slot = i & (plan.ring - 1)
        _wait(refs, slot)
        _score(plan, item, refs, source, step, slot)
        return _next(plan, item, refs, cursor)

    def fetch_and_score(i, cursors):
        fetch_cursor, score_cursor = cursors
        return fetch(i + plan.ring - 1, fetch_cursor), score(i, score_cursor)

    first = (jnp.int32(0), jnp.int32(0))
    fetch_cursor = lax.fori_loop(0, jnp.minimum(total, plan.ring - 1), fetch, first)
    num_ahead = jnp.maximum(total - (plan.ring - 1), 0)
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
    return jnp.maximum((end + plan.step - 1) >> (plan.step.bit_length() - 1), 1)


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
    pages = plan.step // plan.page
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
        keys = pl.ds(pl.multiple_of(step * plan.step, plan.step), plan.step)
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
    keys = refs.ring[slot].reshape(plan.step, -1)
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
        # Each tile is one register of scores; the bounds of the search are collected on the way.
        for tile in range(plan.step_tiles):
            scores = _weigh(dots, refs.weights, part, tile, plan.rows)
            if hasattr(refs, "scale"):
                scores *= refs.scale[slot, tile : tile + 1]
            tile_index = step * plan.step_tiles + tile
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
