"""The decoder on one device's tokens: embedding, layer stacks and final norm, inside a manual region.

`trunk` runs it for `glm5.forward`, for the training loss and for log-probs. Layers run one by one with a cache or
with unstacked weights. Otherwise each stack is one `lax.scan`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.block import KindSwitch, block, block_jit
from glm5_jax.model.cache import AnyLayerCache, Cache, PagedCache
from glm5_jax.model.context import ForwardContext, make_context
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Index, Selection, index_loss_weights
from glm5_jax.model.layer_output import LayerStats, concatenate_stats
from glm5_jax.model.parameters import OWNED_BY_SOME_LAYERS, layers_with, stacks, unstack
from glm5_jax.model.rotated_norm import apply_final_norm
from glm5_jax.model.vocabulary import embed
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import AXES, Region
from pallas_kernels.numerics import accum_dtype


class Trunk(NamedTuple):
    """Result of the decoder on one device.

    Attributes:
      hidden: hidden state after the final norm.
      cache: cache with the new tokens; None without one.
      stats: `LayerStats` of this device with a leading l. Fields of experts cover MoE layers only.
      context: inputs for the MTP block.
    """

    hidden: Float[Array, "b t d"]
    cache: Cache | PagedCache | None
    stats: LayerStats
    context: ForwardContext


class _State(NamedTuple):
    """State between two layers.

    Attributes:
      x: input of the next layer.
      selection: selected keys of the nearest earlier full layer.
      previous_x: input of the layer before; None before the first.
    """

    x: Float[Array, "b t d"]
    selection: Selection
    previous_x: Float[Array, "b t d"] | None = None


def trunk(
    params: PyTree,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"] | None,
    cache: Cache | PagedCache | None,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    region: Region,
    index_weight: Float[Array, "b t"] | None = None,
    index_target: str = "own_layer",
    capture_choices: bool = False,
) -> Trunk:
    """Runs the decoder on one device's tokens. See `glm5.forward` for the other arguments.

    Args:
      index_weight: weight of each query in the indexers' loss; None: the loss is not computed.
      index_target: layers whose attention an indexer is trained on (`index_loss_weights`).
      capture_choices: as in `ForwardContext`.
    """
    weights = WeightGatherer(cfg, region, execution)
    context, cache = make_context(positions, segments, cache, cfg, execution, region)
    context = dataclasses.replace(
        context, index_weight=index_weight, capture_choices=capture_choices
    )
    x = embed(params, weights, tokens, execution.vocab_block)
    selection = Selection(None, None)
    if len(cfg.full_layers) < cfg.num_hidden_layers:
        selection = initial_selection(tokens.shape, x.dtype, context)
    state = _State(x, selection)
    loss_weights = index_loss_weights(cfg, index_target)
    layer_caches, stats = [], []
    for name, layers in stacks(cfg):
        of_layers = [loss_weights[layer] for layer in layers]
        if cache is None and not isinstance(params[name], list):
            state, stack_stats = _scan(
                name, params[name], layers, state, of_layers, weights, context
            )
            stats.append(stack_stats)
        else:
            stack = unstack({name: params[name]}, cfg)[name]
            state, new_caches, layer_stats = _run_one_by_one(
                name, stack, layers, state, cache, of_layers, weights, context
            )
            layer_caches += new_caches
            stats += layer_stats
    # Final norm; statistics of the stacks concatenated.
    norm = weights("final_norm", params["final_norm"])
    if cache is not None:
        cache = cache.advance(layer_caches, context.new_segments)
    joined = concatenate_stats(stats)
    return Trunk(apply_final_norm(state.x, norm, cfg.rms_norm_eps), cache, joined, context)


def initial_selection(
    shape: tuple[int, ...], dtype: DTypeLike, context: ForwardContext
) -> Selection:
    """Returns the initial selection of the layer scan: zeros, overwritten by the first layer's indexer.

    shape: (rows, tokens). dtype: dtype of the index.
    """
    cfg, topk, index = context.cfg, None, None
    i, j = cfg.index_n_heads, cfg.index_head_dim
    if context.is_sparse:
        topk = jnp.zeros((*shape, min(context.index_topk, context.num_keys)), jnp.int32)
    if context.should_keep_index:
        keys = jnp.zeros((shape[0], context.num_keys, j), dtype)
        index = Index(
            jnp.zeros((*shape, i, j), dtype), jnp.zeros((*shape, i), accum_dtype(dtype)), keys
        )
    return Selection(topk, index)


def _run_one_by_one(
    name: str,
    stack: list[PyTree],
    layers: range,
    state: _State,
    cache: Cache | PagedCache | None,
    loss_weights: Sequence[float],
    weights: WeightGatherer,
    context: ForwardContext,
) -> tuple[_State, list[AnyLayerCache | None], list[LayerStats]]:
    """Runs the layers of an unstacked stack; returns (state, the layers' caches, their statistics).

    loss_weights: weight of each layer in the loss of its index.
    """
    run = block if cache is None else block_jit
    gathers = bool(context.region.nontrivial_axes(AXES))
    caches, stats = [], []
    for layer, w, loss_weight in zip(layers, stack, loss_weights):
        x, selection, previous_x = state
        layer_cache = None if cache is None else cache.layers[layer]
        if cache is not None and gathers and previous_x is not None:
            # Starts gathering when the previous layer has begun: XLA would gather as many layers
            # ahead as fit into memory.
            w, _ = lax.optimization_barrier((w, previous_x))
        w, kind = weights(name, w, sliced=True), context.cfg.layer_kinds[layer]
        out = run(w, x, selection, layer_cache, context, True, loss_weight, kind)
        state = _State(out.x, out.selection, x)
        caches.append(out.cache)
        stats.append(jax.tree.map(lambda a: a[None], out.stats))
    return state, caches, stats


def _scan(
    name: str,
    stack: dict[str, PyTree],
    layers: range,
    state: _State,
    loss_weights: Sequence[float],
    weights: WeightGatherer,
    context: ForwardContext,
) -> tuple[_State, LayerStats]:
    """Runs the layers of one stack under `lax.scan`, so that 75 layers compile like one.

    loss_weights: weight of each layer in the loss of its index.
    """
    cfg = context.cfg
    is_full = [layer in cfg.full_layers for layer in layers]
    kinds = [cfg.layer_kinds[layer] for layer in layers]
    kind_names = tuple(dict.fromkeys(kinds))
    body, parts = _split_stack(stack, layers, context)
    # A weight that all layers share is static.
    static_weight = loss_weights[0] if len(set(loss_weights)) == 1 else None
    carried = jax.tree.structure(state.selection)

    def layer(carry, xs: _ScannedLayer):
        x, selection = carry
        w = weights(name, xs.w, sliced=True)
        for part, position in xs.positions.items():
            at = functools.partial(lax.dynamic_index_in_dim, index=position, keepdims=False)
            values = jax.tree.map(at, parts[part].values)
            w[part] = weights(f"{name}/{part}", values, sliced=True)
        out = block(
            w,
            x,
            selection,
            None,
            context,
            True if all(is_full) else xs.is_full,
            xs.loss_weight if static_weight is None else static_weight,
            KindSwitch(kind_names, xs.kind) if len(kind_names) > 1 else kinds[0],
        )
        if jax.tree.structure(out.selection) == carried:
            selection = out.selection
        return (out.x, selection), out.stats

    positions = {part: jnp.asarray(of.positions, jnp.int32) for part, of in parts.items()}
    kind_numbers = jnp.asarray([kind_names.index(kind) for kind in kinds], jnp.int32)
    xs = _ScannedLayer(
        body,
        jnp.asarray(is_full),
        kind_numbers,
        positions,
        jnp.asarray(loss_weights, jnp.float32),
    )
    carry = (state.x, state.selection)
    (x, selection), stats = lax.scan(context.execution.checkpoint(layer), carry, xs)
    return _State(x, selection, state.previous_x), stats


class _ScannedLayer(NamedTuple):
    """Inputs of one step of the layer scan.

    Attributes:
      w: weights that all layers of the stack have.
      is_full: whether the layer's own indexer selects its keys.
      kind: number of its kind of attention.
      positions: positions of its weights in the stacks that only some layers have, by name.
      loss_weight: weight of the layer in the loss of its index.
    """

    w: PyTree
    is_full: Any
    kind: Int[Array, ""]
    positions: dict[str, Int[Array, ""]]
    loss_weight: Float[Array, ""]


class _PartialStack(NamedTuple):
    """Weights that only some layers of a stack have.

    Attributes:
      values: their stack.
      positions: position in it for each layer; that of the nearest earlier owner where a layer has none.
    """

    values: PyTree
    positions: np.ndarray


def _split_stack(
    stack: dict[str, PyTree], layers: range, context: ForwardContext
) -> tuple[dict[str, PyTree], dict[str, _PartialStack]]:
    """Returns (weights that the scan goes over, weights that it indexes in each step).

    Indexers are left out where nothing reads them.
    """
    body, parts = dict(stack), {}
    for part in [name for name in OWNED_BY_SOME_LAYERS if name in stack]:
        owners, values = layers_with(context.cfg, part, layers), body.pop(part)
        if part == "indexer" and not (context.is_sparse or context.index_weight is not None):
            continue
        if len(owners) == len(layers):
            body[part] = values
        else:
            positions = np.maximum(np.cumsum([i in owners for i in layers]) - 1, 0)
            parts[part] = _PartialStack(values, positions)
    return body, parts
