"""Slot of the group buffer: a position in the order of admission, and the group that has it."""

import dataclasses
from collections.abc import Sequence

from glm5_jax.rl.orchestrator.staleness import GroupTicket
from glm5_jax.rl.trajectory import Trajectory


@dataclasses.dataclass(kw_only=True)
class GroupSlot:
    """Position in the order of groups, and the group that has it.

    Attributes:
      ticket: identity of the group.
      version: version of the engines' weights when the group was admitted.
      num_rollbacks: number of rollbacks of the trainer before the admission.
      members: trajectories of a finished group; empty while it runs, and after it was dropped.
      versions: sampling versions of each member; None for a member that failed.
    """

    ticket: GroupTicket
    version: int
    num_rollbacks: int
    members: tuple[Trajectory, ...] = ()
    versions: tuple[tuple[int, ...] | None, ...] = ()

    def complete(self, members: Sequence[Trajectory]) -> None:
        """Sets the members of a group that has finished."""
        self.members = tuple(members)
        self.versions = tuple(None if member.has_failed else member.versions for member in members)

    def clear(self) -> None:
        """Removes the members."""
        self.members, self.versions = (), ()

    def staleness_of(self, index: int, step: int) -> int:
        """Returns the staleness of a member that has not failed."""
        versions = self.versions[index]
        if versions is None:
            raise ValueError(f"member {index} of group {self.ticket.group_id} has failed")
        return step - versions[0]

    def reward_of(self, index: int) -> float:
        """Returns the reward of a member that has not failed."""
        value = self.members[index].reward.value
        if value is None:
            raise ValueError(f"member {index} of group {self.ticket.group_id} has failed")
        return value

    @property
    def priority(self) -> tuple[int, int]:
        """Returns the key of the order in which groups are taken: by version, which gives the due step, then order."""
        return self.version, self.ticket.order

    @property
    def task_number(self) -> tuple[str, int]:
        """Returns the task and the number of the group."""
        return self.ticket.task, self.ticket.number
