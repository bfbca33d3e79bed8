"""How many groups of rollouts may begin, and when a batch of them may be given out, so that none gets too old.

A version is the optimiser step of the weights that sampled a token, and the trainer's step is that of the weights which
learn from it, so that a rollout is as stale as its oldest token: step - version (GLM-5 4.1.2; it discloses neither the
bound nor its unit).

Admission. As many groups are outstanding, from their first token until they are trained on, as the trainer can take
before those that begin now are too old: up to (max_staleness + version - step + 1) * batch_groups (AReaL, arXiv
2505.24298, from what is there and not from totals, which a restart could get wrong).

Pacing. That bounds how many there are, not which are taken: batches of whatever is finished first leave slow groups
behind until they are too old, and what is learnt from leans to short rollouts. A group is due by the step `version when
it was admitted + max_staleness`. A batch is given out only if all that it leaves behind can be taken in time,
batch_groups in each later step; else it waits for those that are due earlier. So none is ever too old when it comes,
however long it took. To wait for those alone that would be too old for the next batch is not enough: of 8 that are due
by the same step, batches of 2 in which others overtook them leave 6 to be dropped.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A group that is to be sampled.

    Attributes:
      order: its place in line, from 0; a group for one that was dropped has that one's place.
      group_id: unlike that of any other group of buffers with the same life.
      task, number: whose attempts.
      tries: groups in this place before it. With order, a seed that does not depend on what came when.
    """

    order: int
    group_id: str
    task: str
    number: int
    tries: int


@dataclasses.dataclass(frozen=True)
class BufferConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      group: attempts at a task number.
      batch_groups: groups of a batch.
      max_staleness: steps; 0: no group begins before the trainer has learnt from all before it, and the engines have
        its weights. If those are pushed every K updates, at least K - 1: nothing would begin until the next push.
      max_running: groups under way.
      pacing: whether batches wait for slow groups; False: they are dropped once they are stale, as in GLM-5.
      max_tries: groups at a task number that the environment may fail before it is given up.
      durable: whether the journal outlives the machine's power too (`Journal`).
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


def room(config: BufferConfig, step: int, version: int, waiting: int, running: int) -> int:
    """How many groups may begin. step: updates of the trainer; version: of the engines' weights; waiting: groups that
    have come and are not yet trained on; running: that are under way."""
    batches = config.max_staleness + version - step + 1
    left = batches * config.batch_groups - waiting - running
    return max(0, min(left, config.max_running - running))


def must_wait(
    config: BufferConfig,
    step: int,
    last: tuple[int, int],
    rest: Iterable[tuple[int, int]],
    running: Iterable[tuple[int, int]],
) -> bool:
    """Whether a batch must not be given out yet.

    Groups are pairs of the version with which they were admitted and their place in line; a batch is the first that
    have come. last: of the batch; rest: have come, too, and are not in it; running: have not, of which those that are
    too old for this batch already count no more.
    """
    running = [own for own in running if own[0] + config.max_staleness >= step]
    # Without one before the last there is no better batch, whatever it leaves behind.
    if not config.pacing or all(own > last for own in running):
        return False
    left = sorted(version + config.max_staleness - step for version, _ in [*rest, *running])
    return any(i >= steps * config.batch_groups for i, steps in enumerate(left))
