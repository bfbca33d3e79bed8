"""Schedule of row tiles and groups for ragged kernels, and masked writes of their rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int


class RowTileSchedule(NamedTuple):
    """Pairs of a row tile and a group, in the order of the rows.

    The first `filled` entries are pairs of a group and a tile that holds rows of it. Tiles without rows follow;
    they are only written.

    Attributes:
      count: number of entries to process.
      filled: number of entries with rows.
      group: group whose weights apply.
      following: next group with rows; -1: none.
      source: tile to read; an entry without rows keeps that of the previous entry.
      tile: tile to write.
      begin, end: range of the group's rows within the tile.
    """

    count: jnp.ndarray
    filled: jnp.ndarray
    group: jnp.ndarray
    following: jnp.ndarray
    source: jnp.ndarray
    tile: jnp.ndarray
    begin: jnp.ndarray
    end: jnp.ndarray


def schedule_row_tiles(
    group_sizes: Int[Array, " e"], rows: int, tile: int, every_group: bool = False
) -> RowTileSchedule:
    """Returns the schedule of groups int32[e] over `rows` rows in tiles of `tile` rows.

    It has at most tiles + e - 1 entries. every_group: a group without rows gets one entry, and tiles without
    rows none. The group of the entry after the last is then e.
    """
    num_groups, num_tiles = group_sizes.shape[0], -(-rows // tile)
    # Row range and number of tiles of each group.
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = jnp.minimum(starts // tile, num_tiles - 1)
    covered = (ends + tile - 1) // tile
    spans = jnp.where(ends > starts, covered - first, int(every_group))
    stops = jnp.cumsum(spans, dtype=jnp.int32)
    filled = stops[-1]
    # Group of each entry.
    entry = jnp.arange(num_tiles + num_groups, dtype=jnp.int32)
    is_filled = entry < filled
    filled_entry = jnp.minimum(entry, jnp.maximum(filled - 1, 0))
    is_before = stops <= filled_entry[:, None]
    group = jnp.minimum(_count_true(is_before), num_groups - 1)

    # Sums over the groups, because they fuse; each gather from such a short list would be a separate program.
    def of_group(x):
        is_group = group[:, None] == jnp.arange(num_groups)
        return jnp.sum(jnp.where(is_group, x, 0), axis=1, dtype=jnp.int32)

    # Tile and row range of each entry.
    source = jnp.minimum(filled_entry + of_group(first - stops + spans), num_tiles - 1)
    begin, end = (
        jnp.where(is_filled, jnp.clip(of_group(x) - source * tile, 0, tile), 0)
        for x in (starts, ends)
    )
    # Next group with rows, and tiles without rows.
    next_group = _count_true(stops <= of_group(stops)[:, None])
    tail = covered[-1] + entry - filled
    return RowTileSchedule(
        count=filled + (0 if every_group else num_tiles - covered[-1]),
        filled=filled,
        group=jnp.where(is_filled, group, num_groups) if every_group else group,
        following=jnp.where(next_group < num_groups, next_group, -1),
        source=source,
        tile=jnp.where(is_filled, source, tail),
        begin=begin,
        end=end,
    )


def _count_true(true):
    return jnp.sum(true, axis=1, dtype=jnp.int32)


def column_tile(n: int, max_columns: int) -> int:
    """Returns the widest tile of at most `max_columns`, an even number of tiles if possible; n if none divides n."""
    divisors = [c for c in range(128, max_columns + 1, 128) if n % c == 0]
    even_divisors = [c for c in divisors if n % (2 * c) == 0]
    return max(even_divisors or divisors, default=n)


def for_each_column_step(columns: int, step: int, compute: Callable) -> None:
    """Calls compute(slice) over `columns` columns, in steps of `step`, 128 or all, whichever divides them first."""
    step = next((s for s in (step, 128) if columns % s == 0), columns)
    if step == columns:
        compute(slice(None))
        return

    def run_step(i, carry):
        compute(pl.ds(pl.multiple_of(i * step, step), step))
        return carry

    lax.fori_loop(0, columns // step, run_step, None)


def store_rows(
    out, columns, y: Float[Array, "rows n"], is_first_write, begin, end, previous: Any = 0
) -> None:
    """Writes rows begin to end of y float32 to `columns` of a tile.

    Other rows keep their content; in the first write to a tile they become `previous`.
    """
    row = lax.broadcasted_iota(jnp.int32, y.shape, 0)
    previous = jnp.where(is_first_write, previous, out[:, columns].astype(jnp.float32))
    out[:, columns] = jnp.where((row >= begin) & (row < end), y, previous).astype(out.dtype)
