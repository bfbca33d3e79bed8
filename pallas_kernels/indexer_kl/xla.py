"""KL of the index scores from the attention's probabilities in XLA, in blocks of queries, keys first.

Causality cuts the keys at each block's end where the first query's index is known.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.blocks import join, offsets, query_runs, split
from pallas_kernels.index_scores.xla import gradients_keys_first, scores_keys_first
from pallas_kernels.mask import HIDDEN, visible
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.summed_attention_probs.xla import heads_first, sum_heads


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
) -> Float[Array, "b t"]:
    """Returns kl [b t]."""
    return _over_blocks(static, idx_q, idx_w, idx_k, q, k, lse, None, start, q_segments, k_segments)


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
) -> tuple[
    Float[Array, "b t"], Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]
]:
    """Returns (kl [b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    blocks = (idx_q, idx_w, idx_k, q, k, lse, weight, start, q_segments, k_segments)
    return _over_blocks(static, *blocks)


def _over_blocks(
    static, idx_q, idx_w, idx_k, q, k, lse, weight, start, q_segments, k_segments
) -> Any:
    first = start if static.start is None else static.start
    s = idx_k.shape[1]
    keys = heads_first(k)
    dk = jnp.zeros(idx_k.shape, accum_dtype(idx_k.dtype))
    outs = []
    for run in query_runs(idx_q.shape[1], s, first, static.block):
        k_ids = None if k_segments is None else k_segments[:, : run.keys]
        run_k = idx_k[:, : run.keys]

        def run_block(dk, args, run=run, k_ids=k_ids, run_k=run_k):
            offset, idx_q, idx_w, q, lse, weight, q_ids = args
            query_index = first + offset + jnp.arange(run.size, dtype=jnp.int32)
            key_index = jnp.arange(run.keys, dtype=jnp.int32)
            mask = visible(query_index, key_index, q_ids, k_ids).swapaxes(1, 2)
            target = sum_heads(static.scale, heads_first(q), keys, heads_first(lse), run.keys)
            kl, dscores = divergence(target, scores_keys_first(idx_q, idx_w, run_k), mask, weight)
            if dscores is None:
                return dk, kl
            dq, dw, part = gradients_keys_first(idx_q, idx_w, run_k, dscores)
            return dk + part, (kl, dq, dw)

        firsts, q_ids = offsets(run, q, q_segments)
        blocks = (split(x, run, 1) for x in (idx_q, idx_w, q, lse, weight, q_ids))
        part, out = lax.scan(run_block, dk[:, : run.keys], (firsts, *blocks))
        # Not `.at[].set`: it is a scatter, and jax 0.11's partitioner crashes on it inside a manual region.
        dk = lax.dynamic_update_slice_in_dim(dk, part, 0, axis=1)
        outs.append(jax.tree.map(lambda x: join(x, 1), out))
    out = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outs)
    return out if weight is None else (*out, dk.astype(idx_k.dtype))


def divergence(
    target: Float[Array, "..."],
    scores: Float[Array, "..."],
    mask: Bool[Array, "..."],
    weight: Float[Array, "b t"] | None,
    axis: int = 1,
) -> tuple[Float[Array, "b t"], Float[Array, "..."] | None]:
    """Returns (kl, gradient of weight * kl by the scores), over the keys at `axis`.

    target and scores [b s t] or [b t s] in the accumulation dtype; the target is not normalised. mask: bool that
    broadcasts to them. weight None: no gradient is returned.
    """
    # The barriers keep XLA:CPU from computing the mask and the maximum again for every element.
    bias = lax.optimization_barrier(jnp.where(mask, 0, HIDDEN).astype(scores.dtype))
    scores = scores + bias
    target = jnp.where(mask, target, 0)
    top = lax.optimization_barrier(jnp.max(scores, axis, keepdims=True))
    score_lse = top + jnp.log(jnp.sum(jnp.exp(scores - top), axis, keepdims=True))
    total = jnp.sum(target, axis, keepdims=True)
    has_keys = total > 0
    p = target / jnp.where(has_keys, total, 1)
    log_softmax = scores - score_lse
    kl = jnp.sum(jnp.where(p > 0, p * (jnp.log(p) - log_softmax), 0), axis)
    if weight is None:
        return kl, None
    weight = jnp.where(has_keys, jnp.expand_dims(weight.astype(kl.dtype), axis), 0)
    return kl, (jnp.exp(log_softmax) - p) * weight
