"""Looks inside a model: runs it layer by layer on one text, and returns what each layer computes."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from glm5_jax.evals.attention_mass import attention_inputs
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.block import block_jit
from glm5_jax.model.context import make_context
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.glm5 import Glm5
from glm5_jax.model.indexer import Selection
from glm5_jax.model.mla import Keys, Queries, mla
from glm5_jax.model.rotated_norm import apply_final_norm
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import Region
from pallas_kernels.index_scores import index_scores
from pallas_kernels.quantized_vectors import QuantizedVectors
from pallas_kernels.summed_attention_probs import summed_attention_probs

EXECUTION = ExecutionConfig()


class LayerView(NamedTuple):
    """Attention, routing and prediction of one layer for t tokens.

    Attributes:
      attention: probabilities of dense attention over the keys, mean over heads; rows are queries.
      scores: scores of the indexer, -inf for keys after the query; None: the layer has no indexer.
      experts: chosen experts of each token; None: the layer has none.
      log_probs: log-probabilities of the next token, if the layer were the last one.
    """

    attention: Float[np.ndarray, "t t"]
    scores: Float[np.ndarray, "t t"] | None
    experts: Int[np.ndarray, "t a"] | None
    log_probs: Float[np.ndarray, "t v"]


def view_layers(model: Glm5, ids: Sequence[int]) -> list[LayerView]:
    """Returns the view of every layer of a model on a text of one document."""
    cfg, region = model.cfg, Region()
    params = glm5.unstack(glm5.params_of(model), cfg)
    weights = WeightGatherer(cfg, region, EXECUTION)
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    context, _ = make_context(positions, None, None, cfg, EXECUTION, region)
    context = dataclasses.replace(context, capture_choices=True)
    x, selection = vocabulary.embed(params, weights, jnp.asarray([ids])), Selection(None, None)
    views = []
    for name, layers in glm5.stacks(cfg):
        for layer, w in zip(layers, params[name], strict=True):
            w = weights(name, w, sliced=True)
            attention, scores = _attention(w, x, context)
            is_full = layer in cfg.full_layers
            x, selection, _, stats = block_jit(w, x, selection, None, context, is_full=is_full)
            experts = None if stats.routing is None else np.asarray(stats.routing.expert_ids)
            if experts is not None:
                experts = experts.reshape(len(ids), -1)
            views.append(LayerView(attention, scores, experts, _log_probs(params, x, weights, cfg)))
    return views


def _attention(w, x, context):
    cfg = context.cfg
    inputs = attention_inputs(w, x, context)
    attended = mla(
        w["attn"], Queries(inputs.queries, 0, None), Keys(inputs.latent, None), cfg, EXECUTION
    )
    masses = summed_attention_probs(attended.q, attended.k, attended.lse, scale=cfg.softmax_scale)
    attention = np.asarray(masses[0] / masses[0].sum(-1, keepdims=True))
    if inputs.index is None:
        return attention, None
    index = inputs.index
    assert not isinstance(index.k, QuantizedVectors), "keys of training are not quantised"
    scores = np.array(index_scores(index.q, index.w, index.k)[0])
    scores[np.triu_indices(len(scores), 1)] = -np.inf
    return attention, scores


def _log_probs(params, x, weights, cfg):
    norm = weights("final_norm", params["final_norm"])
    hidden = apply_final_norm(x, norm, cfg.rms_norm_eps)
    logits = np.asarray(vocabulary.compute_logits(params, hidden, weights))[0]
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)
