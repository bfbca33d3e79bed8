"""Multi-token prediction: one extra layer, run several times with the same weights (paper 2.1).

Step k at position t joins the embedding of token t + k with the normed hidden state of step k - 1
and predicts token t + k + 1. The state that is carried on is the *normed* output, in training and in
drafting alike: engines that mix this up lose their acceptance rate.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from glm5_jax.model.block import Block, Context, block
from glm5_jax.model.indexer import Selection
from glm5_jax.model.turned import read_out
from pallas_kernels.pointwise import rms_norm


class Mtp(nnx.Module):
    """Weights of the multi-token-prediction layer; embedding and head are the trunk's."""

    def __init__(self, declare, cfg):
        self.enorm = declare.ones("enorm", "d")
        self.hnorm = declare.ones("hnorm", "d")
        self.eh_proj = declare.normal("eh_proj", "dd d")
        self.norm = declare.ones("norm", "d")
        indexed = (cfg.num_hidden_layers,) if cfg.index_topk is not None else ()
        self.block = Block(declare.child("block"), cfg, moe=True, full_layers=indexed)


@jax.named_scope("mtp")
def mtp_step(w, hidden, embedded, cache, context: Context):
    """One step: hidden [b t d] (normed, of the trunk or of the step before) and the embeddings
    [b t d] of the tokens that follow -> (normed hidden [b t d], cache, LayerStats)."""
    cfg = context.cfg
    embedded = rms_norm(embedded, w["enorm"], cfg.rms_norm_eps)
    hidden = rms_norm(hidden, w["hnorm"], cfg.rms_norm_eps)
    x = jnp.concatenate([embedded, hidden], axis=-1) @ w["eh_proj"]
    x, _, cache, stats = block(w["block"], x, Selection(None, None), cache, context)
    return read_out(x, w["norm"], cfg.rms_norm_eps), cache, stats
