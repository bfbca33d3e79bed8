"""The attention of a layer: MLA over this device's queries, restricted to the keys that an indexer selects.

`attention` projects the layer's input, then runs one function per mode of the cache:

    no cache           keys of all devices' tokens, gathered over the sequence (training)
    contiguous cache   keys written to the cache, then all of its slots
    paged, prefill     keys written to pages, then one copy of the row's pages
    paged, decode      keys written to pages, of which only the selected ones are fetched

The first three differ only in where keys come from, and share selection, attention and the indexer's loss.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from glm5_jax.model.cache import LayerCache, Paging, write
from glm5_jax.model.context import ForwardContext
from glm5_jax.model.indexer import (
    Index,
    Selection,
    index_keys,
    index_loss,
    index_queries,
    quantize_queries_like_keys,
)
from glm5_jax.model.layer_output import LayerOutput, LayerStats
from glm5_jax.model.mla import (
    AttentionOutput,
    Keys,
    Queries,
    absorbed_queries,
    mla,
    paged_mla,
)
from pallas_kernels.lightning_indexer import lightning_indexer, paged_lightning_indexer
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.quantized_vectors import QuantizedVectors
from pallas_kernels.sparse_flash_attention import WordRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Projections:
    """A layer's weights and the projections of its input, which all modes of the cache start from.

    Attributes:
      w: weights of MLA.
      indexer: weights of the layer's indexer; None: the layer has none.
      q: queries.
      latent: latents of this device's tokens.
      x, c_q: inputs of the indexer, through which no gradient flows.
      selection, is_full, index_loss_weight, window: as in `attention`.
    """

    w: PyTree
    indexer: PyTree | None
    q: Float[Array, "b t n h+r"]
    latent: Float[Array, "b t c+r"]
    x: Float[Array, "b t d"]
    c_q: Float[Array, "b t q"]
    selection: Selection
    context: ForwardContext
    is_full: bool | Bool[Array, ""]
    index_loss_weight: float | Float[Array, ""]
    window: int | None

    def index_keys(self) -> Float[Array, "b t j"]:
        """Returns the index keys of this device's tokens."""
        context = self.context
        return index_keys(self.indexer, self.x, context.cos, context.sin, context.cfg)

    def index_with(self, keys: Float[Array, "b s j"] | QuantizedVectors) -> Index:
        """Returns the index of this device's queries over these keys."""
        context, w = self.context, self.indexer
        queries = index_queries(w, self.x, self.c_q, context.cos, context.sin, context.cfg)
        return Index(*queries, keys)


def attention(
    w: PyTree,
    indexer: PyTree | None,
    x: Float[Array, "b t d"],
    selection: Selection,
    cache: LayerCache | None,
    context: ForwardContext,
    is_full: bool | Bool[Array, ""] = True,
    index_loss_weight: float | Float[Array, ""] = 1.0,
    window: int | None = None,
) -> LayerOutput:
    """Runs MLA over this device's queries and all devices' keys.

    indexer: weights of the layer's indexer; None: the layer has none. The other arguments are those of
    `block` and `mla`.
    """
    c_q, q, latent, _ = mla_prologue(
        x,
        w,
        context.cos,
        context.sin,
        eps=context.cfg.latent_norm_eps,
        # Without a cache a gradient may be taken, and the Pallas forms have none.
        implementation="xla" if cache is None else context.execution.kernels,
    )
    # No gradient flows between trunk and indexer, in either direction.
    index_x, index_c_q = lax.stop_gradient((x, c_q))
    projections = _Projections(
        w=w,
        indexer=indexer,
        q=q,
        latent=latent,
        x=index_x,
        c_q=index_c_q,
        selection=selection,
        context=context,
        is_full=is_full,
        index_loss_weight=index_loss_weight,
        window=window,
    )
    if cache is None:
        return _attend_without_cache(projections)
    if context.paging is None:
        return _attend_contiguous_cache(projections, cache)
    if context.paging.should_gather_pages:
        return _prefill_pages(projections, cache, context.paging)
    return _decode_pages(projections, cache, context.paging)


def _attend_without_cache(p: _Projections) -> LayerOutput:
    """Attends to the keys of all devices' tokens."""
    return _attend(p, p.context.region.gather_sequence(p.latent), None, None)


def _attend_contiguous_cache(p: _Projections, cache: LayerCache) -> LayerOutput:
    """Attends to all slots of a contiguous cache, with the new tokens in it."""
    put = functools.partial(write, length=p.context.start)
    cache = jax.tree.map(put, cache, _new_entries(p, cache))
    assert not isinstance(cache.latent, WordRows), "only pages hold rows of words"
    return _attend(p, cache.latent, cache.idx_k, cache)


def _prefill_pages(p: _Projections, cache: LayerCache, paging: Paging) -> LayerOutput:
    """Attends to one copy of a single row's pages, for many queries."""
    cache = _write_pages(p, cache, paging)
    latent, idx_k = jax.tree.map(paging.gather_row, cache)
    latent = latent.rows() if isinstance(latent, WordRows) else latent
    return _attend(p, latent, idx_k, cache)


def _decode_pages(p: _Projections, cache: LayerCache, paging: Paging) -> LayerOutput:
    """Attends to selected keys that are fetched from the pages, for few queries of each row."""
    context, selection = p.context, p.selection
    cache = _write_pages(p, cache, paging)
    if not context.is_sparse:
        topk = paging.visible_keys(context.num_keys)
    elif cache.idx_k is not None:
        index = quantize_queries_like_keys(p.index_with(cache.idx_k))
        with jax.named_scope("indexer"):
            topk = paged_lightning_indexer(
                index.q,
                index.w,
                index.k,
                paging.tables,
                paging.positions[:, -1] + 1,
                context.index_topk,
                page_scales=index.k_scale,
                implementation=context.execution.kernels,
            )
        selection = Selection(topk, None)
    else:
        topk = selection.topk
        assert topk is not None, "a layer without an indexer follows one with an indexer"
    y = paged_mla(p.w, p.q, cache.latent, paging.tables, topk, context.cfg, context.execution)
    return LayerOutput(y, selection, cache, LayerStats(jnp.zeros((), accum_dtype(p.x.dtype))))


def _new_entries(p: _Projections, cache: LayerCache) -> LayerCache:
    """Returns what the new tokens add to a cache, in the cache's storage format."""
    idx_k = None if cache.idx_k is None else p.index_keys()
    return LayerCache(p.latent, idx_k).with_layout_of(cache)


def _write_pages(p: _Projections, cache: LayerCache, paging: Paging) -> LayerCache:
    put = functools.partial(paging.write, kernels=p.context.execution.kernels)
    return jax.tree.map(put, cache, _new_entries(p, cache))


def _attend(
    p: _Projections,
    latent: Float[Array, "b s c+r"],
    idx_k: Float[Array, "b s j"] | QuantizedVectors | None,
    cache: LayerCache | None,
) -> LayerOutput:
    """Selects keys, attends to them, and computes the indexer's loss where indexers are trained.

    idx_k: index keys; None: those of all devices' tokens are computed. cache: the layer's new cache.
    """
    context = p.context
    trains_indexer = context.index_weight is not None
    # Selection: by this layer's indexer, or that of the nearest earlier full layer.
    selection = p.selection
    if (context.is_sparse or trains_indexer) and p.indexer is not None:
        select = functools.partial(_select, p, idx_k)
        if p.is_full is True:
            selection = select()
        else:
            selection = lax.cond(p.is_full, select, lambda: p.selection)
        if context.is_sparse:
            selection = selection._replace(topk=checkpoint_name(selection.topk, "topk"))
    # Attention, and the loss of the indexer.
    queries = Queries(p.q, context.start, context.segments)
    keys = Keys(latent, context.key_segments)
    topk = selection.topk if context.is_sparse else None
    attended = mla(p.w, queries, keys, context.cfg, context.execution, topk, p.window)
    stats = LayerStats(attended.max_logit)
    if trains_indexer:
        assert selection.index is not None, "indexers are trained, and no layer has one"
        loss = _index_loss(p, latent, attended, topk, selection.index)
        stats = stats._replace(index_loss=loss)
    return LayerOutput(attended.y, selection, cache, stats)


@jax.named_scope("indexer")
def _select(p: _Projections, idx_k: Float[Array, "b s j"] | QuantizedVectors | None) -> Selection:
    """Returns the keys that the layer's indexer selects; all of them where attention is dense."""
    context = p.context
    if idx_k is None:
        idx_k = context.region.gather_sequence(p.index_keys())
    index, topk = p.index_with(idx_k), None
    if context.is_sparse:
        plain = quantize_queries_like_keys(index)
        index = Index(plain.q, plain.w, plain.k)
        topk = lightning_indexer(
            plain.q,
            plain.w,
            plain.k,
            context.index_topk,
            k_scale=plain.k_scale,
            start=context.start,
            q_segments=context.segments,
            k_segments=context.key_segments,
            block=context.execution.query_block,
            implementation=context.execution.kernels,
        )
    return Selection(topk, index if context.should_keep_index else None)


def _index_loss(
    p: _Projections,
    latent: Float[Array, "b s c+r"],
    attended: AttentionOutput,
    topk: Int[Array, "b t k"] | None,
    index: Index,
) -> Float[Array, ""]:
    """Returns the weighted loss of an index against this layer's attention; it is skipped for weight 0."""
    context, weight, query_weight = p.context, p.index_loss_weight, p.context.index_weight
    assert query_weight is not None, "indexers are not trained"

    def loss():
        q, k = attended.q, attended.k
        if topk is not None and k.shape[2] > 1:
            q, k = absorbed_queries(p.w, p.q, context.cfg), latent[:, :, None]
        return index_loss(
            index,
            *lax.stop_gradient((q, k, attended.lse)),
            weight * query_weight,
            context.cfg,
            context.execution,
            topk=topk,
            start=context.start,
            segments=(context.segments, context.key_segments),
        )

    def zero():
        return jnp.zeros((), attended.lse.dtype)

    if isinstance(weight, float):
        return loss() if weight else zero()
    return lax.cond(weight > 0, loss, zero)
