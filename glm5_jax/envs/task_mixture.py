"""The next tasks of several kinds, so that what is learnt from stays in balance (GLM-5, section 3.2).

Groups of some kinds are dropped more often than of others: all right, all wrong, or the environment failed. So
shares are kept among the groups that were accepted, and those still on their way count as if they will be: of
the kinds, the next is the one that is farthest behind its weight (deficit round-robin).
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.rl.shares import shuffled
from glm5_jax.rl.types import Task


@dataclasses.dataclass
class _Kind:
    """tasks: in the order of the source; drawn, accepted, waiting: groups; weight: share of all."""

    tasks: Sequence[Task]
    weight: float
    drawn: int = 0
    accepted: int = 0
    waiting: int = 0


class TaskMixture:
    """Draws tasks; say of each what became of its group, `accept` or `drop`.

    tasks: by kind, each drawn in an order that is shuffled anew every epoch. weights: by kind, shares if divided
    by their sum. most_drawn: a kind is drawn at most so many times as often as its weight says, so that one
    whose groups are never accepted leaves the others their turn; it then falls short of its share. Not for
    several threads.
    """

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Task]],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        most_drawn: float = 4.0,
    ):
        if not tasks or set(tasks) != set(weights):
            raise ValueError(f"there are tasks of {sorted(tasks)} and weights of {sorted(weights)}")
        for kind, weight in weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"the weight of {kind!r} is {weight}; it must be positive")
            if not tasks[kind]:
                raise ValueError(f"there is no task of {kind!r}; give some, or no weight")
        if not most_drawn >= 1:
            raise ValueError(f"most_drawn is {most_drawn}; it must be at least 1")
        whole = sum(weights.values())
        self._kinds = {kind: _Kind(tasks[kind], weights[kind] / whole) for kind in tasks}
        self._kind_of = {task.id: kind for kind in tasks for task in tasks[kind]}
        if len(self._kind_of) < sum(map(len, tasks.values())):
            raise ValueError("two tasks have one id; give each its own")
        self._seed, self._most_drawn = seed, most_drawn

    def draw(self, count: int = 1) -> list[Task]:
        """The next tasks, one for each group that is to be made."""
        return [self._next() for _ in range(count)]

    def accept(self, task: Task) -> None:
        """A group of the task is learnt from."""
        self._returned(task).accepted += 1

    def drop(self, task: Task) -> None:
        """A group of the task is not learnt from, or was lost."""
        self._returned(task)

    def shares(self) -> dict[str, float]:
        """By kind, its share of the accepted groups; of none, 0."""
        whole = sum(kind.accepted for kind in self._kinds.values())
        return {name: kind.accepted / max(whole, 1) for name, kind in self._kinds.items()}

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on with the same tasks, as JSON. Groups on their way are counted: what is not
        made again from another part of the checkpoint has to be dropped after `restore`."""
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
        """Goes on from a `state`. ValueError if it is of other tasks or another seed; weights may change."""
        saved = {name: kind["tasks"] for name, kind in state["kinds"].items()}
        own = {name: self._fingerprint(kind.tasks) for name, kind in self._kinds.items()}
        if (state["seed"], saved) != (self._seed, own):
            raise ValueError(
                f"the state is of seed {state['seed']} and tasks {saved}, not of seed {self._seed} and {own}; "
                "give the tasks that it was saved with"
            )
        for name, kind in self._kinds.items():
            for field in ("drawn", "accepted", "waiting"):
                setattr(kind, field, state["kinds"][name][field])

    def drop_waiting(self) -> None:
        """All groups on their way are lost."""
        for kind in self._kinds.values():
            kind.waiting = 0

    def _next(self) -> Task:
        kinds = self._kinds.items()
        drawn = 1 + sum(kind.drawn for _, kind in kinds)
        # One more than its share allows, or nothing could be drawn at first.
        allowed = [
            (name, kind)
            for name, kind in kinds
            if kind.drawn < 1 + self._most_drawn * kind.weight * drawn
        ]
        # By ratio, so that those that can keep their shares keep them to each other if one cannot. Of those equally
        # far behind, the first.
        name, kind = min(
            allowed, key=lambda pair: (pair[1].accepted + pair[1].waiting) / pair[1].weight
        )
        epoch, place = divmod(kind.drawn, len(kind.tasks))
        kind.drawn += 1
        kind.waiting += 1
        return kind.tasks[shuffled(self._seed, name, epoch, len(kind.tasks))[place]]

    def _returned(self, task: Task) -> _Kind:
        name = self._kind_of.get(task.id)
        if name is None or not self._kinds[name].waiting:
            raise ValueError(f"no group of task {task.id!r} is on its way; report each once")
        self._kinds[name].waiting -= 1
        return self._kinds[name]

    @staticmethod
    def _fingerprint(tasks: Sequence[Task]) -> list[int]:
        return [len(tasks), zlib.crc32("\n".join(task.id for task in tasks).encode())]
