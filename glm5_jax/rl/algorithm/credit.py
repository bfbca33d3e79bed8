"""Turns the rewards of groups into the per-token streams that the learner trains on."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.algorithm.advantage import BASELINES, compute_advantages
from glm5_jax.rl.trajectory import BatchGroup, Group, Trajectory
from glm5_jax.rl.types import Reward

NORMALISATIONS = ("sequence", "token")
KL_TARGETS = ("none", "reference", "uniform")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Options of credit assignment. Raises ValueError if a name is unknown.

    Attributes:
      baseline: name of the advantage's baseline; `compute_advantages` has the formulas.
      normalisation: "sequence" averages over a rollout's tokens, then over rollouts (GLM-5 Eq. 1). "token" averages
        over all tokens, so that long rollouts count more.
      kl_target: distribution whose KL divergence tokens pay for (`PolicyConfig.ref_kl`). "none" as in GLM-5 3.2;
        "reference" is a checkpoint; "uniform" has all tokens equally likely, which makes it an entropy bonus.
      drop_zero_variance_groups: True leaves out groups whose rewards are all equal; False counts them as zeros. Not
        disclosed.
    """

    baseline: str = "zscore"
    normalisation: str = "sequence"
    kl_target: str = "none"
    drop_zero_variance_groups: bool = False

    def __post_init__(self):
        if self.baseline not in BASELINES:
            raise ValueError(f"baseline is {self.baseline!r}; use one of {', '.join(BASELINES)}")
        if self.kl_target not in KL_TARGETS:
            raise ValueError(f"kl_target is {self.kl_target!r}; use one of {', '.join(KL_TARGETS)}")
        if self.normalisation not in NORMALISATIONS:
            raise ValueError(
                f"normalisation is {self.normalisation!r}; use {' or '.join(NORMALISATIONS)}"
            )


def assign_credit(
    groups: Iterable[Group], config: CreditConfig, vocab_size: int
) -> list[TokenRecord]:
    """Returns the records of all attempts that have a reward, with rl_weight, advantage and the other streams filled.

    An attempt without a reward, because the environment failed, is left out; the rest of its group remains.
    vocab_size: size of the vocabulary that the policy samples from, for kl_target="uniform".
    """
    scored = []
    for group in groups:
        values = [reward.value for reward in group.rewards]
        if config.drop_zero_variance_groups and len(set(values) - {None}) < 2:
            continue
        advantages = compute_advantages(values, config.baseline)
        members = zip(group.records, group.rewards, advantages, strict=True)
        scored += [member for member in members if member[1].value is not None]
    return _fill_streams(scored, config, vocab_size)


def assign_batch_credit(
    groups: Iterable[BatchGroup], config: CreditConfig, vocab_size: int
) -> list[TokenRecord]:
    """Returns the records of groups from the buffer, with streams filled as by `assign_credit`.

    Statistics are those of the members without copies. A copy, which pads a group, counts as much as another rollout.
    The branches of a rollout share its advantage, and its weight.
    """
    scored = []
    for group in groups:
        if config.drop_zero_variance_groups and len(set(group.baseline)) < 2:
            continue
        advantages = compute_advantages(group.baseline, config.baseline)
        scored += [
            (record, member.reward, advantages[original])
            for record, member, original in _records_of_group(group)
        ]
    return _fill_streams(scored, config, vocab_size)


def _records_of_group(group: BatchGroup) -> Iterator[tuple[TokenRecord, Trajectory, int]]:
    """Yields the records of a group, each with its member and the index of the original of that member.

    The rollouts of copies get names of their own.
    """
    for index, member in enumerate(group.members):
        # Copies come after the originals, in their order.
        copy, original = divmod(index, len(group.baseline))
        for record in member.records:
            if copy:
                name = f"{record.rollout_id}+{copy}"
                record = dataclasses.replace(record, rollout_id=name)
            yield record, member, original


def make_distillation_records(groups: Iterable[Group], config: CreditConfig) -> list[TokenRecord]:
    """Returns the records of all attempts that did not fail, weighted for distillation only (GLM-5 3.5).

    Their tokens train on a teacher's log-probs, without rewards. ref_logp is still empty.
    """
    records = [
        record
        for group in groups
        for record, attempt in zip(group.records, group.attempts, strict=True)
        if attempt.finish_reason != "failed"
    ]
    return _add_distillation_weights(records, config)


def make_batch_distillation_records(
    groups: Iterable[BatchGroup], config: CreditConfig
) -> list[TokenRecord]:
    """Returns the records of groups from the buffer, weighted as by `make_distillation_records`."""
    records = [record for group in groups for record, *_ in _records_of_group(group)]
    return _add_distillation_weights(records, config)


def _add_distillation_weights(
    records: Sequence[TokenRecord], config: CreditConfig
) -> list[TokenRecord]:
    return _add_weights(records, ("ref_kl_weight",), config, [{}] * len(records))


def _fill_streams(
    scored: Sequence[tuple[TokenRecord, Reward, float]], config: CreditConfig, vocab_size: int
) -> list[TokenRecord]:
    """Returns the records with weights, advantage, rewards and, for kl_target="uniform", ref_logp."""
    streams: list[dict[str, Any]] = [
        {
            "advantage": np.where(record.loss_mask, advantage, 0),
            "rewards": {"value": reward.value, **reward.parts},
        }
        for record, reward, advantage in scored
    ]
    names = ("rl_weight",) if config.kl_target == "none" else ("rl_weight", "ref_kl_weight")
    if config.kl_target == "uniform":
        for fields, (record, *_) in zip(streams, scored):
            fields["ref_logp"] = np.where(record.loss_mask, -np.log(vocab_size), np.nan)
    return _add_weights([record for record, *_ in scored], names, config, streams)


def _add_weights(
    records: Sequence[TokenRecord],
    names: Sequence[str],
    config: CreditConfig,
    fields: Sequence[Mapping[str, Any]],
) -> list[TokenRecord]:
    """Returns the records with the named streams of weights on sampled tokens, and with further fields of each.

    The weights of a rollout sum to 1 over all its records, if the normalisation is "sequence".
    """
    lengths: dict[str, float] = defaultdict(float)
    for record in records:
        lengths[record.rollout_id] += record.loss_mask.sum()
    if config.normalisation == "token":
        lengths = dict.fromkeys(lengths, 1.0)
    weighted = []
    for record, more in zip(records, fields, strict=True):
        weight = record.loss_mask / max(lengths[record.rollout_id], 1.0)
        weighted.append(dataclasses.replace(record, **more, **dict.fromkeys(names, weight)))
    return weighted
