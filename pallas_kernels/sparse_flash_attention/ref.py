"""Attention over selected latents: the meaning of the kernel, with the rows of all queries at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.sparse_flash_attention.word_rows import WordRows


def forward(
    static,
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """Returns (out, lse, largest logit) of q over the rows topk of latents; lse has the accumulation dtype."""
    latents = latents.rows() if isinstance(latents, WordRows) else latents
    dtype, batch = accum_dtype(q.dtype), jnp.arange(len(topk))[:, None, None]
    is_selected = (topk >= 0)[:, :, None]
    rows = jnp.where(is_selected.swapaxes(2, 3), latents[batch, jnp.maximum(topk, 0)], 0)
    logits = static.scale * jnp.einsum("btnx,btkx->btnk", q, rows, preferred_element_type=dtype)
    logits = jnp.where(is_selected, logits, HIDDEN)
    lse = jnp.where(is_selected.any(-1), jax.nn.logsumexp(logits, axis=-1), jnp.inf)
    p = jnp.exp(logits - lse[..., None]).astype(q.dtype)
    values = rows[..., : static.value_dim]
    out = jnp.einsum("btnk,btky->btny", p, values, preferred_element_type=dtype)
    return out.astype(q.dtype), lse, jnp.max(logits)


def paged(
    static,
    q: Float[Array, "b t n x"],
    pages: Float[Array, "p z x"] | WordRows,
    page_table: Int[Array, "b pages"],
    topk: Int32[Array, "b t k"],
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"]]:
    """Returns (out, lse) of q over positions topk of its sequence, which page_table maps to pages."""
    pages = pages.rows() if isinstance(pages, WordRows) else pages
    latents = pages[page_table].reshape(len(page_table), -1, pages.shape[2])
    return forward(static, q, latents, topk)[:2]


def backward(
    static, saved: tuple, dout: Float[Array, "b t n y"]
) -> tuple[Float[Array, "b t n x"], Float[Array, "b s x"]]:
    """Returns (dq, dlatents) for the inputs of `forward`, its out and lse, and the gradient of out."""
    q, latents, topk, _out, _lse = saved
    pull = jax.vjp(lambda q, latents: forward(static, q, latents, topk)[0], q, latents)[1]
    return pull(dout)
