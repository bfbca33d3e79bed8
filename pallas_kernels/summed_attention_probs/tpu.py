"""Attention probabilities summed over heads, by Mosaic: the sum stays in VMEM over the loop over heads.

Grid: (batch, query tile, key tile, head), the heads innermost and in order. Keys lie along sublanes and queries along
lanes, so that per-query numbers (here the log-sum-exp; in the indexer's kernels also head weights and statistics) are
rows that broadcast at no cost.

Blocks, for heads of x = 256 columns in bfloat16, double-buffered by the pipeline: queries of a head [x 512] (256 KiB),
keys of a head [1024 x] (512 KiB), log-sum-exp of all heads float32[64 512] (128 KiB), segments, and the sum
float32[1024 512] (2 MiB), which is also the accumulator.

Phases of a program: (1) first head: set the sum to zero; (2) visible tile: add the head's probabilities; (3) last head:
set hidden pairs to zero.

Padding: queries and keys to multiples of 128, in segment 0. Hidden tiles are not computed, and their keys not copied.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.cost import estimate, visible_pairs
from pallas_kernels.numerics import LOG2E
from pallas_kernels.summed_attention_probs import cost
from pallas_kernels.summed_attention_probs.tiles import (
    find_visible_tiles,
    pad_to_multiple,
    segments_or_ones,
    tile_spans,
)

# Not measured. A step reads (queries + keys) rows of x and multiplies queries * keys of them: 341 FLOP
# per byte at 512 and 1024. v5p needs 166, v7x 313, v6e 560. Output tiles of 2 MiB and logits of 2 MiB,
# double-buffered, take less than 12 MiB.
QUERIES = (512, 256, 128)
KEYS = (1024, 512, 256, 128)
VMEM = 48 * 2**20


class TileVisibility(NamedTuple):
    """Visibility of keys, in the form that kernels read.

    Attributes:
      first: int32[1], key index of query 0.
      tiles: int32[2 * b * query tiles], begin and end (exclusive) of the key tiles that each query tile sees.
      q_ids: segments of queries, int32[b 1 t].
      k_ids: segments of keys, int32[b 1 s].
    """

    first: jax.Array
    tiles: jax.Array
    q_ids: jax.Array
    k_ids: jax.Array


def unsupported_reason(q: Float[Array, "b t n x"], k: Float[Array, "b s m x"]) -> str | None:
    """Returns the reason why q over k is not supported, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}; use bfloat16 or float32"
    if q.dtype != k.dtype:
        return f"q is {q.dtype} and k {k.dtype}"
    if q.shape[-1] % 8:
        return f"{q.shape[-1]} columns are not a multiple of 8"
    return None


def forward(
    static,
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    interpret: object = False,
) -> Float[Array, "b t s"]:
    """Returns the sum over heads."""
    t, s = q.shape[1], k.shape[1]
    pairs = visible_pairs(t, s, start if isinstance(start, int) else None)
    q, lse, q_ids = (pad_to_multiple(x, 1, 128) for x in (q, lse, segments_or_ones(q, q_segments)))
    k, k_ids = (pad_to_multiple(x, 1, 128) for x in (k, segments_or_ones(k, k_segments)))
    sizes = choose_tiles(q.shape[1], k.shape[1], QUERIES, KEYS)
    visibility = tile_visibility(start, q_ids, k_ids, sizes)
    operands = q.transpose(0, 2, 3, 1), k.swapaxes(1, 2), lse.swapaxes(1, 2)
    total = sum_heads(static.scale, *operands, visibility, sizes, pairs, interpret)
    return total[:, :s, :t].swapaxes(1, 2)


def sum_heads(
    scale: float,
    q: Float[Array, "b n x t"],
    k: Float[Array, "b m s x"],
    lse: Float[Array, "b n t"],
    visibility: TileVisibility,
    sizes: tuple[int, int],
    pairs: float,
    interpret: object,
) -> Float[Array, "b s t"]:
    """Returns float32[b s t], 0 where not visible, in tiles of `sizes`.

    pairs: number of visible (query, key) pairs, as far as it is known.
    """
    (b, n, x, t), (_, m, s, _) = q.shape, k.shape
    queries, keys = sizes
    query_tiles = t // queries

    # Block indices: outside the visible tiles they stay the same.
    def read_keys(b, i, j, head, first, tiles):
        low, high = tile_span(tiles, b * query_tiles + i)
        head = jnp.where(j < low, 0, jnp.where(j >= high, n - 1, head))
        return b, lax.div(head, n // m), nearest_tile(j, low, high), 0

    def read_segments(b, i, j, head, first, tiles):
        return b, 0, nearest_tile(j, *tile_span(tiles, b * query_tiles + i))

    # One head of one tile.
    def kernel(first, tiles, q, k, lse, q_ids, k_ids, out):
        b, i, j, head = (pl.program_id(axis) for axis in range(4))
        low, high = tile_span(tiles, b * query_tiles + i)
        is_visible = (low <= j) & (j < high)

        @pl.when(head == 0)
        def _():
            out[...] = jnp.zeros(out.shape, out.dtype)

        @pl.when(is_visible)
        def _():
            logits = dot(k[0, 0], q[0, 0])
            out[0] += jnp.exp2(scale * LOG2E * logits - lse[0, pl.ds(head, 1), :])

        @pl.when(is_visible & (head == n - 1))
        def _():
            mask = visible_mask(first[0] + i * queries, j * keys, q_ids[0], k_ids[0])
            out[0] = jnp.where(mask, out[0], 0)

    # Call the kernel.
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
        name="summed_attention_probs",
    )(
        visibility.first,
        visibility.tiles,
        q,
        k,
        LOG2E * lse.astype(jnp.float32),
        visibility.q_ids,
        visibility.k_ids,
    )


def choose_tiles(
    t: int, s: int, queries: tuple[int, ...], keys: tuple[int, ...]
) -> tuple[int, int]:
    """Returns the largest tile of `queries` that divides t and of `keys` that divides s.

    t and s are multiples of 128.
    """
    return (
        next(size for size in queries if t % size == 0),
        next(size for size in keys if s % size == 0),
    )


def tile_visibility(
    start: int | Int[Array, ""],
    q_ids: Int32[Array, "b t"],
    k_ids: Int32[Array, "b s"],
    sizes: tuple[int, int],
) -> TileVisibility:
    """Returns the visibility of queries whose first has key index start, in tiles of `sizes`.

    q_ids int32[b t] and k_ids int32[b s] are segments.
    """
    queries, keys = sizes
    first = jnp.asarray(start, jnp.int32).reshape(1)
    tile_bounds = tile_spans(find_visible_tiles(first[0], q_ids, k_ids, queries, keys)).reshape(-1)
    return TileVisibility(
        first=first, tiles=tile_bounds, q_ids=q_ids[:, None], k_ids=k_ids[:, None]
    )


def tile_span(tiles, query_tile) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """Returns begin and end (exclusive) of the key tiles that a query tile of `TileVisibility.tiles` sees."""
    return tiles[2 * query_tile], tiles[2 * query_tile + 1]


def nearest_tile(tile, low, high) -> Int32[Array, ""]:
    """Returns the closest tile of a span.

    Outside the span the block index then stays the same, and nothing is copied.
    """
    return jnp.clip(tile, low, jnp.maximum(high - 1, low))


def visible_mask(
    query: Int32[Array, ""],
    key: Int32[Array, ""],
    q_ids: Int32[Array, "1 queries"],
    k_ids: Int32[Array, "1 keys"],
) -> Bool[Array, "keys queries"]:
    """Returns the visibility of a tile whose first query and key have these indices; inside a kernel.

    q_ids and k_ids are segments.
    """
    keys, queries = k_ids.shape[1], q_ids.shape[1]
    shape = (keys, queries)
    key_index = key + lax.broadcasted_iota(jnp.int32, shape, 0)
    query_index = query + lax.broadcasted_iota(jnp.int32, shape, 1)
    key_ids = jnp.broadcast_to(k_ids, (8, keys)).T[:, :1]
    return (key_index <= query_index) & (key_ids == q_ids) & (q_ids != 0)


def dot(a: Array, b: Array, contract: tuple = ((1,), (0,))) -> Array:
    """Returns the float32 product of two tiles; float32 operands are multiplied at full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
