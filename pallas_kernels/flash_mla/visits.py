"""Which tiles of keys the tiles of queries meet, and the list of meetings that a kernel goes through.

A grid over all pairs of tiles would spend a step on each pair that causality or the documents hide. A kernel
instead takes one step per entry of a list that is made here, outside of it, and prefetched as scalars:
int32 numbers that hold the two tiles and what is to be done there.

NumPy makes the list where everything is known when tracing, XLA where the first query's index or the
segments are not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# What an entry of a list says. Neither MASKED nor WHOLE: an idle step behind a shorter list's end.
FIRST, LAST = 1, 2  # of the entries of this outer tile
OPENS, CLOSES = 4, 8  # the first and last entry of this inner tile
MASKED, WHOLE = 16, 32  # some or none of the tile's keys are hidden from some of its queries
INNER_BITS = 12  # and 13 of outer tiles
MOST = 4096  # tiles that can be told apart
ENTRIES = 160_000  # that fit the scalar memory, whose 1 MiB holds other things too


class Tiling(NamedTuple):
    """t queries in `rows` tiles of `row` rows, s keys in `keys` tiles of `key` keys."""

    t: int
    s: int
    row: int
    key: int
    rows: int
    keys: int


class Visits(NamedTuple):
    """entries int32[b or 1, steps], outer tiles ascending, inner tiles ascending within them; count: the
    steps that the longest list needs."""

    entries: jax.Array | np.ndarray
    count: jax.Array | int


def outer_of(entry):
    """The outer tile of an entry, or of an array of them."""
    return entry >> (INNER_BITS + 6)


def inner_of(entry):
    """The inner tile of an entry, or of an array of them."""
    return (entry >> 6) & (2**INNER_BITS - 1)


def has(entry, flags: int):
    """Whether an entry says one of the flags."""
    return (entry & flags) != 0


def meetings(tiling: Tiling, start, q_segments=None, k_segments=None):
    """(met, whole) bool[b or 1, row tiles, key tiles]: whether some query of the one sees some key of the
    other, perhaps; whether every one sees every one, surely.

    start: key index of query 0. Segments int[b, all rows], int[b, all keys], with 0 in rows and keys that
    are padding; the row of query i is i, or all rows are in one tile.
    """
    numbers = np if isinstance(start, int) else jnp
    tile = np.arange(tiling.rows)
    first = start + tile * tiling.row
    last = start + np.minimum((tile + 1) * tiling.row, tiling.t) - 1
    key = np.arange(tiling.keys) * tiling.key
    end = np.minimum(key + tiling.key, tiling.s)
    met = key[None] <= last[:, None]
    whole = (end[None] <= first[:, None] + 1) & (end - key == tiling.key)
    met, whole = met[None], whole[None]
    if q_segments is None:
        return numbers.asarray(met), numbers.asarray(whole)
    q_low, q_high, q_one = _range(q_segments, tiling.rows)
    k_low, k_high, k_one = _range(k_segments, tiling.keys)
    q_low, q_high, q_one = q_low[:, :, None], q_high[:, :, None], q_one[:, :, None]
    k_low, k_high, k_one = k_low[:, None], k_high[:, None], k_one[:, None]
    met = met & (q_low <= k_high) & (k_low <= q_high)
    return met, whole & q_one & k_one & (q_low == k_low)


def _range(segments, tiles: int):
    """(smallest, largest, whether there is one) of the documents in each tile, padding left out of the
    first two."""
    cut = segments.reshape(segments.shape[0], tiles, -1)
    limits = jnp.iinfo(cut.dtype)
    low = jnp.min(jnp.where(cut == 0, limits.max, cut), axis=-1)
    high = jnp.max(jnp.where(cut == 0, limits.min, cut), axis=-1)
    return low, high, (low == high) & jnp.all(cut != 0, axis=-1)


def by_rows(tiling: Tiling, start, segments=()) -> Visits:
    """A list whose outer tiles are all tiles of rows and whose inner tiles are those of their keys."""
    met, whole = meetings(tiling, start, *segments)
    if isinstance(met, np.ndarray):
        steps = None
    elif isinstance(start, int):
        steps = by_rows(tiling, start).count
    else:
        steps = tiling.rows * tiling.keys
    return _listed(_with_one(met, 2), whole, steps)


def by_keys(tiling: Tiling, start, segments, unit, units: int) -> Visits:
    """A list whose outer tiles are all tiles of keys, the last first, and whose inner tiles are all of
    int `unit` [.]: tiles of rows counted over several heads, of which there are `units`."""
    met, whole = meetings(tiling, start, *segments)
    numbers = np if isinstance(met, np.ndarray) and isinstance(unit, np.ndarray) else jnp
    real = (unit < units)[:, None]
    met, whole = (
        (numbers.take(x, unit % tiling.rows, axis=1) & real).swapaxes(1, 2)[:, ::-1]
        for x in (met, whole)
    )
    if numbers is np:
        steps = None
    elif isinstance(start, int) and isinstance(unit, np.ndarray):
        steps = by_keys(tiling, start, (), unit, units).count
    else:
        steps = unit.size * tiling.keys
    return _listed(_with_one(_with_one(met, 2), 1), whole, steps)


def _with_one(met, axis: int):
    """`met` with a first meeting along the axis where there was none: what nobody sees is written too."""
    none = ~met.any(axis=axis, keepdims=True)
    first = np.arange(met.shape[axis]) == 0
    return met | (none & np.expand_dims(first, 2 - axis))


def _listed(met, whole, steps: int | None = None) -> Visits:
    """The list of the meetings [b or 1, outer, inner], which is `steps` long; as long as needed if None."""
    numbers = np if isinstance(met, np.ndarray) else jnp
    lists, outers, inners = met.shape
    outer = np.arange(outers)[:, None]
    inner = np.arange(inners)
    marks = [
        (FIRST, inner == met.argmax(2)[:, :, None]),
        (LAST, inner == inners - 1 - met[:, :, ::-1].argmax(2)[:, :, None]),
        (OPENS, outer == met.argmax(1)[:, None]),
        (CLOSES, outer == outers - 1 - met[:, ::-1].argmax(1)[:, None]),
        (MASKED, ~whole),
        (WHOLE, whole),
    ]
    entries = sum(numbers.where(mark, flag, 0) for flag, mark in marks)
    entries = entries + (((outer << INNER_BITS) + inner) << 6)
    entries = entries.astype(np.int32).reshape(lists, -1)
    met = met.reshape(lists, -1)
    counts = met.sum(axis=1)
    longest = counts.max()
    steps = int(longest) if steps is None else steps
    step = np.arange(steps)
    place = _nth(met, numbers.minimum(step, counts[:, None] - 1))
    chosen = numbers.take_along_axis(entries, place, axis=1)
    # An idle step stays on the last entry's tiles, so that nothing is fetched or written for it.
    return Visits(numbers.where(step < counts[:, None], chosen, chosen & ~63), longest)


def _nth(marks, n):
    """int[., k]: in each row of bool marks [., m], the place of its mark number n [., k] from 0."""
    numbers = np if isinstance(marks, np.ndarray) else jnp
    width = marks.shape[1]
    counted = numbers.cumsum(marks.reshape(-1))
    before = counted.reshape(marks.shape)[:, -1:] - marks.sum(axis=1, keepdims=True)
    place = numbers.searchsorted(counted, (before + n + 1).reshape(-1)).reshape(n.shape)
    return place - width * np.arange(marks.shape[0])[:, None]


def latest_closed(visits: Visits):
    """int32[b or 1, steps]: the inner tile that was closed last at each step, or the one that will be
    closed first."""
    numbers = np if isinstance(visits.entries, np.ndarray) else jnp
    closing = has(visits.entries, CLOSES)
    place = _nth(closing, numbers.maximum(numbers.cumsum(closing, axis=1) - 1, 0))
    return inner_of(numbers.take_along_axis(visits.entries, place, axis=1))
