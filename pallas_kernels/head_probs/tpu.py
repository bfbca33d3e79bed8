"""Attention probabilities summed over heads, by Mosaic: the sum stays on chip while the heads go by.

Keys lie along sublanes and queries along lanes, so that what belongs to a query (its log-sum-exp here,
head weights and statistics in the indexer's kernels) is a row that broadcasts at no cost.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate, visible_pairs
from pallas_kernels.head_probs import cost
from pallas_kernels.head_probs.tiles import may_see, padded, segments_of, spans
from pallas_kernels.numerics import LOG2E

# Not measured. A step reads (queries + keys) rows of x and multiplies queries * keys of them: 341 FLOP
# per byte at 512 and 1024, above what v5p (166) and v7x (313) want, below v6e (560). Output tiles of
# 2 MiB and logits of 2 MiB, twice buffered, are below 12 MiB.
QUERIES = (512, 256, 128)
KEYS = (1024, 512, 256, 128)
VMEM = 48 * 2**20


class Place(NamedTuple):
    """Who sees whom, for kernels: first int32[1], key index of query 0; tiles int32[2 * b * query tiles],
    first and last-but-one key tile that a query tile sees; segments int32 [b 1 t] and [b 1 s]."""

    first: jax.Array
    tiles: jax.Array
    own: jax.Array
    segments: jax.Array


def refuse(q, k):
    """Why q [b t n x] over k [b s m x] cannot run here, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}; bfloat16 and float32 are taken"
    if q.dtype != k.dtype:
        return f"q is {q.dtype} and k {k.dtype}"
    if q.shape[-1] % 8:
        return f"{q.shape[-1]} columns are no multiple of 8"
    return None


def forward(static, q, k, lse, start, q_segments, k_segments, interpret=False):
    """wide[b t s] of q [b t n x], k [b s m x], lse [b t n]."""
    t, s = q.shape[1], k.shape[1]
    pairs = visible_pairs(t, s, start if isinstance(start, int) else None)
    q, lse, own = (padded(x, 1, 128) for x in (q, lse, segments_of(q, q_segments)))
    k, segments = (padded(x, 1, 128) for x in (k, segments_of(k, k_segments)))
    sizes = tiling(q.shape[1], k.shape[1], QUERIES, KEYS)
    where = place(start, own, segments, sizes)
    lanes = q.transpose(0, 2, 3, 1), k.swapaxes(1, 2), lse.swapaxes(1, 2)
    total = summed(static.scale, *lanes, where, sizes, pairs, interpret)
    return total[:, :s, :t].swapaxes(1, 2)


def summed(scale, q, k, lse, where: Place, sizes, pairs: float, interpret):
    """float32[b s t], 0 where not visible, of q [b n x t], k [b m s x], lse [b n t] in tiles of `sizes`; pairs: of a
    query and a key that it sees, as far as that is known."""
    (b, n, x, t), (_, m, s, _) = q.shape, k.shape
    queries, keys = sizes
    query_tiles = t // queries

    def read_keys(b, i, j, head, first, tiles):
        low, high = span(tiles, b * query_tiles + i)
        head = jnp.where(j < low, 0, jnp.where(j >= high, n - 1, head))
        return b, lax.div(head, n // m), nearest(j, low, high), 0

    def read_segments(b, i, j, head, first, tiles):
        return b, 0, nearest(j, *span(tiles, b * query_tiles + i))

    def kernel(first, tiles, q, k, lse, own, segments, out):
        b, i, j, head = (pl.program_id(axis) for axis in range(4))
        low, high = span(tiles, b * query_tiles + i)
        seen = (low <= j) & (j < high)

        @pl.when(head == 0)
        def _():
            out[...] = jnp.zeros(out.shape, out.dtype)

        @pl.when(seen)
        def _():
            logits = dot(k[0, 0], q[0, 0])
            out[0] += jnp.exp2(scale * LOG2E * logits - lse[0, pl.ds(head, 1), :])

        @pl.when(seen & (head == n - 1))
        def _():
            mask = seen_by(first[0] + i * queries, j * keys, own[0], segments[0])
            out[0] = jnp.where(mask, out[0], 0)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, query_tiles, s // keys, n),
            in_specs=[
                pl.BlockSpec((1, 1, x, queries), lambda b, i, j, head, *_: (b, head, 0, i)),
                pl.BlockSpec((1, 1, keys, x), read_keys),
                pl.BlockSpec((1, n, queries), lambda b, i, j, head, *_: (b, 0, i)),
                pl.BlockSpec((1, 1, queries), lambda b, i, j, head, *_: (b, 0, i)),
                pl.BlockSpec((1, 1, keys), read_segments),
            ],
            out_specs=pl.BlockSpec((1, keys, queries), lambda b, i, j, head, *_: (b, j, i)),
        ),
        out_shape=jax.ShapeDtypeStruct((b, s, t), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        cost_estimate=estimate(cost.forward(b, t, s, n, m, x, pairs, q.dtype.itemsize)),
        interpret=interpret,
        name="head_probs",
    )(where.first, where.tiles, q, k, LOG2E * lse.astype(jnp.float32), where.own, where.segments)


def tiling(t: int, s: int, queries, keys) -> tuple[int, int]:
    """The largest tile of `queries` and of `keys` that divides t and s; both are multiples of 128."""
    return (
        next(size for size in queries if t % size == 0),
        next(size for size in keys if s % size == 0),
    )


def place(start, own, segments, sizes) -> Place:
    """Of queries whose first has key index start, own int32[b t] and segments int32[b s], in tiles of `sizes`."""
    queries, keys = sizes
    first = jnp.asarray(start, jnp.int32).reshape(1)
    both = spans(may_see(first[0], own, segments, queries, keys)).reshape(-1)
    return Place(first, both, own[:, None], segments[:, None])


def span(tiles, query_tile):
    """First and last-but-one key tile that a query tile of `Place.tiles` sees."""
    return tiles[2 * query_tile], tiles[2 * query_tile + 1]


def nearest(tile, low, high):
    """The tile of a span that is closest: blocks indexed so stand still, and are not copied, outside it."""
    return jnp.clip(tile, low, jnp.maximum(high - 1, low))


def seen_by(query, key, own, segments):
    """bool[keys queries] of a tile whose first query and key have these indices, own [1 queries] and
    segments [1 keys]; inside a kernel."""
    keys, queries = segments.shape[1], own.shape[1]
    shape = (keys, queries)
    key_index = key + lax.broadcasted_iota(jnp.int32, shape, 0)
    query_index = query + lax.broadcasted_iota(jnp.int32, shape, 1)
    column = jnp.broadcast_to(segments, (8, keys)).T[:, :1]
    return (key_index <= query_index) & (column == own) & (own != 0)


def dot(a, b, contract=((1,), (0,))):
    """float32 product of two tiles; float32 operands are multiplied as such."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
