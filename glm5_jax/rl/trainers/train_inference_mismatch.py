"""Compares the keys, experts and log-probs of the engine with the learner's on the same sampled tokens.

Keys and experts are discrete choices. Where engine and learner choose differently, the importance ratio compares two
models. Training with sparse attention then diverges within a few steps (GLM-5 3.2).

Each record is read twice:

- as the engine reads it: the engine's weights and pages, prompts in prefill chunks, sampled tokens one by one;
- as the learner reads it: in a packed row.

Scores that differ by less than rounding may be ranked either way. Each different choice therefore has a gap: the
distance, by the learner's scores, between choices that only one side made and those that only the other made. A gap
of a few times the scores' precision is rounding; a larger one is a fault. A difference in one layer changes the input
of the next, where gaps can have any size. The first layer with a difference is therefore the one to inspect.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.shapes import bucket_size
from glm5_jax.model.decoder import trunk
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Index
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.trainers.record_replay import (
    ReplayShapes,
    is_sampled,
    of_full_layers,
    param_specs,
    replay_record,
)
from glm5_jax.training.loss import target_logp
from pallas_kernels.index_scores import index_scores

# Rows have a power of two of tokens, at least these, because each length and each number of rows is another program.
MIN_ROW_LENGTH = 128
# Up to this length one row holds all records, so that batches of short records share one program.
JOINT_ROW_LENGTH = 512
MAX_GAP = 2.0  # gap of two scores, in units of the largest


class ChoiceMismatch(NamedTuple):
    """Differences of one kind of choice, keys or experts, for each of its layers.

    Attributes:
      layer: number of the layer.
      match_rate: share of choices that are the same.
      gap: largest gap between the scores of different choices, relative to the layer's largest score. 2 if one side
        chose more than the other.
    """

    layer: np.ndarray
    match_rate: np.ndarray
    gap: np.ndarray


class Mismatch(NamedTuple):
    """Differences of engine and learner on some records.

    Attributes:
      keys: selected keys of layers with an indexer; None: rows of this length select all keys.
      experts: selected experts of MoE layers; None: the model has none.
      logp: absolute difference of the log-prob of each sampled token, learner against engine.
      recorded: absolute difference of each recorded log-prob from the engine's current one. It is almost 0 if the
        engine's current weights sampled the record.
    """

    keys: ChoiceMismatch | None
    experts: ChoiceMismatch | None
    logp: np.ndarray
    recorded: np.ndarray

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name, with the prefix "mismatch/".

        - key_match_rate, expert_match_rate: shares of choices that are the same, over all layers.
        - layer: number of the first layer with a different choice; -1 for none.
        - gap: its gap; 0 for none.
        - logp_max, logp_mean, recorded_max, recorded_mean: differences of log-probs, in nats.
        """
        metrics = {
            "logp_max": self.logp.max(),
            "logp_mean": self.logp.mean(),
            "recorded_max": self.recorded.max(),
            "recorded_mean": self.recorded.mean(),
        }
        different: list[tuple[float, float]] = [(np.inf, 0.0)]
        for name, choice in (("key", self.keys), ("expert", self.experts)):
            if choice is not None:
                metrics[f"{name}_match_rate"] = choice.match_rate.mean()
                # Keys come before experts within a layer.
                is_different = choice.match_rate < 1
                different += zip(choice.layer[is_different], choice.gap[is_different])
        layer, gap = min(different, key=lambda pair: pair[0])
        metrics |= {"layer": layer if np.isfinite(layer) else -1, "gap": gap}
        return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


def compare_choices(
    params: PyTree,
    records: Sequence[TokenRecord],
    engine: Engine,
    cfg: ModelConfig,
    *,
    execution: ExecutionConfig = ExecutionConfig(),
    chunk: int = 1024,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
) -> Mismatch | None:
    """Returns the `Mismatch` of an engine with a learner on some records; None if they have no sampled token.

    All indexer keys are held at once, i * j numbers per token and layer, so only a few records should be compared.
    Raises ValueError if engine and learner choose different numbers of things.

    Args:
      params, cfg, execution, mesh: the learner's.
      records: records to compare.
      engine: the engine.
      chunk: rows at a time of the learner's loss.
      temperature: sampling temperature of the records.
    """
    computation = engine.computation
    _check_same_model(computation.cfg, cfg)
    records = [record for record in records if is_sampled(record).any()]
    if not records:
        return None
    # The learner's forward, on packed rows.
    region = Region() if mesh is None else Region.of(mesh)
    length = _row_length(records, region)
    batch, rows = pack_records(records, length, region.size(BATCH_AXES), ("token_ids",))
    learner_logp, learner = _run_learner(
        params, batch, cfg=cfg, execution=execution, chunk=chunk, temperature=temperature, mesh=mesh
    )
    learner_logp = np.asarray(learner_logp)
    # The engine's forward, record by record, into arrays of the same layout.
    shapes = ReplayShapes.of(records, computation)
    is_read = np.zeros(batch["token_ids"].shape, bool)
    k = None if learner.topk is None else learner.topk.shape[-1]
    topk = None if k is None else np.full((len(cfg.full_layers), *is_read.shape, k), -1, np.int32)
    experts = None if learner.experts is None else np.zeros(learner.experts.shape, np.int32)
    logp_diff, recorded_diff = [], []
    for i, row in enumerate(rows):
        start = 0
        for record in row:
            replayed = replay_record(record, computation, shapes, temperature, k)
            sampled, end = is_sampled(record), start + len(record)
            columns = slice(start, end - 1)  # the engine does not read the last token
            is_read[i, columns] = True
            if topk is not None and replayed.topk is not None:
                topk[:, i, columns] = np.where(replayed.topk < 0, -1, replayed.topk + start)
            if experts is not None and replayed.experts is not None:
                experts[:, i, columns] = replayed.experts
            logp_diff.append(np.abs(learner_logp[i, start:end] - replayed.logp)[sampled])
            recorded_diff.append(np.abs(record.rollout_logp - replayed.logp)[sampled])
            start = end
    # Differences, on the learner's devices.
    key_mismatch = expert_mismatch = None
    if topk is not None:
        differences = jax.device_get(_compare_keys(learner.topk, learner.index, topk, is_read))
        key_mismatch = ChoiceMismatch(np.array(cfg.full_layers), *differences)
    if experts is not None:
        differences = jax.device_get(
            _compare_experts(learner.experts, learner.scores, experts, is_read)
        )
        moe_layers = np.arange(cfg.first_k_dense_replace, cfg.num_hidden_layers)
        expert_mismatch = ChoiceMismatch(moe_layers, *differences)
    return Mismatch(
        key_mismatch, expert_mismatch, np.concatenate(logp_diff), np.concatenate(recorded_diff)
    )


def _check_same_model(engine_cfg: ModelConfig, cfg: ModelConfig) -> None:
    """Raises ValueError if engine and learner choose different numbers of things."""
    for name in ("num_hidden_layers", "full_layers", "index_topk", "num_experts_per_tok"):
        served, trained = getattr(engine_cfg, name), getattr(cfg, name)
        if served != trained:
            raise ValueError(
                f"{name} is {served} in the engine and {trained} in the learner; both must have one model"
            )


def _row_length(records: Sequence[TokenRecord], region: Region) -> int:
    """Returns the tokens of a row: a power of two, rounded up to a multiple of the sequence's shards."""
    lengths = [len(record) for record in records]
    longest = max(max(lengths), min(sum(lengths), JOINT_ROW_LENGTH))
    shards = region.size(SEQUENCE_AXES)
    return -(-bucket_size(longest, 1 << 62, MIN_ROW_LENGTH) // shards) * shards


class _LearnerChoices(NamedTuple):
    """Choices of the learner, with the scores that decide them. None where the model chooses nothing.

    Attributes:
      topk: selected keys of layers with an indexer, int32[l b t k].
      index: inputs of their scores, stacked by layer.
      experts: selected experts of MoE layers, int32[l b t a].
      scores: scores by which experts are selected, wide[l b t e].
    """

    topk: jax.Array | None
    index: Index | None
    experts: jax.Array | None
    scores: jax.Array | None


@functools.partial(jax.jit, static_argnames=("cfg", "execution", "chunk", "temperature", "mesh"))
def _run_learner(
    params: PyTree,
    batch: dict[str, Array],
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    chunk: int,
    temperature: float,
    mesh: Mesh | None,
) -> tuple[Float[Array, "b t"], _LearnerChoices]:
    """Returns the learner's log-prob of each token, and its choices. The first token of a segment has no log-prob."""

    def local(region, params, tokens, positions, segments, targets):
        out = trunk(
            params, tokens, positions, segments, None, cfg, execution, region, capture_choices=True
        )
        weights = WeightGatherer(cfg, region, execution)
        logp = target_logp(params, weights, out.hidden, targets, temperature, chunk, execution)
        topk, index = of_full_layers(out.stats.selection, cfg)
        q, w, k = (None, None, None) if topk is None else index
        routing = out.stats.routing or (None, None, None)
        return logp, (topk, q, w, k, routing[0], routing[2])

    tokens = batch["token_ids"]
    args = tokens, batch["positions"], batch["segment_ids"], jnp.roll(tokens, -1, axis=1)
    if mesh is None:
        logp, choices = local(Region(), params, *args)
    else:
        rows, full_sequence = P(BATCH_AXES, SEQUENCE_AXES), P(None, BATCH_AXES)
        sharded = P(None, BATCH_AXES, SEQUENCE_AXES)
        run = jax.shard_map(
            functools.partial(local, Region.of(mesh)),
            mesh=mesh,
            in_specs=(param_specs(cfg, mesh, params), rows, rows, rows, rows),
            # topk, q, w, k, experts, scores; keys are those of all devices.
            out_specs=(rows, (sharded, sharded, sharded, full_sequence, sharded, sharded)),
            check_vma=False,
        )
        logp, choices = run(params, *args)
    topk, q, w, k, experts, scores = choices
    if scores is not None:
        # The bias takes part in the selection, also in that of groups of experts.
        bias = params["moe_layers"]["router"]["bias"].astype(scores.dtype)
        scores = scores + bias[:, None, None]
    index = None
    if q is not None and w is not None and k is not None:
        index = Index(q, w, k)
    return jnp.roll(logp, 1, axis=1), _LearnerChoices(topk, index, experts, scores)


@jax.jit
def _compare_keys(topk, index: Index, engine_topk, is_read):
    """Returns match_rate and gap of `ChoiceMismatch` for keys int32[l b t k], over queries with is_read bool[b t]."""
    b, t = is_read.shape
    size = math.gcd(t, 128)

    def to_blocks(a):
        """Returns a [b t ...] as [n b size ...]."""
        return jnp.moveaxis(a.reshape(b, t // size, size, *a.shape[2:]), 1, 0)

    def layer(args):
        ours, theirs, (q, w, k) = args

        def block(args):
            ours, theirs, q, w, is_read = args
            # XLA's implementation, because the arrays are on a mesh and this is no manual region.
            scores = index_scores(q, w, k, implementation="xla")
            return measure_difference(scores, ours, theirs, is_read)

        blocks = tuple(map(to_blocks, (ours, theirs, q, w, is_read)))
        same, gap, largest = lax.map(block, blocks)
        return same.sum() / is_read.sum(), relative_gap(gap.max(), largest.max())

    return lax.map(layer, (topk, engine_topk, index))


@jax.jit
def _compare_experts(ids, scores, engine_ids, is_read):
    """Returns match_rate and gap of `ChoiceMismatch` for experts int32[l b t a], over tokens with is_read bool[b t]."""

    def layer(args):
        scores, ours, theirs = args
        same, gap, largest = measure_difference(scores, ours, theirs, is_read)
        return same / is_read.sum(), relative_gap(gap, largest)

    return lax.map(layer, (scores, ids, engine_ids))


def measure_difference(
    scores: Float[Array, "b t s"],
    ours: Int[Array, "b t k"],
    theirs: Int[Array, "b t k"],
    is_read: Bool[Array, "b t"],
) -> tuple[Array, Array, Array]:
    """Returns (sum of the shares that are in both lists, largest gap, largest score) over the rows with is_read.

    The lists hold indices, -1 for none. The gap is between the scores of indices that only one list has. It is inf for
    lists of different lengths.
    """
    in_ours, in_theirs = (_membership(ids, scores.shape[-1]) for ids in (ours, theirs))
    only_ours, only_theirs = in_ours & ~in_theirs, in_theirs & ~in_ours
    length = jnp.maximum(jnp.maximum(in_ours.sum(-1), in_theirs.sum(-1)), 1)
    same = (in_ours & in_theirs).sum(-1) / length
    best = jnp.max(scores, -1, where=only_ours, initial=-jnp.inf)
    worst = jnp.min(scores, -1, where=only_theirs, initial=jnp.inf)
    largest = jnp.max(jnp.abs(scores), -1, where=in_ours | in_theirs, initial=0)
    gap = jnp.maximum(best - worst, 0)
    gap = jnp.where(only_ours.sum(-1) == only_theirs.sum(-1), gap, jnp.inf)
    same, gap, largest = (jnp.where(is_read, a, 0) for a in (same, gap, largest))
    return jnp.sum(same), jnp.max(gap), jnp.max(largest)


def relative_gap(gap: Float[Array, ""], largest: Float[Array, ""]) -> Float[Array, ""]:
    """Returns a gap as a share of the largest number, at most MAX_GAP."""
    return jnp.minimum(gap / jnp.where(largest > 0, largest, 1), MAX_GAP)


def _membership(ids: Int[Array, "b t k"], count: int) -> Bool[Array, "b t n"]:
    """Returns True at the indices that a list has; -1 is none."""
    b, t, _ = ids.shape
    at = jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], jnp.where(ids < 0, count, ids)
    return jnp.zeros((b, t, count), bool).at[at].set(True, mode="drop")
