"""Multi-token prediction: one extra layer that runs several times with the same weights (paper 2.1).

Step k at position t joins two inputs and predicts token t + k + 1:

- the embedding of token t + k,
- the normed hidden state of step k - 1.

Each step passes the *normed* output on, in training and in drafting. Engines that pass on the state
before the norm lose acceptance rate.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.block import Block, block
from glm5_jax.model.cache import AnyLayerCache
from glm5_jax.model.context import ForwardContext
from glm5_jax.model.indexer import Selection
from glm5_jax.model.layer_output import LayerStats
from glm5_jax.model.rotated_norm import apply_final_norm
from glm5_jax.parallel.params import Declare
from pallas_kernels.pointwise import rms_norm


class Mtp(nnx.Module):
    """Weights of the multi-token-prediction layer. Embedding and head are the trunk's."""

    def __init__(self, declare: Declare, cfg: ModelConfig):
        self.enorm = declare.ones("enorm", "d")
        self.hnorm = declare.ones("hnorm", "d")
        self.eh_proj = declare.normal("eh_proj", "dd d")
        self.norm = declare.ones("norm", "d")
        full_layers = (cfg.num_hidden_layers,) if cfg.index_topk is not None else ()
        self.block = Block(declare.child("block"), cfg, is_moe=True, full_layers=full_layers)


@jax.named_scope("mtp")
def mtp_step(
    w: PyTree,
    hidden: Float[Array, "b t d"],
    embedded: Float[Array, "b t d"],
    cache: AnyLayerCache | None,
    context: ForwardContext,
) -> tuple[Float[Array, "b t d"], AnyLayerCache | None, LayerStats]:
    """Runs one MTP step and returns (normed hidden, cache, LayerStats).

    Args:
      hidden: normed hidden state of the trunk or of the previous step.
      embedded: embeddings of the tokens that follow.
      cache: cache of the MTP block; None in training.
    """
    cfg = context.cfg
    embedded = rms_norm(embedded, w["enorm"], cfg.rms_norm_eps)
    hidden = rms_norm(hidden, w["hnorm"], cfg.rms_norm_eps)
    x = jnp.concatenate([embedded, hidden], axis=-1) @ w["eh_proj"]
    x, _, cache, stats = block(w["block"], x, Selection(None, None), cache, context)
    return apply_final_norm(x, w["norm"], cfg.rms_norm_eps), cache, stats
