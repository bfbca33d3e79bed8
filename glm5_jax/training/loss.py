"""The training objective: next-token and multi-token cross-entropy, z-loss and expert balance, and what else tokens
that were sampled are learnt from.

The output projection and its loss run in row chunks, so that logits [rows v] never exist as a whole.
Targets arrive shifted (`shift`), so no shard of the sequence needs its neighbour's tokens.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.core.mesh import AXES, Region
from glm5_jax.model import glm5
from glm5_jax.model.mtp import mtp_step
from glm5_jax.model.plan import Plan
from glm5_jax.model.vocabulary import cross_entropy, embed


class TokenLoss(Protocol):
    """Further parts of the objective, by the log-probs that tokens have under the main head (rl/losses.py).

    Attributes:
      streams: arrays [b t] of a batch that it reads; of each part NAME there is a NAME_weight among them.
      temperature: the log-probs are those of logits / temperature, for the cross-entropy as well.
      coefficients: of the parts and of "ce" in the objective.
    """

    streams: tuple[str, ...]
    temperature: float
    coefficients: Mapping[str, float]

    def __call__(self, logp, streams) -> tuple[dict, dict]:
        """({part: loss [b t] of each token}, {name: numbers [b t], told as their mean over tokens with a weight})."""
        ...


class Shifted(NamedTuple):
    """targets int32[1+k b t], weights float32[1+k b t]: entry j, position t concerns token t + 1 + j. streams: those of
    a `TokenLoss` [b t], of which position t concerns token t + 1."""

    targets: jax.Array
    weights: jax.Array
    streams: dict[str, jax.Array]


def shift(batch, mtp_steps: int, streams=()) -> Shifted:
    """Targets of the main head and of mtp_steps further ones, from a batch of arrays [b t], and these streams of it.

    A target counts if it lies in the same segment; its weight is loss_mask * ce_weight of the token. So it is
    with other weights.
    """
    tokens, segments = batch["token_ids"], batch["segment_ids"]
    weight = batch["loss_mask"] * batch["ce_weight"]

    def ahead(x, j):
        return jnp.pad(x[:, j:], ((0, 0), (0, min(j, x.shape[1]))))[:, : x.shape[1]]

    def counted(weight, j):
        same = (ahead(segments, j) == segments) & (segments != 0)
        return jnp.where(same, ahead(weight, j), 0.0)

    steps = range(1, mtp_steps + 2)
    moved = {
        name: counted(batch["loss_mask"] * batch[name], 1)
        if name.endswith("_weight")
        else ahead(batch[name], 1)
        for name in streams
    }
    return Shifted(
        jnp.stack([ahead(tokens, j) for j in steps]),
        jnp.stack([counted(weight, j) for j in steps]),
        moved,
    )


class LossWeights(NamedTuple):
    """Weights of the parts: mtp (paper: 0.3, then 0.1), balance (1e-4), z (0)."""

    mtp: jax.Array
    balance: float
    z: float


class Totals(NamedTuple):
    """What the sums over a batch are divided by: heads [1+k], the summed weights of each head's
    targets, and queries, in the same precision, its tokens that are no padding; parts: the summed weights of each
    part of a `TokenLoss`, and "tokens" that have any."""

    heads: jax.Array
    queries: jax.Array
    parts: dict[str, jax.Array]


def totals_of(batch, shifted: Shifted) -> Totals:
    """The totals of a whole batch."""
    heads = shifted.weights.sum((1, 2))
    queries = jnp.sum(batch["segment_ids"] != 0, dtype=heads.dtype)
    weights = _weights(shifted.streams)
    parts = {name: weight.sum() for name, weight in weights.items()}
    if weights:
        parts["tokens"] = _sampled(weights).sum()
    return Totals(heads, jnp.maximum(queries, 1), parts)


def _weights(streams) -> dict[str, jax.Array]:
    """By the names of their parts."""
    found = {name.removesuffix("_weight"): x for name, x in streams.items()}
    return {name: x for name, x in found.items() if name not in streams}


def _sampled(weights):
    """1 for tokens with any of these weights, else 0."""
    any_weight = sum(jnp.abs(weight) for weight in weights.values())
    return (any_weight > 0).astype(any_weight.dtype)


class LossParts(NamedTuple):
    """Scalars over the whole batch, and per-layer statistics: max_logit [l], load [l e], index_loss [l], the
    mean over queries of what each indexer learns from, in nats. parts, stats: of a `TokenLoss`, the former
    without their coefficients."""

    ce: jax.Array
    mtp: jax.Array
    balance: jax.Array
    z: jax.Array
    max_logit: jax.Array
    load: jax.Array | None
    index_loss: jax.Array | None
    parts: dict[str, jax.Array]
    stats: dict[str, jax.Array]


def local_objective(
    params,
    batch,
    shifted: Shifted,
    totals: Totals,
    loss_weights: LossWeights,
    *,
    cfg,
    plan: Plan,
    chunk: int,
    region: Region,
    num_rows: int,
    index_factor: float = 0.0,
    index_served: bool = False,
    token_loss: TokenLoss | None = None,
):
    """(objective, LossParts) over all devices, computed from one device's shard of the batch.

    totals are those of the whole batch, num_rows its rows: dividing by them here makes microbatches and
    shards add up to the loss of the whole.
    objective = ce + mtp_weight * mean_k ce_k + balance_weight * sum_layers balance + z_weight * z
                + index_factor * sum_layers index_loss, which a factor of 0 leaves out;
    with a token_loss, ce times its coefficient, and its own parts with theirs.
    """
    weights = glm5.Weights(cfg, region, plan)
    tokens, segments, positions = (batch[k] for k in ("token_ids", "segment_ids", "positions"))
    index_weight = None
    if index_factor:
        index_weight = (segments != 0) / totals.queries
    out = glm5.trunk(
        params,
        tokens,
        positions,
        segments,
        None,
        cfg,
        plan,
        region,
        index_weight=index_weight,
        index_served=index_served,
    )
    hiddens, stats = out.hidden[None], out.stats
    mtp_steps = shifted.targets.shape[0] - 1
    if mtp_steps:

        def step(hidden, embedded):
            w = weights("mtp", params["mtp"])
            hidden, _, stats = mtp_step(w, hidden, embedded, None, out.context)
            return hidden, (hidden, stats)

        # One lookup for all steps: the table is gathered once, and its gradient reduced once.
        embedded = embed(params, weights, shifted.targets[:-1], plan.vocab_block)
        _, (more, mtp_stats) = lax.scan(plan.checkpoint(step), out.hidden, embedded)
        hiddens = jnp.concatenate([hiddens, more])
        # The MTP block counts as one more layer: loads of its runs are summed, their losses averaged.
        stats = glm5.LayerStats(
            jnp.append(stats.max_logit, mtp_stats.max_logit.max()),
            _append(stats.load, mtp_stats.load.sum(0)),
            _append(stats.balance, mtp_stats.balance.mean()),
            None
            if index_weight is None
            else _append(stats.index_loss, mtp_stats.index_loss.mean()),
        )
    if token_loss is not None:
        hiddens = hiddens / token_loss.temperature
    with jax.named_scope("head"):
        rows = hiddens.reshape(-1, hiddens.shape[-1])
        nll, logz = cross_entropy(params, weights, rows, shifted.targets.reshape(-1), chunk, plan)
    nll, logz = (x.reshape(shifted.weights.shape) for x in (nll, logz))
    share = shifted.weights / _divisor(totals.heads)[:, None, None]
    ce = jnp.sum(nll * share, axis=(1, 2))
    z = jnp.sum(logz[0] ** 2 * share[0])
    balance = jnp.zeros((), ce.dtype)
    if stats.balance is not None:
        # Every shard of a sequence holds the whole sequence's value.
        balance = jnp.sum(stats.balance) / (num_rows * region.size(region.sequence_axes))
    mtp = jnp.mean(ce[1:]) if mtp_steps else jnp.zeros((), ce.dtype)
    ce, mtp, balance, z = region.psum((ce[0], mtp, balance, z), AXES)
    factor = 1.0 if token_loss is None else token_loss.coefficients["ce"]
    objective = factor * ce
    objective += loss_weights.mtp * mtp + loss_weights.balance * balance + loss_weights.z * z
    parts, told = {}, {}
    if token_loss is not None:
        parts, told = region.psum(_sums(token_loss, -nll[0], shifted.streams, totals), AXES)
        objective += sum(token_loss.coefficients[name] * value for name, value in parts.items())
    reduced = glm5.reduce_stats(stats, region)
    if index_weight is not None:
        objective += index_factor * jnp.sum(reduced.index_loss)
    return objective, LossParts(
        ce, mtp, balance, z, reduced.max_logit, reduced.load, reduced.index_loss, parts, told
    )


def local_logp(params, batch, targets, temperature, *, cfg, plan: Plan, chunk: int, region: Region):
    """wide[b t]: the log-probs of targets int32[b t], under logits / temperature of this device's shard."""
    tokens, segments, positions = (batch[k] for k in ("token_ids", "segment_ids", "positions"))
    hidden = glm5.trunk(params, tokens, positions, segments, None, cfg, plan, region).hidden
    weights = glm5.Weights(cfg, region, plan)
    return target_logp(params, weights, hidden, targets, temperature, chunk, plan)


@jax.named_scope("head")
def target_logp(
    params, weights: glm5.Weights, hidden, targets, temperature, chunk: int, plan: Plan
):
    """wide[b t]: the log-probs of targets int32[b t], of the trunk's hidden [b t d]."""
    rows = hidden.reshape(-1, hidden.shape[-1]) / temperature
    nll, _ = cross_entropy(params, weights, rows, targets.reshape(-1), chunk, plan)
    return -nll.reshape(targets.shape)


def _sums(token_loss: TokenLoss, logp, streams, totals: Totals) -> tuple[dict, dict]:
    """This device's share of the parts and of the means that are told."""
    weights = _weights(streams)
    losses, stats = token_loss(logp, streams)
    parts = {
        name: jnp.sum(loss * weights[name]) / _divisor(totals.parts[name])
        for name, loss in losses.items()
    }
    sampled = _sampled(weights) / _divisor(totals.parts["tokens"])
    return parts, {name: jnp.sum(value * sampled) for name, value in stats.items()}


def _divisor(total):
    """What has no weight at all adds nothing."""
    return jnp.where(total == 0, 1, total)


def _append(stack, row):
    return row[None] if stack is None else jnp.concatenate([stack, row[None]])
