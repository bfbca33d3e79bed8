"""Attention over selected latents in XLA: each query gathers its own k rows and touches no other key."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import wide
from pallas_kernels.sparse_flash_attention.rows import WordRows


def _taken(latents, topk, foreign=False):
    """[b t k x] rows of latents [b s x], an array or `WordRows`; -1 takes row 0, which the caller masks.

    foreign: row 0 may belong to somebody else, or to nobody; zeros instead, since 0 * NaN is NaN.
    """
    take = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))
    rows = jax.tree.map(lambda a: take(a, topk), latents)
    rows = rows.rows() if isinstance(rows, WordRows) else rows
    return jnp.where(topk[..., None] < 0, 0, rows) if foreign else rows


def _logits(q, rows, topk, scale):
    """[b t k n]: keys first, so that the product reads the gathered rows as they lie."""
    inner = wide(q.dtype)
    logits = scale * jnp.einsum("btkx,btnx->btkn", rows, q, preferred_element_type=inner)
    return logits + jnp.where(topk >= 0, 0, HIDDEN).astype(inner)[..., None]


def forward(static, q, latents, topk, foreign=False):
    """(out [b t n y], lse wide[b t n], largest logit) of q [b t n x] over rows topk [b t k] of latents [b s x]."""
    scale, block = static.scale, static.block

    def one(args):
        q, topk = args
        rows = _taken(latents, topk, foreign)
        logits = _logits(q, rows, topk, scale)
        # Without the barrier XLA:CPU computes the maximum again for every element.
        top = lax.optimization_barrier(jnp.max(logits, axis=2))
        p = jnp.exp(logits - top[:, :, None])
        total = jnp.sum(p, axis=2)
        out = jnp.einsum("btkn,btkx->btnx", p.astype(q.dtype), rows, preferred_element_type=p.dtype)
        seen = top > HIDDEN / 2
        out = out * jnp.where(seen, 1 / total, 0)[..., None]
        lse = jnp.where(seen, top + jnp.log(total), jnp.inf)
        return out.astype(q.dtype), lse, jnp.max(top)

    outs, lses, tops = [], [], []
    # Every query reads k keys wherever it stands: no key cut, one run and a remainder.
    for run in query_runs(q.shape[1], latents.shape[1], None, block):
        out, lse, top = lax.map(one, (split(q, run, 1), split(topk, run, 1)))
        outs.append(join(out, 1))
        lses.append(join(lse, 1))
        tops.append(jnp.max(top))
    out, lse = jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)
    return out[..., : static.value_dim], lse, jnp.max(jnp.stack(tops))


def paged(static, q, pages, page_table, topk):
    """(out [b t n y], lse wide[b t n]) of q [b t n x] over positions topk [b t k], which page_table
    [b pages] finds in pages [p z x], an array or `WordRows`."""
    b, t, n, _ = q.shape
    # All pages are one batch row's latents, and all sequences its queries.
    latents = jax.tree.map(lambda a: a.reshape(1, -1, *a.shape[2:]), pages)
    rows = rows_of(page_table, topk, pages.shape[1]).reshape(1, b * t, -1)
    out, lse, _ = forward(static, q.reshape(1, b * t, *q.shape[2:]), latents, rows, foreign=True)
    return out.reshape(b, t, n, -1), lse.reshape(b, t, n)


def rows_of(page_table, topk, slots: int):
    """int32[b t k]: the rows of all pages, of so many slots, where positions topk are; -1 for none."""
    page = jnp.take_along_axis(page_table[:, None], topk // slots, axis=2, mode="clip")
    return jnp.where(topk < 0, -1, page * slots + topk % slots)


def backward(static, saved, dout):
    """(dq, dlatents) for what `forward` took, out and lse that it gave, and the gradient of out."""
    q, latents, topk, out, lse = saved
    scale, block = static.scale, static.block
    inner = wide(q.dtype)
    delta = jnp.sum(dout.astype(inner) * out.astype(inner), axis=-1)
    # The latent serves as key and value whole: a copy of its first columns costs more than the others.
    unused = latents.shape[-1] - static.value_dim
    dout = jnp.pad(dout, ((0, 0), (0, 0), (0, 0), (0, unused)))
    batch = jnp.arange(q.shape[0])[:, None, None]

    def one(dlatents, args):
        q, topk, dout, lse, delta = args
        rows = _taken(latents, topk)
        p = jnp.exp(_logits(q, rows, topk, scale) - lse[:, :, None])
        dp = jnp.einsum("btkx,btnx->btkn", rows, dout, preferred_element_type=inner)
        ds = (p * (dp - delta[:, :, None]) * scale).astype(q.dtype)
        dq = jnp.einsum("btkn,btkx->btnx", ds, rows, preferred_element_type=inner)
        # A row's gradient as key and as value, in one product.
        both = jnp.concatenate([ds, p.astype(q.dtype)], axis=3)
        against = jnp.concatenate([q, dout], axis=2)
        drows = jnp.einsum("btkn,btnx->btkx", both, against, preferred_element_type=inner)
        where = jnp.where(topk < 0, latents.shape[1], topk)
        return dlatents.at[batch, where].add(drows, mode="drop"), dq.astype(q.dtype)

    dlatents = jnp.zeros(latents.shape, inner)
    dqs = []
    for run in query_runs(q.shape[1], latents.shape[1], None, block):
        args = tuple(split(x, run, 1) for x in (q, topk, dout, lse, delta))
        dlatents, dq = lax.scan(one, dlatents, args)
        dqs.append(join(dq, 1))
    return jnp.concatenate(dqs, axis=1), dlatents.astype(latents.dtype)
