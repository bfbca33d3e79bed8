"""Kinds of attention that a layer may have, by name: their functions and their weights.

`block` runs the kind that the config gives a layer. MLA is `attention.attention`; the alternatives are in
`ablations`. A new kind is a name in `config.LAYER_KINDS` and a function in `ATTENTION`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.ablations.gdn import Gdn
from glm5_jax.model.ablations.gqa import Gqa
from glm5_jax.model.ablations.layer import (
    Alternative,
    grouped_query_attention,
    linear_attention,
)
from glm5_jax.model.attention import attention
from glm5_jax.model.cache import AnyLayerCache, KeyValues, LayerCache, RecurrentState
from glm5_jax.model.context import ForwardContext
from glm5_jax.model.indexer import Selection
from glm5_jax.model.layer_output import LayerOutput, LayerStats
from glm5_jax.model.mla import Mla
from glm5_jax.parallel.params import Declare


class LayerInputs(NamedTuple):
    """Inputs of a layer's attention.

    Attributes:
      w: weights of the layer.
      x: normed input.
      selection, cache, context, is_full, index_loss_weight: as in `block`.
    """

    w: PyTree
    x: Float[Array, "b t d"]
    selection: Selection
    cache: AnyLayerCache | None
    context: ForwardContext
    is_full: bool | Bool[Array, ""]
    index_loss_weight: float | Float[Array, ""]


def softmax_attention(inputs: LayerInputs, window: int | None = None) -> LayerOutput:
    """Runs MLA or grouped-query attention, by the config's projections.

    window: number of latest keys that each query is restricted to; None: all.
    """
    w, x, selection, cache, context, is_full, index_loss_weight = inputs
    if context.cfg.projections == "gqa":
        assert cache is None or isinstance(cache, KeyValues)
        alternative = grouped_query_attention(w["attn"], x, cache, context, window)
        return _pass_selection(alternative, selection)
    assert cache is None or isinstance(cache, LayerCache)
    return attention(
        w["attn"],
        w.get("indexer"),
        x,
        selection,
        cache,
        context,
        is_full,
        index_loss_weight,
        window,
    )


def window_attention(inputs: LayerInputs) -> LayerOutput:
    """Runs `softmax_attention` over the latest `cfg.sliding_window` keys."""
    return softmax_attention(inputs, inputs.context.cfg.sliding_window)


def gated_delta_net(inputs: LayerInputs) -> LayerOutput:
    """Runs Gated DeltaNet on the layer's projections."""
    return _recurrent(inputs, inputs.w["gdn"])


def simple_gated_delta_net(inputs: LayerInputs) -> LayerOutput:
    """Runs SimpleGDN on the layer's projections."""
    return _recurrent(inputs, None)


def _recurrent(inputs: LayerInputs, gates: PyTree | None) -> LayerOutput:
    cache = inputs.cache
    assert cache is None or isinstance(cache, RecurrentState)
    alternative = linear_attention(inputs.w["attn"], gates, inputs.x, cache, inputs.context)
    return _pass_selection(alternative, inputs.selection)


def _pass_selection(out: Alternative, selection: Selection) -> LayerOutput:
    """Returns the output of an attention without indexer, which passes the selection on."""
    return LayerOutput(out.y, selection, out.cache, LayerStats(out.max_logit))


# By the names of `config.LAYER_KINDS`.
ATTENTION: dict[str, Callable[[LayerInputs], LayerOutput]] = {
    "full": softmax_attention,
    "window": window_attention,
    "gdn": gated_delta_net,
    "simple_gdn": simple_gated_delta_net,
}
# Weights that layers of a kind have in addition to their projections, by kind.
ADDITIONAL_WEIGHTS: dict[str, Callable[[Declare], nnx.Module]] = {"gdn": Gdn}


@jax.named_scope("attention")
def run_attention(kind: str, inputs: LayerInputs) -> LayerOutput:
    """Runs the attention of a kind."""
    return ATTENTION[kind](inputs)


def declare_projections(declare: Declare, cfg: ModelConfig) -> nnx.Module:
    """Declares the weights that every kind of attention reads: MLA's or GQA's, by the config."""
    return Gqa(declare) if cfg.projections == "gqa" else Mla(declare, cfg)
