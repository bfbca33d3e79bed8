"""What the indexer learns from in the sparse stage: the KL of the warm-up over the selected keys alone.

Both distributions are normalised over a query's selected keys (DeepSeek-V3.2, arXiv 2512.02556).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import dispatch
from pallas_kernels.numerics import wide


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    scale: float
    block: int


def sparse_indexer_kl(
    idx_q,
    idx_w,
    idx_k,
    q,
    latents,
    lse,
    topk,
    *,
    scale: float,
    weight=None,
    block: int = 32,
    implementation="auto",
):
    """(loss, kl): kl wide[b t] = KL(p_t || softmax(I_t)) over the keys that topk int32[b t k] names (-1:
    none; each at most once), and the wide scalar sum of weight [b t] (None: ones) times kl.

    The scores are those of `index_scores` for idx_q [b t i j], idx_w [b t i], idx_k [b s j]. The target
    is the normalised sum over heads of exp(scale q . latent - lse), with q [b t n x], latents [b s x] and
    lse [b t n] of `sparse_flash_attention`. A query without keys has kl 0.

    Only loss carries a gradient, and only to the three inputs of the indexer: it is computed along with
    the value, from one gather of the rows (see `indexer_kl`). The gradient of idx_k is added query by
    query, so that it has the same bits on every run.

    block: queries at a time of the XLA form. implementation: see `dispatch.choose`.
    """
    choice = dispatch.choose("sparse_indexer_kl", implementation, idx_q, idx_k, q, latents, topk)
    if weight is None:
        weight = jnp.ones(idx_q.shape[:2], wide(idx_q.dtype))
    loss, kl = _kl(Static(choice, scale, block), idx_q, idx_w, idx_k, q, latents, lse, weight, topk)
    return loss, lax.stop_gradient(kl)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kl(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk):
    kl = static.choice.function("forward")(static, idx_q, idx_w, idx_k, q, latents, lse, topk)
    return jnp.sum(weight * kl), kl


def _saving(static, *args):
    kl, *gradients = static.choice.function("forward_and_gradients")(static, *args)
    return (jnp.sum(args[6] * kl), kl), [checkpoint_name(g, "index_gradients") for g in gradients]


def _backward(static, gradients, cotangents):
    scaled = ((g * cotangents[0]).astype(g.dtype) for g in gradients)
    return *scaled, *[None] * 5


_kl.defvjp(_saving, _backward)
