"""KL over selected keys: the meaning of the kernel, with the rows of all queries at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.indexer_kl.ref import kl_divergence
from pallas_kernels.numerics import accum_dtype


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    lse: Float[Array, "b t n"],
    topk: Int32[Array, "b t k"],
) -> Float[Array, "b t"]:
    """Returns kl [b t]."""
    dtype, batch = accum_dtype(idx_q.dtype), jnp.arange(len(topk))[:, None, None]
    rows, index_rows = (x[batch, jnp.maximum(topk, 0)] for x in (latents, idx_k))
    logits = static.scale * jnp.einsum("btkx,btnx->btkn", rows, q, preferred_element_type=dtype)
    target = jnp.sum(jnp.exp(logits - lse[:, :, None]), axis=-1)
    dots = jnp.einsum("btkj,btij->btki", index_rows, idx_q, preferred_element_type=dtype)
    weights = idx_w.astype(dtype) * idx_q.shape[-1] ** -0.5
    scores = jnp.einsum("btki,bti->btk", jax.nn.relu(dots), weights)
    return kl_divergence(target, scores, topk >= 0)


def forward_and_gradients(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    lse: Float[Array, "b t n"],
    weight: Float[Array, "b t"],
    topk: Int32[Array, "b t k"],
) -> tuple[
    Float[Array, "b t"], Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]
]:
    """Returns (kl [b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""

    def run(idx_q, idx_w, idx_k):
        return forward(static, idx_q, idx_w, idx_k, q, latents, lse, topk)

    kl, pull = jax.vjp(run, idx_q, idx_w, idx_k)
    return kl, *pull(weight.astype(kl.dtype))
