"""Rules of selecting keys in place of the library's exact one, and the model's forward under any of them.

A layer without an indexer takes the selection that it is given: so IndexShare works, and so a rule gets
in here. The library itself has no rule but the exact one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.config import ModelConfig
from glm5_jax.core.mesh import Region
from glm5_jax.evals.attention_mass import look
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.block import block
from glm5_jax.model.cache import Cache, init_cache, write
from glm5_jax.model.indexer import Index, Selection
from glm5_jax.model.plan import Plan
from pallas_kernels.eight_bits import quantize_vectors
from pallas_kernels.index_scores import index_scores
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mask import visible
from pallas_kernels.pointwise import rms_norm

RECALL = 0.95  # the default of lax.approx_max_k
PLAN = Plan(remat="none")

# (index, place of the first query among the keys, (segments of queries, of keys), k, random key) -> topk [b t k]
Rule = Callable[..., jax.Array]


def exact(index: Index, start, segments, k: int, key) -> jax.Array:
    """The library's: equal scores go to the lower index."""
    own, keys = segments
    return lightning_indexer(*index, k, start=start, q_segments=own, k_segments=keys)


def lax_top_k(index: Index, start, segments, k: int, key) -> jax.Array:
    """`lax.top_k`: -0.0 is below 0.0 for it, but the scores of one query have zeros of one sign alone."""
    return _ascending(*lax.top_k(masked_scores(index, start, segments), k))


def random_ties(index: Index, start, segments, k: int, key, dtype=None) -> jax.Array:
    """Equal scores in an order that the key draws; dtype: what the scores are rounded to before."""
    scores = masked_scores(index, start, segments)
    scores = scores if dtype is None else scores.astype(dtype)
    order = jax.random.bits(key, scores.shape)
    places = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    best, _, places = lax.sort((-scores, order, places), num_keys=2)
    return _ascending(-best[..., :k], places[..., :k])


def approx_here(index: Index, start, segments, k: int, key) -> jax.Array:
    """`lax.approx_max_k` as it is on this platform."""
    scores = masked_scores(index, start, segments)
    return _ascending(*lax.approx_max_k(scores, k, recall_target=RECALL))


def approx_on_tpu(index: Index, start, segments, k: int, key, size: int) -> jax.Array:
    """What `lax.approx_max_k` does on a TPU (2206.14286): of every `size` keys only the best is in the choice."""
    scores = masked_scores(index, start, segments)
    padded = jnp.pad(
        scores, ((0, 0), (0, 0), (0, -scores.shape[-1] % size)), constant_values=-jnp.inf
    )
    grouped = padded.reshape(*scores.shape[:2], -1, size)
    values, group = lax.top_k(jnp.max(grouped, axis=-1), k)
    winner = jnp.take_along_axis(jnp.argmax(grouped, axis=-1), group, axis=-1)
    return _ascending(values, group * size + winner)


def group_size(s: int, k: int) -> int:
    """Of how many keys `lax.approx_max_k` keeps one on a TPU, for the k best of s; 1 where it is exact."""
    search = functools.partial(lax.approx_max_k, k=k, recall_target=RECALL, aggregate_to_topk=False)
    groups = jax.eval_shape(search, jax.ShapeDtypeStruct((1, s), jnp.float32))[0].shape[-1]
    return -(-s // groups)


def in_bfloat16(index: Index, start, segments, k: int, key) -> jax.Array:
    """Exact, of queries and keys rounded to bfloat16."""
    half = jnp.bfloat16
    rounded = Index(index.q.astype(half), index.w, index.k.astype(half))
    return exact(rounded, start, segments, k, key)


def in_float8(index: Index, start, segments, k: int, key) -> jax.Array:
    """Exact, of queries and keys rounded to FP8 with a scale for each."""
    own, keys = segments
    q, scale = quantize_vectors(index.q, jnp.float8_e4m3fn)
    idx_k, k_scale = quantize_vectors(index.k, jnp.float8_e4m3fn)
    rest = {"start": start, "q_segments": own, "k_segments": keys}
    return lightning_indexer(q, index.w * scale, idx_k, k, k_scale=k_scale, **rest)


rounded_ties = functools.partial(random_ties, dtype=jnp.bfloat16)


rounded_ties = functools.partial(random_ties, dtype=jnp.bfloat16)
in_pairs = functools.partial(approx_on_tpu, size=2)
in_fours = functools.partial(approx_on_tpu, size=4)


def masked_scores(index: Index, start, segments):
    """wide[b t s] scores, -inf where a key is not visible."""
    scores = index_scores(*index)
    t, s = scores.shape[1:]
    places = jnp.arange(s, dtype=jnp.int32)
    return jnp.where(visible(start + jnp.arange(t), places, *segments), scores, -jnp.inf)


def _ascending(values, places):
    """topk as the library gives it: ascending, -1 at the end for what is not visible."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(values == -jnp.inf, last, places), axis=-1)
    return jnp.where(ordered == last, -1, ordered)


class Memory(NamedTuple):
    """A cache of latents, and of the index keys [b s j] of every layer."""

    cache: Cache
    idx_k: tuple[jax.Array, ...]


class Pass(NamedTuple):
    """logits float32[b t v], topk int32[l b t k], and what was remembered."""

    logits: jax.Array
    topk: jax.Array
    memory: Memory | None


def forward(
    params, tokens, cfg: ModelConfig, rule: Rule, key, memory: Memory | None = None
) -> Pass:
    """The model's forward with another rule of selection. params: unstacked; every layer has an indexer.

    A layer that is given a selection and has no indexer of its own takes it as it is, which is
    how IndexShare works; so each layer's indexer is run here, and taken away from the layer.
    """
    weights = glm5.Weights(cfg, Region(), PLAN)
    cache = memory and memory.cache
    first = 0 if cache is None else cache.length
    positions = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, tokens.shape)
    context, cache = glm5.begin(positions, None, cache, cfg, PLAN, Region())
    x, layer_caches, idx_keys, topks = vocabulary.embed(params, weights, tokens), [], [], []
    for name, layers in glm5.stacks(cfg):
        for layer, w in zip(layers, params[name]):
            w = weights(name, w, sliced=True)
            index = look(w, x, context).index
            if memory is not None:
                idx_k = write(memory.idx_k[layer], index.k, context.start)
                index = index._replace(k=idx_k)
                idx_keys.append(idx_k)
            segments = context.segments, context.key_segments
            own_key = jax.random.fold_in(key, layer)
            topk = rule(index, context.start, segments, cfg.index_topk, own_key)
            served = {part: value for part, value in w.items() if part != "indexer"}
            own = cache and cache.layers[layer]
            x, _, own, _ = block(served, x, Selection(topk, None), own, context)
            layer_caches.append(own)
            topks.append(topk)
    norm = weights("final_norm", params["final_norm"])
    hidden = rms_norm(x, norm, cfg.rms_norm_eps)
    logits = jnp.einsum("btd,dv->btv", hidden, vocabulary.head(params, weights))
    if memory is not None:
        cache = cache._replace(layers=tuple(layer_caches), length=first + tokens.shape[1])
        memory = Memory(cache, tuple(idx_keys))
    return Pass(logits, jnp.stack(topks), memory)


@functools.partial(jax.jit, static_argnames=("cfg", "rule"))
def train(params, tokens, cfg, rule, key) -> Pass:
    """As training sees a row: all tokens at once."""
    return forward(params, tokens, cfg, rule, key)


@functools.partial(jax.jit, static_argnames=("cfg", "rule", "capacity"))
def rollout(params, tokens, cfg, rule, key, capacity: int) -> Pass:
    """As a rollout sees it: the first half as prefill, the others token by token through a cache."""
    b, t = tokens.shape
    latents = init_cache(dataclasses.replace(cfg, attention="dense"), b, capacity)
    empty = jnp.zeros((b, capacity, cfg.index_head_dim), cfg.dtype)
    memory = Memory(latents, (empty,) * cfg.num_hidden_layers)
    begun = forward(params, tokens[:, : t // 2], cfg, rule, key, memory)

    def step(memory, args):
        number, token = args
        own = jax.random.fold_in(key, number)
        out = forward(params, token[:, None], cfg, rule, own, memory)
        return out.memory, (out.logits[:, 0], out.topk[:, :, 0])

    numbers = jnp.arange(1, t - t // 2 + 1)
    memory, (logits, topk) = lax.scan(step, begun.memory, (numbers, tokens[:, t // 2 :].T))
    logits, topk = logits.swapaxes(0, 1), jnp.moveaxis(topk, 0, 2)
    return Pass(
        jnp.concatenate([begun.logits, logits], axis=1),
        jnp.concatenate([begun.topk, topk], axis=2),
        memory,
    )
