"""KL of the index scores from the attention's probabilities: the meaning of the kernel, with all pairs at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.index_scores import ref as index_scores
from pallas_kernels.mask import HIDDEN, visible
from pallas_kernels.summed_attention_probs import ref as summed_attention_probs


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
    first = start if static.start is None else static.start
    target = summed_attention_probs.forward(static, q, k, lse, first, q_segments, k_segments)
    queries, keys = first + jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    mask = visible(queries, keys, q_segments, k_segments)
    return kl_divergence(target, index_scores.forward(static, idx_q, idx_w, idx_k), mask)


def kl_divergence(
    target: Float[Array, "b t k"], scores: Float[Array, "b t k"], mask: Bool[Array, "..."]
) -> Float[Array, "b t"]:
    """Returns KL(target, normalised || softmax(scores)) over the keys of a mask; 0 where there are none."""
    target = jnp.where(mask, target, 0)
    total = jnp.sum(target, axis=-1, keepdims=True)
    p = target / jnp.where(total > 0, total, 1)
    log_softmax = jax.nn.log_softmax(jnp.where(mask, scores, HIDDEN), axis=-1)
    return jnp.sum(jnp.where(p > 0, p * (jnp.log(p) - log_softmax), 0), axis=-1)


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

    def run(idx_q, idx_w, idx_k):
        return forward(static, idx_q, idx_w, idx_k, q, k, lse, start, q_segments, k_segments)

    kl, pull = jax.vjp(run, idx_q, idx_w, idx_k)
    return kl, *pull(weight.astype(kl.dtype))
