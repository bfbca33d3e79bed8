"""One decoder layer: x += Attention(RMSNorm(x)); x += FFN(RMSNorm(x)), dense or mixture of experts."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import RECURRENT_KINDS
from glm5_jax.core.mesh import Region
from glm5_jax.model.ablations.gdn import Gdn
from glm5_jax.model.ablations.gqa import Gqa
from glm5_jax.model.ablations.layer import grouped, linear
from glm5_jax.model.cache import LayerCache, Paging, write
from glm5_jax.model.dispatch import routed_experts
from glm5_jax.model.experts import Experts
from glm5_jax.model.indexer import (
    Index,
    Indexer,
    Selection,
    index_keys,
    index_loss,
    index_queries,
    multiplied,
)
from glm5_jax.model.mla import Keys, Mla, Queries, absorbed_queries, mla, paged_mla
from glm5_jax.model.mlp import Mlp, mlp
from glm5_jax.model.plan import Plan
from glm5_jax.model.router import Router, Routing, expert_load, route, sequence_balance
from pallas_kernels.lightning_indexer import lightning_indexer, paged_lightning_indexer
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.numerics import wide
from pallas_kernels.pointwise import rms_norm
from pallas_kernels.sparse_flash_attention import WordRows


class Block(nnx.Module):
    """Weights of a layer or of a stack; full_layers: those of the stack that own an indexer, gdn_layers:
    those of Gated DeltaNet."""

    def __init__(self, declare, cfg, moe: bool, full_layers, gdn_layers=()):
        self.attn_norm = declare.ones("attn_norm", "d")
        self.mlp_norm = declare.ones("mlp_norm", "d")
        heads = declare.child("attn")
        self.attn = Gqa(heads) if cfg.projections == "gqa" else Mla(heads, cfg)
        if gdn_layers:
            self.gdn = Gdn(declare.stack(gdn_layers).child("gdn"))
        if full_layers:
            stacked = declare.layers is not None
            self.indexer = Indexer(
                (declare.stack(full_layers) if stacked else declare).child("indexer")
            )
        if not moe:
            self.mlp = Mlp(declare.child("mlp", f=cfg.intermediate_size))
            return
        self.router = Router(declare.child("router"))
        self.experts = Experts(declare.child("experts", f=cfg.moe_intermediate_size))
        if cfg.n_shared_experts:
            width = cfg.moe_intermediate_size * cfg.n_shared_experts
            self.shared = Mlp(declare.child("shared", f=width))


@dataclasses.dataclass(frozen=True)
class Context:
    """What all layers of one forward share.

    cos, sin [b t r/2]; start: key index of query 0 (int where known); segments int[b t] of the
    queries and key_segments int[b s], or None for one document per row. index_weight [b t]: of each query in
    the indexers' loss, or None if they do not learn. paging: of a paged cache, where start is that of its
    one row, if there is but one. watched: whether `LayerStats` tell what was chosen.
    """

    cfg: Any
    plan: Plan
    region: Region
    cos: jax.Array
    sin: jax.Array
    start: int | jax.Array
    num_keys: int
    segments: jax.Array | None
    key_segments: jax.Array | None
    index_weight: jax.Array | None = None
    paging: Paging | None = None
    watched: bool = False

    @property
    def selects(self) -> bool:
        """Whether some key is left out: up to index_topk keys sparse attention is dense."""
        return self.cfg.attention == "sparse" and self.num_keys > self.cfg.index_topk

    @property
    def keeps_index(self) -> bool:
        """Whether a `Selection` holds the index behind it."""
        return self.watched or self.index_weight is not None


jax.tree_util.register_dataclass(
    Context,
    ("cos", "sin", "start", "segments", "key_segments", "index_weight", "paging"),
    ("cfg", "plan", "region", "num_keys", "watched"),
)


def no_selection(shape, dtype, context: Context) -> Selection:
    """What the layers start from where some own no indexer: zeros, which the first layer replaces."""
    cfg, topk, index = context.cfg, None, None
    i, j = cfg.index_n_heads, cfg.index_head_dim
    if context.selects:
        topk = jnp.zeros((*shape, min(cfg.index_topk, context.num_keys)), jnp.int32)
    if context.keeps_index:
        keys = jnp.zeros((shape[0], context.num_keys, j), dtype)
        index = Index(jnp.zeros((*shape, i, j), dtype), jnp.zeros((*shape, i), wide(dtype)), keys)
    return Selection(topk, index)


class LayerStats(NamedTuple):
    """Of one layer on one device: load float32[e] (None if dense), balance (sum over rows), logit, and the
    weighted loss of its indexer (None if they do not learn). Of a watched forward alone: the selection that the
    layer attends by, and the routing of its tokens [b t ...] (None if dense)."""

    max_logit: jax.Array
    load: jax.Array | None = None
    balance: jax.Array | None = None
    index_loss: jax.Array | None = None
    selection: Selection | None = None
    routing: Routing | None = None


class Switch(NamedTuple):
    """Which of several kinds of attention a scanned layer has: int32[] index."""

    kinds: tuple[str, ...]
    index: jax.Array


def block(
    w,
    x,
    selection: Selection,
    cache,
    context: Context,
    full=True,
    share=1.0,
    kind: str | Switch = "full",
):
    """x [b t d] -> (x, Selection, cache, LayerStats).

    selection: of the nearest earlier full layer. full: whether this layer selects for itself; a traced bool
    in a scanned stack that mixes both kinds. share: the part of its index's loss that is learned from this
    layer's attention; 0 skips it. kind: one of `config.LAYER_KINDS`, or the choice among those of a scanned
    stack that has several.
    """
    cfg = context.cfg
    normed = rms_norm(x, w["attn_norm"], cfg.rms_norm_eps)

    @jax.named_scope("attention")
    def attend(kind):
        window = cfg.sliding_window if kind == "window" else None
        if kind in RECURRENT_KINDS:
            gates = w["gdn"] if kind == "gdn" else None
            y, own, max_logit = linear(w["attn"], gates, normed, cache, context)
        elif cfg.projections == "gqa":
            y, own, max_logit = grouped(w["attn"], normed, cache, context, window)
        else:
            weights = w["attn"], w.get("indexer")
            return attention(*weights, normed, selection, cache, context, full, share, window)
        return y, selection, own, LayerStats(max_logit)

    if isinstance(kind, Switch):
        branches = [functools.partial(attend, name) for name in kind.kinds]
        y, selection, cache, stats = lax.switch(kind.index, branches)
    else:
        y, selection, cache, stats = attend(kind)
    if context.watched:
        stats = stats._replace(selection=selection)
    x = x + y
    normed = rms_norm(x, w["mlp_norm"], cfg.rms_norm_eps)
    if "mlp" in w:
        return x + mlp(w["mlp"], normed, context.region), selection, cache, stats
    y, load, balance, routing = mixture(w, normed, context)
    stats = stats._replace(load=load, balance=balance, routing=routing)
    return x + y, selection, cache, stats


# Of layers that are not scanned: those that are alike are traced and lowered once, not 78 times, which takes minutes.
block_once = jax.jit(block, static_argnames=("full", "share", "kind"))


def attention(
    w,
    indexer,
    x,
    selection: Selection,
    cache: LayerCache | None,
    context: Context,
    full,
    share,
    window=None,
):
    """MLA over this device's queries and everyone's keys -> (y [b t d], Selection, cache, LayerStats)."""
    cfg, region, learns = context.cfg, context.region, context.index_weight is not None
    c_q, q, latent, _ = mla_prologue(
        x,
        w,
        context.cos,
        context.sin,
        eps=cfg.latent_norm_eps,
        # Without a cache there may be a gradient to take, which the Pallas forms have not.
        implementation="ref" if cache is None else context.plan.kernels,
    )
    # The trunk takes no gradient from selection, nor the indexer one from the trunk.
    still, c_q_still = lax.stop_gradient((x, c_q))
    idx_k, paging = None, context.paging
    if cache is None:
        latent = region.whole_sequence(latent)
    else:
        if paging is None:
            put = functools.partial(write, length=context.start)
        else:
            put = functools.partial(paging.write, kernels=context.plan.kernels)
        new = LayerCache(latent, None)
        if cache.idx_k is not None:
            new = LayerCache(latent, index_keys(indexer, still, context.cos, context.sin, cfg))
        cache = jax.tree.map(put, cache, new.like(cache))
        if paging is None:
            latent, idx_k = cache
        elif paging.one_row:
            latent, idx_k = jax.tree.map(paging.row, cache)
            latent = latent.rows() if isinstance(latent, WordRows) else latent
        else:
            return _paged(w, indexer, still, c_q_still, q, selection, cache, context)
    if (context.selects or learns) and indexer is not None:

        @jax.named_scope("indexer")
        def fresh():
            keys = idx_k
            if keys is None:
                keys = index_keys(indexer, still, context.cos, context.sin, cfg)
                keys = region.whole_sequence(keys)
            index = Index(
                *index_queries(indexer, still, c_q_still, context.cos, context.sin, cfg), keys
            )
            topk = None
            if context.selects:
                index, k_scale = multiplied(index)
                topk = lightning_indexer(
                    *index,
                    cfg.index_topk,
                    k_scale=k_scale,
                    start=context.start,
                    q_segments=context.segments,
                    k_segments=context.key_segments,
                    block=context.plan.query_block,
                    implementation=context.plan.kernels,
                )
            return Selection(topk, index if context.keeps_index else None)

        selection = fresh() if full is True else lax.cond(full, fresh, lambda: selection)
        if context.selects:
            selection = selection._replace(topk=checkpoint_name(selection.topk, "topk"))
    queries = Queries(q, context.start, context.segments)
    keys = Keys(latent, context.key_segments)
    topk = selection.topk if context.selects else None
    attended = mla(w, queries, keys, cfg, context.plan, topk, window)
    stats = LayerStats(attended.max_logit)
    if learns:
        loss = _index_loss(w, queries, keys, attended, topk, selection.index, context, share)
        stats = stats._replace(index_loss=loss)
    return attended.y, selection, cache, stats


def _paged(w, indexer, x, c_q, q, selection: Selection, cache: LayerCache, context: Context):
    """`attention` of few queries over the pages that hold their keys."""
    cfg, paging = context.cfg, context.paging
    if not context.selects:
        topk = paging.visible(context.num_keys)
    elif cache.idx_k is not None:
        queries = index_queries(indexer, x, c_q, context.cos, context.sin, cfg)
        index, page_scales = multiplied(Index(*queries, cache.idx_k))
        with jax.named_scope("indexer"):
            topk = paged_lightning_indexer(
                *index,
                paging.tables,
                paging.positions[:, -1] + 1,
                cfg.index_topk,
                page_scales=page_scales,
                implementation=context.plan.kernels,
            )
        selection = Selection(topk, None)
    else:
        topk = selection.topk
    y = paged_mla(w, q, cache.latent, paging.tables, topk, cfg, context.plan)
    return y, selection, cache, LayerStats(jnp.zeros((), wide(x.dtype)))


def _index_loss(w, queries, keys, attended, topk, index, context: Context, share):
    """`share` of the loss that an index has with this layer's attention; nothing is computed for 0."""
    cfg = context.cfg

    def loss():
        q, k = attended.q, attended.k
        if topk is not None and k.shape[2] > 1:
            q, k = absorbed_queries(w, queries.q, cfg), keys.latent[:, :, None]
        return index_loss(
            index,
            *lax.stop_gradient((q, k, attended.lse)),
            share * context.index_weight,
            cfg,
            context.plan,
            topk=topk,
            start=context.start,
            segments=(context.segments, context.key_segments),
        )

    def nothing():
        return jnp.zeros((), attended.lse.dtype)

    if isinstance(share, float):
        return loss() if share else nothing()
    return lax.cond(share > 0, loss, nothing)


def mixture(w, x, context: Context):
    """Routed experts plus the shared one on x [b t d] -> (y, load float32[e], balance, the Routing [b t ...] of a
    watched forward)."""
    cfg, region = context.cfg, context.region
    b, t, d = x.shape
    routing = route(w["router"], x.reshape(-1, d), cfg)
    valid = jnp.ones((b, t), bool) if context.segments is None else context.segments != 0
    load = expert_load(routing.expert_ids, valid.reshape(-1), cfg.n_routed_experts)
    routing = Routing(*(a.reshape(b, t, -1) for a in routing))
    ids, weights, probs = routing
    balance = sequence_balance(probs, ids, valid, region, cfg)
    # Padding goes to no expert: it is all alike, and one expert would have all of it.
    sent = jnp.where(valid[..., None], ids, cfg.n_routed_experts)
    tokens = (x, sent, weights)
    if region.shard_sequence:
        tokens = tuple(region.all_gather(a, ("tensor",), 1) for a in tokens)
    rows = (a.reshape(-1, a.shape[-1]) for a in tokens)
    plan = context.plan
    y = routed_experts(
        w["experts"], *rows, region, plan.token_chunk, plan.kernels, plan.expert_slices
    )
    y = y.reshape(b, -1, d)
    y = (
        region.psum_scatter(y, ("tensor",), 1)
        if region.shard_sequence
        else region.psum(y, ("tensor",))
    )
    if "shared" in w:
        y = y + mlp(w["shared"], x, region)
    return y, load, balance, routing if context.watched else None
