"""Multi-head Latent Attention (spec: transformers' `glm_moe_dsa`; GLM-5 paper 2.1).

Keys and values of all heads are linear in one latent c_kv [c] and one rotated key k_rope [r] per
token; those two are what a cache holds. `mla` is the only attention of the project: pre-training,
prefill, decoding, drafting and log-probs call it, dense or over selected keys. It has three forms
with equal results, chosen by their arithmetic cost, which depends on shapes alone:

    expanded   keys and values per head, softmax over all keys (training and prefill)
    absorbed   k_b folded into the query, v_b applied after: nothing is expanded (decoding)
    gathered   absorbed, over the selected keys only
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import dispatch
from pallas_kernels.flash_mla import flash_mla
from pallas_kernels.quantised import product
from pallas_kernels.sparse_flash_attention import paged_sparse_attention, sparse_flash_attention


class Mla(nnx.Module):
    """Weights of one attention: query and key/value latents, per-head up-projections, output."""

    def __init__(self, declare, cfg):
        self.q_a = declare.normal("q_a", "d q")
        self.q_a_norm = declare.ones("q_a_norm", "q")
        self.q_b = declare.normal("q_b", "q n hr")
        self.kv_a = declare.normal("kv_a", "d cr")
        self.kv_a_norm = declare.ones("kv_a_norm", "c")
        self.k_b = declare.normal("k_b", "c n h")
        self.v_b = declare.normal("v_b", "c n u")
        self.o = declare.normal("o", "n u d")
        if cfg.attention_bias:
            self.q_a_bias = declare.zeros("q_a_bias", "q")
            self.kv_a_bias = declare.zeros("kv_a_bias", "cr")
            self.o_bias = declare.zeros("o_bias", "d")


class Queries(NamedTuple):
    """q [b t n h+r], its last r rotated; start: index of the first query among the keys (an int if known
    when tracing); segments int[b t] or None."""

    q: jax.Array
    start: int | jax.Array
    segments: jax.Array | None


class Keys(NamedTuple):
    """latent [b s c+r]: c_kv, normed, then k_rope, rotated; segments int[b s] or None."""

    latent: jax.Array
    segments: jax.Array | None


class Attended(NamedTuple):
    """y [b t d], the largest logit (wide scalar), and what the indexer learns from: lse wide[b t n] of the
    logits, which are the scaled products of q [b t n x] and k [b s m x]. Only y carries a gradient."""

    y: jax.Array
    max_logit: jax.Array
    lse: jax.Array
    q: jax.Array
    k: jax.Array


def expand(w, latent):
    """(k [b s n h+r], v [b s n u]) of every head from latents [b s c+r]."""
    c_kv, k_rope = jnp.split(latent, [w["k_b"].shape[0]], axis=-1)
    k_nope = jnp.einsum("bsc,cnh->bsnh", c_kv, w["k_b"])
    v = jnp.einsum("bsc,cnu->bsnu", c_kv, w["v_b"])
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), v


def mla(w, queries: Queries, keys: Keys, cfg, plan, topk=None, window=None) -> Attended:
    """The attention of one layer.

    topk int32[b t k] restricts every query to those keys (-1: none), window to the last so many (dense
    forms only); causality and segments hold in any case. A query that sees no key yields zeros.
    """
    form = plan.attention_form or cheapest_form(queries, keys, cfg, topk, window)
    c = cfg.kv_lora_rank
    dense = dense_attention(queries, keys.segments, cfg, plan, topk, window)
    if form == "expanded":
        q, (k, v) = queries.q, expand(w, keys.latent)
        out, lse, top = dense(q, k, v)
    elif form in ("absorbed", "gathered"):
        q, k = absorbed_queries(w, queries.q, cfg), keys.latent[:, :, None]
        if form == "absorbed":
            # The latent serves as key and value whole: a copy of its first c columns costs more than
            # the r columns of output that are dropped.
            out, lse, top = dense(q, k, k)
            out = out[..., :c]
        else:
            out, lse, top = sparse_flash_attention(
                q,
                keys.latent,
                topk,
                scale=cfg.softmax_scale,
                value_dim=c,
                block=plan.gather_block,
                implementation=plan.kernels,
            )
        out = jnp.einsum("btnc,cnu->btnu", out, w["v_b"])
    else:
        raise ValueError(f"attention form {form!r}; use expanded, absorbed or gathered")
    return Attended(_output(w, out), top, lse, q, k)


def paged_mla(w, q, pages, tables, topk, cfg, plan):
    """The gathered form over a paged cache, y [b t d]: q [b t n h+r], pages [p z c+r] or `WordRows`, tables
    int32[b n], topk int32[b t k] of positions (-1: none)."""
    out, _ = paged_sparse_attention(
        absorbed_queries(w, q, cfg),
        pages,
        tables,
        topk,
        scale=cfg.softmax_scale,
        value_dim=cfg.kv_lora_rank,
        implementation=plan.kernels,
    )
    return _output(w, jnp.einsum("btnc,cnu->btnu", out, w["v_b"]))


def _output(w, out):
    """y [b t d] of the heads' values [b t n u]."""
    y = product("btnu,nud->btd", out, w["o"])
    return y + w["o_bias"] if "o_bias" in w else y


def dense_attention(queries: Queries, key_segments, cfg, plan, topk=None, window=None):
    """`flash_mla` for queries at their place, as a function of (q, k, v) alone."""
    return functools.partial(
        flash_mla,
        scale=cfg.softmax_scale,
        start=queries.start,
        q_segments=queries.segments,
        k_segments=key_segments,
        topk=topk,
        window=window,
        block=plan.query_block,
        implementation=plan.kernels,
    )


def absorbed_queries(w, q, cfg):
    """[b t n c+r]: queries [b t n h+r] that are multiplied with latents instead of keys."""
    q_nope, q_rope = jnp.split(q, [cfg.qk_nope_head_dim], axis=-1)
    return jnp.concatenate([jnp.einsum("btnh,cnh->btnc", q_nope, w["k_b"]), q_rope], axis=-1)


# A query that gathers its own rows multiplies them at a third of a plain matmul's rate (measured on
# CPU at 4096 tokens, k 256).
GATHER_COST = 3


def cheapest_form(queries: Queries, keys: Keys, cfg, topk, window=None) -> str:
    """The form with the fewest multiply-adds for these shapes, gathered ones counted thrice.

    Where a kernel gathers, always "gathered" over selected keys: attention by masking has no kernel.
    """
    if topk is not None and dispatch.platform() in dispatch.OF_PLATFORM:
        return "gathered"
    t, s, n = queries.q.shape[1], keys.latent.shape[1], cfg.num_attention_heads
    h, r, u = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    c = cfg.kv_lora_rank
    pairs = t * (s - t / 2) if isinstance(queries.start, int) else t * s
    if window is not None:
        pairs = min(pairs, t * window)
    fold = t * n * c * (h + u)
    cost = {
        "expanded": s * n * c * (h + u) + pairs * n * (h + r + u),
        "absorbed": fold + pairs * n * (2 * c + r),
    }
    if topk is not None:
        cost["gathered"] = fold + GATHER_COST * t * topk.shape[-1] * n * (2 * c + r)
    return min(cost, key=cost.get)
