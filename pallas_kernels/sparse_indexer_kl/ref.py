"""KL over selected keys in XLA: each query gathers its own rows of latents and of index keys."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.index_scores.ref import head_weights
from pallas_kernels.indexer_kl.ref import divergence
from pallas_kernels.numerics import wide


def forward(static, idx_q, idx_w, idx_k, q, latents, lse, topk):
    """kl wide[b t]."""
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, None, topk)


def forward_and_gradients(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk):
    """(kl wide[b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk)


def _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk):
    inner = wide(idx_q.dtype)

    def one(dk, args):
        idx_q, idx_w, q, lse, weight, topk = args
        rows = taken(latents, topk)
        logits = jnp.einsum("btkx,btnx->btkn", rows, q, preferred_element_type=inner)
        target = jnp.sum(jnp.exp(static.scale * logits - lse[:, :, None]), axis=-1)
        w = head_weights(idx_q, idx_w)
        own = taken(idx_k, topk)
        dots = jnp.einsum("btkj,btij->btki", own, idx_q, preferred_element_type=inner)
        scores = jnp.sum(jnp.maximum(dots, 0) * w[:, :, None], axis=-1)
        kl, dscores = divergence(target, scores, topk >= 0, weight, axis=2)
        if weight is None:
            return dk, kl
        passed = jnp.where(dots > 0, dscores[..., None], 0).astype(idx_q.dtype)
        e = jnp.einsum("btki,btkj->btij", passed, own, preferred_element_type=inner)
        dw = jnp.sum(e * idx_q.astype(inner), axis=-1) * idx_q.shape[-1] ** -0.5
        weighted = (idx_q * w[..., None]).astype(idx_q.dtype)
        drows = jnp.einsum("btki,btij->btkj", passed, weighted, preferred_element_type=inner)
        dq = (e * w[..., None]).astype(idx_q.dtype)
        return added(dk, topk, drows), (kl, dq, dw.astype(idx_w.dtype))

    dk = jnp.zeros(idx_k.shape, inner)
    outs = []
    # Every query reads k keys wherever it stands: no key cut, one run and a remainder.
    for run in query_runs(idx_q.shape[1], idx_k.shape[1], None, static.block):
        args = tuple(split(x, run, 1) for x in (idx_q, idx_w, q, lse, weight, topk))
        dk, out = lax.scan(one, dk, args)
        outs.append(jax.tree.map(lambda x: join(x, 1), out))
    out = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outs)
    return out if weight is None else (*out, dk.astype(idx_k.dtype))


def taken(x, topk):
    """[b t k ...] rows of x [b s ...]; -1 takes row 0, which the caller masks."""
    return jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(x, topk)


def added(total, topk, rows):
    """total [b s j] plus rows [b t k j] at topk [b t k], query by query: in one scatter keys repeat, and
    their order is then up to the platform."""
    s = total.shape[1]

    def add(total, args):
        topk, rows = args
        place = jnp.where(topk < 0, s + jnp.arange(topk.shape[1], dtype=jnp.int32), topk)
        one = jax.vmap(lambda x, i, r: x.at[i].add(r, mode="drop", unique_indices=True))
        return one(total, place, rows), None

    return lax.scan(add, total, (topk.swapaxes(0, 1), rows.swapaxes(0, 1)))[0]
