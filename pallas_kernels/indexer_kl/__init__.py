"""What the indexer learns from in the dense warm-up: sum_t KL(p_t || softmax(I_t)) over all visible keys.

p_t is the main attention's probability summed over heads and normalised over the keys, I_t the index
scores (DeepSeek-V3.2, arXiv 2512.02556; GLM-5 paper 2.1.1).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import dispatch
from pallas_kernels.head_probs import check_heads
from pallas_kernels.numerics import wide


class Static(NamedTuple):
    """What is known when tracing; start: key index of query 0, or None if only known at run time."""

    choice: dispatch.Choice
    scale: float
    block: int
    start: int | None


def indexer_kl(
    idx_q,
    idx_w,
    idx_k,
    q,
    k,
    lse,
    *,
    scale: float,
    weight=None,
    start=0,
    q_segments=None,
    k_segments=None,
    block: int = 128,
    implementation="auto",
):
    """(loss, kl): kl wide[b t] = KL(p_t || softmax(I_t)) over the keys that query t sees, and the wide
    scalar sum of weight [b t] (None: ones) times kl.

    The scores are those of `index_scores` for idx_q [b t i j], idx_w [b t i], idx_k [b s j]. The target
    is the normalised sum over heads of exp(scale q . k - lse), with q [b t n x], k [b s m x] and lse
    [b t n] of the attention; visibility is that of `flash_mla`. A query that sees nothing has kl 0.

    Only loss carries a gradient, and only to the three inputs of the indexer: its gradient is computed
    along with its value, in one pass over the target. Hence the weights go in, and neither the attention's
    keys nor its queries are kept for a backward pass. A `jax.checkpoint` whose policy saves the name
    "index_gradients" computes neither the target again nor the attention behind it. Of all pairs of queries
    and keys no more exist at a time than a block's, [b block s].

    block: queries at a time of the XLA form. implementation: see `dispatch.choose`.
    """
    check_heads("indexer_kl", q, k)
    known = start if isinstance(start, int) else None
    choice = dispatch.choose("indexer_kl", implementation, idx_q, idx_w, idx_k, q, k)
    static = Static(choice, scale, block, known)
    start = 0 if known is not None else start
    if weight is None:
        weight = jnp.ones(idx_q.shape[:2], wide(idx_q.dtype))
    loss, kl = _kl(static, idx_q, idx_w, idx_k, q, k, lse, weight, start, q_segments, k_segments)
    return loss, lax.stop_gradient(kl)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kl(static, idx_q, idx_w, idx_k, q, k, lse, weight, *place):
    run = static.choice.function("forward")
    kl = run(static, idx_q, idx_w, idx_k, q, k, lse, *place)
    return jnp.sum(weight * kl), kl


def _saving(static, idx_q, idx_w, idx_k, q, k, lse, weight, *place):
    run = static.choice.function("forward_and_gradients")
    kl, *gradients = run(static, idx_q, idx_w, idx_k, q, k, lse, weight, *place)
    return (jnp.sum(weight * kl), kl), [checkpoint_name(g, "index_gradients") for g in gradients]


def _backward(static, gradients, cotangents):
    scaled = ((g * cotangents[0]).astype(g.dtype) for g in gradients)
    return *scaled, *[None] * 7


_kl.defvjp(_saving, _backward)
