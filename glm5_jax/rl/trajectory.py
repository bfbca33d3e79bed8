"""What became of a rollout, in the one form that all task services have (GLM-5 4.1.1)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.types import Attempt, Message, Reward, Task


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A rollout that has ended.

    Attributes:
      rollout_id, group_id: its own, and that of all attempts at the same task. task: the service's name, number: which of
        the service's tasks.
      messages: the task's, the policy's replies and what tools answered.
      reward: value None: the environment failed, and nothing is known of the policy.
      records: what is trained on, a record for each branch of the chat, as the gateway kept them.
      metrics: numbers by name, beside the reward's parts. seconds: from its start to its reward.
    """

    rollout_id: str
    group_id: str
    task: str
    number: int
    messages: tuple[Message, ...]
    reward: Reward
    records: tuple[TokenRecord, ...] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it says nothing of the policy: its environment failed, or nothing was sampled."""
        return self.reward.value is None or self.versions is None

    @property
    def versions(self) -> tuple[int, int] | None:
        """Of the weights that sampled it: the oldest and the newest; None if none did."""
        sampled = [own[own >= 0] for own in (r.weight_version for r in self.records)]
        found = [(int(own.min()), int(own.max())) for own in sampled if own.size]
        return (min(a for a, _ in found), max(b for _, b in found)) if found else None

    def told(self) -> dict:
        """As JSON; `trajectory` is the way back."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        more = {
            "reward": dataclasses.asdict(self.reward),
            "records": [told(record) for record in self.records],
        }
        return own | more


@dataclasses.dataclass(frozen=True)
class Taken:
    """A group that is to be learnt from.

    Attributes:
      group_id, task, number, order: as it was admitted.
      members: `group` trajectories; copies behind the others are the same objects.
      baseline: the rewards of the members without copies, whose statistics the advantages are of.
      staleness: of the oldest member, in steps.
    """

    group_id: str
    task: str
    number: int
    order: int
    members: tuple[Trajectory, ...]
    baseline: tuple[float, ...]
    staleness: int


@dataclasses.dataclass
class Group:
    """The attempts at a task, what was sampled for each, and, once they are judged, what each is worth."""

    task: Task
    attempts: list[Attempt]
    records: list[TokenRecord]
    rewards: list[Reward] = dataclasses.field(default_factory=list)


def trajectory(said: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `Trajectory.told` spoke of."""
    ids = {name: said[name] for name in ("group_id", "rollout_id")}
    more = {
        "messages": tuple(said["messages"]),
        "reward": Reward(**said["reward"]),
        "records": tuple(heard(record, **ids) for record in said["records"]),
    }
    return Trajectory(**{**said, **more})


def told(record: TokenRecord) -> dict:
    """What is said over HTTP of a record; `heard` is the way back."""
    streams = {
        "token_ids": record.token_ids.tolist(),
        "loss_mask": record.loss_mask.astype(int).tolist(),
        "rollout_logp": [None if x != x else x for x in record.rollout_logp.tolist()],
        "weight_version": record.weight_version.tolist(),
    }
    return {**streams, "status": record.status}


def heard(said: Mapping, **more: Any) -> TokenRecord:
    """The record that `told` spoke of; more: other fields."""
    logp = [float("nan") if x is None else x for x in said["rollout_logp"]]
    return TokenRecord(**{**said, "rollout_logp": logp, **more})
