"""KL of the index scores from the attention's probabilities by Mosaic, one block of queries at a time.

Three kernels per block of up to 512 queries: (1) the target (`summed_attention_probs`); (2) `_compare`: the scores and
all sums of the KL; (3) the gradients (`index_scores.tpu.gradients`), whose tiles of dI are computed in VMEM from target
and scores. Target and scores go through memory once. XLA scans over the blocks and sums dk in float32.

Grid of `_compare`: (batch, query tile, key tile), the key tiles in order. Keys lie along sublanes and queries along
lanes. Blocks, for 32 heads of j = 128 in bfloat16, double-buffered by the pipeline: queries [32 j 256] (2 MiB), weights
float32[32 256], keys [512 j] (128 KiB), target and scores float32[512 256] (512 KiB each), three sums float32[3 256].
Scratch VMEM: a tile of scores if they are not kept, and four rows float32[1 256] of running sums.

Phases of a program:

1. First tile of keys: reset the running maximum and sums.
2. Visible tile: scores of all heads; mask; add to the sums over keys of a query: exponentials, target, and target
   times (log target - score).
3. Last tile of keys: combine the sums to the KL, the log-sum-exp of the scores and the sum of the target.

Padding: queries and keys to multiples of 128, in segment 0, which sees nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import join
from pallas_kernels.cost import estimate, visible_pairs
from pallas_kernels.index_scores import tpu as scores_kernel
from pallas_kernels.index_scores.tpu import (
    add_scores,
    gradients,
    queries_in_lanes,
    query_gradients,
    query_specs,
)
from pallas_kernels.indexer_kl import cost
from pallas_kernels.mask import HIDDEN
from pallas_kernels.summed_attention_probs import tpu as target_kernel
from pallas_kernels.summed_attention_probs.tiles import pad_to_multiple, segments_or_ones
from pallas_kernels.summed_attention_probs.tpu import (
    TileVisibility,
    choose_tiles,
    nearest_tile,
    tile_span,
    tile_visibility,
    visible_mask,
)

# Not measured. These sizes suit the kernels of target and scores, and give each of a chip's two cores a tile.
BLOCKS = (512, 256, 128)
VMEM = 48 * 2**20


def unsupported_reason(
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
) -> str | None:
    """Returns the reason why idx_q, idx_w, idx_k or q, k are not supported, or None."""
    return scores_kernel.unsupported_reason(
        idx_q, idx_w, idx_k
    ) or target_kernel.unsupported_reason(q, k)


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    interpret: object = False,
) -> Float[Array, "b t"]:
    """Returns kl [b t]."""
    visibility = (start, q_segments, k_segments)
    return _over_blocks(static, idx_q, idx_w, idx_k, q, k, lse, None, *visibility, interpret)


def forward_and_gradients(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    weight: Float[Array, "b t"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    interpret: object = False,
) -> tuple[
    Float[Array, "b t"], Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]
]:
    """Returns (kl [b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    visibility = (start, q_segments, k_segments)
    return _over_blocks(static, idx_q, idx_w, idx_k, q, k, lse, weight, *visibility, interpret)


def _over_blocks(
    static, idx_q, idx_w, idx_k, q, k, lse, weight, start, q_segments, k_segments, interpret
) -> Any:
    start = start if static.start is None else static.start
    t, s = idx_q.shape[1], idx_k.shape[1]
    pairs = visible_pairs(t, s, static.start)
    # Pad to tiles, and choose the block and tile sizes.
    k_ids = pad_to_multiple(segments_or_ones(k, k_segments), 1, 128)
    keys, padded_k = pad_to_multiple(k.swapaxes(1, 2), 2, 128), pad_to_multiple(idx_k, 1, 128)
    arrays = (idx_q, idx_w, q, lse, weight, segments_or_ones(q, q_segments))
    arrays = tuple(None if x is None else pad_to_multiple(x, 1, 128) for x in arrays)
    padded_t = -(-t // 128) * 128
    block = next(size for size in BLOCKS if padded_t % size == 0)
    target_sizes = choose_tiles(block, keys.shape[2], target_kernel.QUERIES, target_kernel.KEYS)
    sizes = choose_tiles(block, keys.shape[2], scores_kernel.QUERIES, scores_kernel.KEYS)

    # Target, scores and gradients of one block of queries.
    def run_block(dk, args):
        first, (idx_q, idx_w, q, lse, weight, q_ids) = args
        # Target, then scores and the sums of the KL.
        q, lse = q.transpose(0, 2, 3, 1), lse.swapaxes(1, 2)
        visibility = tile_visibility(first, q_ids, k_ids, target_sizes)
        target = target_kernel.sum_heads(
            static.scale, q, keys, lse, visibility, target_sizes, pairs_per_block, interpret
        )
        visibility = tile_visibility(first, q_ids, k_ids, sizes)
        heads = queries_in_lanes(idx_q, idx_w)
        kl, norm, total, *scores = _compare(
            *heads,
            padded_k,
            target,
            visibility,
            sizes,
            pairs_per_block,
            weight is not None,
            interpret,
        )
        if weight is None:
            return dk, kl
        # A query without visible keys has no target, and a gradient of zero.
        has_target = total > 0
        normalised_weight = jnp.where(has_target, weight / total, 0)
        rows = jnp.stack([norm, normalised_weight, jnp.where(has_target, weight, 0)], axis=1)

        def read(scores, target, rows, scratch):
            norm, normalised_weight, weight = (rows[0, i : i + 1] for i in range(3))
            scratch[...] = jnp.exp(scores[0] - norm) * weight - target[0] * normalised_weight

        # Gradients, from tiles of dI that `read` computes.
        options = (read, (scores[0], target), (rows,), visibility.tiles)
        e, part = gradients(
            "indexer_kl_backward", *options, *heads, padded_k, sizes, pairs_per_block, interpret
        )
        return dk + part, (kl, *query_gradients(e, idx_q, idx_w))

    # Scan over the blocks; dk is summed.
    count = padded_t // block
    pairs_per_block = pairs / count  # on average: later blocks see more
    blocks = jax.tree.map(lambda x: _cut(x, count), arrays)
    firsts = start + block * jnp.arange(count, dtype=jnp.int32)
    dk, out = lax.scan(run_block, jnp.zeros(padded_k.shape, jnp.float32), (firsts, blocks))
    out = jax.tree.map(lambda x: join(x, 1)[:, :t], out)
    return out if weight is None else (*out, dk[:, :s].astype(idx_k.dtype))


def _cut(x, count: int):
    """Splits [b t ...] into [count b t/count ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


def _compare(
    q, w, k, target, visibility: TileVisibility, sizes, pairs: float, keep: bool, interpret
):
    """Returns (kl, log-sum-exp of the scores, sum of the target), float32[b t] each, and with `keep` the scores.

    Inputs: q [b i j t], w [b i t], k [b s j], target [b s t]; scores [b s t]. Scores of hidden tiles are not
    written.
    pairs: number of visible (query, key) pairs, as far as it is known.
    """
    (b, i, j, t), s = q.shape, k.shape[1]
    queries, keys = sizes
    query_tiles, key_tiles = t // queries, s // keys

    def visible_key_tile(b, t, s, tiles):
        return nearest_tile(s, *tile_span(tiles, b * query_tiles + t))

    # Online sums over the tiles of keys.
    def kernel(first, tiles, q, w, k, target, q_ids, k_ids, sums, *rest):
        *score_outputs, scores, top, norm, total, cross = rest
        scores = score_outputs[0] if score_outputs else scores
        b, i, j = (pl.program_id(axis) for axis in range(3))
        low, high = tile_span(tiles, b * query_tiles + i)

        # First tile: reset the sums.
        @pl.when(j == 0)
        def _():
            top[...] = jnp.full(top.shape, HIDDEN, jnp.float32)
            for accumulator in (norm, total, cross):
                accumulator[...] = jnp.zeros(accumulator.shape, jnp.float32)

        # Visible tile: scores, and their sums and those of the target.
        @pl.when((low <= j) & (j < high))
        def _():
            scores[...] = jnp.zeros(scores.shape, jnp.float32)
            add_scores(q, w, k, scores)
            mask = visible_mask(first[0] + i * queries, j * keys, q_ids[0], k_ids[0])
            tile = jnp.where(mask, scores[0], HIDDEN)
            scores[0] = tile
            p = target[0]
            higher = jnp.maximum(top[...], jnp.max(tile, axis=0, keepdims=True))
            tile_sum = jnp.sum(jnp.exp(tile - higher), axis=0, keepdims=True)
            norm[...] = norm[...] * jnp.exp(top[...] - higher) + tile_sum
            top[...] = higher
            total[...] += jnp.sum(p, axis=0, keepdims=True)
            accumulator = jnp.where(p > 0, p * (jnp.log(p) - tile), 0)
            cross[...] += jnp.sum(accumulator, axis=0, keepdims=True)

        # Last tile: combine the sums.
        @pl.when(j == key_tiles - 1)
        def _():
            mass = total[...]
            score_lse = top[...] + jnp.log(norm[...])
            kl = cross[...] / mass - jnp.log(mass) + score_lse
            sums[0, 0:1] = jnp.where(mass > 0, kl, 0)
            sums[0, 1:2] = score_lse
            sums[0, 2:3] = mass

    # Call the kernel.
    pair = pl.BlockSpec(
        (1, keys, queries), lambda b, t, s, _, tiles: (b, visible_key_tile(b, t, s, tiles), t)
    )
    row = pltpu.VMEM((1, queries), jnp.float32)
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, query_tiles, key_tiles),
            in_specs=[
                *query_specs(i, j, queries),
                pl.BlockSpec(
                    (1, keys, j), lambda b, t, s, _, tiles: (b, visible_key_tile(b, t, s, tiles), 0)
                ),
                pair,
                pl.BlockSpec((1, 1, queries), lambda b, t, *_: (b, 0, t)),
                pl.BlockSpec(
                    (1, 1, keys), lambda b, t, s, _, tiles: (b, 0, visible_key_tile(b, t, s, tiles))
                ),
            ],
            out_specs=[
                pl.BlockSpec((1, 3, queries), lambda b, t, *_: (b, 0, t)),
                *([pair] if keep else []),
            ],
            scratch_shapes=[pltpu.VMEM((1, keys, queries), jnp.float32), row, row, row, row],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((b, 3, t), jnp.float32),
            *([jax.ShapeDtypeStruct((b, s, t), jnp.float32)] if keep else []),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=estimate(cost.compare(b, t, s, i, j, pairs, keep, q.dtype.itemsize)),
        interpret=interpret,
        name="indexer_kl",
    )(visibility.first, visibility.tiles, q, w, k, target, visibility.q_ids, visibility.k_ids)
    return *(out[0][:, n] for n in range(3)), *out[1:]
