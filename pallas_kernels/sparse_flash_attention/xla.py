"""Attention over selected latents in XLA: each query gathers its k rows and reads no other key."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.sparse_flash_attention.word_rows import WordRows


def _gather_latents(latents, topk, zero_missing=False):
    """Returns rows [b t k x] of latents [b s x], an array or `WordRows`.

    -1 takes row 0, which the caller masks. zero_missing: -1 gives zeros instead, because row 0 may belong to
    another sequence or be unused, and 0 * NaN is NaN.
    """
    take = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))
    rows = jax.tree.map(lambda a: take(a, topk), latents)
    rows = rows.rows() if isinstance(rows, WordRows) else rows
    return jnp.where(topk[..., None] < 0, 0, rows) if zero_missing else rows


def _logits(q, rows, topk, scale):
    """Returns [b t k n]: keys first, so that the product reads the gathered rows in memory order."""
    dtype = accum_dtype(q.dtype)
    logits = scale * jnp.einsum("btkx,btnx->btkn", rows, q, preferred_element_type=dtype)
    return logits + jnp.where(topk >= 0, 0, HIDDEN).astype(dtype)[..., None]


def forward(
    static,
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
    zero_missing: bool = False,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """Returns (out, lse, largest logit) of q over the rows topk of latents.

    lse has the accumulation dtype. zero_missing: see `_gather_latents`.
    """
    scale, block = static.scale, static.block

    def attend_block(args):
        q, topk = args
        rows = _gather_latents(latents, topk, zero_missing)
        logits = _logits(q, rows, topk, scale)
        # Without the barrier XLA:CPU computes the maximum again for every element.
        top = lax.optimization_barrier(jnp.max(logits, axis=2))
        p = jnp.exp(logits - top[:, :, None])
        total = jnp.sum(p, axis=2)
        out = jnp.einsum("btkn,btkx->btnx", p.astype(q.dtype), rows, preferred_element_type=p.dtype)
        has_rows = top > HIDDEN / 2
        out = out * jnp.where(has_rows, 1 / total, 0)[..., None]
        lse = jnp.where(has_rows, top + jnp.log(total), jnp.inf)
        return out.astype(q.dtype), lse, jnp.max(top)

    outs, lses, tops = [], [], []
    # Every query reads k keys at any position: no key cut, one run and a remainder.
    for run in query_runs(q.shape[1], latents.shape[1], None, block):
        out, lse, top = lax.map(attend_block, (split(q, run, 1), split(topk, run, 1)))
        outs.append(join(out, 1))
        lses.append(join(lse, 1))
        tops.append(jnp.max(top))
    out, lse = jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)
    return out[..., : static.value_dim], lse, jnp.max(jnp.stack(tops))


def paged(
    static,
    q: Float[Array, "b t n x"],
    pages: Float[Array, "p z x"] | WordRows,
    page_table: Int[Array, "b pages"],
    topk: Int32[Array, "b t k"],
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"]]:
    """Returns (out, lse) of q over positions topk of its sequence.

    page_table maps the positions to pages, an array or `WordRows`.
    """
    b, t, n, _ = q.shape
    # All pages are one batch row's latents, and all sequences its queries.
    latents = jax.tree.map(lambda a: a.reshape(1, -1, *a.shape[2:]), pages)
    rows = find_rows(page_table, topk, pages.shape[1]).reshape(1, b * t, -1)
    out, lse, _ = forward(
        static, q.reshape(1, b * t, *q.shape[2:]), latents, rows, zero_missing=True
    )
    return out.reshape(b, t, n, -1), lse.reshape(b, t, n)


def find_rows(
    page_table: Int[Array, "b pages"], topk: Int32[Array, "b t k"], slots: int
) -> Int32[Array, "b t k"]:
    """Returns int32[b t k]: rows, among all pages of `slots` slots, of the positions topk; -1 for none."""
    page = jnp.take_along_axis(page_table[:, None], topk // slots, axis=2, mode="clip")
    return jnp.where(topk < 0, -1, page * slots + topk % slots)


def backward(
    static, saved: tuple, dout: Float[Array, "b t n y"]
) -> tuple[Float[Array, "b t n x"], Float[Array, "b s x"]]:
    """Returns (dq, dlatents) for the inputs of `forward`, its out and lse, and the gradient of out."""
    q, latents, topk, out, lse = saved
    scale, block = static.scale, static.block
    dtype = accum_dtype(q.dtype)
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)
    # The full latent serves as key and value: a copy of its first columns would cost more than the rest.
    unused = latents.shape[-1] - static.value_dim
    dout = jnp.pad(dout, ((0, 0), (0, 0), (0, 0), (0, unused)))
    batch = jnp.arange(q.shape[0])[:, None, None]

    # Gradients of one block of queries.
    def add_block(dlatents, args):
        q, topk, dout, lse, delta = args
        rows = _gather_latents(latents, topk)
        p = jnp.exp(_logits(q, rows, topk, scale) - lse[:, :, None])
        dp = jnp.einsum("btkx,btnx->btkn", rows, dout, preferred_element_type=dtype)
        ds = (p * (dp - delta[:, :, None]) * scale).astype(q.dtype)
        dq = jnp.einsum("btkn,btkx->btnx", ds, rows, preferred_element_type=dtype)
        # One product gives a row's gradient as key and as value.
        key_and_value_weights = jnp.concatenate([ds, p.astype(q.dtype)], axis=3)
        key_and_value_sources = jnp.concatenate([q, dout], axis=2)
        drows = jnp.einsum(
            "btkn,btnx->btkx",
            key_and_value_weights,
            key_and_value_sources,
            preferred_element_type=dtype,
        )
        target_rows = jnp.where(topk < 0, latents.shape[1], topk)
        return dlatents.at[batch, target_rows].add(drows, mode="drop"), dq.astype(q.dtype)

    dlatents = jnp.zeros(latents.shape, dtype)
    dqs = []
    for run in query_runs(q.shape[1], latents.shape[1], None, block):
        args = tuple(split(x, run, 1) for x in (q, topk, dout, lse, delta))
        dlatents, dq = lax.scan(add_block, dlatents, args)
        dqs.append(join(dq, 1))
    return jnp.concatenate(dqs, axis=1), dlatents.astype(latents.dtype)
