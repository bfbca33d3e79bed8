"""What ragged kernels share: which tile of rows meets which group, and how its rows are written."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


class Visits(NamedTuple):
    """Entry by entry, in the order of the rows; `count` of them are there to be done.

    A visit is a group and a tile that holds rows of it; there are `filled` of them. Tiles without any
    row follow, as visits without rows that only write. group: whose weights; following: the group with
    rows after it, or -1. source: tile to read, where a visit without rows keeps what the one before it
    had. tile: tile to write. begin, end: the group's rows within the tile.
    """

    count: jnp.ndarray
    filled: jnp.ndarray
    group: jnp.ndarray
    following: jnp.ndarray
    source: jnp.ndarray
    tile: jnp.ndarray
    begin: jnp.ndarray
    end: jnp.ndarray


def visits(group_sizes, rows: int, tile: int, every_group: bool = False) -> Visits:
    """The visits of groups int32[e] to `rows` rows in tiles of so many; at most tiles + e - 1.

    every_group: a group without rows gets one visit, and tiles without rows none; the group of the
    entry behind the last is then e.
    """
    num_groups, num_tiles = group_sizes.shape[0], -(-rows // tile)
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = jnp.minimum(starts // tile, num_tiles - 1)
    covered = (ends + tile - 1) // tile
    spans = jnp.where(ends > starts, covered - first, int(every_group))
    stops = jnp.cumsum(spans, dtype=jnp.int32)
    filled = stops[-1]
    entry = jnp.arange(num_tiles + num_groups, dtype=jnp.int32)
    real = entry < filled
    at = jnp.minimum(entry, jnp.maximum(filled - 1, 0))
    passed = stops <= at[:, None]
    group = jnp.minimum(_count(passed), num_groups - 1)

    # Sums over the groups: they fuse, where gathers from such short lists would each be a program.
    def of_group(x):
        mine = group[:, None] == jnp.arange(num_groups)
        return jnp.sum(jnp.where(mine, x, 0), axis=1, dtype=jnp.int32)

    source = jnp.minimum(at + of_group(first - stops + spans), num_tiles - 1)
    begin, end = (
        jnp.where(real, jnp.clip(of_group(x) - source * tile, 0, tile), 0) for x in (starts, ends)
    )
    next_group = _count(stops <= of_group(stops)[:, None])
    tail = covered[-1] + entry - filled
    return Visits(
        filled + (0 if every_group else num_tiles - covered[-1]),
        filled,
        jnp.where(real, group, num_groups) if every_group else group,
        jnp.where(next_group < num_groups, next_group, -1),
        source,
        jnp.where(real, source, tail),
        begin,
        end,
    )


def _count(true):
    return jnp.sum(true, axis=1, dtype=jnp.int32)


def column_tile(n: int, most: int) -> int:
    """The widest tile of at most `most` columns, an even number of them if there is one; n if n has none."""
    fitting = [c for c in range(128, most + 1, 128) if n % c == 0]
    even = [c for c in fitting if n % (2 * c) == 0]
    return max(even or fitting, default=n)


def in_steps(columns: int, step: int, compute):
    """compute(slice) over so many columns, `step` at a time, 128 or all, whichever divides them first."""
    step = next((s for s in (step, 128) if columns % s == 0), columns)
    if step == columns:
        compute(slice(None))
        return

    def one(i, carry):
        compute(pl.ds(pl.multiple_of(i * step, step), step))
        return carry

    lax.fori_loop(0, columns // step, one, None)


def store(out, at, y, fresh, begin, end, kept=0):
    """Writes rows begin to end of y float32 into columns `at` of a tile; the others stay, or are `kept`
    in a fresh tile."""
    row = lax.broadcasted_iota(jnp.int32, y.shape, 0)
    kept = jnp.where(fresh, kept, out[:, at].astype(jnp.float32))
    out[:, at] = jnp.where((row >= begin) & (row < end), y, kept).astype(out.dtype)
