"""One decoder layer: x += Attention(RMSNorm(x)); x += FFN(RMSNorm(x)), with a dense FFN or a mixture of experts.

`block` runs a layer. Its attention is one of `attention_kinds`, its mixture of experts `moe.moe`.
`context.ForwardContext` holds the inputs that all layers of a forward share.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention_kinds import (
    ADDITIONAL_WEIGHTS,
    LayerInputs,
    declare_projections,
    run_attention,
)
from glm5_jax.model.cache import AnyLayerCache
from glm5_jax.model.context import ForwardContext
from glm5_jax.model.experts import Experts
from glm5_jax.model.indexer import Indexer, Selection
from glm5_jax.model.layer_output import LayerOutput
from glm5_jax.model.mlp import Mlp, mlp
from glm5_jax.model.moe import moe
from glm5_jax.model.router import ExpertRouter
from glm5_jax.parallel.params import Declare
from pallas_kernels.pointwise import rms_norm


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
        self.attn = declare_projections(declare.child("attn"), cfg)
        if gdn_layers:
            self.gdn = ADDITIONAL_WEIGHTS["gdn"](declare.stack(gdn_layers).child("gdn"))
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


class KindSwitch(NamedTuple):
    """Attention kind of a scanned layer: `kinds[index]`, chosen at run time."""

    kinds: tuple[str, ...]
    index: Int[Array, ""]


def block(
    w: PyTree,
    x: Float[Array, "b t d"],
    selection: Selection,
    cache: AnyLayerCache | None,
    context: ForwardContext,
    is_full: bool | Bool[Array, ""] = True,
    index_loss_weight: float | Float[Array, ""] = 1.0,
    kind: str | KindSwitch = "full",
) -> LayerOutput:
    """Runs one layer.

    Args:
      selection: selection of the nearest earlier full layer.
      cache: cache of the layer; None in training.
      is_full: whether the layer's own indexer selects its keys; traced in a scanned stack that mixes
        both kinds.
      index_loss_weight: weight of this layer's attention in the loss of its index; 0 skips the loss.
      kind: one of `config.LAYER_KINDS`, or a run-time choice in a scanned stack that has several.
    """
    eps = context.cfg.rms_norm_eps
    # Attention.
    normed = rms_norm(x, w["attn_norm"], eps)
    inputs = LayerInputs(w, normed, selection, cache, context, is_full, index_loss_weight)
    if isinstance(kind, KindSwitch):
        branches = [functools.partial(run_attention, name, inputs) for name in kind.kinds]
        y, selection, cache, stats = lax.switch(kind.index, branches)
    else:
        y, selection, cache, stats = run_attention(kind, inputs)
    if context.capture_choices:
        stats = stats._replace(selection=selection)
    x = x + y
    # Feed-forward.
    normed = rms_norm(x, w["mlp_norm"], eps)
    if "mlp" in w:
        return LayerOutput(x + mlp(w["mlp"], normed, context.region), selection, cache, stats)
    y, load, balance, routing = moe(w, normed, context)
    stats = stats._replace(load=load, balance=balance, routing=routing)
    return LayerOutput(x + y, selection, cache, stats)


# For layers outside a scan: equal layers are traced and lowered once, because 78 times would take minutes.
block_jit = jax.jit(block, static_argnames=("is_full", "index_loss_weight", "kind"))
