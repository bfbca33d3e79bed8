"""One decoder layer: x += Attention(RMSNorm(x)); x += FFN(RMSNorm(x)), with a dense FFN or a mixture of experts.

`block` runs a layer. `attention` is MLA with its indexer over a device's queries and all keys; `moe` is the
mixture of experts. `ForwardContext` holds the inputs that all layers of a forward share.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from glm5_jax.config import RECURRENT_KINDS, ModelConfig
from glm5_jax.model.ablations.gdn import Gdn
from glm5_jax.model.ablations.gqa import Gqa
from glm5_jax.model.ablations.layer import grouped_query_attention, linear_attention
from glm5_jax.model.cache import KeyValues, LayerCache, Paging, RecurrentState, write
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.expert_dispatch import routed_experts
from glm5_jax.model.experts import Experts
from glm5_jax.model.indexer import (
    Index,
    Indexer,
    Selection,
    index_keys,
    index_loss,
    index_queries,
    quantize_queries_like_keys,
)
from glm5_jax.model.mla import Keys, Mla, Queries, absorbed_queries, mla, paged_mla
from glm5_jax.model.mlp import Mlp, mlp
from glm5_jax.model.router import ExpertRouter, Routing, expert_load, route, sequence_balance
from glm5_jax.parallel.mesh import Region
from glm5_jax.parallel.params import Declare
from pallas_kernels.lightning_indexer import lightning_indexer, paged_lightning_indexer
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.pointwise import rms_norm
from pallas_kernels.sparse_flash_attention import WordRows


class Block(nnx.Module):
    """Weights of one layer or of a stack of layers.

    full_layers: layers of the stack that have an indexer.
    gdn_layers: layers of the stack with Gated DeltaNet.
    """

    def __init__(
        self,
        declare: Declare,
        cfg: ModelConfig,
        is_moe: bool,
        full_layers: Sequence[int],
        gdn_layers: Sequence[int] = (),
    ):
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
        if not is_moe:
            self.mlp = Mlp(declare.child("mlp", f=cfg.intermediate_size))
            return
        self.router = ExpertRouter(declare.child("router"))
        self.experts = Experts(declare.child("experts", f=cfg.moe_intermediate_size))
        if cfg.n_shared_experts:
            width = cfg.moe_intermediate_size * cfg.n_shared_experts
            self.shared = Mlp(declare.child("shared", f=width))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """Inputs that all layers of one forward share.

    Attributes:
      cos, sin: rotations of the queries' positions.
      start: key index of query 0, an int where known. With paging: that of the only row, if there is one.
      num_keys: number of key slots, which may be more than the keys of a row.
      segments: segment ids of the queries; None: one document per row.
      key_segments: segment ids of the keys; None: one document per row.
      index_weight: weight of each query in the indexers' loss; None: indexers are not trained.
      paging: destination of new tokens in a paged cache; None: no paged cache.
      capture_choices: whether `LayerStats` hold the chosen keys and experts.
    """

    cfg: ModelConfig
    execution: ExecutionConfig
    region: Region
    cos: Float[Array, "b t r/2"]
    sin: Float[Array, "b t r/2"]
    start: int | Int[Array, ""]
    num_keys: int
    segments: Int[Array, "b t"] | None
    key_segments: Int[Array, "b s"] | None
    index_weight: Float[Array, "b t"] | None = None
    paging: Paging | None = None
    capture_choices: bool = False

    @property
    def is_sparse(self) -> bool:
        """Returns True if some key is left out: up to index_topk keys, sparse attention equals dense attention."""
        return self.cfg.attention == "sparse" and self.num_keys > self.cfg.index_topk

    @property
    def should_keep_index(self) -> bool:
        """Returns True if a `Selection` carries the index that its keys were chosen by."""
        return self.capture_choices or self.index_weight is not None


jax.tree_util.register_dataclass(
    ForwardContext,
    ("cos", "sin", "start", "segments", "key_segments", "index_weight", "paging"),
    ("cfg", "execution", "region", "num_keys", "capture_choices"),
)


def initial_selection(shape: tuple[int, int], dtype, context: ForwardContext) -> Selection:
    """Returns the initial selection of the layer scan: zeros, overwritten by the first layer's indexer.

    shape: (rows, tokens). dtype: dtype of the index.
    """
    cfg, topk, index = context.cfg, None, None
    i, j = cfg.index_n_heads, cfg.index_head_dim
    if context.is_sparse:
        topk = jnp.zeros((*shape, min(cfg.index_topk, context.num_keys)), jnp.int32)
    if context.should_keep_index:
        keys = jnp.zeros((shape[0], context.num_keys, j), dtype)
        index = Index(
            jnp.zeros((*shape, i, j), dtype), jnp.zeros((*shape, i), accum_dtype(dtype)), keys
        )
    return Selection(topk, index)


class LayerStats(NamedTuple):
    """Statistics of one layer on one device.

    Attributes:
      max_logit: largest attention logit; 0 where there are none.
      load: tokens per expert, float32; None if dense.
      balance: sum over rows of the sequence-level balance loss; None if dense.
      index_loss: weighted loss of the layer's indexer; None if indexers are not trained.
      selection: keys that the layer attends to; None unless the forward captures choices.
      routing: expert choice of the tokens [b t ...]; None if dense, or unless choices are captured.
    """

    max_logit: Float[Array, ""]
    load: Float[Array, " e"] | None = None
    balance: Float[Array, ""] | None = None
    index_loss: Float[Array, ""] | None = None
    selection: Selection | None = None
    routing: Routing | None = None


class KindSwitch(NamedTuple):
    """Attention kind of a scanned layer: `kinds[index]`, chosen at run time."""

    kinds: tuple[str, ...]
    index: Int[Array, ""]


def block(
    w: PyTree,
    x: Float[Array, "b t d"],
    selection: Selection,
    cache: LayerCache | KeyValues | RecurrentState | None,
    context: ForwardContext,
    is_full: bool | Bool[Array, ""] = True,
    index_loss_weight: float | Float[Array, ""] = 1.0,
    kind: str | KindSwitch = "full",
):
    """Runs one layer and returns (x, Selection, cache, LayerStats).

    Args:
      selection: selection of the nearest earlier full layer.
      cache: cache of the layer; None in training.
      is_full: whether the layer's own indexer selects its keys; traced in a scanned stack that mixes
        both kinds.
      index_loss_weight: weight of this layer's attention in the loss of its index; 0 skips the loss.
      kind: one of `config.LAYER_KINDS`, or a run-time choice in a scanned stack that has several.
    """
    cfg = context.cfg
    normed = rms_norm(x, w["attn_norm"], cfg.rms_norm_eps)

    @jax.named_scope("attention")
    def attend(kind):
        window = cfg.sliding_window if kind == "window" else None
        if kind in RECURRENT_KINDS:
            gates = w["gdn"] if kind == "gdn" else None
            y, layer_cache, max_logit = linear_attention(w["attn"], gates, normed, cache, context)
        elif cfg.projections == "gqa":
            y, layer_cache, max_logit = grouped_query_attention(
                w["attn"], normed, cache, context, window
            )
        else:
            return attention(
                w["attn"],
                w.get("indexer"),
                normed,
                selection,
                cache,
                context,
                is_full,
                index_loss_weight,
                window,
            )
        return y, selection, layer_cache, LayerStats(max_logit)

    # Attention.
    if isinstance(kind, KindSwitch):
        branches = [functools.partial(attend, name) for name in kind.kinds]
        y, selection, cache, stats = lax.switch(kind.index, branches)
    else:
        y, selection, cache, stats = attend(kind)
    if context.capture_choices:
        stats = stats._replace(selection=selection)
    x = x + y
    # Feed-forward.
    normed = rms_norm(x, w["mlp_norm"], cfg.rms_norm_eps)
    if "mlp" in w:
        return x + mlp(w["mlp"], normed, context.region), selection, cache, stats
    y, load, balance, routing = moe(w, normed, context)
    stats = stats._replace(load=load, balance=balance, routing=routing)
    return x + y, selection, cache, stats


# For layers outside a scan: equal layers are traced and lowered once, because 78 times would take minutes.
block_jit = jax.jit(block, static_argnames=("is_full", "index_loss_weight", "kind"))


def attention(
    w: PyTree,
    indexer: PyTree | None,
    x: Float[Array, "b t d"],
    selection: Selection,
    cache: LayerCache | None,
    context: ForwardContext,
    is_full: bool | Bool[Array, ""],
    index_loss_weight: float | Float[Array, ""],
    window: int | None = None,
):
    """Runs MLA over this device's queries and all devices' keys; returns (y, Selection, cache, LayerStats).

    indexer: weights of the layer's indexer; None: the layer has none. The other arguments are those of
    `block` and `mla`.
    """
    cfg, region = context.cfg, context.region
    trains_indexer = context.index_weight is not None
    c_q, q, latent, _ = mla_prologue(
        x,
        w,
        context.cos,
        context.sin,
        eps=cfg.latent_norm_eps,
        # Without a cache a gradient may be taken, and the Pallas forms have none.
        implementation="ref" if cache is None else context.execution.kernels,
    )
    # No gradient flows between trunk and indexer, in either direction.
    index_x, index_c_q = lax.stop_gradient((x, c_q))
    # Keys: gathered over the sequence in training, else written to the cache and read from it.
    idx_k, paging = None, context.paging
    if cache is None:
        latent = region.gather_sequence(latent)  # from all devices
    else:
        if paging is None:
            put = functools.partial(write, length=context.start)
        else:
            put = functools.partial(paging.write, kernels=context.execution.kernels)
        new = LayerCache(latent, None)
        if cache.idx_k is not None:
            new = LayerCache(latent, index_keys(indexer, index_x, context.cos, context.sin, cfg))
        cache = jax.tree.map(put, cache, new.with_layout_of(cache))
        if paging is None:
            latent, idx_k = cache
        elif paging.should_gather_pages:
            latent, idx_k = jax.tree.map(paging.gather_row, cache)
            latent = latent.rows() if isinstance(latent, WordRows) else latent
        else:
            return _paged(w, indexer, index_x, index_c_q, q, selection, cache, context)
    # Selection: by this layer's indexer, or that of the nearest earlier full layer.
    if (context.is_sparse or trains_indexer) and indexer is not None:

        @jax.named_scope("indexer")
        def select():
            keys = idx_k
            if keys is None:
                keys = index_keys(indexer, index_x, context.cos, context.sin, cfg)
                keys = region.gather_sequence(keys)
            idx_q, idx_w = index_queries(indexer, index_x, index_c_q, context.cos, context.sin, cfg)
            index, topk = Index(idx_q, idx_w, keys), None
            if context.is_sparse:
                index, k_scale = quantize_queries_like_keys(index)
                topk = lightning_indexer(
                    *index,
                    cfg.index_topk,
                    k_scale=k_scale,
                    start=context.start,
                    q_segments=context.segments,
                    k_segments=context.key_segments,
                    block=context.execution.query_block,
                    implementation=context.execution.kernels,
                )
            return Selection(topk, index if context.should_keep_index else None)

        selection = select() if is_full is True else lax.cond(is_full, select, lambda: selection)
        if context.is_sparse:
            selection = selection._replace(topk=checkpoint_name(selection.topk, "topk"))
    # Attention, and the loss of the indexer.
    queries = Queries(q, context.start, context.segments)
    keys = Keys(latent, context.key_segments)
    topk = selection.topk if context.is_sparse else None
    attended = mla(w, queries, keys, cfg, context.execution, topk, window)
    stats = LayerStats(attended.max_logit)
    if trains_indexer:
        loss = _index_loss(
            w, queries, keys, attended, topk, selection.index, context, index_loss_weight
        )
        stats = stats._replace(index_loss=loss)
    return attended.y, selection, cache, stats


def _paged(w, indexer, x, c_q, q, selection: Selection, cache: LayerCache, context: ForwardContext):
    """Runs `attention` for few queries over the pages that hold their keys."""
    cfg, paging = context.cfg, context.paging
    if not context.is_sparse:
        topk = paging.visible_keys(context.num_keys)
    elif cache.idx_k is not None:
        queries = index_queries(indexer, x, c_q, context.cos, context.sin, cfg)
        index, page_scales = quantize_queries_like_keys(Index(*queries, cache.idx_k))
        with jax.named_scope("indexer"):
            topk = paged_lightning_indexer(
                *index,
                paging.tables,
                paging.positions[:, -1] + 1,
                cfg.index_topk,
                page_scales=page_scales,
                implementation=context.execution.kernels,
            )
        selection = Selection(topk, None)
    else:
        topk = selection.topk
    y = paged_mla(w, q, cache.latent, paging.tables, topk, cfg, context.execution)
    return y, selection, cache, LayerStats(jnp.zeros((), accum_dtype(x.dtype)))


def _index_loss(w, queries, keys, attended, topk, index, context: ForwardContext, loss_weight):
    """Returns loss_weight times the loss of an index against this layer's attention; skipped for 0."""
    cfg = context.cfg

    def loss():
        q, k = attended.q, attended.k
        if topk is not None and k.shape[2] > 1:
            q, k = absorbed_queries(w, queries.q, cfg), keys.latent[:, :, None]
        return index_loss(
            index,
            *lax.stop_gradient((q, k, attended.lse)),
            loss_weight * context.index_weight,
            cfg,
            context.execution,
            topk=topk,
            start=context.start,
            segments=(context.segments, context.key_segments),
        )

    def zero():
        return jnp.zeros((), attended.lse.dtype)

    if isinstance(loss_weight, float):
        return loss() if loss_weight else zero()
    return lax.cond(loss_weight > 0, loss, zero)


def moe(w: PyTree, x: Float[Array, "b t d"], context: ForwardContext):
    """Applies routed and shared experts to x; returns (y, load, balance, routing) as in `LayerStats`."""
    cfg, region = context.cfg, context.region
    b, t, d = x.shape
    routing = route(w["router"], x.reshape(-1, d), cfg)
    valid = jnp.ones((b, t), bool) if context.segments is None else context.segments != 0
    load = expert_load(routing.expert_ids, valid.reshape(-1), cfg.n_routed_experts)
    routing = jax.tree.map(lambda a: a.reshape(b, t, -1), routing)
    ids, weights, probs = routing
    balance = sequence_balance(probs, ids, valid, region, cfg)
    # Padding is sent to no expert: equal tokens would all go to one expert.
    expert_ids = jnp.where(valid[..., None], ids, cfg.n_routed_experts)
    tokens = (x, expert_ids, weights)
    if region.shard_sequence:
        tokens = tuple(region.all_gather(a, ("tensor",), 1) for a in tokens)
    rows = (a.reshape(-1, a.shape[-1]) for a in tokens)
    execution = context.execution
    y = routed_experts(
        w["experts"],
        *rows,
        region,
        execution.token_chunk,
        execution.kernels,
        execution.expert_slices,
    )
    y = y.reshape(b, -1, d)
    y = (
        region.psum_scatter(y, ("tensor",), 1)
        if region.shard_sequence
        else region.psum(y, ("tensor",))
    )
    if "shared" in w:
        y = y + mlp(w["shared"], x, region)
    return y, load, balance, routing if context.capture_choices else None
