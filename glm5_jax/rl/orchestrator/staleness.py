"""Admission and pacing: how many groups of rollouts may start, and when a batch is released, so that none is too old.

The version of a token is the optimiser step of the weights that sampled it. The trainer's step is that of the weights
that train on it. The staleness of a rollout is that of its oldest token: step - version (GLM-5 4.1.2 discloses neither
the bound nor its unit).

Admission. A group is outstanding from its first token until it is trained on. At most
(max_staleness + version - step + 1) * batch_groups groups are outstanding (AReaL, arXiv 2505.24298). More groups would be
too old before the trainer could take them. Existing groups are counted, because totals could be wrong after a restart.

Pacing. Admission limits the number of groups, but not which groups are trained on. With batches of the first groups that
finish, slow groups wait until they are too old, and the training data is biased to short rollouts. Therefore:

- A group is due by the step `version at admission + max_staleness`.
- A batch is released only if all remaining groups can still be taken in time, batch_groups in each later step.
- Otherwise the batch waits for the groups that are due earlier.

So no group is ever too old when it finishes, however long it takes. It is not enough to wait only for groups that would
be too old for the next batch: if 8 groups are due by the same step and batches of 2 contain others that overtook them,
6 of them are dropped.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupTicket:
    """Identity of a group that is admitted for sampling.

    Attributes:
      order: position in the order of admission, from 0. A group that replaces a dropped one has the same position.
      group_id: unique id among all groups of buffers with the same run_id.
      task, number: name of the task, and number of the task among those of its service.
      tries: number of dropped groups with the same order. With order, it gives a seed that is independent of timing.
    """

    order: int
    group_id: str
    task: str
    number: int
    tries: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """Options of the group buffer. Raises ValueError for values out of range.

    Attributes:
      group: attempts at one task number.
      batch_groups: groups of a batch.
      max_staleness: maximum staleness in steps. With 0 no group starts before the trainer has trained on all earlier
        ones and the engines have its weights. If weights are pushed every K updates, it must be at least K - 1, since
        otherwise no group could start until the next push.
      max_running: maximum number of running groups.
      pacing: whether batches wait for slow groups; False: groups that are too old are dropped, as in GLM-5.
      max_tries: groups of a task number that the environment may fail before the number is given up.
      durable: whether the journal survives a power failure too (`Journal`).
    """

    group: int = 8  # not disclosed
    batch_groups: int = 8  # not disclosed
    max_staleness: int = 4  # not disclosed
    max_running: int = 128  # GLM-5 4.1.1: more than 1,000 rollouts
    pacing: bool = True
    max_tries: int = 8  # ours
    durable: bool = False

    def __post_init__(self):
        for name in ("group", "batch_groups", "max_running", "max_tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness is {self.max_staleness}; 0 is the synchronous trainer")


def num_admissible(
    config: BufferConfig, step: int, version: int, num_waiting: int, num_running: int
) -> int:
    """Returns how many groups may start.

    - step: number of updates of the trainer.
    - version: version of the engines' weights.
    - num_waiting: groups that have finished and are not yet trained on.
    - num_running: groups that are being sampled.
    """
    batches = config.max_staleness + version - step + 1
    capacity = batches * config.batch_groups - num_waiting - num_running
    return max(0, min(capacity, config.max_running - num_running))


def must_wait(
    config: BufferConfig,
    step: int,
    last: tuple[int, int],
    rest: Iterable[tuple[int, int]],
    running: Iterable[tuple[int, int]],
) -> bool:
    """Returns whether a batch must not be released yet.

    Groups are pairs of the version at their admission and their order. A batch contains the smallest pairs of the
    finished groups.

    - last: last group of the batch.
    - rest: finished groups that are not in the batch.
    - running: groups that have not finished. Those that are already too old for this batch are ignored.
    """
    running = [group for group in running if group[0] + config.max_staleness >= step]
    # If no running group is due before the last one, no later batch would be better.
    if not config.pacing or all(group > last for group in running):
        return False
    slack_steps = sorted(version + config.max_staleness - step for version, _ in [*rest, *running])
    return any(i >= steps * config.batch_groups for i, steps in enumerate(slack_steps))
