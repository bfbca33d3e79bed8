"""Groups of rollouts between the engines that sample them and the trainer.

How many may begin, and when a batch is given out, `admission` says; what is left of a group, when it comes and when it
is taken, `repair`. Of one that is dropped the task number is admitted again. Nothing here waits or touches a socket:
the orchestrator tells what happened, and asks.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from glm5_jax.rl.orchestrator.group_repair import FAILED, LOST, STALE, left_out, repaired, versions
from glm5_jax.rl.orchestrator.journal import Entry, Journal, of_this_release
from glm5_jax.rl.orchestrator.staleness import Admitted, BufferConfig, must_wait, room
from glm5_jax.rl.trajectory import Taken, Trajectory
from glm5_jax.rl.types import Weights, is_ahead

_STATE = "state"  # the name of the journal's entry that is no group
_KEPT = ("group", "batch_groups", "max_staleness")  # what a journal's batches were made by


@dataclasses.dataclass
class _Place:
    """A group, or the place of one that was dropped. version: of the engines when it was admitted; lineage: how often
    steps had been lost by then. Once it has come: members, and the versions that sampled each, None if it failed."""

    admitted: Admitted
    version: int
    lineage: int
    members: tuple[Trajectory, ...] = ()
    versions: tuple[tuple[int, ...] | None, ...] = ()

    def come(self, members: Sequence[Trajectory]) -> None:
        self.members, self.versions = tuple(members), tuple(versions(one) for one in members)


class Buffer:
    """The groups that are outstanding. What it cannot do is a ValueError, and changes nothing.

    A journal that cannot be written, as its disk is full, lags behind in order, and `unwritten` says why. Nothing that depends
    on it should be answered until `write_journal` has succeeded.

    journal: a folder that outlives the process: whoever opens it next goes on with all groups that had come, taken or
    not, and is to admit those again that were under way.

    Attributes:
      life: with which the ids of all its groups begin, and of those that open the same journal after it.
      step: updates of the trainer; version: of the weights that the engines have.
      lease: of the trainer that began last, later than all before it; 0: none has begun.
      checksum: of the engines' weights, None: they tell none.
    """

    def __init__(self, config: BufferConfig, journal: pathlib.Path | None = None, life: str = ""):
        self.config, self.life = config, life
        self.step = self.version = self.lease = 0
        self.checksum: str | None = None
        self._trained: collections.Counter[str] = collections.Counter()  # trajectories by task
        self._next = 0  # the next new place
        self._begun: collections.Counter[str] = collections.Counter()  # new places by task
        self._running: dict[str, _Place] = {}
        self._waiting: dict[str, _Place] = {}  # with those that are taken
        self._taken: dict[int, tuple[str, ...]] = {}  # by step, not yet trained on
        self._owed: dict[int, _Place] = {}  # by place, whose task numbers are to be admitted again
        self._told: set[int] = set()  # of those
        self._lost: list[tuple[int, int]] = []  # by lineage, versions above the one up to the other
        self._counts: collections.Counter[str] = collections.Counter()
        self._before = self._counts.copy()  # as the last batch was given out
        self._counted: dict[int, collections.Counter[str]] = {}  # by step, as `_taken`
        self._staleness: collections.Counter[int] = collections.Counter()
        self._journal = None
        if journal is not None:
            self._journal = Journal(journal, config.durable)
            with of_this_release(journal):
                self._restore(journal)
            self._write_state()

    @property
    def unwritten(self) -> str:
        """Why the journal lacks the last changes, and what to do; "" if it has all."""
        return "" if self._journal is None else self._journal.error

    def write_journal(self) -> None:
        """Tries again to write what the journal lacks."""
        if self._journal is not None:
            self._journal.flush()

    @property
    def waiting(self) -> int:
        """Groups that have come and are not yet trained on, those that are taken included."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Groups under way."""
        return len(self._running)

    @property
    def accepted(self) -> dict[str, int]:
        """By task, trajectories that were accepted, copies not counted: they are waiting, or were trained on."""
        found = self._trained.copy()
        for place in self._waiting.values():
            found[place.admitted.task] += self._why(place, self.step).count(None)
        return dict(found)

    @property
    def begun(self) -> dict[str, int]:
        """By task, groups that were admitted to a place of their own: after a restart, its new numbers go on there."""
        return dict(self._begun)

    @property
    def weights(self) -> Weights | None:
        """That the engines have; None: no trainer has begun."""
        return Weights(self.lease, self.version, self.checksum) if self.lease else None

    def room(self) -> int:
        """How many groups may be admitted now."""
        return room(self.config, self.step, self.version, self.waiting, self.running)

    def admit(self, task: str, number: int) -> Admitted:
        """A group begins: a new one at the end of the line, or one for a dropped group (`again`), in its place."""
        if not self.room():
            raise ValueError(
                f"{task} {number} cannot be admitted: {self.waiting} groups wait and {self.running} run, at step "
                f"{self.step} with version {self.version}; ask room() first"
            )
        owed = min((o for o, p in self._owed.items() if _number(p) == (task, number)), default=None)
        if owed is None:
            order, tries = self._next, 0
        else:
            order, tries = owed, self._owed[owed].admitted.tries + 1
        admitted = Admitted(order, f"{self.life}{order}-{tries}", task, number, tries)
        place = _Place(admitted, self.version, len(self._lost))
        self._write(place)
        if owed is None:
            self._next += 1
            self._begun[task] += 1
        else:
            del self._owed[order]
            self._told.discard(order)
        self._running[admitted.group_id] = place
        return admitted

    def put(self, group_id: str, trajectories: Sequence[Trajectory]) -> bool:
        """A group has come. Whether it is accepted: False if too few of its members can be learnt from, or if nobody
        waits for it, as it was cancelled, trained on or dropped before."""
        place = self._running.get(group_id)
        if place is None:
            self._counts["groups/unknown"] += group_id not in self._waiting
            return group_id in self._waiting
        self._check_group(place, trajectories)
        place.come(trajectories)
        self._counts["attempts/ended"] += len(trajectories)
        self._counts["attempts/failed"] += sum(one.failed for one in trajectories)
        del self._running[group_id]
        self._waiting[group_id] = place
        if not self._keep(place, self.step):
            return False
        try:
            self._write(place)
        except (ValueError, TypeError, RecursionError):
            # It holds what cannot be encoded, so that the next buffer would not have it.
            del self._waiting[group_id]
            place.members, place.versions = (), ()
            self._running[group_id] = place
            raise
        return True

    def cancel(self, group_id: str, again: bool = True) -> None:
        """A group will never come; one that does not run is left as it is. again: admit its task number again."""
        place = self._running.pop(group_id, None)
        if place is not None:
            self._counts["groups/cancelled"] += 1
            self._vacate(place, again)

    def take(self, step: int) -> list[Taken] | None:
        """The batch of a step, in order; None while there is none. Asked again before it is trained on, the same."""
        self._check_step(step)
        size, before = self.config.batch_groups, self._taken.get(step, ())
        if len(before) == size:  # fewer if the journal lost some
            return [self._repaired(self._waiting[name], step) for name in before]
        taken = {name for own, names in self._taken.items() if own != step for name in names}
        free = [place for name, place in self._waiting.items() if name not in taken]
        free = sorted((p for p in free if self._keep(p, step, newest=step)), key=_rank)
        batch, rest = free[:size], free[size:]
        if len(batch) < size:
            return None
        running = map(_rank, self._running.values())
        if must_wait(self.config, step, _rank(batch[-1]), map(_rank, rest), running):
            return None
        batch.sort(key=lambda place: place.admitted.order)
        self._taken[step] = tuple(place.admitted.group_id for place in batch)
        found = [self._repaired(place, step) for place in batch]
        self._write_state()
        for place, own in zip(batch, found):
            self._count(place, own, step)
        self._counted[step] = self._counts - self._before
        self._before = self._counts.copy()
        return found

    def counted(self, step: int) -> dict[str, int]:
        """What has been counted since the batch before that of a step, which is taken, and with it: those of `metrics` that
        are not 0. Nothing, if a buffer before this one gave it out."""
        return dict(self._counted.get(step, {}))

    def again(self) -> list[tuple[str, int]]:
        """The task numbers of dropped groups, which are to be admitted again before new ones; each is told once."""
        new = sorted(self._owed.keys() - self._told)
        self._told.update(new)
        return [_number(self._owed[order]) for order in new]

    def trained(self, step: int) -> None:
        """The trainer has learnt from the batch of a step; a repeated message is ignored."""
        if step < self.step:
            return
        if step not in self._taken or step > self.step:
            raise ValueError(
                f"the batch of step {step} cannot be trained on: {self.step} updates are done and the batches of "
                f"{sorted(self._taken)} are taken"
            )
        gone = self._learnt(step)
        self.step = step + 1
        self._forget(gone)

    def push(self, version: int, checksum: str | None = None) -> None:
        """The engines have the weights of this version: one that the trainer has made, and not older than before."""
        if not self.version <= version <= self._updates:
            raise ValueError(
                f"version is {version}; after version {self.version} and {self.step} updates it can be up to "
                f"{self._updates}, and older ones follow begin() alone"
            )
        self.version, self.checksum = version, checksum
        self._write_state()

    def begin(self, step: int, version: int, checksum: str | None = None, least: int = 0) -> None:
        """A trainer starts or goes on at this step, and the engines have this version. least: of its lease, the time now in
        milliseconds; 0: no clock.

        Batches of earlier steps were trained on; later ones are waiting again. What was sampled by weights newer than
        the step is never learnt from, in groups that have come and in those under way: not even once the trainer has
        come to that step again, and made other weights of the same number.
        """
        if not 0 <= version <= step:
            raise ValueError(
                f"version is {version} at step {step}; push the trainer's weights to the engines before it begins"
            )
        seen = [own[-1] for place in self._waiting.values() for own in place.versions if own]
        newest = max([self.version, self._updates, *seen])
        gone = [order for own in sorted(self._taken) if own < step for order in self._learnt(own)]
        self._taken.clear()
        self._counted.clear()
        if newest > step:
            self._lost.append((step, newest))
        for place in self._running.values():
            place.version = min(place.version, version)  # what is sampled from now on
        self.step, self.version, self.checksum = step, version, checksum
        self.lease = (
            least if least and is_ahead(self.lease, least / 1e3) else max(self.lease + 1, least)
        )
        self._forget(gone)
        for place in list(self._waiting.values()):
            self._keep(place, step)

    def metrics(self) -> dict:
        """Numbers since it was opened: of groups, of members, why they were left out, of all attempts that ended, how many
        environments failed, and the staleness of what was taken, with how many members had which."""
        counts, found = self._counts, self._staleness
        members, padded = counts["members/taken"], counts["members/padded"]
        return {
            **{name: counts[name] for name in _COUNTS},
            "padded_share": padded / max(members + padded, 1),
            "staleness/mean": sum(k * n for k, n in found.items()) / max(members, 1),
            "staleness/max": max(found, default=0),
            "staleness/histogram": dict(sorted(found.items())),
        }

    @property
    def _updates(self) -> int:
        """That the trainer may have done, as far as it was told; the step of its next batch."""
        return self.step + len(self._taken)

    def _why(self, place: _Place, step: int, newest: float = math.inf) -> list[str | None]:
        """Of each member, why it is left out of a step's batch. newest: version that there can be."""
        oldest, lost = step - self.config.max_staleness, self._lost[place.lineage :]
        return [left_out(own, oldest, newest, lost) for own in place.versions]

    def _keep(self, place: _Place, step: int, newest: float = math.inf) -> bool:
        """Whether a group that has come can still be learnt from; if not, it is dropped."""
        why = self._why(place, step, newest)
        if repaired(_valid(why), self.config.group) is not None:
            return True
        reason = max((FAILED, LOST, STALE), key=why.count)
        self._counts[f"groups/{reason}"] += 1
        self._counts.update(f"members/{one}" for one in why if one)
        del self._waiting[place.admitted.group_id]
        tries = place.admitted.tries + 1
        given_up = reason == FAILED and tries >= self.config.max_tries
        self._counts["groups/given_up"] += given_up
        self._vacate(place, not given_up)
        return False

    def _vacate(self, place: _Place, again: bool) -> None:
        """The group that had the place is gone."""
        place.members, place.versions = (), ()
        if again:
            self._owed[place.admitted.order] = place
            self._write(place)
        else:
            self._forget([place.admitted.order])

    def _repaired(self, place: _Place, step: int) -> Taken:
        valid = _valid(self._why(place, step, step))
        members = repaired(valid, self.config.group)
        own = place.admitted
        return Taken(
            own.group_id,
            own.task,
            own.number,
            own.order,
            tuple(place.members[i] for i in members),
            tuple(place.members[i].reward.value for i in valid),
            step - min(place.versions[i][0] for i in valid),
        )

    def _count(self, place: _Place, found: Taken, step: int) -> None:
        """Into the metrics, what was taken."""
        why = self._why(place, step, step)
        valid = _valid(why)
        padded = self.config.group - len(valid)
        self._counts.update(f"members/{one}" for one in why if one)
        self._counts["groups/taken"] += 1
        self._counts["groups/repaired"] += padded > 0
        self._counts["members/padded"] += padded
        self._counts["members/taken"] += len(valid)
        self._staleness.update(step - place.versions[i][0] for i in valid)

    def _learnt(self, step: int) -> list[int]:
        """The places of a batch that was trained on, which are outstanding no more."""
        names = self._taken.pop(step)
        self._counted.pop(step, None)
        places = [self._waiting.pop(name) for name in names if name in self._waiting]
        for place in places:
            self._trained[place.admitted.task] += self._why(place, step, step).count(None)
        return [place.admitted.order for place in places]

    def _check_step(self, step: int) -> None:
        if step not in self._taken and step != self._updates:
            raise ValueError(
                f"there is no batch of step {step}: the next is of step {self._updates}; a trainer that goes on from "
                "another step says so with begin()"
            )

    def _check_group(self, place: _Place, members: Sequence[Trajectory]) -> None:
        name = place.admitted.group_id
        if len(members) != self.config.group:
            raise ValueError(
                f"group {name} has {len(members)} trajectories; it must have {self.config.group}, those that failed too"
            )
        if other := {one.group_id for one in members} - {name}:
            raise ValueError(f"group {name} has trajectories of {', '.join(sorted(other))}")
        if len({one.rollout_id for one in members}) < len(members):
            raise ValueError(f"group {name} has a rollout twice: {[m.rollout_id for m in members]}")
        for one in members:
            if any(r.weight_version is None and r.loss_mask.any() for r in one.records):
                raise ValueError(
                    f"rollout {one.rollout_id} has tokens to train on without a weight_version; keep the engine's"
                )

    def _write(self, place: _Place) -> None:
        if self._journal is not None:
            own = place.admitted
            head = {
                "admitted": dataclasses.asdict(own),
                "version": place.version,
                "lineage": place.lineage,
            }
            self._journal.write(f"{own.order:012d}", head, place.members)

    def _write_state(self, gone: Sequence[int] = ()) -> None:
        """gone: places whose entries are removed next; whoever is killed in between must not read them as groups."""
        if self._journal is not None:
            state: dict[str, Any] = {
                **{name: getattr(self.config, name) for name in _KEPT},
                "life": self.life,
                "step": self.step,
                "version": self.version,
                "lease": self.lease,
                "checksum": self.checksum,
                "next": self._next,
                "begun": self._begun,
                "taken": list(self._taken.items()),
                "lost": self._lost,
                "trained": self._trained,
                "gone": list(gone),
            }
            self._journal.write(_STATE, state)

    def _forget(self, orders: Sequence[int]) -> None:
        """Of these places nothing is kept."""
        self._write_state(orders)
        if self._journal is not None:
            for order in orders:
                self._journal.remove(f"{order:012d}")

    def _restore(self, folder: pathlib.Path) -> None:
        entries, torn = self._journal.read()
        if not entries and not torn:
            return
        if _STATE not in entries:
            raise ValueError(
                f"the journal in {folder} has groups and no readable state: some may have been trained on; empty the "
                "folder"
            )
        state = entries.pop(_STATE).head
        for name in _KEPT:
            if state[name] != getattr(self.config, name):
                raise ValueError(
                    f"the journal in {folder} is of {name}={state[name]}, not {getattr(self.config, name)}; take "
                    "that, or another folder"
                )
        self.life = state["life"]
        self.step, self.version, self.lease = state["step"], state["version"], state["lease"]
        self.checksum = state["checksum"]
        self._lost = [(low, high) for low, high in state["lost"]]
        self._trained.update(state["trained"])
        self._counts["groups/torn"] = len(torn)
        self._next = max([state["next"], *(int(name) + 1 for name in [*entries, *torn])])
        self._begun.update(state["begun"])
        admitted = [entry.head["admitted"] for entry in entries.values()]
        self._begun.update(own["task"] for own in admitted if own["order"] >= state["next"])
        gone = {f"{order:012d}" for order in state["gone"]}
        for name in gone:
            self._journal.remove(name)
        for name, entry in entries.items():
            if name not in gone:
                self._resume(entry)
        self._taken = {
            step: tuple(name for name in names if name in self._waiting)
            for step, names in state["taken"]
        }

    def _resume(self, entry: Entry) -> None:
        """A group that had come, or one that was under way or dropped, whose place is owed."""
        head = entry.head
        place = _Place(Admitted(**head["admitted"]), head["version"], head["lineage"])
        if entry.members:
            place.come(entry.members)
            self._waiting[place.admitted.group_id] = place
        else:
            self._owed[place.admitted.order] = place


_COUNTS = (
    *("groups/taken", "groups/repaired", "groups/failed", "groups/lost", "groups/stale"),
    *("groups/cancelled", "groups/given_up", "groups/unknown", "groups/torn"),
    *("members/taken", "members/failed", "members/lost", "members/stale", "members/padded"),
    *("attempts/ended", "attempts/failed"),
)


def _valid(why: Sequence[str | None]) -> list[int]:
    return [i for i, reason in enumerate(why) if reason is None]


def _rank(place: _Place) -> tuple[int, int]:
    """By its version, which says by when it must be taken, then by its place in line."""
    return place.version, place.admitted.order


def _number(place: _Place) -> tuple[str, int]:
    return place.admitted.task, place.admitted.number
