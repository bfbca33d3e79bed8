"""DeepSeek Sparse Attention: selection by the indexer, attention over the selected keys alone.

Work after selection is linear in the length: each query gathers its k latents and no other key is
touched. Selection itself scores all pairs, in query blocks, so memory stays linear too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.core.numerics import wide
from glm5_jax.model.blocks import join, query_runs, split
from glm5_jax.model.indexer import index_scores, select
from glm5_jax.model.mask import HIDDEN, visible


def select_keys(idx_q, idx_w, idx_k, start, q_segments, k_segments, k: int, block: int):
    """topk int32[b t k] of idx_q [b t i j], idx_w [b t i] over idx_k [b s j]; see `indexer.select`.

    start: key index of query 0 (int or scalar); segments int[b t], int[b s] or None.
    """
    s = idx_k.shape[1]
    width = min(k, s)
    parts = []
    for run in query_runs(idx_q.shape[1], s, start, block):
        keys = idx_k[:, : run.keys]
        segments = None if k_segments is None else k_segments[:, : run.keys]

        def one(args, run=run, keys=keys, segments=segments):
            q, w, own, offset = args
            query_index = start + offset + jnp.arange(run.size, dtype=jnp.int32)
            key_index = jnp.arange(run.keys, dtype=jnp.int32)
            mask = visible(query_index, key_index, own, segments)
            picked = select(index_scores(q, w, keys), mask, k)
            missing = width - picked.shape[-1]
            return jnp.pad(picked, ((0, 0), (0, 0), (0, missing)), constant_values=-1)

        offsets = run.first + run.size * jnp.arange(run.count, dtype=jnp.int32)
        args = (split(idx_q, run, 1), split(idx_w, run, 1), split(q_segments, run, 1), offsets)
        parts.append(join(lax.map(one, args), 1))
    return jnp.concatenate(parts, axis=1)


def gathered_attention(q, latents, topk, scale: float, block: int):
    """Attention of absorbed queries q [b t n x] over their own rows of latents [b s x], which are keys
    and values at once -> ([b t n x], largest logit).

    topk int32[b t k] names the rows (-1: none). The largest logit carries no gradient.
    """
    out, top = _gathered(scale, block, q, latents, topk)
    return out, lax.stop_gradient(top)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(scale, block, q, latents, topk):
    return _forward(scale, block, q, latents, topk)[0]


def _taken(latents, topk):
    """[b t k x] rows of latents [b s x]; -1 takes row 0, which the caller masks."""
    return jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(latents, topk)


def _logits(q, rows, topk, scale):
    """[b t k n]: keys first, so that the product reads the gathered rows as they lie."""
    inner = wide(q.dtype)
    logits = scale * jnp.einsum("btkx,btnx->btkn", rows, q, preferred_element_type=inner)
    return logits + jnp.where(topk >= 0, 0, HIDDEN).astype(inner)[..., None]


def _forward(scale, block, q, latents, topk):
    def one(args):
        q, topk = args
        rows = _taken(latents, topk)
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
    return (out, jnp.max(jnp.stack(tops))), lse


def _forward_saving(scale, block, q, latents, topk):
    result, lse = _forward(scale, block, q, latents, topk)
    return result, (q, latents, topk, result[0], lse)


def _backward(scale, block, saved, cotangents):
    q, latents, topk, out, lse = saved
    dout, _ = cotangents
    inner = wide(q.dtype)
    delta = jnp.sum(dout.astype(inner) * out.astype(inner), axis=-1)
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
    return jnp.concatenate(dqs, axis=1), dlatents.astype(latents.dtype), None


_gathered.defvjp(_forward_saving, _backward)
