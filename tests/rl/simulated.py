"""Simulation of a trainer, engines and services around a `GroupBuffer`, in virtual time and with
random failures."""

import collections
import heapq
import itertools
import random

import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.orchestrator.group_buffer import GroupBuffer
from glm5_jax.rl.trajectory import Trajectory, summarize_records
from glm5_jax.rl.types import Reward


def rollout(ticket, i, versions, reward=1.0, **options):
    """Returns the i-th attempt of a group. versions: weight versions of its tokens; empty: nothing
    was sampled."""
    ids = {"group_id": ticket.group_id, "rollout_id": f"{ticket.group_id}.{i}"}
    weight_version = np.array([-1, *versions])
    logp = np.where(weight_version >= 0, -0.5, np.nan)
    record = TokenRecord(
        token_ids=np.arange(len(weight_version)),
        loss_mask=weight_version >= 0,
        rollout_logp=logp,
        weight_version=weight_version,
        **ids,
    )
    task, number = ticket.task, ticket.number
    return Trajectory(
        **ids,
        task=task,
        number=number,
        reward=Reward(reward),
        summary=summarize_records((record,), f"digest of {ids['rollout_id']}"),
        **options,
    )


def group(ticket, versions, rewards=None):
    """Returns the attempts of a group. versions: token versions of each; rewards: None where the
    environment failed."""
    rewards = rewards or [1.0] * len(versions)
    return [
        rollout(ticket, i, token_versions, reward)
        for i, (token_versions, reward) in enumerate(zip(versions, rewards))
    ]


def pace_of(number):
    """Returns the mean sampling time of a task number, in seconds: heavy-tailed, and the same in
    every attempt."""
    return min(0.3 * random.Random(number).paretovariate(1.2), 30.0)


class Simulation:
    """Run of a trainer in virtual time.

    Attributes:
      batches: (step, batch) of all updates, rolled back ones included.
      durations_s: time from admission until the end of each group, by group id.
      latest_ids: id of the latest group of each task number.
      dropped: ids of groups whose task numbers were sampled again.
      lost: ids of the rollouts whose records are lost.
      engine: weight version of the engines.
      rollbacks: steps at which a trainer resumed.
      lineages: (version, number of earlier rollbacks) of each token, by rollout id.
      trainer: number of restarts of the trainer.
      step: step of the trainer.
    """

    def __init__(
        self,
        config,
        seed,
        journal=None,
        *,
        push_every=1,
        fail=0.0,
        cancel=0.0,
        crash=0.0,
        kill=0.0,
        lose=0.0,
    ):
        """Builds the simulation.

        push_every: number of updates between two pushes.
        fail: probability that the environment of an attempt fails.
        cancel: probability that a group is cancelled.
        crash: probability that the trainer dies before an update.
        kill: probability that the orchestrator dies before an update.
        lose: probability that the gateway loses records of a batch.
        """
        self.config, self.journal, self.push_every = config, journal, push_every
        self.chances, self.lose = (fail, cancel, crash, kill), lose
        self.lost = set()
        self.buffer = GroupBuffer(config, journal)
        self.rng = random.Random(seed)
        self.now, self.events, self.ties = 0.0, [], itertools.count()
        self.new_numbers, self.to_resample = itertools.count(), collections.deque()
        self.engine, self.rollbacks = 0, []
        self.lineages = {}
        self.batches, self.durations_s, self.latest_ids, self.dropped = [], {}, {}, []
        self.trainer, self.step = 0, 0

    def run(self, updates):
        """Runs until the trainer has done `updates` updates. Raises AssertionError if the next one can never happen."""
        self._take_batch()
        self._fill()
        for _ in range(100_000):
            if self.step == updates:
                return self
            assert self.events, f"no event is left at step {self.step}: {self.buffer.metrics()}"
            self.now, _, action, args = heapq.heappop(self.events)
            action(*args)
            self._fill()
            self.check_room()
        raise AssertionError(f"only {self.step} of {updates} updates are done")

    def check_room(self):
        """Checks that the buffer admits as many groups as the staleness rule allows."""
        buffer, config = self.buffer, self.config
        max_outstanding = (
            config.max_staleness + buffer.version - buffer.step + 1
        ) * config.batch_groups
        room = min(
            max_outstanding - buffer.waiting - buffer.running, config.max_running - buffer.running
        )
        assert buffer.num_admissible() == max(0, room)

    def _at(self, delay_s, action, *args):
        heapq.heappush(self.events, (self.now + delay_s, next(self.ties), action, args))

    def _fill(self):
        resamples = self.buffer.pop_resamples()
        self.dropped += [self.latest_ids[number] for _, number in resamples]
        self.to_resample.extend(resamples)
        while self.buffer.num_admissible():
            task, number = (
                self.to_resample.popleft() if self.to_resample else ("t", next(self.new_numbers))
            )
            admitted = self.buffer.admit(task, number)
            self.latest_ids[number] = admitted.group_id
            self._start_group(admitted)

    def _start_group(self, ticket):
        """Waits for an engine, samples a group for a heavy-tailed time, and finishes it after the
        rewards."""
        fail, cancel, _, _ = self.chances
        start_time = self.now
        if self.rng.random() < cancel:
            self._at(self.rng.random(), self._cancel, ticket.group_id)
            return
        tokens = [[] for _ in range(self.config.group)]
        ends = []
        queue_s, mean_duration_s = self.rng.random(), pace_of(ticket.number)
        for i in range(self.config.group):
            end_s = queue_s + mean_duration_s * self.rng.uniform(0.5, 1.0)
            for fraction in (0.0, 0.4, 1.0):
                delay_s = queue_s + fraction * (end_s - queue_s)
                self._at(delay_s, self._sample, tokens[i])
            ends.append(end_s + self.rng.expovariate(3))
        rewards = [None if self.rng.random() < fail else self.rng.random() for _ in tokens]
        self._at(max(ends), self._finish_group, ticket, tokens, rewards, start_time)

    def _sample(self, tokens):
        tokens.append((self.engine, len(self.rollbacks)))

    def _cancel(self, group_id):
        self.buffer.cancel(group_id)

    def _finish_group(self, ticket, tokens, rewards, start_time):
        """Puts a finished group, twice if the first response was lost."""
        versions = [[version for version, _ in attempt] for attempt in tokens]
        members = group(ticket, versions, rewards)
        for member, attempt in zip(members, tokens):
            self.lineages[member.rollout_id] = attempt
        self.durations_s[ticket.group_id] = self.now - start_time
        for _ in range(self.rng.choice((1, 1, 2))):
            self.buffer.put(ticket.group_id, members)

    def _take_batch(self):
        """Requests a batch until it is ready."""
        _, _, crash, kill = self.chances
        if self.rng.random() < kill:
            self._kill_orchestrator()
        batch = self.buffer.take(self.step)
        if batch is None:
            self._at(0.2, self._unless_restarted, self.trainer, self._take_batch)
            return
        self._check(batch)
        if self.lose and self.rng.random() < self.lose:
            rollout_ids = sorted({m.rollout_id for group in batch for m in group.members})
            lost = self.rng.sample(rollout_ids, self.rng.randint(1, len(rollout_ids)))
            self.lost.update(lost)
            self.buffer.mark_lost(lost)
            self._at(0.2, self._unless_restarted, self.trainer, self._take_batch)
            return
        if self.rng.random() < crash:
            self._crash()
        else:
            self._at(
                self.rng.uniform(0.5, 1.0),
                self._unless_restarted,
                self.trainer,
                self._update,
                batch,
            )

    def _unless_restarted(self, trainer, action, *args):
        if trainer == self.trainer:
            action(*args)

    def _update(self, batch):
        _, _, crash, _ = self.chances
        self.batches.append((self.step, batch))
        self.step += 1
        if self.rng.random() < crash / 2:  # after its checkpoint, before its report
            self._resume(self.step)
            return
        if self.step % self.push_every == 0:
            self.engine = self.step
            self._at(0.1, self._unless_restarted, self.trainer, self._push, self.step)
        # The report arrives before or after the push.
        self._at(
            self.rng.choice((0.0, 0.12)), self._unless_restarted, self.trainer, self._mark_trained
        )

    def _mark_trained(self):
        for _ in range(self.rng.choice((1, 1, 2))):
            self.buffer.mark_trained(self.step - 1)
        self._schedule_take()

    def _push(self, version):
        self.buffer.push(version)

    def _schedule_take(self):
        self._at(0.15, self._unless_restarted, self.trainer, self._take_batch)

    def _crash(self):
        """Kills the trainer in the middle of an update, and resumes from a checkpoint."""
        self._resume(max(0, self.step - self.rng.choice((0, 1, 3))))

    def _resume(self, step):
        self.trainer += 1
        self.step = self.engine = step
        self.rollbacks.append(step)
        self.buffer.begin(step, step)
        self._schedule_take()

    def _kill_orchestrator(self):
        if self.journal is not None:
            buffer = self.buffer
            expected = (
                buffer.step,
                buffer.version,
                buffer.waiting,
                buffer.accepted,
                buffer.num_started,
            )
            self.buffer = GroupBuffer(self.config, self.journal)
            buffer = self.buffer
            assert (
                buffer.step,
                buffer.version,
                buffer.waiting,
                buffer.accepted,
                buffer.num_started,
            ) == expected
            assert buffer.running == 0
            self.to_resample.clear()

    def _check(self, batch):
        """Checks that every member of a batch may be trained on, without the counters of the buffer."""
        config, group_size = self.config, self.config.group
        assert len(batch) == config.batch_groups
        assert [group.order for group in batch] == sorted(group.order for group in batch)
        for group in batch:
            assert len(group.members) == group_size
            rollout_ids = list(dict.fromkeys(member.rollout_id for member in group.members))
            assert 2 * len(rollout_ids) > group_size and len(group.baseline) == len(rollout_ids)
            versions = []
            assert not self.lost & set(rollout_ids)
            for member in group.members:
                assert member.reward.value is not None and member.group_id == group.group_id
                for version, lineage in self.lineages[member.rollout_id]:
                    assert all(version <= step for step in self.rollbacks[lineage:])
                    versions.append(version)
            assert group.staleness == self.step - min(versions) <= config.max_staleness
            assert max(versions) <= self.step

    def num_to_resample(self):
        """Returns the number of task numbers that must be sampled again."""
        return len(self.to_resample) + len(self.buffer.pop_resamples())
