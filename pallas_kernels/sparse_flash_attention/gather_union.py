"""Union of the rows that a block of neighbouring queries selects, each named once, with membership bits.

Neighbours mostly select the same rows. A kernel that gathers the union once for all of them moves a fraction of
the bytes, starts a fraction of the copies, and masks by membership.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

MAX_QUERIES = 31  # queries of a block: one bit each, without the sign bit


class GatherUnion(NamedTuple):
    """Unions of the rows of g blocks of queries.

    Attributes:
      rows: int32[b g c], the distinct rows in ascending order.
      members: int32[b g c]; bit a is set if query a of the block selected the row.
      count: int32[b g], number of used entries. Other entries have no members and name row 0.
    """

    rows: jax.Array
    members: jax.Array
    count: jax.Array


def num_blocks(t: int, queries: int) -> int:
    """Returns the number of blocks of `queries` queries that cover t of them."""
    return -(-t // queries)


def capacity(queries: int, k: int, s: int, multiple: int) -> int:
    """Returns the maximum size of a union of `queries` queries with k of s rows each, rounded up."""
    return multiple * -(-min(queries * k, s) // multiple)


def unite(topk: Int32[Array, "b t k"], s: int, queries: int, multiple: int = 1) -> GatherUnion:
    """Returns the union of topk int32[b t k] for every `queries` neighbours.

    Numbers that are not a row of s count as none. The union has room for `capacity(queries, k, s, multiple)`
    rows. Queries beyond t, in the last block, select nothing. A block of one query whose k entries have room keeps
    its rows in their order, and its gaps as entries without members. Raises ValueError if queries is above
    MAX_QUERIES, or s is too large for row and query in one int32.
    """
    b, t, k = topk.shape
    if not 0 < queries <= MAX_QUERIES:
        raise ValueError(f"unite: blocks of {queries} queries; use 1 to {MAX_QUERIES}")
    if s * queries > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"unite: {s} rows for blocks of {queries} queries; use fewer of either")
    groups = num_blocks(t, queries)
    topk = jnp.pad(topk, ((0, 0), (0, groups * queries - t), (0, 0)), constant_values=-1)
    topk = topk.reshape(b, groups, queries, k)
    is_row = (topk >= 0) & (topk < s)
    room = capacity(queries, k, s, multiple)
    if queries == 1 and k <= room:
        is_row = is_row[:, :, 0]
        position = 1 + jnp.arange(k, dtype=jnp.int32)
        rows, members = jnp.where(is_row, topk[:, :, 0], 0), is_row.astype(jnp.int32)
        union = GatherUnion(rows, members, jnp.max(jnp.where(is_row, position, 0), axis=-1))
    else:
        union = _merge_queries(topk, is_row, s)
    fit = [(0, 0), (0, 0), (0, max(0, room - queries * k))]
    rows, members = (jnp.pad(x[..., :room], fit) for x in union[:2])
    return GatherUnion(rows, members, union.count)


def _merge_queries(topk, is_row, s: int) -> GatherUnion:
    """Returns the union of topk [b g a k], with room for all entries.

    It uses two sorts and no scatter: on a TPU XLA's scatters and gathers of single numbers are far slower than
    its sorting network.
    """
    b, groups, queries, k = topk.shape
    none = jnp.iinfo(jnp.int32).max
    query = jnp.arange(queries, dtype=jnp.int32)[:, None]
    # Sort by row and query.
    keys = jnp.where(is_row, topk * queries + query, none).reshape(b * groups, queries * k)
    keys = lax.sort(keys, is_stable=False)
    used = keys != none
    row = keys // queries
    members = jnp.where(used, jnp.left_shift(1, keys - row * queries), 0)
    row = jnp.where(used, row, -1)
    # The entries of a row are neighbours, at most one per query: the first collects the bits of all.
    step = 1
    while step < queries:
        same = row[:, step:] == row[:, :-step]
        bits = jnp.where(same, members[:, step:], 0)
        members = members | jnp.pad(bits, [(0, 0), (0, step)])
        step *= 2
    before = jnp.pad(row[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    first = used & (row != before)
    count = jnp.sum(first, axis=1, dtype=jnp.int32)
    # Ascending rows again, followed by unused entries; row and bits in one number where they fit.
    if s < 2 ** (31 - queries):
        packed = jnp.where(first, (row << queries) | members, none)
        packed = lax.sort(packed, is_stable=False)
        is_used = packed != none
        row, members = packed >> queries, packed & (2**queries - 1)
    else:
        row, members = jnp.where(first, row, none), jnp.where(first, members, 0)
        row, members = lax.sort((row, members), num_keys=1, is_stable=False)
        is_used = row != none
    row, members = (
        jnp.where(is_used, x, 0).reshape(b, groups, queries * k) for x in (row, members)
    )
    return GatherUnion(row, members, count.reshape(b, groups))
