"""KL of the index scores from the attention's probabilities on Hopper, one block of queries at a time.

Four kernels per block: target (`summed_attention_probs`), scores (`index_scores`), and from dI both sums of the
gradients (`index_scores`); their modules have the outlines. Hidden tiles are not computed. Between the kernels XLA
computes the sums over keys and dI, in three fusions: maximum and sums of both arrays, the sum of the exponentials, and
dI in both of its orders. XLA also scans over the blocks and sums dk in float32, in their order.

Padding: queries to full blocks in segment 0, which sees nothing, and keys to multiples of 256.

At GLM-5's block of 512 queries over 32,768 keys, each of the five reads and two writes of an array moves 67 MB,
and each of the two writes and two reads of dI 33 MB. Together this is 0.6 GB, or 0.13 ms at memory bandwidth,
compared with 1.25 ms of products on tensor cores (only forward: 0.34 GB and 0.70 ms). Computing the sums inside
the scores' kernel would save a third of that traffic, 3% of the time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.blocks import join
from pallas_kernels.index_scores import gpu as scores_kernel
from pallas_kernels.mask import HIDDEN, visible
from pallas_kernels.summed_attention_probs import gpu as target_kernel
from pallas_kernels.summed_attention_probs.tiles import (
    find_visible_tiles,
    pad_to_multiple,
    segments_or_ones,
    tile_spans,
)

# Not measured. With 512 queries, the kernel that sums over keys has a block for nearly every processor.
BLOCK = 512  # maximum number of queries


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
    # Pad the keys to tiles, and choose the block size.
    k_ids = pad_to_multiple(segments_or_ones(k, k_segments), 1, target_kernel.KEYS)
    keys = target_kernel.pad_to_tiles(k, target_kernel.KEYS)
    padded_k = pad_to_multiple(idx_k, 1, target_kernel.KEYS)
    count = -(-t // BLOCK)
    block = scores_kernel.QUERIES * -(-t // (scores_kernel.QUERIES * count))
    arrays = (idx_q, idx_w, q, lse, weight, segments_or_ones(q, q_segments))

    # Target, scores and gradients of one block of queries.
    def run_block(dk, args):
        first, (idx_q, idx_w, q, lse, weight, q_ids) = args
        target = target_kernel.sum_heads(static.scale, first, q, lse, q_ids, keys, k_ids, interpret)

        def visible_tiles(queries):
            padded_ids = pad_to_multiple(q_ids, 1, queries)
            return find_visible_tiles(first, padded_ids, k_ids, queries, scores_kernel.KEYS)

        tiles = scores_kernel.pad_to_tiles(idx_q, idx_w, padded_k, scores_kernel.QUERIES)
        scores = scores_kernel.scores(
            *tiles, tile_spans(visible_tiles(scores_kernel.QUERIES)), interpret
        )
        query, key = (jnp.arange(n, dtype=jnp.int32) for n in scores.shape[1:])
        mask = visible(first + query, key, q_ids, k_ids)
        kl, dscores = compare(target, scores, mask, weight)
        if dscores is None:
            return dk, kl
        dq, dw, part = scores_kernel.gradients(
            idx_q, idx_w, padded_k, dscores, visible_tiles(scores_kernel.ROWS), interpret
        )
        return dk + part, (kl, dq, dw)

    # Scan over the blocks; dk is summed.
    blocks = jax.tree.map(lambda x: _cut(x, count, block), arrays)
    firsts = start + block * jnp.arange(count, dtype=jnp.int32)
    dk, out = lax.scan(run_block, jnp.zeros(padded_k.shape, jnp.float32), (firsts, blocks))
    out = jax.tree.map(lambda x: join(x, 1)[:, :t], out)
    return out if weight is None else (*out, dk[:, :s].astype(idx_k.dtype))


def _cut(x, count: int, block: int):
    """Splits [b t ...] into [count b block ...], with zeros at the end."""
    x = pad_to_multiple(x, 1, count * block)
    return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)


def compare(
    target: Float[Array, "b t s"],
    scores: Float[Array, "b t s"],
    mask: Bool[Array, "b t s"],
    weight: Float[Array, "b t"] | None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t s"] | None]:
    """Returns (kl, gradient of weight * kl by the scores), over the last axis of target and scores.

    Where mask is False, target is 0 and scores may be anything. weight None: no gradient is returned.
    """
    scores = jnp.where(mask, scores, HIDDEN)
    top = jnp.max(scores, axis=-1)
    score_lse = top + jnp.log(jnp.sum(jnp.exp(scores - top[..., None]), axis=-1))
    total = jnp.sum(target, axis=-1)
    log_target = jnp.log(jnp.where(target > 0, target, 1))
    cross = jnp.sum(jnp.where(target > 0, target * (log_target - scores), 0), axis=-1)
    has_keys = total > 0
    total = jnp.where(has_keys, total, 1)
    kl = jnp.where(has_keys, cross / total - jnp.log(total) + score_lse, 0)
    if weight is None:
        return kl, None
    weight = jnp.where(has_keys, weight.astype(jnp.float32), 0)
    weighted_softmax = jnp.exp(scores - score_lse[..., None]) * weight[..., None]
    return kl, weighted_softmax - target * (weight / total)[..., None]
