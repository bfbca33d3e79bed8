"""Draws tasks of several kinds so that the groups that are trained on stay in balance (GLM-5, section 3.2).

Groups of some kinds are dropped more often than of others: all right, all wrong, or the environment failed.
So shares are computed over accepted groups, and pending groups count as if they will be accepted. The next
kind is the one with the largest deficit relative to its weight (deficit round-robin). If all groups are accepted, the
order is that of `rl.orchestrator.fair_share.FairShare`.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.rl.orchestrator.fair_share import shuffled_indices
from glm5_jax.rl.types import Task


@dataclasses.dataclass(kw_only=True)
class _Kind:
    """Tasks of one kind, with counts of groups.

    Attributes:
      tasks: tasks in the order of the source.
      weight: weight of the kind, relative to the other weights.
      share: weight divided by the sum of all weights.
      drawn, accepted, waiting: number of groups drawn, accepted and pending.
    """

    tasks: Sequence[Task]
    weight: float
    share: float
    drawn: int = 0
    accepted: int = 0
    waiting: int = 0


class TaskMixture:
    """Draws tasks by weight; the caller reports the result of each group with `accept` or `drop`. Not thread-safe.

    Args:
      tasks: tasks by kind, each drawn in an order that is shuffled every epoch.
      weights: weights by kind; divided by their sum they are shares.
      seed: random seed of the orders.
      max_overdraw: limit of how often a kind is drawn, as a multiple of its weight's share. So a kind whose
          groups are never accepted leaves the others their share, and falls short of its own.
    """

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Task]],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        max_overdraw: float = 4.0,
    ):
        if not tasks or set(tasks) != set(weights):
            raise ValueError(f"there are tasks of {sorted(tasks)} and weights of {sorted(weights)}")
        for kind, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of {kind!r} is {weight}; it must be positive")
            if not tasks[kind]:
                raise ValueError(f"there is no task of {kind!r}; give some, or no weight")
        if not max_overdraw >= 1:
            raise ValueError(f"max_overdraw is {max_overdraw}; it must be at least 1")
        total = sum(weights.values())
        self._kinds = {
            kind: _Kind(tasks=tasks[kind], weight=weights[kind], share=weights[kind] / total)
            for kind in tasks
        }
        self._kind_of = {task.id: kind for kind in tasks for task in tasks[kind]}
        if len(self._kind_of) < sum(map(len, tasks.values())):
            raise ValueError("two tasks have the same id; give each a separate one")
        self._seed, self._max_overdraw = seed, max_overdraw

    def draw(self, count: int = 1) -> list[Task]:
        """Returns the next tasks, one for each group that is to be sampled."""
        return [self._next() for _ in range(count)]

    def accept(self, task: Task) -> None:
        """Records that a group of the task is trained on."""
        self._returned(task).accepted += 1

    def drop(self, task: Task) -> None:
        """Records that a group of the task is not trained on, or is lost."""
        self._returned(task)

    def shares(self) -> dict[str, float]:
        """Returns each kind's share of the accepted groups, 0 if there are none."""
        total = sum(kind.accepted for kind in self._kinds.values())
        return {name: kind.accepted / max(total, 1) for name, kind in self._kinds.items()}

    def state(self) -> dict[str, Any]:
        """Returns the state that `restore` needs to continue with the same tasks, as JSON.

        Pending groups are included. A group that is not restored from another part of the checkpoint has to
        be dropped after `restore`.
        """
        return {
            "seed": self._seed,
            "kinds": {
                name: {
                    "tasks": self._fingerprint(kind.tasks),
                    "drawn": kind.drawn,
                    "accepted": kind.accepted,
                    "waiting": kind.waiting,
                }
                for name, kind in self._kinds.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`. Raises ValueError if it has other tasks or another seed; weights may change."""
        saved = {name: kind["tasks"] for name, kind in state["kinds"].items()}
        fingerprints = {name: self._fingerprint(kind.tasks) for name, kind in self._kinds.items()}
        if (state["seed"], saved) != (self._seed, fingerprints):
            raise ValueError(
                f"the state is of seed {state['seed']} and tasks {saved}, not of seed {self._seed} and {fingerprints}; "
                "give the tasks that it was saved with"
            )
        for name, kind in self._kinds.items():
            for field in ("drawn", "accepted", "waiting"):
                setattr(kind, field, state["kinds"][name][field])

    def drop_waiting(self) -> None:
        """Drops all pending groups."""
        for kind in self._kinds.values():
            kind.waiting = 0

    def _next(self) -> Task:
        kinds = self._kinds.items()
        drawn = 1 + sum(kind.drawn for _, kind in kinds)
        # One more than the share allows, because otherwise nothing could be drawn at first.
        allowed = [
            (name, kind)
            for name, kind in kinds
            if kind.drawn < 1 + self._max_overdraw * kind.share * drawn
        ]
        # By ratio, so that the other kinds keep their shares relative to each other if one falls short. Equal kinds are
        # ordered by name.
        name, kind = min(
            allowed,
            key=lambda pair: ((pair[1].accepted + pair[1].waiting) / pair[1].weight, pair[0]),
        )
        epoch, index = divmod(kind.drawn, len(kind.tasks))
        kind.drawn += 1
        kind.waiting += 1
        return kind.tasks[shuffled_indices(self._seed, name, epoch, len(kind.tasks))[index]]

    def _returned(self, task: Task) -> _Kind:
        name = self._kind_of.get(task.id)
        if name is None or not self._kinds[name].waiting:
            raise ValueError(f"no group of task {task.id!r} is on its way; report each once")
        self._kinds[name].waiting -= 1
        return self._kinds[name]

    @staticmethod
    def _fingerprint(tasks: Sequence[Task]) -> list[int]:
        return [len(tasks), zlib.crc32("\n".join(task.id for task in tasks).encode())]
