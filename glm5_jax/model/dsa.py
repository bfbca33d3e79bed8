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
from glm5_jax.model.mask import visible


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


def absorb(w, q_nope):
    """q_nope [b t n h] folded with k_b into queries over the latent, [b t n c]."""
    return jnp.einsum("btnh,cnh->btnc", q_nope, w["k_b"])


def gathered_attention(w, queries, keys, topk, scale: float, plan):
    """Attention over the topk int32[b t k] latents of every query -> ([b t n u], largest logit)."""
    q = jnp.concatenate([absorb(w, queries.q_nope), queries.q_rope], axis=-1)
    latents = jnp.concatenate([keys.c_kv, keys.k_rope], axis=-1)
    width = keys.c_kv.shape[-1]
    out, top = _gathered(scale, plan.gather_block, width, q, latents, topk)
    return jnp.einsum("btnc,cnu->btnu", out, w["v_b"]), lax.stop_gradient(top)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(scale, block, width, q, latents, topk):
    return _forward(scale, block, width, q, latents, topk)[0]


def _taken(latents, topk):
    """[b t k x] rows of latents [b s x]; -1 takes row 0, which the caller masks."""
    return jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(latents, topk)


def _logits(q, rows, topk, scale):
    logits = scale * jnp.einsum("btnx,btkx->btnk", q, rows, preferred_element_type=wide(q.dtype))
    return jnp.where((topk >= 0)[:, :, None], logits, -jnp.inf)


def _forward(scale, block, width, q, latents, topk):
    def one(args):
        q, topk = args
        rows = _taken(latents, topk)
        logits = _logits(q, rows, topk, scale)
        top = jnp.max(logits, axis=-1, keepdims=True)
        top = jnp.where(jnp.isfinite(top), top, 0)
        p = jnp.exp(logits - top)
        total = jnp.sum(p, axis=-1, keepdims=True)
        values = rows[..., :width]
        out = jnp.einsum(
            "btnk,btkc->btnc", p.astype(q.dtype), values, preferred_element_type=p.dtype
        )
        out = out / jnp.where(total == 0, 1, total)
        lse = jnp.where(total == 0, jnp.inf, top + jnp.log(total))
        return out.astype(q.dtype), lse[..., 0], jnp.max(top)

    outs, lses, tops = [], [], []
    # Every query reads k keys wherever it stands: no key cut, one run and a remainder.
    for run in query_runs(q.shape[1], latents.shape[1], None, block):
        out, lse, top = lax.map(one, (split(q, run, 1), split(topk, run, 1)))
        outs.append(join(out, 1))
        lses.append(join(lse, 1))
        tops.append(jnp.max(top))
    out, lse = jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)
    return (out, jnp.max(jnp.stack(tops))), lse


def _forward_saving(scale, block, width, q, latents, topk):
    result, lse = _forward(scale, block, width, q, latents, topk)
    return result, (q, latents, topk, result[0], lse)


def _backward(scale, block, width, saved, cotangents):
    q, latents, topk, out, lse = saved
    dout, _ = cotangents
    inner = wide(q.dtype)
    delta = jnp.sum(dout.astype(inner) * out.astype(inner), axis=-1)
    batch = jnp.arange(q.shape[0])[:, None, None]

    def one(dlatents, args):
        q, topk, dout, lse, delta = args
        rows = _taken(latents, topk)
        p = jnp.exp(_logits(q, rows, topk, scale) - lse[..., None])
        dp = jnp.einsum("btnc,btkc->btnk", dout, rows[..., :width], preferred_element_type=inner)
        ds = (p * (dp - delta[..., None]) * scale).astype(q.dtype)
        dq = jnp.einsum("btnk,btkx->btnx", ds, rows, preferred_element_type=inner)
        drows = jnp.einsum("btnk,btnx->btkx", ds, q, preferred_element_type=inner)
        dvalues = jnp.einsum(
            "btnk,btnc->btkc", p.astype(q.dtype), dout, preferred_element_type=inner
        )
        drows = drows.at[..., :width].add(dvalues)
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
