"""From judged groups to what the learner reads: the per-token streams of their records."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.algorithm.advantage import BASELINES, advantages
from glm5_jax.rl.trajectory import Group, Taken
from glm5_jax.rl.types import Reward

NORMALISATIONS = ("sequence", "token")
PULLS = ("none", "reference", "uniform")


@dataclasses.dataclass(frozen=True)
class CreditConfig:
    """What a group's rewards mean for its tokens. Construction refuses other names (ValueError).

    Attributes:
      baseline: see `advantages`.
      normalisation: "sequence": the mean over a rollout's tokens, then over rollouts (GLM-5 Eq. 1); "token": over all
        tokens, so that long rollouts count more.
      pull: what tokens also pay for leaving (`PolicyConfig.ref_kl`): "none", as in GLM-5 3.2; a "reference", a
        checkpoint; or "uniform", all tokens being as likely: an entropy bonus.
      drop_flat: whether groups without a difference are left out, not counted as zeros; not disclosed.
    """

    baseline: str = "zscore"
    normalisation: str = "sequence"
    pull: str = "none"
    drop_flat: bool = False

    def __post_init__(self):
        if self.baseline not in BASELINES:
            raise ValueError(f"baseline is {self.baseline!r}; use one of {', '.join(BASELINES)}")
        if self.pull not in PULLS:
            raise ValueError(f"pull is {self.pull!r}; use one of {', '.join(PULLS)}")
        if self.normalisation not in NORMALISATIONS:
            raise ValueError(
                f"normalisation is {self.normalisation!r}; use {' or '.join(NORMALISATIONS)}"
            )


def credited(groups: Iterable[Group], config: CreditConfig, vocab_size: int) -> list[TokenRecord]:
    """The records of all attempts that have a reward, with rl_weight, advantage and the other streams filled.

    Attempts without one, failures of the environment, are left out; of their group the others remain. vocab_size: tokens
    that the policy chooses from, for a pull towards the uniform distribution.
    """
    found = []
    for group in groups:
        values = [reward.value for reward in group.rewards]
        if config.drop_flat and len({value for value in values if value is not None}) < 2:
            continue
        worth = advantages(values, config.baseline)
        judged = zip(group.records, group.rewards, worth, strict=True)
        found += [own for own in judged if own[1].value is not None]
    return _credited(found, config, vocab_size)


def credited_rollouts(
    groups: Iterable[Taken], config: CreditConfig, vocab_size: int
) -> list[TokenRecord]:
    """As `credited`, of groups that the buffer gave out: statistics are those of the members without copies, and a copy
    counts as much as another rollout. A rollout's branches share its advantage, and its weight."""
    found = []
    for group in groups:
        if config.drop_flat and len(set(group.baseline)) < 2:
            continue
        worth = advantages(group.baseline, config.baseline)
        for place, member in enumerate(group.members):
            copy, own = divmod(place, len(worth))  # copies go on in the order of what they are of
            for record in member.records:
                if copy:
                    name = f"{record.rollout_id}+{copy}"
                    record = dataclasses.replace(record, rollout_id=name)
                found.append((record, member.reward, worth[own]))
    return _credited(found, config, vocab_size)


def _credited(
    judged: Sequence[tuple[TokenRecord, Reward, float]], config: CreditConfig, vocab_size: int
) -> list[TokenRecord]:
    given = [
        {
            "advantage": np.where(record.loss_mask, advantage, 0),
            "rewards": {"value": reward.value, **reward.parts},
        }
        for record, reward, advantage in judged
    ]
    names = ("rl_weight",) if config.pull == "none" else ("rl_weight", "ref_kl_weight")
    if config.pull == "uniform":
        for fields, (record, *_) in zip(given, judged):
            fields["ref_logp"] = np.where(record.loss_mask, -np.log(vocab_size), np.nan)
    return _weighted([record for record, *_ in judged], names, config, given)


def distilled(groups: Iterable[Group], config: CreditConfig) -> list[TokenRecord]:
    """The records of all attempts that did not fail, whose tokens learn from a teacher's log-probs alone (GLM-5 3.5);
    ref_logp is still to be filled."""
    found = [
        record
        for group in groups
        for record, attempt in zip(group.records, group.attempts, strict=True)
        if attempt.finish_reason != "failed"
    ]
    return _weighted(found, ("ref_kl_weight",), config, [{}] * len(found))


def _weighted(
    records: Sequence[TokenRecord],
    names: Sequence[str],
    config: CreditConfig,
    given: Sequence[dict],
) -> list[TokenRecord]:
    """With streams of weights on what was sampled: all of a rollout's, in however many records, together 1. given: other
    fields of each."""
    lengths: dict[str, float] = defaultdict(float)
    for record in records:
        lengths[record.rollout_id] += record.loss_mask.sum()
    if config.normalisation == "token":
        lengths = dict.fromkeys(lengths, 1.0)
    found = []
    for record, fields in zip(records, given, strict=True):
        weight = record.loss_mask / max(lengths[record.rollout_id], 1.0)
        found.append(dataclasses.replace(record, **fields, **dict.fromkeys(names, weight)))
    return found
