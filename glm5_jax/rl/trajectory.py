"""Trajectories: finished rollouts, in the one form that all task services share (GLM-5 4.1.1).

A task service ends a rollout; `Trajectory` holds its reward and a summary of its token records. The records stay at the
gateway until the trainer fetches those of its batch. The buffer collects the trajectories of one task into a
`BatchGroup`, which the trainer trains on. The in-process engine returns a `Group` instead.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.types import Attempt, Reward, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordSummary:
    """Summary of the token records of a rollout, sufficient for staleness, group repair and metrics.

    Attributes:
      lengths: number of tokens of each record.
      num_trained_tokens: number of tokens of all records that are trained on.
      versions: distinct versions of the weights that sampled tokens, ascending; empty: no token was sampled.
      is_truncated: whether the last record ended at its length limit.
      digest: digest of the encoded records (`rollouts.record_codec`); empty: the records never left this process.
    """

    lengths: tuple[int, ...]
    num_trained_tokens: int
    versions: tuple[int, ...]
    is_truncated: bool
    digest: str = ""


def summarize_records(records: Sequence[TokenRecord], digest: str = "") -> RecordSummary:
    """Returns the summary of sampled records.

    Raises ValueError for a record with tokens to train on and without a weight_version.
    """
    for record in records:
        if record.weight_version is None and record.loss_mask.any():
            raise ValueError(
                f"rollout {record.rollout_id!r} has tokens to train on without a weight_version; keep the engine's"
            )
    streams = [record.weight_version for record in records if record.weight_version is not None]
    versions = np.unique(np.concatenate([np.zeros(0, np.int32), *streams]))
    return RecordSummary(
        lengths=tuple(len(record) for record in records),
        num_trained_tokens=sum(int(record.loss_mask.sum()) for record in records),
        versions=tuple(versions[versions >= 0].tolist()),
        is_truncated=bool(records) and records[-1].status == "truncated",
        digest=digest,
    )


def summary_from_json(body: Any) -> RecordSummary:
    """Returns the summary of a JSON object with its fields. Raises ValueError for another value."""
    return msgspec.convert(body, RecordSummary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Rollout that has ended.

    Attributes:
      rollout_id: id of the rollout, and of its session at the gateway.
      group_id: id of its group, the attempts at one task.
      task: name of the task service.
      number: number of the task within the service.
      reward: the reward. Its value is None if the environment failed; the policy is then not judged.
      summary: summary of the records; None if the environment failed.
      records: records to train on, one for each branch of the chat, with the tokens as the gateway sampled them; empty
        where they were not fetched, as in the orchestrator.
      metrics: numbers by name, in addition to the reward's parts.
      has_used_tools: whether a reply of the policy follows a tool's result.
      duration_s: time from the start to the reward, in seconds.
    """

    rollout_id: str
    group_id: str
    task: str
    number: int
    reward: Reward
    summary: RecordSummary | None = None
    records: tuple[TokenRecord, ...] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    has_used_tools: bool = False
    duration_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Returns True if nothing is known of the policy: the environment failed, or no token was sampled."""
        return self.reward.value is None or not self.versions

    @property
    def versions(self) -> tuple[int, ...]:
        """Returns the distinct versions of the weights that sampled tokens, ascending."""
        return () if self.summary is None else self.summary.versions

    def to_json(self) -> dict[str, Any]:
        """Returns the trajectory as JSON, without its records; `trajectory_from_json` is the inverse."""
        fields = msgspec.to_builtins(dataclasses.replace(self, records=()), enc_hook=_plain_number)
        del fields["records"]
        return fields


def _plain_number(value: Any) -> Any:
    """Returns a NumPy number, such as a reward, as a number of Python."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} has no JSON form; give a number or a text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchGroup:
    """Group of trajectories that the trainer trains on.

    Attributes:
      group_id, task, number: as in `Trajectory`.
      order: position in the order in which groups were admitted.
      members: trajectories, as many as the group size. Copies come after the originals and are the same objects.
      baseline: rewards of the members without copies; advantages take their statistics.
      staleness: age of the oldest member's weights, in training steps.
    """

    group_id: str
    task: str
    number: int
    order: int
    members: tuple[Trajectory, ...]
    baseline: tuple[float, ...]
    staleness: int


@dataclasses.dataclass(kw_only=True)
class Group:
    """Attempts at one task by an engine in the trainer's process.

    Attributes:
      task: the task.
      attempts: the attempts.
      records: sampled tokens of each attempt.
      rewards: reward of each attempt; empty until they are judged.
    """

    task: Task
    attempts: list[Attempt]
    records: list[TokenRecord]
    rewards: list[Reward] = dataclasses.field(default_factory=list)


def trajectory_from_json(body: Any) -> Trajectory:
    """Returns the trajectory that `Trajectory.to_json` wrote. Raises ValueError for another value."""
    return msgspec.convert(body, Trajectory)
