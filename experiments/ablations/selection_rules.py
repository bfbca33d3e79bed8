"""Defines rules of key selection other than the library's exact one, and the model's forward with any of them.

The library itself has only the exact rule. A layer without an indexer uses the selection that it gets as input, as in
IndexShare, and the rules here use the same way in.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.evals.attention_mass import attention_inputs
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.block import block
from glm5_jax.model.cache import Cache, init_cache, write
from glm5_jax.model.context import make_context
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Index, Selection
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import Region
from pallas_kernels.index_scores import index_scores
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mask import visible
from pallas_kernels.pointwise import rms_norm
from pallas_kernels.quantized_vectors import QuantizedVectors, quantize_vectors

RECALL = 0.95  # the default of lax.approx_max_k
EXECUTION = ExecutionConfig(remat="none")

# (index, position of the first query among the keys, (segments of queries, of keys), k, random key) -> topk [b t k]
Rule = Callable[..., jax.Array]


def keys_of(index: Index) -> jax.Array:
    """Returns the keys [b s j] of an index, which no cache of this module holds in 8 bits."""
    assert not isinstance(index.k, QuantizedVectors), "the rules select from plain keys"
    return index.k


def exact(
    index: Index,
    start: int | jax.Array,
    segments: tuple[jax.Array | None, jax.Array | None],
    k: int,
    key: jax.Array,
) -> jax.Array:
    """Selects as the library does: among equal scores, the lower index."""
    q_segments, keys = segments
    positions = {"start": start, "q_segments": q_segments, "k_segments": keys}
    return lightning_indexer(index.q, index.w, keys_of(index), k, **positions)


def lax_top_k(
    index: Index,
    start: int | jax.Array,
    segments: tuple[jax.Array | None, jax.Array | None],
    k: int,
    key: jax.Array,
) -> jax.Array:
    """Selects by `lax.top_k`, which orders -0.0 below 0.0; the zeros of one query all have the same sign."""
    return _ascending(*lax.top_k(masked_scores(index, start, segments), k))


def random_ties(
    index: Index,
    start: int | jax.Array,
    segments: tuple[jax.Array | None, jax.Array | None],
    k: int,
    key: jax.Array,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Selects exactly, with equal scores in a random order; dtype: rounds the scores first."""
    scores = masked_scores(index, start, segments)
    scores = scores if dtype is None else scores.astype(dtype)
    order = jax.random.bits(key, scores.shape)
    indices = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    best, _, indices = lax.sort((-scores, order, indices), num_keys=2)
    return _ascending(-best[..., :k], indices[..., :k])


def approx_native(
    index: Index,
    start: int | jax.Array,
    segments: tuple[jax.Array | None, jax.Array | None],
    k: int,
    key: jax.Array,
) -> jax.Array:
    """Selects by `lax.approx_max_k` as this platform implements it."""
    scores = masked_scores(index, start, segments)
    return _ascending(*lax.approx_max_k(scores, k, recall_target=RECALL))


def approx_on_tpu(
    index: Index,
    start: int | jax.Array,
    segments: tuple[jax.Array | None, jax.Array | None],
    k: int,
    key: jax.Array,
    size: int,
) -> jax.Array:
    """Emulates `lax.approx_max_k` on a TPU (2206.14286): only the best of every `size` keys is a candidate."""
    scores = masked_scores(index, start, segments)
    padded = jnp.pad(
        scores, ((0, 0), (0, 0), (0, -scores.shape[-1] % size)), constant_values=-jnp.inf
    )
    grouped = padded.reshape(*scores.shape[:2], -1, size)
    values, group = lax.top_k(jnp.max(grouped, axis=-1), k)
    winner = jnp.take_along_axis(jnp.argmax(grouped, axis=-1), group, axis=-1)
    return _ascending(values, group * size + winner)


def group_size(s: int, k: int) -> int:
    """Returns the number of keys of which `lax.approx_max_k` keeps one on a TPU for the k best of s; 1 where it is exact."""
    search = functools.partial(lax.approx_max_k, k=k, recall_target=RECALL, aggregate_to_topk=False)
    groups = jax.eval_shape(search, jax.ShapeDtypeStruct((1, s), jnp.float32))[0].shape[-1]
    return -(-s // groups)


def in_bfloat16(
    index: Index,
    start: int | jax.Array,
    segments: tuple[jax.Array | None, jax.Array | None],
    k: int,
    key: jax.Array,
) -> jax.Array:
    """Selects exactly, from queries and keys rounded to bfloat16."""
    half = jnp.bfloat16
    rounded = Index(index.q.astype(half), index.w, keys_of(index).astype(half))
    return exact(rounded, start, segments, k, key)


def in_float8(
    index: Index,
    start: int | jax.Array,
    segments: tuple[jax.Array | None, jax.Array | None],
    k: int,
    key: jax.Array,
) -> jax.Array:
    """Selects exactly, from queries and keys rounded to FP8, with a scale for each."""
    q_segments, keys = segments
    q, scale = quantize_vectors(index.q, jnp.float8_e4m3fn)
    idx_k, k_scale = quantize_vectors(keys_of(index), jnp.float8_e4m3fn)
    positions = {"start": start, "q_segments": q_segments, "k_segments": keys}
    return lightning_indexer(q, index.w * scale, idx_k, k, k_scale=k_scale, **positions)


rounded_ties = functools.partial(random_ties, dtype=jnp.bfloat16)
in_pairs = functools.partial(approx_on_tpu, size=2)
in_fours = functools.partial(approx_on_tpu, size=4)


def masked_scores(
    index: Index, start: int | jax.Array, segments: tuple[jax.Array | None, jax.Array | None]
) -> jax.Array:
    """Returns wide[b t s] scores, -inf where a key is not visible."""
    scores = index_scores(index.q, index.w, keys_of(index))
    t, s = scores.shape[1:]
    positions = jnp.arange(s, dtype=jnp.int32)
    return jnp.where(visible(start + jnp.arange(t), positions, *segments), scores, -jnp.inf)


def _ascending(values, indices):
    """Returns topk in the library's form: ascending, -1 at the end for keys that are not visible."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(values == -jnp.inf, last, indices), axis=-1)
    return jnp.where(ordered == last, -1, ordered)


class Memory(NamedTuple):
    """Cache of latents, and of the index keys [b s j] of every layer."""

    cache: Cache
    idx_k: tuple[jax.Array, ...]


class Pass(NamedTuple):
    """Results of a forward pass.

    Attributes:
      logits: float32[b t v].
      topk: int32[l b t k], selected keys.
      memory: cache after the pass; None: no cache.
    """

    logits: jax.Array
    topk: jax.Array
    memory: Memory | None


def forward(
    params: PyTree,
    tokens: jax.Array,
    cfg: ModelConfig,
    rule: Rule,
    key: jax.Array,
    memory: Memory | None = None,
) -> Pass:
    """Runs the model's forward with another rule of selection. params: unstacked; every layer has an indexer.

    A layer without an indexer uses the selection that it gets, which is how IndexShare works. So each layer's indexer runs
    here, and is removed from the layer.
    """
    weights = WeightGatherer(cfg, Region(), EXECUTION)
    cache = memory and memory.cache
    first = 0 if cache is None else cache.length
    positions = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, tokens.shape)
    context, cache = make_context(positions, None, cache, cfg, EXECUTION, Region())
    x, layer_caches, idx_keys, topks = vocabulary.embed(params, weights, tokens), [], [], []
    for name, layers in glm5.stacks(cfg):
        for layer, w in zip(layers, params[name]):
            w = weights(name, w, sliced=True)
            index = attention_inputs(w, x, context).index
            assert index is not None, "every layer has an indexer"
            if memory is not None:
                idx_k = write(memory.idx_k[layer], keys_of(index), context.start)
                index = index._replace(k=idx_k)
                idx_keys.append(idx_k)
            segments = context.segments, context.key_segments
            layer_key = jax.random.fold_in(key, layer)
            topk = rule(index, context.start, segments, cfg.index_topk, layer_key)
            without_indexer = {part: value for part, value in w.items() if part != "indexer"}
            layer_cache = cache and cache.layers[layer]
            x, _, layer_cache, _ = block(
                without_indexer, x, Selection(topk, None), layer_cache, context
            )
            layer_caches.append(layer_cache)
            topks.append(topk)
    norm = weights("final_norm", params["final_norm"])
    hidden = rms_norm(x, norm, cfg.rms_norm_eps)
    logits = jnp.einsum("btd,dv->btv", hidden, vocabulary.head_weight(params, weights))
    if isinstance(cache, Cache):
        cache = cache._replace(layers=tuple(layer_caches), length=first + tokens.shape[1])
        memory = Memory(cache, tuple(idx_keys))
    return Pass(logits, jnp.stack(topks), memory)


@functools.partial(jax.jit, static_argnames=("cfg", "rule"))
def train(params: PyTree, tokens: jax.Array, cfg: ModelConfig, rule: Rule, key: jax.Array) -> Pass:
    """Runs a row as training does: all tokens at once."""
    return forward(params, tokens, cfg, rule, key)


@functools.partial(jax.jit, static_argnames=("cfg", "rule", "capacity"))
def rollout(
    params: PyTree, tokens: jax.Array, cfg: ModelConfig, rule: Rule, key: jax.Array, capacity: int
) -> Pass:
    """Runs a row as a rollout does: the first half as prefill, the rest token by token through a cache."""
    b, t = tokens.shape
    latents = init_cache(dataclasses.replace(cfg, attention="dense"), b, capacity)
    empty = jnp.zeros((b, capacity, cfg.index_head_dim), cfg.dtype)
    memory = Memory(latents, (empty,) * cfg.num_hidden_layers)
    prefilled = forward(params, tokens[:, : t // 2], cfg, rule, key, memory)

    def step(memory, args):
        number, token = args
        step_key = jax.random.fold_in(key, number)
        out = forward(params, token[:, None], cfg, rule, step_key, memory)
        return out.memory, (out.logits[:, 0], out.topk[:, :, 0])

    numbers = jnp.arange(1, t - t // 2 + 1)
    memory, (logits, topk) = lax.scan(step, prefilled.memory, (numbers, tokens[:, t // 2 :].T))
    logits, topk = logits.swapaxes(0, 1), jnp.moveaxis(topk, 0, 2)
    return Pass(
        jnp.concatenate([prefilled.logits, logits], axis=1),
        jnp.concatenate([prefilled.topk, topk], axis=2),
        memory,
    )
