"""Replays sampled records through the engine's programs, and returns the engine's choices and log-probs.

A record is read as the engine reads a request: with the engine's weights, into empty pages, prompts in prefill chunks
and sampled tokens one by one. The programs are compiled for this purpose, because those of the engine do not return
the selected keys and experts.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.runner import Computation
from glm5_jax.inference.shapes import EngineShapes
from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_pages
from glm5_jax.model.decoder import trunk
from glm5_jax.model.vocabulary import compute_logits
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import BATCH_AXES, Region


def is_sampled(record: TokenRecord) -> np.ndarray:
    """Returns a mask of the tokens that were sampled, bool[t]."""
    if record.rollout_logp is None:
        return np.zeros(len(record), bool)
    return ~np.isnan(record.rollout_logp)


class ReplayedRecord(NamedTuple):
    """Results of the engine for a record of n tokens. It reads all tokens but the last.

    Attributes:
      logp: log-probs [n]; NaN where none was computed.
      topk: selected keys, int32[l n-1 k]; None if the learner selects all keys.
      experts: selected experts, int32[l n-1 a]; None without MoE layers.
    """

    logp: np.ndarray
    topk: np.ndarray | None
    experts: np.ndarray | None


class _Run(NamedTuple):
    """Consecutive tokens that the engine reads together: a prefill chunk, or sampled tokens that it decodes.

    Attributes:
      first: index of the first token.
      count: number of tokens.
      is_decoded: True if the tokens are read one by one.
    """

    first: int
    count: int
    is_decoded: bool


def _runs(record: TokenRecord, chunk: int) -> list[_Run]:
    """Returns the runs in which an engine reads a record: all tokens but the last."""
    sampled, runs = is_sampled(record)[:-1], []
    for is_decoded, group in itertools.groupby(range(len(sampled)), lambda i: bool(sampled[i])):
        indices = list(group)
        runs += [
            _Run(first, min(chunk, indices[-1] + 1 - first), is_decoded)
            for first in range(indices[0], indices[-1] + 1, chunk)
        ]
    return runs


class ReplayShapes(NamedTuple):
    """Array sizes of the two programs that replay some records, prefill and decode.

    Attributes:
      num_pages: pages of the table.
      num_tokens: tokens of a run, by `_Run.is_decoded`.
    """

    num_pages: int
    num_tokens: dict[bool, int]

    @classmethod
    def of(cls, records: Sequence[TokenRecord], computation: Computation) -> "ReplayShapes":
        shape, counts = computation.shape, {True: 1, False: 1}
        for record in records:
            for run in _runs(record, shape.prefill_chunk):
                counts[run.is_decoded] = max(counts[run.is_decoded], run.count)
        longest = max(map(len, records))
        return cls(
            shape.table_width(-(-longest // shape.page_size)),
            {is_decoded: shape.prefill_tokens(count) for is_decoded, count in counts.items()},
        )


def replay_record(
    record: TokenRecord,
    computation: Computation,
    shapes: ReplayShapes,
    temperature: float,
    k: int | None,
) -> ReplayedRecord:
    """Reads a record as the engine does. k: number of keys that the learner selects; None: all."""
    ids = record.token_ids
    static = {
        "cfg": computation.cfg,
        "execution": computation.execution,
        "mesh": computation.mesh,
        "temperature": temperature,
    }
    layers, tables = _make_pages(computation, shapes.num_pages)
    logp, topk, experts = np.full(len(ids), np.nan), [], []
    for first, count, is_decoded in _runs(record, computation.shape.prefill_chunk):
        tokens, targets = np.zeros((2, shapes.num_tokens[is_decoded]), np.int32)
        tokens[:count], targets[:count] = ids[first:][:count], ids[first + 1 :][:count]
        step = _decode if is_decoded else _prefill
        layers, run_logp, (run_topk, run_experts) = step(
            computation.params, layers, tables, tokens, targets, first, count, **static
        )
        run_logp = np.asarray(run_logp)[:count]
        end = first + count + 1
        logp[end - len(run_logp) : end] = run_logp
        if k is not None:
            topk.append(_selected_keys(run_topk, first, count, k))
        if run_experts is not None:
            experts.append(np.asarray(run_experts)[:, :count])
    topk, experts = (np.concatenate(parts, axis=1) if parts else None for parts in (topk, experts))
    return ReplayedRecord(logp, topk, experts)


def _selected_keys(topk: Array | None, first: int, count: int, k: int) -> np.ndarray:
    """Returns selected keys int32[l count k]; for None all that are visible, from position `first` on."""
    if topk is not None:
        return np.asarray(topk)[:, :count]
    positions = np.arange(k, dtype=np.int32)
    is_visible = positions <= np.arange(first, first + count)[:, None]
    return np.where(is_visible, positions, -1)[None]


def _make_pages(computation: Computation, width: int) -> tuple[PyTree, np.ndarray]:
    """Returns empty pages of one sequence for each data-parallel rank, and their table."""
    mesh = computation.mesh
    dp_size = 1 if mesh is None else Region.of(mesh).size(BATCH_AXES)
    tables = np.broadcast_to(np.arange(width, dtype=np.int32), (dp_size, width))
    return _page_maker(computation.cfg, computation.shape, mesh, dp_size * width)(), tables


# Cached, because another function would be another program.
@functools.cache
def _page_maker(cfg: ModelConfig, shape: EngineShapes, mesh: Mesh | None, count: int):
    """Returns a compiled function that makes `count` empty pages."""
    empty = functools.partial(
        init_pages,
        cfg,
        count,
        shape.page_size,
        index_cache=shape.index_cache,
        latent_cache=shape.latent_cache,
    )
    sharding = None if mesh is None else NamedSharding(mesh, P(BATCH_AXES))
    return jax.jit(empty, out_shardings=sharding)


_STATIC = ("cfg", "execution", "mesh", "temperature")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="layers")
def _prefill(params, layers, tables, tokens, targets, start, count, **static):
    """Returns (layers, log-prob [1] of the target after the last of `count` tokens int32[t], choices)."""
    layers, logp, choices = _forward(params, layers, tables, tokens, start, count, **static)
    return layers, logp[targets[count - 1]][None], choices


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="layers")
def _decode(params, layers, tables, tokens, targets, start, count, **static):
    """Returns (layers, log-probs [t] of the targets, choices) of `count` tokens int32[t] that are read one by one."""

    def step(layers, args):
        i, token, target = args
        is_real = (i < count).astype(jnp.int32)
        layers, logp, choices = _forward(
            params, layers, tables, token[None], start + i, is_real, **static
        )
        return layers, (logp[target], choices)

    args = jnp.arange(len(tokens)), tokens, targets
    layers, (logp, choices) = lax.scan(step, layers, args)
    return layers, logp, jax.tree.map(lambda a: jnp.moveaxis(a[:, :, 0], 0, 1), choices)


def _forward(params, layers, tables, tokens, start, count, *, cfg, execution, mesh, temperature):
    """Returns (layers, log-probs [v] after the last of `count` tokens, (topk [l t k], experts [l t a])).

    On a mesh every data-parallel rank computes the same, and the first rank's results are returned.
    """

    def local(region, params, layers, tables):
        b, t = len(tables), len(tokens)
        cache = PagedCache(layers, tables, jnp.full(b, start, jnp.int32))
        segments = jnp.broadcast_to((jnp.arange(t) < count).astype(jnp.int32), (b, t))
        ids = jnp.broadcast_to(tokens, (b, t))
        out = trunk(
            params,
            ids,
            cache.positions(t),
            segments,
            cache,
            cfg,
            execution,
            region,
            capture_choices=True,
        )
        assert out.cache is not None  # because the trunk was given one
        last = jnp.full((b, 1), jnp.maximum(count - 1, 0), jnp.int32)
        logits = compute_logits(params, out.hidden, WeightGatherer(cfg, region, execution), last)
        topk, _ = of_full_layers(out.stats.selection, cfg)
        routing = out.stats.routing
        return logits[:, 0], out.cache.layers, topk, None if routing is None else routing[0]

    if mesh is None:
        logits, layers, *choices = local(Region(), params, layers, tables)
    else:
        ranks, stacked = P(BATCH_AXES), P(None, BATCH_AXES)
        run = jax.shard_map(
            functools.partial(local, Region.of(mesh, shard_sequence=False)),
            mesh=mesh,
            in_specs=(param_specs(cfg, mesh, params), ranks, ranks),
            out_specs=(ranks, ranks, stacked, stacked),
            check_vma=False,
        )
        logits, layers, *choices = run(params, layers, tables)
    logp = jax.nn.log_softmax(logits[0] / temperature)
    return layers, logp, tuple(jax.tree.map(lambda a: a[:, 0], choices))


def of_full_layers(selection: Any, cfg: ModelConfig) -> Any:
    """Returns (topk, index) of the layers with an indexer, from a Selection stacked over all layers."""
    return jax.tree.map(lambda a: a[np.asarray(cfg.full_layers, int)], tuple(selection))


def param_specs(cfg: ModelConfig, mesh: Mesh, params: PyTree) -> PyTree:
    """Returns the partition specs of the parameters."""
    return jax.tree.map(lambda s: s.spec, glm5.param_shardings(cfg, mesh, params))
