"""How few keys hold a query's attention, and how much of it an indexer's selection catches.

Measured on p_t, what the indexers learn (model/indexer.py): the attention's probabilities over all visible
keys, summed over heads and normalised. The share of it inside the indexer's k keys, beside the two that
frame it: inside the best k keys, which no selection passes, and inside the last k, for which nobody needs an
indexer. And how many keys hold 90% and 99% of it: the rest is what GLM-5 2.1.1 calls redundant.
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

from glm5_jax.config import ModelConfig
from glm5_jax.core.mesh import Region
from glm5_jax.evals.batches import batches
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.block import Context, block
from glm5_jax.model.indexer import Index, Selection, index_keys, index_queries
from glm5_jax.model.mla import Attended, Keys, Queries, mla
from glm5_jax.model.plan import Plan
from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.head_probs import head_probs
from pallas_kernels.index_scores import index_scores
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.pointwise import rms_norm


@dataclasses.dataclass(frozen=True)
class MassConfig:
    """What is measured. Construction refuses values out of range (ValueError).

    Attributes:
      top_k: numbers of selected keys (GLM-5 2.1.1 selects 2048).
      levels: shares of the mass, for each of which the keys that hold it are counted.
      edges: ascending borders of the buckets of visible keys, 1 the lowest; empty: powers of two, and
        one more than the rows' length.
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


@dataclasses.dataclass(frozen=True)
class Mass:
    """Means over the queries of a layer that see start .. end - 1 keys, themselves included.

    selected, best, recent: shares of the mass by `MassConfig.top_k`, inside the indexer's keys, the best
    ones and the last ones (1 where fewer are visible). keys, redundant: by `MassConfig.levels`, how many of
    the best keys hold that share, and which share of the visible ones is not needed for it.
    """

    layer: int
    start: int
    end: int
    selected: tuple[float, ...]
    best: tuple[float, ...]
    recent: tuple[float, ...]
    keys: tuple[float, ...]
    redundant: tuple[float, ...]


class Looks(NamedTuple):
    """What the attention of a layer is made of, for its own tokens: queries [b t n h+r], latent [b t c+r],
    and what its indexer says of them (None where it has none)."""

    queries: jax.Array
    latent: jax.Array
    index: Index | None


def look(w, x, context: Context) -> Looks:
    """Of a layer with weights w and input x [b t d], as `model.block.attention` makes them."""
    cfg, turns = context.cfg, (context.cos, context.sin)
    normed = rms_norm(x, w["attn_norm"], cfg.rms_norm_eps)
    c_q, q, latent, _ = mla_prologue(
        normed, w["attn"], *turns, eps=cfg.latent_norm_eps, implementation=context.plan.kernels
    )
    if "indexer" not in w:
        return Looks(q, latent, None)
    own = w["indexer"]
    queries = index_queries(own, normed, c_q, *turns, cfg)
    return Looks(q, latent, Index(*queries, index_keys(own, normed, *turns, cfg)))


def attention_mass(
    params,
    cfg: ModelConfig,
    tokens: np.ndarray,
    config: MassConfig,
    *,
    batch_size: int = 1,
    plan: Plan = Plan(),
) -> list[Mass]:
    """Of every layer, by visible keys, on rows int32[n t] of one document each.

    Layers follow each other as the model runs them, dense or sparse; what is measured is in either case the
    attention that they would have over all visible keys. An indexer that serves several layers is
    compared with each of them. Work and memory are those of blocks of plan.query_block queries.
    ValueError for a model without indexers or with layers of other kinds, and for edges beyond the rows.
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
    found = []
    for batch, count in batches(tokens, batch_size):
        found.append(measure_layers(layers, batch, cfg, config, plan)[:, :count])
    # [l rows t measures]
    return _by_bucket(np.concatenate(found, axis=1).astype(np.float64), config, edges)


def measure_layers(params, tokens, cfg: ModelConfig, config: MassConfig, plan: Plan) -> np.ndarray:
    """float[l b t measures] of the layers of an unstacked tree; those of a stack share a program."""
    x, own, found = _embed(params, tokens, cfg, plan), (None, Selection(None, None)), []
    served = own
    for name, layers in glm5.stacks(cfg):
        for layer, w in zip(layers, params[name]):
            # A layer that has an indexer ignores what it is given: of one structure, it compiles once.
            given = own if layer in cfg.full_layers else served
            x, *served, measures = measure_layer(w, x, *given, name, cfg, config, plan)
            found.append(np.asarray(measures))
    return np.stack(found)


@functools.partial(jax.jit, static_argnames=("cfg", "plan"))
def _embed(params, tokens, cfg, plan):
    return vocabulary.embed(params, glm5.Weights(cfg, Region(), plan), tokens)


@functools.partial(jax.jit, static_argnames=("name", "cfg", "config", "plan"))
def measure_layer(w, x, index, selection, name, cfg, config, plan):
    """(output, index, selection, measures [b t ...]) of a layer; index and selection: of the nearest
    earlier one that has an indexer."""
    w = glm5.Weights(cfg, Region(), plan)(name, w, sliced=True)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    context, _ = glm5.begin(positions, None, None, cfg, plan, Region())
    looks = look(w, x, context)
    index = looks.index or index
    attended = mla(w["attn"], Queries(looks.queries, 0, None), Keys(looks.latent, None), cfg, plan)
    measures = _measure(attended, index, config, cfg, plan)
    x, selection, _, _ = block(w, x, selection, None, context)
    return x, index, selection, measures


def _measure(attended: Attended, index: Index, config: MassConfig, cfg, plan: Plan):
    """wide[b t 3 top_k + levels]: of every query, selected, best and recent by top_k, then keys by levels."""
    t = index.k.shape[1]

    def one(args):
        first, q, lse, idx_q, idx_w = args
        rest = {"scale": cfg.softmax_scale, "start": first, "implementation": plan.kernels}
        p = head_probs(q, attended.k, lse, **rest)
        scores = index_scores(idx_q, idx_w, index.k, implementation=plan.kernels)
        return shares(p, scores, first + 1 + jnp.arange(q.shape[1], dtype=jnp.int32), config)

    parts = []
    for run in query_runs(
        t, t, None, plan.query_block
    ):  # all keys: a program for every length is slower
        firsts = run.first + run.size * jnp.arange(run.count, dtype=jnp.int32)
        queries = (split(x, run, 1) for x in (attended.q, attended.lse, index.q, index.w))
        parts.append(join(lax.map(one, (firsts, *queries)), 1))
    return jnp.concatenate(parts, axis=1)


def shares(p, scores, visible, config: MassConfig):
    """wide[b t 3 top_k + levels] of masses p [b t s], zero where a key is not visible, and index scores [b t s].

    visible int[t]: how many keys a query sees, the first ones. The order of the measures is that of `Mass`.
    """
    s = p.shape[-1]
    p = p / jnp.sum(p, axis=-1, keepdims=True)
    place = jnp.arange(s, dtype=jnp.int32)
    # As the indexer selects: NaN is -inf, and equal scores go to the lower index, which a stable sort does.
    ranked = jnp.where(place < visible[:, None], -scores, jnp.inf)
    ranked = jnp.where(jnp.isnan(ranked), jnp.inf, ranked)
    _, by_score = lax.sort((ranked, p), num_keys=1, is_stable=True)
    held = jnp.cumsum(jnp.sort(p, axis=-1, descending=True), axis=-1)

    def last(k):
        return jnp.sum(jnp.where(place >= visible[:, None] - k, p, 0), axis=-1)

    ends = jnp.minimum(jnp.asarray(config.top_k), s) - 1
    selected, best = (x[..., ends] for x in (jnp.cumsum(by_score, axis=-1), held))
    recent = jnp.stack([last(k) for k in config.top_k], axis=-1)
    keys = [1 + jnp.sum(held < level, axis=-1).astype(p.dtype) for level in config.levels]
    return jnp.concatenate([selected, best, recent, jnp.stack(keys, axis=-1)], axis=-1)


def _by_bucket(measures: np.ndarray, config: MassConfig, edges: Sequence[int]) -> list[Mass]:
    """Means of measures [l rows t ...] over the rows and over the queries between edges."""
    ks, levels = len(config.top_k), len(config.levels)
    visible = 1 + np.arange(measures.shape[2])
    unneeded = 1 - measures[..., 3 * ks :] / visible[:, None]
    measures = np.concatenate([measures, unneeded], axis=-1).mean(1)
    cuts = np.cumsum([ks, ks, ks, levels])
    found = []
    for layer, of_layer in enumerate(measures):
        for start, end in zip(edges, edges[1:]):
            means = of_layer[start - 1 : end - 1].mean(0)
            parts = (tuple(part.tolist()) for part in np.split(means, cuts))
            found.append(Mass(layer, start, end, *parts))
    return found
