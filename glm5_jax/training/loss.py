"""Training objective: next-token and multi-token cross-entropy, z-loss, expert balance, losses on sampled tokens.

The output projection and its loss run in chunks of rows, so that logits [rows v] never exist in full. `shift`
prepares the targets, so that no shard of the sequence needs its neighbour's tokens.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, Shaped

from glm5_jax.config import ModelConfig
from glm5_jax.model.decoder import Trunk, trunk
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.layer_output import LayerStats, reduce_stats
from glm5_jax.model.mtp import mtp_step
from glm5_jax.model.vocabulary import cross_entropy, embed
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import AXES, Region


class TokenLoss(Protocol):
    """Loss on sampled tokens: parts of the objective that read their log-probs under the main head (rl/algorithm/losses.py).

    Attributes:
      streams: arrays [b t] of a batch that the loss reads; each part NAME has a NAME_weight among them.
      temperature: divisor of the logits, for the cross-entropy as well.
      coefficients: coefficients of the parts and of "ce" in the objective.
    """

    streams: tuple[str, ...]
    temperature: float
    coefficients: Mapping[str, float]

    def __call__(self, logp, streams) -> tuple[dict, dict]:
        """Returns ({part: loss [b t] of each token}, {metric: numbers [b t]}).

        A metric is reported as its mean over the tokens with a weight.
        """
        ...


class Shifted(NamedTuple):
    """Targets of a batch, shifted to the positions that predict them.

    Attributes:
      targets, weights: entry j, position t belongs to token t + 1 + j.
      streams: streams of a `TokenLoss`; position t belongs to token t + 1.
    """

    targets: Int[Array, "1+k b t"]
    weights: Float[Array, "1+k b t"]
    streams: dict[str, Shaped[Array, "b t"]]


def shift(batch: dict[str, Array], mtp_steps: int, streams: Sequence[str] = ()) -> Shifted:
    """Returns the targets of the main head and of mtp_steps further ones, for a batch of arrays [b t].

    A target counts if it lies in the same segment. Its weight is the token's loss_mask * ce_weight. Other weights
    are masked likewise.

    streams: further streams of the batch to shift.
    """
    tokens, segments = batch["token_ids"], batch["segment_ids"]
    weight = batch["loss_mask"] * batch["ce_weight"]

    def ahead(x, j):
        return jnp.pad(x[:, j:], ((0, 0), (0, min(j, x.shape[1]))))[:, : x.shape[1]]

    def counted(weight, j):
        same = (ahead(segments, j) == segments) & (segments != 0)
        return jnp.where(same, ahead(weight, j), 0.0)

    steps = range(1, mtp_steps + 2)
    shifted_streams = {
        name: counted(batch["loss_mask"] * batch[name], 1)
        if name.endswith("_weight")
        else ahead(batch[name], 1)
        for name in streams
    }
    return Shifted(
        jnp.stack([ahead(tokens, j) for j in steps]),
        jnp.stack([counted(weight, j) for j in steps]),
        shifted_streams,
    )


class LossWeights(NamedTuple):
    """Weights of the objective's parts: mtp (paper: 0.3, then 0.1), balance (1e-4), z (0)."""

    mtp: Float[Array, ""]
    balance: float
    z: float


class Totals(NamedTuple):
    """Divisors of the sums over a batch.

    Attributes:
      heads: summed weights of each head's targets.
      queries: number of tokens that are not padding, in the dtype of heads.
      parts: summed weights of each part of a `TokenLoss`, and "tokens", the number of tokens with any.
    """

    heads: Float[Array, " 1+k"]
    queries: Float[Array, ""]
    parts: dict[str, Float[Array, ""]]


def totals_of(batch: dict[str, Array], shifted: Shifted) -> Totals:
    """Returns the totals of a full batch."""
    heads = shifted.weights.sum((1, 2))
    queries = jnp.sum(batch["segment_ids"] != 0, dtype=heads.dtype)
    weights = _weights(shifted.streams)
    parts = {name: weight.sum() for name, weight in weights.items()}
    if weights:
        parts["tokens"] = _sampled(weights).sum()
    return Totals(heads, jnp.maximum(queries, 1), parts)


def _weights(streams) -> dict[str, jax.Array]:
    """Returns {part: weights} of the streams whose names end in _weight."""
    by_part = {name.removesuffix("_weight"): x for name, x in streams.items()}
    return {name: x for name, x in by_part.items() if name not in streams}


def _sampled(weights):
    """Returns 1 for tokens with any of these weights, else 0."""
    any_weight = jnp.asarray(sum(jnp.abs(weight) for weight in weights.values()))
    return (any_weight > 0).astype(any_weight.dtype)


class LossParts(NamedTuple):
    """Parts of the objective over the full batch, and per-layer statistics.

    Attributes:
      ce, mtp, balance, z: scalars, without their weights.
      max_logit: largest attention logit of each layer.
      load: tokens per expert of each layer; None for a dense model.
      index_loss: mean over queries of each layer's indexer loss, in nats; None if indexers are not trained.
      parts: parts of a `TokenLoss`, without their coefficients.
      stats: metrics of a `TokenLoss`.
    """

    ce: Float[Array, ""]
    mtp: Float[Array, ""]
    balance: Float[Array, ""]
    z: Float[Array, ""]
    max_logit: Float[Array, " l"]
    load: Float[Array, "l e"] | None
    index_loss: Float[Array, " l"] | None
    parts: dict[str, Float[Array, ""]]
    stats: dict[str, Float[Array, ""]]


def local_objective(
    params: PyTree,
    batch: dict[str, Array],
    shifted: Shifted,
    totals: Totals,
    loss_weights: LossWeights,
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    chunk: int,
    region: Region,
    num_rows: int,
    index_factor: float = 0.0,
    index_target: str = "own_layer",
    token_loss: TokenLoss | None = None,
) -> tuple[Float[Array, ""], LossParts]:
    """Returns (objective, LossParts) over all devices, computed from one device's shard of the batch.

    objective = ce + mtp_weight * mean_k ce_k + balance_weight * sum_layers balance + z_weight * z
                + index_factor * sum_layers index_loss
    With a token_loss, ce is multiplied by its coefficient, and the token_loss adds its parts.

    Args:
      totals, num_rows: those of the full batch. Dividing by them makes microbatches and shards add up to the
        loss of the full batch.
      chunk: rows of logits at a time.
      index_factor: weight of the indexers' loss; 0: it is not computed.
      index_target: as in `StepConfig`.
    """
    weights = WeightGatherer(cfg, region, execution)
    tokens, segments, positions = (batch[k] for k in ("token_ids", "segment_ids", "positions"))
    # Trunk.
    index_weight = None
    if index_factor:
        index_weight = (segments != 0) / totals.queries
    out = trunk(
        params,
        tokens,
        positions,
        segments,
        None,
        cfg,
        execution,
        region,
        index_weight=index_weight,
        index_target=index_target,
    )
    mtp_steps = shifted.targets.shape[0] - 1
    hiddens, stats = out.hidden[None], out.stats
    if mtp_steps:
        hiddens, stats = _run_mtp(params, weights, out, shifted.targets, execution)
    # Cross-entropy of all heads.
    if token_loss is not None:
        hiddens = hiddens / token_loss.temperature
    with jax.named_scope("head"):
        rows = hiddens.reshape(-1, hiddens.shape[-1])
        nll, logz = cross_entropy(
            params, weights, rows, shifted.targets.reshape(-1), chunk, execution
        )
    nll, logz = (x.reshape(shifted.weights.shape) for x in (nll, logz))
    share = shifted.weights / _divisor(totals.heads)[:, None, None]
    ce = jnp.sum(nll * share, axis=(1, 2))
    z = jnp.sum(logz[0] ** 2 * share[0])
    balance = jnp.zeros((), ce.dtype)
    if stats.balance is not None:
        # Every shard of a sequence holds the value of the full sequence.
        balance = jnp.sum(stats.balance) / (num_rows * region.size(region.sequence_axes))
    mtp = jnp.mean(ce[1:]) if mtp_steps else jnp.zeros((), ce.dtype)
    ce, mtp, balance, z = region.psum((ce[0], mtp, balance, z), AXES)
    # The objective.
    factor = 1.0 if token_loss is None else token_loss.coefficients["ce"]
    objective = factor * ce
    objective += loss_weights.mtp * mtp + loss_weights.balance * balance + loss_weights.z * z
    token_parts, token_stats = {}, {}
    if token_loss is not None:
        token_parts, token_stats = region.psum(
            _sums(token_loss, -nll[0], shifted.streams, totals), AXES
        )
        objective += sum(
            token_loss.coefficients[name] * value for name, value in token_parts.items()
        )
    reduced = reduce_stats(stats, region)
    if reduced.index_loss is not None:
        objective += index_factor * jnp.sum(reduced.index_loss)
    return objective, LossParts(
        ce=ce,
        mtp=mtp,
        balance=balance,
        z=z,
        max_logit=reduced.max_logit,
        load=reduced.load,
        index_loss=reduced.index_loss,
        parts=token_parts,
        stats=token_stats,
    )


def _run_mtp(
    params: PyTree,
    weights: WeightGatherer,
    out: Trunk,
    targets: Int[Array, "1+k b t"],
    execution: ExecutionConfig,
) -> tuple[Float[Array, "1+k b t d"], LayerStats]:
    """Runs the MTP layer for k steps. Their inputs are all targets but the last.

    Returns the hidden states of trunk and steps, and their statistics. The MTP block counts as one more layer: loads
    of its runs are summed, their losses averaged.
    """

    def step(hidden, embedded):
        w = weights("mtp", params["mtp"])
        hidden, _, stats = mtp_step(w, hidden, embedded, None, out.context)
        return hidden, (hidden, stats)

    first = out.hidden[None]
    # One lookup for all steps: the table is gathered once, and its gradient reduced once.
    embedded = embed(params, weights, targets[:-1], execution.vocab_block)
    _, (later, mtp_stats) = lax.scan(execution.checkpoint(step), out.hidden, embedded)
    hiddens = jnp.concatenate([first, later])
    stats, index_loss = out.stats, None
    if mtp_stats.index_loss is not None:
        index_loss = _append(stats.index_loss, mtp_stats.index_loss.mean())
    return hiddens, LayerStats(
        max_logit=jnp.append(stats.max_logit, mtp_stats.max_logit.max()),
        load=_append(stats.load, mtp_stats.load.sum(0)),
        balance=_append(stats.balance, mtp_stats.balance.mean()),
        index_loss=index_loss,
    )


def local_logp(
    params: PyTree,
    batch: dict[str, Array],
    targets: Int[Array, "b t"],
    temperature: float,
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    chunk: int,
    region: Region,
) -> Float[Array, "b t"]:
    """Returns the log-probs of targets under logits / temperature, for this device's shard, in `accum_dtype`."""
    tokens, segments, positions = (batch[k] for k in ("token_ids", "segment_ids", "positions"))
    hidden = trunk(params, tokens, positions, segments, None, cfg, execution, region).hidden
    weights = WeightGatherer(cfg, region, execution)
    return target_logp(params, weights, hidden, targets, temperature, chunk, execution)


@jax.named_scope("head")
def target_logp(
    params: PyTree,
    weights: WeightGatherer,
    hidden: Float[Array, "b t d"],
    targets: Int[Array, "b t"],
    temperature: float,
    chunk: int,
    execution: ExecutionConfig,
) -> Float[Array, "b t"]:
    """Returns the log-probs of targets under the trunk's hidden state, in `accum_dtype`."""
    rows = hidden.reshape(-1, hidden.shape[-1]) / temperature
    nll, _ = cross_entropy(params, weights, rows, targets.reshape(-1), chunk, execution)
    return -nll.reshape(targets.shape)


def _sums(token_loss: TokenLoss, logp, streams, totals: Totals) -> tuple[dict, dict]:
    """Returns this device's share of the token_loss's parts and metrics."""
    weights = _weights(streams)
    losses, stats = token_loss(logp, streams)
    parts = {
        name: jnp.sum(loss * weights[name]) / _divisor(totals.parts[name])
        for name, loss in losses.items()
    }
    sampled = _sampled(weights) / _divisor(totals.parts["tokens"])
    return parts, {name: jnp.sum(value * sampled) for name, value in stats.items()}


def _divisor(total):
    """Replaces 0 by 1, so that rows without weight do not give 0/0."""
    return jnp.where(total == 0, 1, total)


def _append(stack, row):
    return row[None] if stack is None else jnp.concatenate([stack, row[None]])
