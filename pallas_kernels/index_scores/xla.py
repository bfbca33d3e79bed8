"""Index scores and their gradients in XLA, head by head: no array is larger than the scores."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.numerics import accum_dtype


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
) -> Float[Array, "b t s"]:
    """Returns [b t s] for idx_q [b t i j], idx_w [b t i], idx_k [b s j]."""
    return scores_keys_first(idx_q, idx_w, idx_k).swapaxes(1, 2)


def backward(
    static, saved: tuple, dscores: Float[Array, "b t s"]
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]]:
    """Returns (dq, dw, dk) for the inputs of `forward` and the gradient of its result."""
    idx_q, idx_w, idx_k = saved
    dq, dw, dk = gradients_keys_first(idx_q, idx_w, idx_k, dscores.swapaxes(1, 2))
    return dq, dw, dk.astype(idx_k.dtype)


def scores_keys_first(
    idx_q: Float[Array, "b t i j"], idx_w: Float[Array, "b t i"], idx_k: Float[Array, "b s j"]
) -> Float[Array, "b s t"]:
    """Returns the scores keys first, [b s t]: the maximum and the weights are then along full rows."""
    dtype = accum_dtype(idx_q.dtype)
    w = head_weights(idx_q, idx_w)

    def add(total, head):
        q, w = head
        dots = jnp.einsum("bsj,btj->bst", idx_k, q, preferred_element_type=dtype)
        return total + w[:, None] * jnp.maximum(dots, 0), None

    b, t = idx_q.shape[:2]
    zeros = jnp.zeros((b, idx_k.shape[1], t), dtype)
    return lax.scan(add, zeros, (jnp.moveaxis(idx_q, 2, 0), jnp.moveaxis(w, 2, 0)))[0]


def gradients_keys_first(
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    dscores: Float[Array, "b s t"],
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]]:
    """Returns (dq, dw, dk in the accumulation dtype) for the gradient of the scores keys first, [b s t].

    With e_i = sum_s [q_i . k_s > 0] dI_s k_s, a head's gradients are w_i e_i and q_i . e_i. The second needs no
    extra pass over the keys.
    """
    dtype = accum_dtype(idx_q.dtype)
    w = head_weights(idx_q, idx_w)
    weighted = (idx_q.astype(dtype) * w[..., None]).astype(idx_q.dtype)

    def add(dk, head):
        q, weighted = head
        dots = jnp.einsum("bsj,btj->bst", idx_k, q, preferred_element_type=dtype)
        masked = jnp.where(dots > 0, dscores, 0).astype(idx_q.dtype)
        e = jnp.einsum("bsj,bst->bjt", idx_k, masked, preferred_element_type=dtype)
        return dk + jnp.einsum("bst,btj->bsj", masked, weighted, preferred_element_type=dtype), e

    heads = (jnp.moveaxis(idx_q, 2, 0), jnp.moveaxis(weighted, 2, 0))
    dk, e = lax.scan(add, jnp.zeros(idx_k.shape, dtype), heads)
    e = e.transpose(1, 3, 0, 2)
    dw = jnp.sum(e * idx_q.astype(dtype), axis=-1) * idx_q.shape[-1] ** -0.5
    return (e * w[..., None]).astype(idx_q.dtype), dw.astype(idx_w.dtype), dk


def head_weights(
    idx_q: Float[Array, "b t i j"], idx_w: Float[Array, "b t i"]
) -> Float[Array, "b t i"]:
    """Returns head weights [b t i] times the scale of the dot products, in the accumulation dtype."""
    return idx_w.astype(accum_dtype(idx_q.dtype)) * idx_q.shape[-1] ** -0.5
