"""Buffer of groups of rollouts, between the engines that sample them and the trainer.

`staleness` decides how many groups may start and when a batch is released. `group_repair` decides which
rollouts of a group survive, when it finishes and when it is taken. The task of a dropped group is sampled again.

The buffer does no network I/O and never waits. The orchestrator reports events, and asks for what may be done.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Collection, Sequence

from glm5_jax.rl.orchestrator.buffer_metrics import BufferMetrics
from glm5_jax.rl.orchestrator.group_journal import BufferState, GroupJournal, RestoredBuffer
from glm5_jax.rl.orchestrator.group_repair import (
    FAILED,
    ROLLED_BACK,
    STALE,
    exclusion_reason,
    repair_group,
)
from glm5_jax.rl.orchestrator.group_slot import GroupSlot
from glm5_jax.rl.orchestrator.staleness import BufferConfig, GroupTicket, must_wait, num_admissible
from glm5_jax.rl.trajectory import BatchGroup, Trajectory
from glm5_jax.rl.types import Reward, WeightVersion, is_lease_ahead

LOST_RECORDS = Reward(None, error="the gateway has lost its token records")


class GroupBuffer:
    """Outstanding groups of rollouts. An impossible operation raises ValueError and changes nothing.

    If the disk is full, the journal lags; its changes are then written later, in their order, and `journal_error` is set.
    Answers that depend on a change should wait until `write_journal` has succeeded.

    - journal: folder that outlives the process; None: no journal. The next buffer on the folder has all finished groups,
      taken or not, and samples the task numbers again whose groups were running.
    - run_id: prefix of all group ids.

    Attributes:
      config: options of the buffer.
      run_id: prefix of all group ids; kept when the journal is reopened.
      step: number of updates of the trainer.
      version: version of the engines' weights.
      checksum: checksum of the engines' weights; None: they report none.
      lease: lease of the trainer that began last, larger than all earlier ones; 0: no trainer has begun.
    """

    def __init__(self, config: BufferConfig, journal: pathlib.Path | None = None, run_id: str = ""):
        self.config, self.run_id = config, run_id
        self.step = self.version = self.lease = 0
        self.checksum: str | None = None
        self._num_trained: collections.Counter[str] = collections.Counter()  # trajectories by task
        self._next_order = 0
        self._num_started: collections.Counter[str] = collections.Counter()  # orders by task
        self._running: dict[str, GroupSlot] = {}
        self._waiting: dict[str, GroupSlot] = {}  # finished groups, those in batches included
        self._batches: dict[int, tuple[str, ...]] = {}  # group ids by step, not yet trained on
        self._to_resample: dict[int, GroupSlot] = {}  # dropped groups by order
        self._popped: set[int] = set()  # orders that `pop_resamples` has returned
        self._rollbacks: list[tuple[int, int]] = []  # versions low < v <= high that are no more
        self._metrics = BufferMetrics()
        self._journal = GroupJournal(journal, config)
        if (restored := self._journal.read()) is not None:
            self._restore(restored)
        self._journal.write_state(self._state())

    @property
    def journal_error(self) -> str:
        """Returns why the journal lacks the last changes, and what to do; "" if it has all."""
        return self._journal.error

    def write_journal(self) -> None:
        """Tries again to write the changes that the journal lacks."""
        self._journal.flush()

    @property
    def waiting(self) -> int:
        """Returns the number of finished groups that are not yet trained on, those in batches included."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Returns the number of running groups."""
        return len(self._running)

    @property
    def accepted(self) -> dict[str, int]:
        """Returns the number of accepted trajectories by task, without copies: they wait, or were trained on."""
        counts = self._num_trained.copy()
        for slot in self._waiting.values():
            counts[slot.ticket.task] += self._reasons(slot, self.step).count(None)
        return dict(counts)

    @property
    def num_started(self) -> dict[str, int]:
        """Returns the number of groups by task, without those that replaced a dropped one.

        New task numbers continue from there after a restart.
        """
        return dict(self._num_started)

    @property
    def weights(self) -> WeightVersion | None:
        """Returns the weights of the engines; None: no trainer has begun."""
        return WeightVersion(self.lease, self.version, self.checksum) if self.lease else None

    def has_group(self, group_id: str) -> bool:
        """Returns whether a group is running, or finished and not yet trained on."""
        return group_id in self._running or group_id in self._waiting

    def num_admissible(self) -> int:
        """Returns how many groups may be admitted now."""
        return num_admissible(self.config, self.step, self.version, self.waiting, self.running)

    def admit(self, task: str, number: int) -> GroupTicket:
        """Starts a group: at the end of the order, or in place of a dropped one (`pop_resamples`)."""
        if not self.num_admissible():
            raise ValueError(
                f"{task} {number} cannot be admitted: {self.waiting} groups wait and {self.running} run, at step "
                f"{self.step} with version {self.version}; call num_admissible() first"
            )
        orders = (o for o, slot in self._to_resample.items() if slot.task_number == (task, number))
        dropped = min(orders, default=None)
        if dropped is None:
            order, tries = self._next_order, 0
        else:
            order, tries = dropped, self._to_resample[dropped].ticket.tries + 1
        ticket = GroupTicket(
            order=order,
            group_id=f"{self.run_id}{order}-{tries}",
            task=task,
            number=number,
            tries=tries,
        )
        slot = GroupSlot(ticket=ticket, version=self.version, num_rollbacks=len(self._rollbacks))
        self._journal.write_group(slot)
        if dropped is None:
            self._next_order += 1
            self._num_started[task] += 1
        else:
            del self._to_resample[order]
            self._popped.discard(order)
        self._running[ticket.group_id] = slot
        return ticket

    def put(self, group_id: str, trajectories: Sequence[Trajectory]) -> bool:
        """Adds a finished group, and returns whether it is accepted.

        Returns False if too few rollouts are trainable, or if the group is no longer expected because it was cancelled,
        dropped or already trained on.
        """
        slot = self._running.get(group_id)
        if slot is None:
            self._metrics.add("groups/unknown", group_id not in self._waiting)
            return group_id in self._waiting
        self._check_group(slot, trajectories)
        slot.complete(trajectories)
        self._metrics.add("attempts/ended", len(trajectories))
        self._metrics.add("attempts/failed", sum(member.has_failed for member in trajectories))
        del self._running[group_id]
        self._waiting[group_id] = slot
        if not self._keep_or_drop(slot, self.step):
            return False
        try:
            self._journal.write_group(slot)
        except (ValueError, TypeError, RecursionError):
            # The group cannot be encoded, so that the next buffer would not have it.
            del self._waiting[group_id]
            slot.clear()
            self._running[group_id] = slot
            raise
        return True

    def cancel(self, group_id: str, should_resample: bool = True) -> None:
        """Removes a running group; another id is ignored. should_resample: whether its task number is sampled again."""
        slot = self._running.pop(group_id, None)
        if slot is not None:
            self._metrics.add("groups/cancelled")
            self._drop(slot, should_resample)

    def mark_lost(self, rollout_ids: Collection[str]) -> None:
        """Records that the token records of these rollouts are lost, so that the rollouts have failed.

        Rollouts of other groups than finished ones are ignored. A batch that loses a group is not complete any more, and
        `take` completes it.
        """
        step_of = {name: step for step, names in self._batches.items() for name in names}
        for group_id, slot in list(self._waiting.items()):
            lost = {
                member.rollout_id
                for member in slot.members
                if member.rollout_id in rollout_ids and not member.has_failed
            }
            if not lost:
                continue
            self._metrics.add("members/lost", len(lost))
            slot.complete(
                [
                    dataclasses.replace(member, reward=LOST_RECORDS, summary=None)
                    if member.rollout_id in lost
                    else member
                    for member in slot.members
                ]
            )
            step = step_of.get(group_id)
            is_kept = (
                self._keep_or_drop(slot, self.step)
                if step is None
                else self._keep_or_drop(slot, step, newest=step)
            )
            if is_kept:
                self._journal.write_group(slot)
        self._batches = {
            step: tuple(name for name in names if name in self._waiting)
            for step, names in self._batches.items()
        }
        self._journal.write_state(self._state())

    def take(self, step: int) -> list[BatchGroup] | None:
        """Returns the batch of a step, in the order of admission; None if it is not ready.

        Until the batch is trained on, repeated calls return the same batch.
        """
        self._check_step(step)
        size, group_ids = self.config.batch_groups, self._batches.get(step, ())
        if len(group_ids) == size:  # a journal, or the gateway, may have lost some of them
            return [self._repair(self._waiting[group_id], step) for group_id in group_ids]

        # Candidates: finished groups that no other batch has and that are still trainable.
        in_batches = {
            group_id
            for other_step, group_ids in self._batches.items()
            if other_step != step
            for group_id in group_ids
        }
        free = [slot for group_id, slot in self._waiting.items() if group_id not in in_batches]
        free = [slot for slot in free if self._keep_or_drop(slot, step, newest=step)]
        free.sort(key=lambda slot: slot.priority)
        batch, rest = free[:size], free[size:]
        if len(batch) < size:
            return None
        running = [slot.priority for slot in self._running.values()]
        rest = [slot.priority for slot in rest]
        if must_wait(self.config, step, batch[-1].priority, rest, running):
            return None

        # Release the batch, and record it in the journal and in the counts.
        batch.sort(key=lambda slot: slot.ticket.order)
        self._batches[step] = tuple(slot.ticket.group_id for slot in batch)
        groups = [self._repair(slot, step) for slot in batch]
        self._journal.write_state(self._state())
        for slot in batch:
            self._count(slot, step)
        self._metrics.close_batch(step)
        return groups

    def batch_counts(self, step: int) -> dict[str, int]:
        """Returns the nonzero counts of `metrics` from the previous batch up to that of `step`, included.

        Empty if an earlier process released the batch.
        """
        return self._metrics.batch_counts(step)

    def pop_resamples(self) -> list[tuple[str, int]]:
        """Returns the task numbers of dropped groups, each once. They must be admitted before new ones."""
        orders = sorted(self._to_resample.keys() - self._popped)
        self._popped.update(orders)
        return [self._to_resample[order].task_number for order in orders]

    def mark_trained(self, step: int) -> None:
        """Records that the trainer has trained on the batch of `step`. A repeated call is ignored."""
        if step < self.step:
            return
        if step not in self._batches or step > self.step:
            raise ValueError(
                f"the batch of step {step} cannot be trained on: {self.step} updates are done and the batches of "
                f"{sorted(self._batches)} are taken"
            )
        orders = self._remove_batch(step)
        self.step = step + 1
        self._journal.write_state(self._state(), orders)

    def push(self, version: int, checksum: str | None = None) -> None:
        """Records that the engines have these weights.

        Raises ValueError for a version that the trainer cannot have made yet, or one older than the current version.
        """
        if not self.version <= version <= self._max_step:
            raise ValueError(
                f"version is {version}; after version {self.version} and {self.step} updates it can be up to "
                f"{self._max_step}, and only begin() allows older ones"
            )
        self.version, self.checksum = version, checksum
        self._journal.write_state(self._state())

    def begin(
        self, step: int, version: int, checksum: str | None = None, min_lease: int = 0
    ) -> None:
        """Records that a trainer starts or resumes at this step, and that the engines have this version.

        Batches of earlier steps count as trained on. The groups of later ones wait again. Tokens of weights newer than
        the step are never trained on, in finished groups and in running ones. That holds also after the trainer has
        reached that step again, and made other weights with the same version.

        min_lease: minimum of the new lease, the time now in milliseconds; 0: no clock.
        """
        if not 0 <= version <= step:
            raise ValueError(
                f"version is {version} at step {step}; push the trainer's weights to the engines before it begins"
            )
        sampled = [
            versions[-1]
            for slot in self._waiting.values()
            for versions in slot.versions
            if versions
        ]
        newest = max([self.version, self._max_step, *sampled])
        orders = [
            order
            for batch_step in sorted(self._batches)
            if batch_step < step
            for order in self._remove_batch(batch_step)
        ]
        self._batches.clear()
        self._metrics.clear_batches()
        if newest > step:
            self._rollbacks.append((step, newest))
        for slot in self._running.values():
            slot.version = min(slot.version, version)  # of the tokens that are sampled from now on
        self.step, self.version, self.checksum = step, version, checksum
        if min_lease and is_lease_ahead(self.lease, min_lease / 1e3):
            self.lease = min_lease  # the clock was set back
        else:
            self.lease = max(self.lease + 1, min_lease)
        self._journal.write_state(self._state(), orders)
        for slot in list(self._waiting.values()):
            self._keep_or_drop(slot, step)

    def raise_lease(self, lease: int) -> None:
        """Sets a later lease for the trainer that has begun, because another program knows one between the two."""
        self.lease = max(self.lease, lease)
        self._journal.write_state(self._state())

    def metrics(self) -> dict:
        """Returns the counts since the buffer was opened, by name.

        - groups/*, members/*: groups and members by what became of them, and why they were dropped or excluded.
        - members/lost: members whose token records the gateway has lost, which count as failed ones too.
        - attempts/*: rollouts that ended, and those whose environment failed.
        - padded_share: share of copies among the members that were taken.
        - staleness/*: mean, maximum and histogram of the staleness of the members that were taken.
        """
        return self._metrics.summary()

    @property
    def _max_step(self) -> int:
        """Returns the number of updates that the trainer may have done, which is the step of its next batch."""
        return self.step + len(self._batches)

    def _reasons(self, slot: GroupSlot, step: int, newest: float = math.inf) -> list[str | None]:
        """Returns the exclusion reason of each member from the batch of `step`. newest: newest possible version."""
        oldest = step - self.config.max_staleness
        rollbacks = self._rollbacks[slot.num_rollbacks :]
        return [exclusion_reason(versions, oldest, newest, rollbacks) for versions in slot.versions]

    def _keep_or_drop(self, slot: GroupSlot, step: int, newest: float = math.inf) -> bool:
        """Returns whether a finished group is still trainable, and drops it if it is not."""
        reasons = self._reasons(slot, step, newest)
        if repair_group(_valid(reasons), self.config.group) is not None:
            return True
        reason = max((FAILED, ROLLED_BACK, STALE), key=reasons.count)
        self._metrics.add(f"groups/{reason}")
        self._metrics.add_excluded(reasons)
        del self._waiting[slot.ticket.group_id]
        is_given_up = reason == FAILED and slot.ticket.tries + 1 >= self.config.max_tries
        self._metrics.add("groups/given_up", is_given_up)
        self._drop(slot, should_resample=not is_given_up)
        return False

    def _drop(self, slot: GroupSlot, should_resample: bool) -> None:
        """Drops the group of a slot, and queues its task number again or removes the slot."""
        slot.clear()
        if should_resample:
            self._to_resample[slot.ticket.order] = slot
            self._journal.write_group(slot)
        else:
            self._journal.write_state(self._state(), [slot.ticket.order])

    def _repair(self, slot: GroupSlot, step: int) -> BatchGroup:
        """Returns the group of a slot as the trainer gets it. It has enough valid members."""
        valid = _valid(self._reasons(slot, step, step))
        indices = repair_group(valid, self.config.group)
        if indices is None:
            raise ValueError(f"group {slot.ticket.group_id} has too few valid members")
        return BatchGroup(
            group_id=slot.ticket.group_id,
            task=slot.ticket.task,
            number=slot.ticket.number,
            order=slot.ticket.order,
            members=tuple(slot.members[i] for i in indices),
            baseline=tuple(slot.reward_of(i) for i in valid),
            staleness=max(slot.staleness_of(i, step) for i in valid),
        )

    def _count(self, slot: GroupSlot, step: int) -> None:
        """Adds a group of a new batch to the metrics."""
        reasons = self._reasons(slot, step, step)
        staleness = [slot.staleness_of(i, step) for i in _valid(reasons)]
        self._metrics.add_taken(reasons, staleness)

    def _remove_batch(self, step: int) -> list[int]:
        """Removes a batch that was trained on from the outstanding groups, and returns its orders."""
        group_ids = self._batches.pop(step)
        self._metrics.remove_batch(step)
        slots = [self._waiting.pop(name) for name in group_ids if name in self._waiting]
        for slot in slots:
            self._num_trained[slot.ticket.task] += self._reasons(slot, step, step).count(None)
        return [slot.ticket.order for slot in slots]

    def _check_step(self, step: int) -> None:
        if step not in self._batches and step != self._max_step:
            raise ValueError(
                f"there is no batch of step {step}: the next is of step {self._max_step}; a trainer that resumes from "
                "another step must call begin()"
            )

    def _check_group(self, slot: GroupSlot, members: Sequence[Trajectory]) -> None:
        """Raises ValueError unless the trajectories are the members of the slot's group."""
        group_id = slot.ticket.group_id
        if len(members) != self.config.group:
            raise ValueError(
                f"group {group_id} has {len(members)} trajectories; it must have {self.config.group}, with failed ones"
            )
        if other := {member.group_id for member in members} - {group_id}:
            raise ValueError(f"group {group_id} has trajectories of {', '.join(sorted(other))}")
        rollout_ids = [member.rollout_id for member in members]
        if len(set(rollout_ids)) < len(members):
            raise ValueError(f"group {group_id} has a rollout twice: {rollout_ids}")

    def _state(self) -> BufferState:
        return BufferState(
            run_id=self.run_id,
            step=self.step,
            version=self.version,
            lease=self.lease,
            checksum=self.checksum,
            next_order=self._next_order,
            num_started=self._num_started,
            batches=self._batches,
            rollbacks=self._rollbacks,
            num_trained=self._num_trained,
        )

    def _restore(self, restored: RestoredBuffer) -> None:
        """Continues with the state and the groups of an earlier process."""
        state = restored.state
        self.run_id = state.run_id
        self.step, self.version, self.lease = state.step, state.version, state.lease
        self.checksum = state.checksum
        self._next_order = state.next_order
        self._num_started.update(state.num_started)
        self._num_trained.update(state.num_trained)
        self._rollbacks = list(state.rollbacks)
        self._batches = dict(state.batches)
        self._waiting, self._to_resample = restored.waiting, restored.to_resample
        self._metrics.add("groups/torn", restored.num_torn)


def _valid(reasons: Sequence[str | None]) -> list[int]:
    """Returns the indices of the members that are not excluded."""
    return [i for i, reason in enumerate(reasons) if reason is None]
