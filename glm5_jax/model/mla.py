"""Multi-head Latent Attention (MLA; spec: transformers' `glm_moe_dsa`; GLM-5 paper 2.1).

Keys and values of all heads are linear in one latent c_kv [c] and one rotated key k_rope [r] per token. A
cache holds only those two. `mla` is the only attention of the project: pre-training, prefill, decoding,
drafting and log-probs call it, dense or over selected keys. It has three forms with equal results. Their
arithmetic cost, which depends on shapes alone, decides which one runs:

    expanded   keys and values per head, softmax over all keys (training and prefill)
    absorbed   k_b folded into the query, v_b applied after: nothing is expanded (decoding)
    gathered   absorbed, over the selected keys only
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.params import Declare
from pallas_kernels import backends
from pallas_kernels.flash_mla import flash_mla
from pallas_kernels.quantized_weights import quantized_einsum
from pallas_kernels.sparse_flash_attention import (
    WordRows,
    paged_sparse_attention,
    sparse_flash_attention,
)


class Mla(nnx.Module):
    """Weights of one attention layer: query and key/value latents, per-head up-projections, output."""

    def __init__(self, declare: Declare, cfg: ModelConfig):
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
    """Queries of an attention call.

    Attributes:
      q: queries whose last r columns are rotated.
      start: index of the first query among the keys; an int if known when tracing.
      segments: segment ids of the queries; None: one document per row.
    """

    q: Float[Array, "b t n h+r"]
    start: int | Int[Array, ""]
    segments: Int[Array, "b t"] | None


class Keys(NamedTuple):
    """Latents of an attention call.

    Attributes:
      latent: normed c_kv followed by rotated k_rope.
      segments: segment ids of the keys; None: one document per row.
    """

    latent: Float[Array, "b s c+r"]
    segments: Int[Array, "b s"] | None


class AttentionOutput(NamedTuple):
    """Result of `mla`. Only y carries a gradient.

    Attributes:
      y: output of the layer.
      max_logit: largest logit, in `accum_dtype`.
      lse: log-sum-exp of the logits, in `accum_dtype`. The indexer's loss reads it.
      q, k: factors of the logits, which are their scaled products.
    """

    y: Float[Array, "b t d"]
    max_logit: Float[Array, ""]
    lse: Float[Array, "b t n"]
    q: Float[Array, "b t n x"]
    k: Float[Array, "b s m x"]


def expand(
    w: PyTree, latent: Float[Array, "b s c+r"]
) -> tuple[Float[Array, "b s n h+r"], Float[Array, "b s n u"]]:
    """Returns (k, v) of every head from latents."""
    c_kv, k_rope = jnp.split(latent, [w["k_b"].shape[0]], axis=-1)
    k_nope = jnp.einsum("bsc,cnh->bsnh", c_kv, w["k_b"])
    v = jnp.einsum("bsc,cnu->bsnu", c_kv, w["v_b"])
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), v


def mla(
    w: PyTree,
    queries: Queries,
    keys: Keys,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    topk: Int[Array, "b t k"] | None = None,
    window: int | None = None,
) -> AttentionOutput:
    """Computes the attention of one layer.

    Causality and segments always hold. A query that sees no key yields zeros.

    Args:
      topk: keys that each query is restricted to (-1: none); None: no restriction.
      window: number of latest keys that each query is restricted to, in dense forms only; None: all.
    """
    form = execution.attention_form or cheapest_form(queries, keys, cfg, topk, window)
    c = cfg.kv_lora_rank
    dense = dense_attention(queries, keys.segments, cfg, execution, topk, window)
    if form == "expanded":
        q, (k, v) = queries.q, expand(w, keys.latent)
        out, lse, top = dense(q, k, v)
    elif form in ("absorbed", "gathered"):
        q, k = absorbed_queries(w, queries.q, cfg), keys.latent[:, :, None]
        if form == "absorbed":
            # All c + r columns of the latent serve as value: a copy of the first c would cost more
            # than the r output columns that are dropped.
            out, lse, top = dense(q, k, k)
            out = out[..., :c]
        else:
            if topk is None:
                raise ValueError("attention form 'gathered' needs topk; use expanded or absorbed")
            out, lse, top = sparse_flash_attention(
                q,
                keys.latent,
                topk,
                scale=cfg.softmax_scale,
                value_dim=c,
                block=execution.gather_block,
                implementation=execution.kernels,
            )
        out = jnp.einsum("btnc,cnu->btnu", out, w["v_b"])
    else:
        raise ValueError(f"attention form {form!r}; use expanded, absorbed or gathered")
    return AttentionOutput(_output(w, out), top, lse, q, k)


def paged_mla(
    w: PyTree,
    q: Float[Array, "b t n h+r"],
    pages: Float[Array, "p z c+r"] | WordRows,
    tables: Int[Array, "b n"],
    topk: Int[Array, "b t k"],
    cfg: ModelConfig,
    execution: ExecutionConfig,
) -> Float[Array, "b t d"]:
    """Computes the gathered form over a paged cache.

    tables: page indices of each row. topk: positions of the selected keys (-1: none).
    """
    out, _ = paged_sparse_attention(
        absorbed_queries(w, q, cfg),
        pages,
        tables,
        topk,
        scale=cfg.softmax_scale,
        value_dim=cfg.kv_lora_rank,
        implementation=execution.kernels,
    )
    return _output(w, jnp.einsum("btnc,cnu->btnu", out, w["v_b"]))


def _output(w, out):
    """Returns y [b t d] of the heads' values [b t n u]."""
    y = quantized_einsum("btnu,nud->btd", out, w["o"])
    return y + w["o_bias"] if "o_bias" in w else y


def dense_attention(
    queries: Queries,
    key_segments: Int[Array, "b s"] | None,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    topk: Int[Array, "b t k"] | None = None,
    window: int | None = None,
) -> Callable:
    """Returns `flash_mla` as a function of (q, k, v), with positions and segments of the queries bound."""
    return functools.partial(
        flash_mla,
        scale=cfg.softmax_scale,
        start=queries.start,
        q_segments=queries.segments,
        k_segments=key_segments,
        topk=topk,
        window=window,
        block=execution.query_block,
        implementation=execution.kernels,
    )


def absorbed_queries(
    w: PyTree, q: Float[Array, "b t n h+r"], cfg: ModelConfig
) -> Float[Array, "b t n c+r"]:
    """Returns queries that are multiplied with latents instead of keys."""
    q_nope, q_rope = jnp.split(q, [cfg.qk_nope_head_dim], axis=-1)
    return jnp.concatenate([jnp.einsum("btnh,cnh->btnc", q_nope, w["k_b"]), q_rope], axis=-1)


# A query that gathers its rows multiplies them at a third of a plain matmul's rate (measured on CPU at
# 4096 tokens, k 256).
GATHER_COST = 3


def cheapest_form(
    queries: Queries,
    keys: Keys,
    cfg: ModelConfig,
    topk: Int[Array, "b t k"] | None,
    window: int | None = None,
) -> str:
    """Returns the form with the fewest multiply-adds for these shapes; those of gathered rows count three times.

    On a platform with a gather kernel, selected keys always use "gathered", because attention by masking has
    no kernel.
    """
    if topk is not None and backends.platform() in backends.BACKEND_OF_PLATFORM:
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
    return min(cost, key=cost.__getitem__)
