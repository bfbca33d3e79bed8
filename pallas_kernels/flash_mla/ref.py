"""Softmax attention over all visible keys: the meaning of the kernel, with all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.mask import HIDDEN, visible
from pallas_kernels.numerics import accum_dtype


def forward(
    static,
    q: Float[Array, "b m g t x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    topk: Int32[Array, "b t k"] | None,
) -> tuple[Float[Array, "b m g t y"], Float[Array, "b m g t"], Float[Array, ""]]:
    """Returns (out, lse, largest logit); lse has the accumulation dtype."""
    first, dtype = start if static.start is None else static.start, accum_dtype(q.dtype)
    queries, keys = first + jnp.arange(q.shape[3]), jnp.arange(k.shape[2])
    mask = visible(queries, keys, q_segments, k_segments, static.window)
    if topk is not None:
        mask = mask & (topk[..., None] == keys).any(2)
    mask = mask[:, None, None]
    logits = static.scale * jnp.einsum("bmgtx,bmsx->bmgts", q, k, preferred_element_type=dtype)
    logits = jnp.where(mask, logits, HIDDEN)
    lse = jnp.where(mask.any(-1), jax.nn.logsumexp(logits, axis=-1), jnp.inf)
    p = jnp.exp(logits - lse[..., None]).astype(v.dtype)
    out = jnp.einsum("bmgts,bmsy->bmgty", p, v, preferred_element_type=dtype)
    return out.astype(q.dtype), lse, jnp.max(logits)


def backward(
    static, saved: tuple, dout: Float[Array, "b m g t y"]
) -> tuple[Float[Array, "b m g t x"], Float[Array, "b m s x"], Float[Array, "b m s y"]]:
    """Returns (dq, dk, dv) for the inputs of `forward`, its out and lse, and the gradient of out."""
    q, k, v, start, q_segments, k_segments, topk, _out, _lse = saved

    def out(q, k, v):
        return forward(static, q, k, v, start, q_segments, k_segments, topk)[0]

    return jax.vjp(out, q, k, v)[1](dout)
