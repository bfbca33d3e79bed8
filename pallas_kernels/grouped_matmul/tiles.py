"""What ragged kernels share: which tile of rows meets which group, and how its rows are written."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


class Visits(NamedTuple):
    """Entry by entry, in the order of the rows; `count` of them are there to be done.

    A visit is a group and a tile that holds rows of it. Tiles without any row follow, as visits
    without rows that only write. group: whose weights; following: the group with rows after it, or -1.
    source: tile to read, where a visit without rows keeps what the one before it had. tile: tile to
    write. begin, end: the group's rows within the tile.
    """

    count: jnp.ndarray
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
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = jnp.minimum(starts // tile, num_tiles - 1)
    spans = jnp.where(ends > starts, -(-ends // tile) - first, int(every_group))
    stops = jnp.cumsum(spans)
    entry = jnp.arange(num_tiles + num_groups, dtype=jnp.int32)
    owner = jnp.searchsorted(stops, entry, side="right", method="compare_all").astype(jnp.int32)
    real = entry < stops[-1]
    last = jnp.maximum(stops[-1] - 1, 0)
    group = jnp.minimum(jnp.where(real, owner, owner[last]), num_groups - 1)
    at = jnp.minimum(entry, last)
    source = jnp.minimum(first[group] + at - (stops - spans)[group], num_tiles - 1)
    covered = -(-ends[-1] // tile)
    begin, end = (
        jnp.where(real, jnp.clip(x[group] - source * tile, 0, tile), 0) for x in (starts, ends)
    )
    after = stops[group]
    following = jnp.where(after < stops[-1], owner[jnp.minimum(after, last)], -1)
    return Visits(
        stops[-1] if every_group else stops[-1] + num_tiles - covered,
        jnp.where(real, group, num_groups) if every_group else group,
        following,
        source,
        jnp.where(real, source, covered + entry - stops[-1]),
        begin,
        end,
    )


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


def store(out, at, y, fresh, begin, end):
    """Writes rows begin to end of y float32 into columns `at` of a tile; the others stay, or are zero in
    a fresh tile."""
    row = lax.broadcasted_iota(jnp.int32, y.shape, 0)
    kept = jnp.where(fresh, 0, out[:, at].astype(jnp.float32))
    out[:, at] = jnp.where((row >= begin) & (row < end), y, kept).astype(out.dtype)
