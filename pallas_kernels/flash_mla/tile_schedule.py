"""Schedule of tile pairs: the list of (query tile, key tile) that a kernel goes through.

A grid over all pairs of tiles would spend a step on each pair that causality or the documents hide. Instead a
kernel takes one step per entry of a list. The list is computed outside the kernel and prefetched as scalars:
int32 numbers that hold the two tiles and what to do there.

NumPy computes the list if everything is known when tracing; XLA does if the first query's index or the segments
are not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

# Flags of an entry. Neither MASKED nor UNMASKED: an idle step after the end of a shorter list.
FIRST, LAST = 1, 2  # first and last entry of this outer tile
OPENS, CLOSES = 4, 8  # first and last entry of this inner tile
MASKED, UNMASKED = 16, 32  # some or none of the tile's keys are hidden from some of its queries
INNER_BITS = 12  # bits of inner tiles; outer tiles have 13
MAX_TILES = 4096  # tiles that an entry can number
MAX_ENTRIES = 160_000  # entries that fit the scalar memory, whose 1 MiB also holds other data


class Tiling(NamedTuple):
    """t queries in `rows` tiles of `row` rows, s keys in `keys` tiles of `key` keys."""

    t: int
    s: int
    row: int
    key: int
    rows: int
    keys: int


class TileSchedule(NamedTuple):
    """List of tile pairs.

    Attributes:
      entries: int32[b or 1, steps], outer tiles ascending, inner tiles ascending within them.
      count: steps of the longest list.
    """

    entries: jax.Array | np.ndarray
    count: jax.Array | int


def outer_tile(entry: Array | np.ndarray) -> Array | np.ndarray:
    """Returns the outer tile of an entry, or of an array of them."""
    return entry >> (INNER_BITS + 6)


def inner_tile(entry: Array | np.ndarray) -> Array | np.ndarray:
    """Returns the inner tile of an entry, or of an array of them."""
    return (entry >> 6) & (2**INNER_BITS - 1)


def has_flag(entry: Array | np.ndarray, flags: int) -> Array | np.ndarray:
    """Returns whether an entry has one of the flags."""
    return (entry & flags) != 0


def tile_visibility(
    tiling: Tiling,
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b rows"] | None = None,
    k_segments: Int[Array, "b keys"] | None = None,
) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Returns (is_visible, is_unmasked), bool[b or 1, row tiles, key tiles].

    is_visible: whether some query of the row tile may see some key of the key tile; False is certain.
    is_unmasked: whether every query sees every key; True is certain.
    start: key index of query 0. Segments are int[b, all rows] and int[b, all keys], with 0 in padding. The row
    of query i is i, or all rows are in one tile.
    """
    xp = np if isinstance(start, int) else jnp
    tile = np.arange(tiling.rows)
    first = start + tile * tiling.row
    last = start + np.minimum((tile + 1) * tiling.row, tiling.t) - 1
    key = np.arange(tiling.keys) * tiling.key
    end = np.minimum(key + tiling.key, tiling.s)
    is_visible = key[None] <= last[:, None]
    is_unmasked = (end[None] <= first[:, None] + 1) & (end - key == tiling.key)
    is_visible, is_unmasked = is_visible[None], is_unmasked[None]
    if q_segments is None:
        return xp.asarray(is_visible), xp.asarray(is_unmasked)
    q_low, q_high, q_one = _range(q_segments, tiling.rows)
    k_low, k_high, k_one = _range(k_segments, tiling.keys)
    q_low, q_high, q_one = q_low[:, :, None], q_high[:, :, None], q_one[:, :, None]
    k_low, k_high, k_one = k_low[:, None], k_high[:, None], k_one[:, None]
    is_visible = is_visible & (q_low <= k_high) & (k_low <= q_high)
    return is_visible, is_unmasked & q_one & k_one & (q_low == k_low)


def _range(segments, tiles: int):
    """Returns (smallest, largest, whether there is exactly one) of the documents in each tile.

    The first two ignore padding.
    """
    cut = segments.reshape(segments.shape[0], tiles, -1)
    limits = jnp.iinfo(cut.dtype)
    low = jnp.min(jnp.where(cut == 0, limits.max, cut), axis=-1)
    high = jnp.max(jnp.where(cut == 0, limits.min, cut), axis=-1)
    return low, high, (low == high) & jnp.all(cut != 0, axis=-1)


def by_rows(
    tiling: Tiling, start: int | Int[Array, ""], segments: tuple[Array, ...] = ()
) -> TileSchedule:
    """Returns a schedule whose outer tiles are all tiles of rows and whose inner tiles are those of their keys."""
    is_visible, is_unmasked = tile_visibility(tiling, start, *segments)
    if isinstance(is_visible, np.ndarray):
        steps = None
    elif isinstance(start, int):
        steps = by_rows(tiling, start).count
    else:
        steps = tiling.rows * tiling.keys
    return _build_schedule(_ensure_one(is_visible, 2), is_unmasked, steps)


def by_keys(
    tiling: Tiling,
    start: int | Int[Array, ""],
    segments: tuple[Array, ...],
    unit: Array | np.ndarray,
    units: int,
) -> TileSchedule:
    """Returns a schedule with all tiles of keys outside, the last first, and all of `unit` inside.

    unit int[.]: tiles of rows, counted over several heads; there are `units` of them.
    """
    is_visible, is_unmasked = tile_visibility(tiling, start, *segments)
    xp = np if isinstance(is_visible, np.ndarray) and isinstance(unit, np.ndarray) else jnp
    real = (unit < units)[:, None]
    is_visible, is_unmasked = (
        (xp.take(x, unit % tiling.rows, axis=1) & real).swapaxes(1, 2)[:, ::-1]
        for x in (is_visible, is_unmasked)
    )
    if xp is np:
        steps = None
    elif isinstance(start, int) and isinstance(unit, np.ndarray):
        steps = by_keys(tiling, start, (), unit, units).count
    else:
        steps = unit.size * tiling.keys
    return _build_schedule(_ensure_one(_ensure_one(is_visible, 2), 1), is_unmasked, steps)


def _ensure_one(is_visible, axis: int):
    """Marks the first tile along the axis where none is visible, so that its (empty) result is written too."""
    none = ~is_visible.any(axis=axis, keepdims=True)
    first = np.arange(is_visible.shape[axis]) == 0
    return is_visible | (none & np.expand_dims(first, 2 - axis))


def _build_schedule(is_visible, is_unmasked, steps: Any = None) -> TileSchedule:
    """Returns the schedule of visible pairs [b or 1, outer, inner] with `steps` entries; None: as many as needed."""
    xp = np if isinstance(is_visible, np.ndarray) else jnp
    lists, outers, inners = is_visible.shape
    outer = np.arange(outers)[:, None]
    inner = np.arange(inners)
    marks = [
        (FIRST, inner == is_visible.argmax(2)[:, :, None]),
        (LAST, inner == inners - 1 - is_visible[:, :, ::-1].argmax(2)[:, :, None]),
        (OPENS, outer == is_visible.argmax(1)[:, None]),
        (CLOSES, outer == outers - 1 - is_visible[:, ::-1].argmax(1)[:, None]),
        (MASKED, ~is_unmasked),
        (UNMASKED, is_unmasked),
    ]
    entries = sum(xp.where(mark, flag, 0) for flag, mark in marks)
    entries = entries + (((outer << INNER_BITS) + inner) << 6)
    entries = entries.astype(np.int32).reshape(lists, -1)
    is_visible = is_visible.reshape(lists, -1)
    counts = is_visible.sum(axis=1)
    longest = counts.max()
    steps = int(longest) if steps is None else steps
    step = np.arange(steps)
    place = _nth_true(is_visible, xp.minimum(step, counts[:, None] - 1))
    chosen = xp.take_along_axis(entries, place, axis=1)
    # An idle step keeps the tiles of the last entry, so that nothing is fetched or written for it.
    return TileSchedule(xp.where(step < counts[:, None], chosen, chosen & ~63), longest)


def _nth_true(marks, n):
    """Returns int[., k]: the position of the n-th true mark (from 0) in each row.

    marks: bool [., m]; n: [., k].
    """
    xp = np if isinstance(marks, np.ndarray) else jnp
    width = marks.shape[1]
    counted = xp.cumsum(marks.reshape(-1))
    before = counted.reshape(marks.shape)[:, -1:] - marks.sum(axis=1, keepdims=True)
    place = xp.searchsorted(counted, (before + n + 1).reshape(-1)).reshape(n.shape)
    return place - width * np.arange(marks.shape[0])[:, None]


def latest_closed(schedule: TileSchedule) -> Array | np.ndarray:
    """Returns int32[b or 1, steps]: the last inner tile closed at each step, else the first to be closed."""
    xp = np if isinstance(schedule.entries, np.ndarray) else jnp
    closing = has_flag(schedule.entries, CLOSES)
    place = _nth_true(closing, xp.maximum(xp.cumsum(closing, axis=1) - 1, 0))
    return inner_tile(xp.take_along_axis(schedule.entries, place, axis=1))
