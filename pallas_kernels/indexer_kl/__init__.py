"""Indexer loss of the dense warm-up: sum_t KL(p_t || softmax(I_t)) over all visible keys.

p_t is the main attention's probability summed over heads and normalised over the keys. I_t are the index scores
(DeepSeek-V3.2, arXiv 2512.02556; GLM-5 paper 2.1.1).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp
from pallas_kernels.mask import check_segments
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.summed_attention_probs import check_heads


class Static(NamedTuple):
    """Static arguments. start: key index of query 0; None: known only at run time."""

    backend: backends.Backend
    scale: float
    block: int
    start: int | None


def indexer_kl(
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    *,
    scale: float,
    weight: Float[Array, "b t"] | None = None,
    start: int | Int[Array, ""] = 0,
    q_segments: Int[Array, "b t"] | None = None,
    k_segments: Int[Array, "b s"] | None = None,
    block: int = 128,
    implementation: str | backends.Implementation = "auto",
) -> tuple[Float[Array, ""], Float[Array, "b t"]]:
    """Returns (loss, kl) with kl = KL(p_t || softmax(I_t)) over the keys visible to query t.

    loss = sum(weight * kl). The scores are those of `index_scores` for idx_q, idx_w, idx_k. The target is the
    normalised sum over heads of exp(scale q . k - lse), with q, k and lse of the attention. Visibility is that
    of `flash_mla`. A query without visible keys has kl 0. Both results have the accumulation dtype. weight:
    None means ones.

    Only loss carries a gradient, and only to the indexer's three inputs. The gradient is computed together with
    the value, in one pass over the target. Therefore the weights are an argument, and neither the keys nor the
    queries of the attention are kept for a backward pass. A `jax.checkpoint` whose policy saves the name
    "index_gradients" recomputes neither the target nor the attention that it depends on. At most one block [b
    block s] of (query, key) pairs exists at a time.

    block: queries per step of the XLA form. implementation: see `backends.select_backend`. Raises ValueError if
    heads or segments do not match.
    """
    check_heads("indexer_kl", q, k)
    check_segments("indexer_kl", q_segments, k_segments, q.shape[:2], k.shape[:2])
    static_start = start if isinstance(start, int) else None
    backend = backends.select_backend("indexer_kl", implementation, idx_q, idx_w, idx_k, q, k)
    static = Static(backend=backend, scale=scale, block=block, start=static_start)
    start = 0 if static_start is not None else start
    if weight is None:
        weight = jnp.ones(idx_q.shape[:2], accum_dtype(idx_q.dtype))
    loss, kl = _kl(static, idx_q, idx_w, idx_k, q, k, lse, weight, start, q_segments, k_segments)
    return loss, lax.stop_gradient(kl)


@custom_vjp(1)
def _kl(static, idx_q, idx_w, idx_k, q, k, lse, weight, *visibility) -> tuple[Array, Array]:
    run = static.backend.function("forward")
    kl = run(static, idx_q, idx_w, idx_k, q, k, lse, *visibility)
    return jnp.sum(weight * kl), kl


def _forward_with_gradients(static, idx_q, idx_w, idx_k, q, k, lse, weight, *visibility):
    run = static.backend.function("forward_and_gradients")
    kl, *gradients = run(static, idx_q, idx_w, idx_k, q, k, lse, weight, *visibility)
    return (jnp.sum(weight * kl), kl), [checkpoint_name(g, "index_gradients") for g in gradients]


def _backward(static, gradients, cotangents):
    scaled = ((g * cotangents[0]).astype(g.dtype) for g in gradients)
    return *scaled, *[None] * 7


_kl.defvjp(_forward_with_gradients, _backward)
