"""KL over selected keys in XLA: each query gathers its rows of latents and of index keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.index_scores.xla import head_weights
from pallas_kernels.indexer_kl.xla import divergence
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
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, None, topk)


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
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk)


def _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk) -> Any:
    dtype = accum_dtype(idx_q.dtype)

    def run_block(dk, args):
        idx_q, idx_w, q, lse, weight, topk = args
        rows = gather_rows(latents, topk)
        logits = jnp.einsum("btkx,btnx->btkn", rows, q, preferred_element_type=dtype)
        target = jnp.sum(jnp.exp(static.scale * logits - lse[:, :, None]), axis=-1)
        w = head_weights(idx_q, idx_w)
        key_rows = gather_rows(idx_k, topk)
        dots = jnp.einsum("btkj,btij->btki", key_rows, idx_q, preferred_element_type=dtype)
        scores = jnp.sum(jnp.maximum(dots, 0) * w[:, :, None], axis=-1)
        kl, dscores = divergence(target, scores, topk >= 0, weight, axis=2)
        if dscores is None:
            return dk, kl
        masked = jnp.where(dots > 0, dscores[..., None], 0).astype(idx_q.dtype)
        e = jnp.einsum("btki,btkj->btij", masked, key_rows, preferred_element_type=dtype)
        dw = jnp.sum(e * idx_q.astype(dtype), axis=-1) * idx_q.shape[-1] ** -0.5
        weighted = (idx_q * w[..., None]).astype(idx_q.dtype)
        drows = jnp.einsum("btki,btij->btkj", masked, weighted, preferred_element_type=dtype)
        dq = (e * w[..., None]).astype(idx_q.dtype)
        return add_rows(dk, topk, drows), (kl, dq, dw.astype(idx_w.dtype))

    dk = jnp.zeros(idx_k.shape, dtype)
    outs = []
    # Every query reads k keys at any position: no key cut, one run and a remainder.
    for run in query_runs(idx_q.shape[1], idx_k.shape[1], None, static.block):
        args = tuple(split(x, run, 1) for x in (idx_q, idx_w, q, lse, weight, topk))
        dk, out = lax.scan(run_block, dk, args)
        outs.append(jax.tree.map(lambda x: join(x, 1), out))
    out = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outs)
    return out if weight is None else (*out, dk.astype(idx_k.dtype))


def gather_rows(x: Shaped[Array, "b s j"], topk: Int32[Array, "b t k"]) -> Shaped[Array, "b t k j"]:
    """Returns rows [b t k ...] of x [b s ...]; -1 takes row 0, which the caller masks."""
    return jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(x, topk)


def add_rows(
    total: Float[Array, "b s j"], topk: Int32[Array, "b t k"], rows: Float[Array, "b t k j"]
) -> Float[Array, "b s j"]:
    """Adds rows [b t k j] to total [b s j] at topk [b t k], query by query.

    In one scatter keys would repeat, and the order of their additions would depend on the platform.
    """
    s = total.shape[1]

    def add(total, args):
        topk, rows = args
        index = jnp.where(topk < 0, s + jnp.arange(topk.shape[1], dtype=jnp.int32), topk)
        add_to_batch = jax.vmap(lambda x, i, r: x.at[i].add(r, mode="drop", unique_indices=True))
        return add_to_batch(total, index, rows), None

    return lax.scan(add, total, (topk.swapaxes(0, 1), rows.swapaxes(0, 1)))[0]
