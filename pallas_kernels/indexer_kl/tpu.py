"""KL of the index scores from the attention's probabilities by Mosaic, a block of queries at a time.

Three kernels a block: the target (`head_probs`), the scores beside it with all sums that the KL takes,
and the gradients, whose tiles of dI are made from both on chip. Target and scores go through memory once.
Keys lie along sublanes and queries along lanes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import join
from pallas_kernels.cost import estimate, visible_pairs
from pallas_kernels.head_probs import tpu as target_kernel
from pallas_kernels.head_probs.tiles import padded, segments_of
from pallas_kernels.head_probs.tpu import Place, nearest, place, seen_by, span, tiling
from pallas_kernels.index_scores import tpu as scores_kernel
from pallas_kernels.index_scores.tpu import add_scores, gradients, lanes, of_queries, query_specs
from pallas_kernels.indexer_kl import cost
from pallas_kernels.mask import HIDDEN

# Not measured: what the kernels of target and scores take, in blocks of which one chip's two cores can
# take a tile each.
BLOCKS = (512, 256, 128)
VMEM = 48 * 2**20


def refuse(idx_q, idx_w, idx_k, q, k):
    """Why the scores of idx_q, idx_w, idx_k or the probabilities of q, k cannot run here, or None."""
    return scores_kernel.refuse(idx_q, idx_w, idx_k) or target_kernel.refuse(q, k)


def forward(static, idx_q, idx_w, idx_k, q, k, lse, start, q_segments, k_segments, interpret=False):
    """kl wide[b t]."""
    place = (start, q_segments, k_segments)
    return _over_blocks(static, idx_q, idx_w, idx_k, q, k, lse, None, *place, interpret)


def forward_and_gradients(
    static, idx_q, idx_w, idx_k, q, k, lse, weight, start, q_segments, k_segments, interpret=False
):
    """(kl wide[b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    place = (start, q_segments, k_segments)
    return _over_blocks(static, idx_q, idx_w, idx_k, q, k, lse, weight, *place, interpret)


def _over_blocks(
    static, idx_q, idx_w, idx_k, q, k, lse, weight, start, q_segments, k_segments, interpret
):
    start = start if static.start is None else static.start
    t, s = idx_q.shape[1], idx_k.shape[1]
    pairs = visible_pairs(t, s, static.start)
    segments = padded(segments_of(k, k_segments), 1, 128)
    keys, seen_k = padded(k.swapaxes(1, 2), 2, 128), padded(idx_k, 1, 128)
    arrays = (idx_q, idx_w, q, lse, weight, segments_of(q, q_segments))
    arrays = tuple(None if x is None else padded(x, 1, 128) for x in arrays)
    block = next(size for size in BLOCKS if arrays[0].shape[1] % size == 0)
    target_sizes = tiling(block, keys.shape[2], target_kernel.QUERIES, target_kernel.KEYS)
    sizes = tiling(block, keys.shape[2], scores_kernel.QUERIES, scores_kernel.KEYS)

    def one(dk, args):
        first, (idx_q, idx_w, q, lse, weight, own) = args
        q, lse = q.transpose(0, 2, 3, 1), lse.swapaxes(1, 2)
        where = place(first, own, segments, target_sizes)
        target = target_kernel.summed(
            static.scale, q, keys, lse, where, target_sizes, each, interpret
        )
        where = place(first, own, segments, sizes)
        heads = lanes(idx_q, idx_w)
        kl, norm, total, *scores = _compare(
            *heads, seen_k, target, where, sizes, each, weight is not None, interpret
        )
        if weight is None:
            return dk, kl
        # A query that sees nothing has no target, and a gradient of zero.
        found = total > 0
        share = jnp.where(found, weight / total, 0)
        rows = jnp.stack([norm, share, jnp.where(found, weight, 0)], axis=1)

        def read(scores, target, rows, scratch):
            norm, share, weight = (rows[0, at : at + 1] for at in range(3))
            scratch[...] = jnp.exp(scores[0] - norm) * weight - target[0] * share

        given = (read, (scores[0], target), (rows,), where.tiles)
        e, part = gradients("indexer_kl_backward", *given, *heads, seen_k, sizes, each, interpret)
        return dk + part, (kl, *of_queries(e, idx_q, idx_w))

    count = arrays[0].shape[1] // block
    each = pairs / count  # on average: later blocks see more
    blocks = jax.tree.map(lambda x: _cut(x, count), arrays)
    firsts = start + block * jnp.arange(count, dtype=jnp.int32)
    dk, out = lax.scan(one, jnp.zeros(seen_k.shape, jnp.float32), (firsts, blocks))
    out = jax.tree.map(lambda x: join(x, 1)[:, :t], out)
    return out if weight is None else (*out, dk[:, :s].astype(idx_k.dtype))


def _cut(x, count: int):
    """[count b t/count ...] of [b t ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)


def _compare(q, w, k, target, where: Place, sizes, pairs: float, keep: bool, interpret):
    """(kl, log-sum-exp of the scores, sum of the target), float32[b t] each, and with `keep` the scores
    [b s t], of q [b i j t], w [b i t], k [b s j] beside the target [b s t]; scores of tiles that nobody sees
    are never written. pairs: of a query and a key that it sees, as far as that is known."""
    (b, i, j, t), s = q.shape, k.shape[1]
    queries, keys = sizes
    query_tiles, key_tiles = t // queries, s // keys

    def near(b, t, s, tiles):
        return nearest(s, *span(tiles, b * query_tiles + t))

    def kernel(first, tiles, q, w, k, target, own, segments, sums, *rest):
        *kept, scores, top, norm, total, cross = rest
        scores = kept[0] if kept else scores
        b, i, j = (pl.program_id(axis) for axis in range(3))
        low, high = span(tiles, b * query_tiles + i)

        @pl.when(j == 0)
        def _():
            top[...] = jnp.full(top.shape, HIDDEN, jnp.float32)
            for each in (norm, total, cross):
                each[...] = jnp.zeros(each.shape, jnp.float32)

        @pl.when((low <= j) & (j < high))
        def _():
            scores[...] = jnp.zeros(scores.shape, jnp.float32)
            add_scores(q, w, k, scores)
            mask = seen_by(first[0] + i * queries, j * keys, own[0], segments[0])
            tile = jnp.where(mask, scores[0], HIDDEN)
            scores[0] = tile
            p = target[0]
            higher = jnp.maximum(top[...], jnp.max(tile, axis=0, keepdims=True))
            now = jnp.sum(jnp.exp(tile - higher), axis=0, keepdims=True)
            norm[...] = norm[...] * jnp.exp(top[...] - higher) + now
            top[...] = higher
            total[...] += jnp.sum(p, axis=0, keepdims=True)
            each = jnp.where(p > 0, p * (jnp.log(p) - tile), 0)
            cross[...] += jnp.sum(each, axis=0, keepdims=True)

        @pl.when(j == key_tiles - 1)
        def _():
            mass = total[...]
            logs = top[...] + jnp.log(norm[...])
            kl = cross[...] / mass - jnp.log(mass) + logs
            sums[0, 0:1] = jnp.where(mass > 0, kl, 0)
            sums[0, 1:2] = logs
            sums[0, 2:3] = mass

    pair = pl.BlockSpec((1, keys, queries), lambda b, t, s, _, tiles: (b, near(b, t, s, tiles), t))
    row = pltpu.VMEM((1, queries), jnp.float32)
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, query_tiles, key_tiles),
            in_specs=[
                *query_specs(i, j, queries),
                pl.BlockSpec((1, keys, j), lambda b, t, s, _, tiles: (b, near(b, t, s, tiles), 0)),
                pair,
                pl.BlockSpec((1, 1, queries), lambda b, t, *_: (b, 0, t)),
                pl.BlockSpec((1, 1, keys), lambda b, t, s, _, tiles: (b, 0, near(b, t, s, tiles))),
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
    )(where.first, where.tiles, q, w, k, target, where.own, where.segments)
    return *(out[0][:, at] for at in range(3)), *out[1:]
