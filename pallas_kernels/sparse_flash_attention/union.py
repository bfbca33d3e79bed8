"""The rows that a block of neighbouring queries needs together, each named once, and who chose which.

Neighbours choose mostly the same rows. A kernel that fetches the union once for all of them moves a
fraction of the bytes, and starts a fraction of the copies, and masks by membership.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MOST_QUERIES = 31  # of one block: a bit each, the sign bit left alone


class Union(NamedTuple):
    """Of g blocks of queries: rows int32[b g c], the distinct rows in ascending order; members int32[b g c],
    where bit a says that query a of the block chose the row; count int32[b g] of the entries in use.
    Entries beyond it have no members and name row 0."""

    rows: jax.Array
    members: jax.Array
    count: jax.Array


def blocks_of(t: int, queries: int) -> int:
    """How many blocks of so many queries cover t of them."""
    return -(-t // queries)


def capacity(queries: int, k: int, s: int, multiple: int) -> int:
    """Entries that hold any union of so many queries with k of s rows each, rounded up to a multiple."""
    return multiple * -(-min(queries * k, s) // multiple)


def unite(topk, s: int, queries: int, multiple: int = 1) -> Union:
    """The union of topk int32[b t k] for every `queries` neighbours; what is not a row of s counts as none.

    Room for `capacity(queries, k, s, multiple)` rows. Queries beyond t, in the last block, choose nothing.
    A block of one query keeps its rows in their order, and its gaps as entries without members.
    ValueError if queries is above MOST_QUERIES, or s too large for row and query in one int32.
    """
    b, t, k = topk.shape
    if not 0 < queries <= MOST_QUERIES:
        raise ValueError(f"unite: blocks of {queries} queries; use 1 to {MOST_QUERIES}")
    if s * queries > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"unite: {s} rows for blocks of {queries} queries; use fewer of either")
    groups = blocks_of(t, queries)
    topk = jnp.pad(topk, ((0, 0), (0, groups * queries - t), (0, 0)), constant_values=-1)
    topk = topk.reshape(b, groups, queries, k)
    found = (topk >= 0) & (topk < s)
    if queries == 1:
        found = found[:, :, 0]
        place = 1 + jnp.arange(k, dtype=jnp.int32)
        rows, members = jnp.where(found, topk[:, :, 0], 0), found.astype(jnp.int32)
        union = Union(rows, members, jnp.max(jnp.where(found, place, 0), axis=-1))
    else:
        union = _merged(topk, found, s)
    room = capacity(queries, k, s, multiple)
    fit = [(0, 0), (0, 0), (0, max(0, room - queries * k))]
    rows, members = (jnp.pad(x[..., :room], fit) for x in union[:2])
    return Union(rows, members, union.count)


def _merged(topk, found, s: int) -> Union:
    """The union of topk [b g a k], with room for all entries.

    Two sorts and no scatter: what XLA makes of a scatter or a gather of single numbers is far slower on a
    TPU than its sorting network.
    """
    b, groups, queries, k = topk.shape
    none = jnp.iinfo(jnp.int32).max
    query = jnp.arange(queries, dtype=jnp.int32)[:, None]
    keys = jnp.where(found, topk * queries + query, none).reshape(b * groups, queries * k)
    keys = lax.sort(keys, is_stable=False)
    used = keys != none
    row = keys // queries
    members = jnp.where(used, jnp.left_shift(1, keys - row * queries), 0)
    row = jnp.where(used, row, -1)
    # A row's entries are neighbours, at most one per query: its first gathers the bits of all.
    step = 1
    while step < queries:
        same = row[:, step:] == row[:, :-step]
        bits = jnp.where(same, members[:, step:], 0)
        members = members | jnp.pad(bits, [(0, 0), (0, step)])
        step *= 2
    before = jnp.pad(row[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    first = used & (row != before)
    count = jnp.sum(first, axis=1, dtype=jnp.int32)
    # Ascending rows again, the others behind them; row and bits in one number where they fit.
    if s < 2 ** (31 - queries):
        packed = jnp.where(first, (row << queries) | members, none)
        packed = lax.sort(packed, is_stable=False)
        kept = packed != none
        row, members = packed >> queries, packed & (2**queries - 1)
    else:
        row, members = jnp.where(first, row, none), jnp.where(first, members, 0)
        row, members = lax.sort((row, members), num_keys=1, is_stable=False)
        kept = row != none
    row, members = (jnp.where(kept, x, 0).reshape(b, groups, queries * k) for x in (row, members))
    return Union(row, members, count.reshape(b, groups))
