"""Measures how few keys hold a query's attention mass, and how much of it an indexer's selection covers.

The mass is p_t, the target of the indexers (model/indexer.py): the attention probabilities over all visible keys, summed
over heads and normalised. The measures are:

- the share inside the indexer's k keys,
- its upper bound, the share inside the best k keys,
- a baseline without an indexer, the share inside the last k keys,
- how many keys hold 90% and 99% of the mass; GLM-5 2.1.1 calls the other keys redundant.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.evals.batches import batches
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.block import block
from glm5_jax.model.context import ForwardContext, make_context
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Index, Selection, index_keys, index_queries
from glm5_jax.model.mla import AttentionOutput, Keys, Queries, mla
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import Region
from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.index_scores import index_scores
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.pointwise import rms_norm
from pallas_kernels.quantized_vectors import QuantizedVectors
from pallas_kernels.summed_attention_probs import summed_attention_probs


@dataclasses.dataclass(kw_only=True, frozen=True)
class MassConfig:
    """Options of the measurement. Raises ValueError if a value is out of range.

    Attributes:
      top_k: numbers of selected keys (GLM-5 2.1.1 selects 2048).
      levels: shares of the mass for which the keys that hold it are counted.
      edges: ascending borders of the buckets of visible keys, at least 1; empty: powers of two, and the rows'
        length + 1.
    """

    top_k: tuple[int, ...] = (2048,)
    levels: tuple[float, ...] = (0.9, 0.99)
    edges: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.top_k or min(self.top_k) < 1:
            raise ValueError(f"top_k is {self.top_k}; name at least one positive number of keys")
        if not all(0 < level < 1 for level in self.levels):
            raise ValueError(f"levels are {self.levels}; they must lie between 0 and 1")
        if self.edges and (len(self.edges) < 2 or self.edges[0] < 1):
            raise ValueError(f"edges are {self.edges}; give at least two, from 1 on")
        if any(a >= b for a, b in zip(self.edges, self.edges[1:])):
            raise ValueError(f"edges are {self.edges}; they must ascend")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mass:
    """Means over the queries of a layer that see start .. end - 1 keys, their own included.

    Attributes:
      layer: number of the layer.
      start, end: borders of the number of visible keys.
      selected, best, recent: shares of the mass inside the indexer's keys, the best ones and the last ones, by
        `MassConfig.top_k`; 1 where fewer are visible.
      keys: number of the best keys that hold each share of `MassConfig.levels`.
      redundant: share of the visible keys that is not needed for each of them.
    """

    layer: int
    start: int
    end: int
    selected: tuple[float, ...]
    best: tuple[float, ...]
    recent: tuple[float, ...]
    keys: tuple[float, ...]
    redundant: tuple[float, ...]


class AttentionInputs(NamedTuple):
    """Inputs of a layer's attention.

    Attributes:
      queries: [b t n h+r].
      latent: keys and values, [b t c+r].
      index: queries and keys of the layer's indexer; None: the layer has none.
    """

    queries: jax.Array
    latent: jax.Array
    index: Index | None


def attention_inputs(w: PyTree, x: jax.Array, context: ForwardContext) -> AttentionInputs:
    """Computes the attention inputs of a layer with weights w and input x [b t d], like `model.attention.attention`."""
    cfg, turns = context.cfg, (context.cos, context.sin)
    normed = rms_norm(x, w["attn_norm"], cfg.rms_norm_eps)
    c_q, q, latent, _ = mla_prologue(
        normed, w["attn"], *turns, eps=cfg.latent_norm_eps, implementation=context.execution.kernels
    )
    if "indexer" not in w:
        return AttentionInputs(q, latent, None)
    weights = w["indexer"]
    queries = index_queries(weights, normed, c_q, *turns, cfg)
    return AttentionInputs(q, latent, Index(*queries, index_keys(weights, normed, *turns, cfg)))


def attention_mass(
    params: PyTree,
    cfg: ModelConfig,
    tokens: np.ndarray,
    config: MassConfig,
    *,
    batch_size: int = 1,
    execution: ExecutionConfig = ExecutionConfig(),
) -> list[Mass]:
    """Measures the attention mass of every layer by visible keys, on rows int32[n t] of one document each.

    The layers run as in the model, dense or sparse. In both cases the measured attention is the one over all visible keys.
    An indexer that serves several layers is compared with each of them. Time and memory are those of blocks of
    execution.query_block queries.

    Raises ValueError for a model without indexers or with layers of other kinds, and for edges beyond the rows.
    """
    if cfg.index_topk is None or cfg.projections != "mla" or {*cfg.layer_kinds} != {"full"}:
        raise ValueError(
            f"index_topk is {cfg.index_topk}, layers are {cfg.projections!r} and {cfg.layer_kinds}; "
            "attention mass is measured on MLA in every layer, with indexers"
        )
    t = tokens.shape[1]
    edges = config.edges or (*(2**i for i in range(math.floor(math.log2(t)) + 1)), t + 1)
    if edges[-1] > t + 1:
        raise ValueError(f"edges {edges} exceed rows of {t} tokens, whose last query sees {t} keys")
    layers = jax.jit(glm5.unstack, static_argnums=1)(params, cfg)
    measures = []
    for batch, count in batches(tokens, batch_size):
        measures.append(measure_layers(layers, batch, cfg, config, execution)[:, :count])
    # [l rows t measures]
    return _by_bucket(np.concatenate(measures, axis=1).astype(np.float64), config, edges)


def measure_layers(
    params: PyTree,
    tokens: np.ndarray,
    cfg: ModelConfig,
    config: MassConfig,
    execution: ExecutionConfig,
) -> np.ndarray:
    """Returns float[l b t measures] of the layers of an unstacked tree; layers of a stack share a program."""
    x, empty = _embed(params, tokens, cfg, execution), (None, Selection(None, None))
    carried, measures = empty, []
    for name, layers in glm5.stacks(cfg):
        for layer, w in zip(layers, params[name]):
            # A layer with an indexer ignores the carried values. Inputs of one structure let it compile once.
            inputs = empty if layer in cfg.full_layers else carried
            x, *carried, of_layer = measure_layer(w, x, *inputs, name, cfg, config, execution)
            measures.append(np.asarray(of_layer))
    return np.stack(measures)


@functools.partial(jax.jit, static_argnames=("cfg", "execution"))
def _embed(params, tokens, cfg, execution):
    return vocabulary.embed(params, WeightGatherer(cfg, Region(), execution), tokens)


@functools.partial(jax.jit, static_argnames=("name", "cfg", "config", "execution"))
def measure_layer(
    w: PyTree,
    x: jax.Array,
    index: Index | None,
    selection: Selection,
    name: str,
    cfg: ModelConfig,
    config: MassConfig,
    execution: ExecutionConfig,
) -> tuple[jax.Array, Index, Selection, jax.Array]:
    """Runs a layer, and returns (output, index, selection, measures [b t ...]).

    index, selection: those of the last layer with an indexer.
    """
    w = WeightGatherer(cfg, Region(), execution)(name, w, sliced=True)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    context, _ = make_context(positions, None, None, cfg, execution, Region())
    inputs = attention_inputs(w, x, context)
    index = inputs.index or index
    attended = mla(
        w["attn"], Queries(inputs.queries, 0, None), Keys(inputs.latent, None), cfg, execution
    )
    assert index is not None, "the first layer has an indexer"
    measures = _measure(attended, index, config, cfg, execution)
    x, selection, _, _ = block(w, x, selection, None, context)
    return x, index, selection, measures


def _measure(
    attended: AttentionOutput, index: Index, config: MassConfig, cfg, execution: ExecutionConfig
):
    """Returns wide[b t 3 top_k + levels] per query: selected, best and recent by top_k, then keys by levels."""
    idx_k = index.k
    assert not isinstance(idx_k, QuantizedVectors), "only caches hold keys in 8 bits"
    t = idx_k.shape[1]

    def measure_block(args):
        first, q, lse, idx_q, idx_w = args
        rest = {"scale": cfg.softmax_scale, "start": first, "implementation": execution.kernels}
        p = summed_attention_probs(q, attended.k, lse, **rest)
        scores = index_scores(idx_q, idx_w, idx_k, implementation=execution.kernels)
        return shares(p, scores, first + 1 + jnp.arange(q.shape[1], dtype=jnp.int32), config)

    parts = []
    # All keys for every block, because a program per length would be slower.
    for run in query_runs(t, t, None, execution.query_block):
        firsts = run.first + run.size * jnp.arange(run.count, dtype=jnp.int32)
        queries = (split(x, run, 1) for x in (attended.q, attended.lse, index.q, index.w))
        parts.append(join(lax.map(measure_block, (firsts, *queries)), 1))
    return jnp.concatenate(parts, axis=1)


def shares(p: jax.Array, scores: jax.Array, visible: jax.Array, config: MassConfig) -> jax.Array:
    """Returns the measures wide[b t 3 top_k + levels], in the order of `Mass`.

    p: masses [b t s], zero where a key is not visible. scores: index scores [b t s]. visible: number of keys that a
    query sees, the first ones, int[t].
    """
    s = p.shape[-1]
    p = p / jnp.sum(p, axis=-1, keepdims=True)
    position = jnp.arange(s, dtype=jnp.int32)
    # Select like the indexer: NaN counts as -inf, and among equal scores the lower index wins, as in a stable sort.
    ranked = jnp.where(position < visible[:, None], -scores, jnp.inf)
    ranked = jnp.where(jnp.isnan(ranked), jnp.inf, ranked)
    _, by_score = lax.sort((ranked, p), num_keys=1, is_stable=True)
    held = jnp.cumsum(jnp.sort(p, axis=-1, descending=True), axis=-1)

    def last(k):
        return jnp.sum(jnp.where(position >= visible[:, None] - k, p, 0), axis=-1)

    ends = jnp.minimum(jnp.asarray(config.top_k), s) - 1
    selected, best = (x[..., ends] for x in (jnp.cumsum(by_score, axis=-1), held))
    recent = jnp.stack([last(k) for k in config.top_k], axis=-1)
    keys = [1 + jnp.sum(held < level, axis=-1).astype(p.dtype) for level in config.levels]
    return jnp.concatenate([selected, best, recent, jnp.stack(keys, axis=-1)], axis=-1)


def _by_bucket(measures: np.ndarray, config: MassConfig, edges: Sequence[int]) -> list[Mass]:
    """Returns the means of measures [l rows t ...] over the rows and over the queries between edges."""
    ks, levels = len(config.top_k), len(config.levels)
    visible = 1 + np.arange(measures.shape[2])
    unneeded = 1 - measures[..., 3 * ks :] / visible[:, None]
    measures = np.concatenate([measures, unneeded], axis=-1).mean(1)
    cuts = np.cumsum([ks, ks, ks, levels])
    masses = []
    for layer, of_layer in enumerate(measures):
        for start, end in zip(edges, edges[1:]):
            means = of_layer[start - 1 : end - 1].mean(0)
            parts = (tuple(part.tolist()) for part in np.split(means, cuts))
            names = ("selected", "best", "recent", "keys", "redundant")
            shares_of_names = dict(zip(names, parts, strict=True))
            masses.append(Mass(layer=layer, start=start, end=end, **shares_of_names))
    return masses
