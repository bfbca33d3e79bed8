"""Index scores and their gradients in XLA, head by head: no array is larger than the scores."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import wide


def forward(static, idx_q, idx_w, idx_k):
    """wide[b t s] of idx_q [b t i j], idx_w [b t i], idx_k [b s j]."""
    return scored(idx_q, idx_w, idx_k).swapaxes(1, 2)


def backward(static, saved, dscores):
    """(dq, dw, dk) for what `forward` took and the gradient of what it gave."""
    idx_q, idx_w, idx_k = saved
    dq, dw, dk = pulled(idx_q, idx_w, idx_k, dscores.swapaxes(1, 2))
    return dq, dw, dk.astype(idx_k.dtype)


def scored(idx_q, idx_w, idx_k):
    """The scores keys first, wide[b s t]: the maximum and the weights are then along whole rows."""
    inner = wide(idx_q.dtype)
    w = head_weights(idx_q, idx_w)

    def add(total, head):
        q, w = head
        dots = jnp.einsum("bsj,btj->bst", idx_k, q, preferred_element_type=inner)
        return total + w[:, None] * jnp.maximum(dots, 0), None

    b, t = idx_q.shape[:2]
    zeros = jnp.zeros((b, idx_k.shape[1], t), inner)
    return lax.scan(add, zeros, (jnp.moveaxis(idx_q, 2, 0), jnp.moveaxis(w, 2, 0)))[0]


def pulled(idx_q, idx_w, idx_k, dscores):
    """(dq, dw, dk wide) of the gradient of the scores keys first, wide[b s t].

    With e_i = sum_s [q_i . k_s > 0] dI_s k_s, a head's gradients are w_i e_i and q_i . e_i: the
    second needs no pass over the keys of its own.
    """
    inner = wide(idx_q.dtype)
    w = head_weights(idx_q, idx_w)
    weighted = (idx_q.astype(inner) * w[..., None]).astype(idx_q.dtype)

    def add(dk, head):
        q, weighted = head
        dots = jnp.einsum("bsj,btj->bst", idx_k, q, preferred_element_type=inner)
        passed = jnp.where(dots > 0, dscores, 0).astype(idx_q.dtype)
        e = jnp.einsum("bsj,bst->bjt", idx_k, passed, preferred_element_type=inner)
        return dk + jnp.einsum("bst,btj->bsj", passed, weighted, preferred_element_type=inner), e

    heads = (jnp.moveaxis(idx_q, 2, 0), jnp.moveaxis(weighted, 2, 0))
    dk, e = lax.scan(add, jnp.zeros(idx_k.shape, inner), heads)
    e = e.transpose(1, 3, 0, 2)
    dw = jnp.sum(e * idx_q.astype(inner), axis=-1) * idx_q.shape[-1] ** -0.5
    return (e * w[..., None]).astype(idx_q.dtype), dw.astype(idx_w.dtype), dk


def head_weights(idx_q, idx_w):
    """Head weights with the scale of the dot products, wide[b t i]."""
    return idx_w.astype(wide(idx_q.dtype)) * idx_q.shape[-1] ** -0.5
