"""Indexer loss of the sparse stage: the KL of the warm-up, restricted to the selected keys.

Both distributions are normalised over a query's selected keys (DeepSeek-V3.2, arXiv 2512.02556).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp
from pallas_kernels.numerics import accum_dtype


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend
    scale: float
    block: int


def sparse_indexer_kl(
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    lse: Float[Array, "b t n"],
    topk: Int32[Array, "b t k"],
    *,
    scale: float,
    weight: Float[Array, "b t"] | None = None,
    block: int = 32,
    implementation: str | backends.Implementation = "auto",
) -> tuple[Float[Array, ""], Float[Array, "b t"]]:
    """Returns (loss, kl): kl [b t] = KL(p_t || softmax(I_t)) over the keys in topk; loss = sum(weight * kl).

    topk names the keys of each query (-1: none), each at most once. The scores are those of `index_scores` for
    idx_q, idx_w, idx_k. The target is the normalised sum over heads of exp(scale q . latent - lse), with q,
    latents and lse of `sparse_flash_attention`. A query without keys has kl 0. Both results have the
    accumulation dtype. weight: None means ones.

    Only loss carries a gradient, and only to the indexer's three inputs. It is computed together with the
    value, from one gather of the rows (see `indexer_kl`). The gradient of idx_k is added query by query, so
    that it has the same bits on every run.

    block: queries per step of the XLA form. implementation: see `backends.select_backend`.
    """
    backend = backends.select_backend(
        "sparse_indexer_kl", implementation, idx_q, idx_k, q, latents, topk
    )
    if weight is None:
        weight = jnp.ones(idx_q.shape[:2], accum_dtype(idx_q.dtype))
    loss, kl = _kl(
        Static(backend, scale, block), idx_q, idx_w, idx_k, q, latents, lse, weight, topk
    )
    return loss, lax.stop_gradient(kl)


@custom_vjp(1)
def _kl(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk) -> tuple[Array, Array]:
    kl = static.backend.function("forward")(static, idx_q, idx_w, idx_k, q, latents, lse, topk)
    return jnp.sum(weight * kl), kl


def _forward_with_gradients(static, *args):
    kl, *gradients = static.backend.function("forward_and_gradients")(static, *args)
    return (jnp.sum(args[6] * kl), kl), [checkpoint_name(g, "index_gradients") for g in gradients]


def _backward(static, gradients, cotangents):
    scaled = ((g * cotangents[0]).astype(g.dtype) for g in gradients)
    return *scaled, *[None] * 5


_kl.defvjp(_forward_with_gradients, _backward)
