"""KL of the index scores from the attention's probabilities on Hopper, a block of queries at a time.

Four kernels a block: target (`head_probs`), scores (`index_scores`), and from dI both sums of the gradients
(`index_scores`); tiles that nobody sees are not computed. XLA makes the sums over keys and dI between
them, in three fusions: maximum and sums of both arrays, the exponentials' sum, and dI in both of its
orders. At GLM-5's block of 512 queries over 32,768 keys that is 67 MB for each of the five readings of an
array and the two writings, and 33 MB for two writings and two readings of dI: 0.6 GB, 0.13 ms at the
memory's rate, beside 1.25 ms of products at the tensor cores' (forward alone: 0.34 GB and 0.70 ms). Sums
made inside the scores' kernel would save a third of that traffic, 3% of the time.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import join
from pallas_kernels.head_probs import gpu as target_kernel
from pallas_kernels.head_probs.tiles import may_see, padded, segments_of, spans
from pallas_kernels.index_scores import gpu as scores_kernel
from pallas_kernels.mask import HIDDEN, visible

# Not measured: of 512 queries, the kernel that sums over keys has a block for nearly every processor.
BLOCK = 512  # queries at most


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
    segments = padded(segments_of(k, k_segments), 1, target_kernel.KEYS)
    keys = target_kernel.whole_tiles(k, target_kernel.KEYS)
    seen_k = padded(idx_k, 1, target_kernel.KEYS)
    count = -(-t // BLOCK)
    block = scores_kernel.QUERIES * -(-t // (scores_kernel.QUERIES * count))
    arrays = (idx_q, idx_w, q, lse, weight, segments_of(q, q_segments))

    def one(dk, args):
        first, (idx_q, idx_w, q, lse, weight, own) = args
        target = target_kernel.summed(static.scale, first, q, lse, own, keys, segments, interpret)

        def seen(queries):
            whole = padded(own, 1, queries)
            return may_see(first, whole, segments, queries, scores_kernel.KEYS)

        tiles = scores_kernel.whole_tiles(idx_q, idx_w, seen_k, scores_kernel.QUERIES)
        scores = scores_kernel.scores(*tiles, spans(seen(scores_kernel.QUERIES)), interpret)
        query, key = (jnp.arange(n, dtype=jnp.int32) for n in scores.shape[1:])
        mask = visible(first + query, key, own, segments)
        kl, dscores = compare(target, scores, mask, weight)
        if weight is None:
            return dk, kl
        dq, dw, part = scores_kernel.gradients(
            idx_q, idx_w, seen_k, dscores, seen(scores_kernel.ROWS), interpret
        )
        return dk + part, (kl, dq, dw)

    blocks = jax.tree.map(lambda x: _cut(x, count, block), arrays)
    firsts = start + block * jnp.arange(count, dtype=jnp.int32)
    dk, out = lax.scan(one, jnp.zeros(seen_k.shape, jnp.float32), (firsts, blocks))
    out = jax.tree.map(lambda x: join(x, 1)[:, :t], out)
    return out if weight is None else (*out, dk[:, :s].astype(idx_k.dtype))


def _cut(x, count: int, block: int):
    """[count b block ...] of [b t ...], with zeros behind."""
    x = padded(x, 1, count * block)
    return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)


def compare(target, scores, mask, weight):
    """(kl float32[b t], its gradient by the scores times weight [b t], or None for None) over the last axis of
    target and scores float32[b t s]; where mask [b t s] is false, target is 0 and scores may be anything.
    """
    scores = jnp.where(mask, scores, HIDDEN)
    top = jnp.max(scores, axis=-1)
    norm = top + jnp.log(jnp.sum(jnp.exp(scores - top[..., None]), axis=-1))
    total = jnp.sum(target, axis=-1)
    logs = jnp.log(jnp.where(target > 0, target, 1))
    cross = jnp.sum(jnp.where(target > 0, target * (logs - scores), 0), axis=-1)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    kl = jnp.where(seen, cross / total - jnp.log(total) + norm, 0)
    if weight is None:
        return kl, None
    weight = jnp.where(seen, weight.astype(jnp.float32), 0)
    grown = jnp.exp(scores - norm[..., None]) * weight[..., None]
    return kl, grown - target * (weight / total)[..., None]
