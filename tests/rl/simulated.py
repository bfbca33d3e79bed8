"""A trainer, engines and services in virtual time around a `Buffer`: everything that could go wrong, in any order."""

import collections
import heapq
import itertools
import random

import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.orchestrator.group_buffer import GroupBuffer
from glm5_jax.rl.trajectory import Trajectory, summarize_records
from glm5_jax.rl.types import Reward


def rollout(admitted, i, versions, reward=1.0, **more):
    """The i-th attempt of a group, whose tokens weights of these versions sampled; none: nothing was."""
    ids = {"group_id": admitted.group_id, "rollout_id": f"{admitted.group_id}.{i}"}
    own = np.array([-1, *versions])
    logp = np.where(own >= 0, -0.5, np.nan)
    record = TokenRecord(
        token_ids=np.arange(len(own)),
        loss_mask=own >= 0,
        rollout_logp=logp,
        weight_version=own,
        **ids,
    )
    task, number = admitted.task, admitted.number
    return Trajectory(
        **ids,
        task=task,
        number=number,
        reward=Reward(reward),
        summary=summarize_records((record,), f"digest of {ids['rollout_id']}"),
        **more,
    )


def group(admitted, versions, rewards=None):
    """Its attempts, by the versions of each; a reward of None: the environment failed."""
    rewards = rewards or [1.0] * len(versions)
    return [rollout(admitted, i, own, r) for i, (own, r) in enumerate(zip(versions, rewards))]


def pace_of(number):
    """How long attempts at a task number take, about, however often it is attempted: heavy-tailed."""
    return min(0.3 * random.Random(number).paretovariate(1.2), 30.0)


class Simulation:
    """A run in virtual time.

    Attributes:
      batches: (step, batch) of all that was trained on, those of steps that were lost included.
      seconds: of each group by id, from its admission until it came; last: of each task number, its latest group.
      dropped: groups whose task numbers had to be admitted again.
    """

    def __init__(
        self,
        config,
        seed,
        journal=None,
        *,
        every=1,
        fail=0.0,
        cancel=0.0,
        crash=0.0,
        kill=0.0,
        lose=0.0,
    ):
        """every: updates between two pushes. Chances: fail, of an attempt that its environment fails; cancel, of a group to be
        called off; of an update that the trainer (crash) or the orchestrator (kill) dies before it, or that the gateway has lost
        records of its batch (lose)."""
        self.config, self.journal, self.every = config, journal, every
        self.chances, self.lose = (fail, cancel, crash, kill), lose
        self.lost = set()  # rollouts whose records are lost
        self.buffer = GroupBuffer(config, journal)
        self.draw = random.Random(seed)
        self.now, self.events, self.ties = 0.0, [], itertools.count()
        self.fresh, self.again = itertools.count(), collections.deque()
        self.engine, self.went_back = (
            0,
            [],
        )  # the engines' version; steps that the trainer went back to
        self.lineages = {}  # rollout_id: (version, how often the trainer had gone back) of each token
        self.batches, self.seconds, self.last, self.dropped = [], {}, {}, []
        self.trainer, self.step = 0, 0  # the trainer's lives, its step

    def run(self, updates):
        """Until the trainer has done so many. AssertionError if it can never do the next."""
        self._train()
        self._fill()
        for _ in range(100_000):
            if self.step == updates:
                return self
            assert self.events, f"nothing is under way at step {self.step}: {self.buffer.metrics()}"
            self.now, _, act, args = heapq.heappop(self.events)
            act(*args)
            self._fill()
            self.check_room()
        raise AssertionError(f"there are {updates} updates to do, and only {self.step} are done")

    def check_room(self):
        """That as many are outstanding as the rule says, whatever happened to the counters."""
        buffer, config = self.buffer, self.config
        most = (config.max_staleness + buffer.version - buffer.step + 1) * config.batch_groups
        room = min(most - buffer.waiting - buffer.running, config.max_running - buffer.running)
        assert buffer.num_admissible() == max(0, room)

    def _at(self, seconds, act, *args):
        heapq.heappush(self.events, (self.now + seconds, next(self.ties), act, args))

    def _fill(self):
        told = self.buffer.pop_resamples()
        self.dropped += [self.last[number] for _, number in told]
        self.again.extend(told)
        while self.buffer.num_admissible():
            task, number = self.again.popleft() if self.again else ("t", next(self.fresh))
            admitted = self.buffer.admit(task, number)
            self.last[number] = admitted.group_id
            self._begin(admitted)

    def _begin(self, admitted):
        """A group waits for an engine, is sampled for a heavy-tailed time, and then judged."""
        fail, cancel, _, _ = self.chances
        began = self.now
        if self.draw.random() < cancel:
            self._at(self.draw.random(), self._cancel, admitted.group_id)
            return
        tokens = [[] for _ in range(self.config.group)]
        ends = []
        queue, pace = self.draw.random(), pace_of(admitted.number)
        for i in range(self.config.group):
            seconds = queue + pace * self.draw.uniform(0.5, 1.0)
            for share in (0.0, 0.4, 1.0):
                self._at(queue + share * (seconds - queue), self._sample, tokens[i])
            ends.append(seconds + self.draw.expovariate(3))
        rewards = [None if self.draw.random() < fail else self.draw.random() for _ in tokens]
        self._at(max(ends), self._come, admitted, tokens, rewards, began)

    def _sample(self, tokens):
        tokens.append((self.engine, len(self.went_back)))

    def _cancel(self, group_id):
        self.buffer.cancel(group_id)

    def _come(self, admitted, tokens, rewards, began):
        """What was sampled comes in, twice if the answer was lost."""
        found = group(admitted, [[version for version, _ in own] for own in tokens], rewards)
        for one, own in zip(found, tokens):
            self.lineages[one.rollout_id] = own
        self.seconds[admitted.group_id] = self.now - began
        for _ in range(self.draw.choice((1, 1, 2))):
            self.buffer.put(admitted.group_id, found)

    def _train(self):
        """Asks for a batch until there is one."""
        _, _, crash, kill = self.chances
        if self.draw.random() < kill:
            self._kill_orchestrator()
        batch = self.buffer.take(self.step)
        if batch is None:
            self._at(0.2, self._if_alive, self.trainer, self._train)
            return
        self._check(batch)
        if self.lose and self.draw.random() < self.lose:
            members = sorted({one.rollout_id for group in batch for one in group.members})
            lost = self.draw.sample(members, self.draw.randint(1, len(members)))
            self.lost.update(lost)
            self.buffer.mark_lost(lost)
            self._at(0.2, self._if_alive, self.trainer, self._train)
            return
        if self.draw.random() < crash:
            self._crash()
        else:
            self._at(self.draw.uniform(0.5, 1.0), self._if_alive, self.trainer, self._update, batch)

    def _if_alive(self, trainer, act, *args):
        if trainer == self.trainer:
            act(*args)

    def _update(self, batch):
        _, _, crash, _ = self.chances
        self.batches.append((self.step, batch))
        self.step += 1
        if self.draw.random() < crash / 2:  # after its checkpoint, before it told
            self._go_on(self.step)
            return
        if self.step % self.every == 0:
            self.engine = self.step
            self._at(0.1, self._if_alive, self.trainer, self._push, self.step)
        # What is said first is heard first or last.
        self._at(self.draw.choice((0.0, 0.12)), self._if_alive, self.trainer, self._tell)

    def _tell(self):
        for _ in range(self.draw.choice((1, 1, 2))):
            self.buffer.mark_trained(self.step - 1)
        self._train_next()

    def _push(self, version):
        self.buffer.push(version)

    def _train_next(self):
        self._at(0.15, self._if_alive, self.trainer, self._train)

    def _crash(self):
        """The trainer dies in the middle of an update, and goes on from a checkpoint."""
        self._go_on(max(0, self.step - self.draw.choice((0, 1, 3))))

    def _go_on(self, step):
        self.trainer += 1
        self.step = self.engine = step
        self.went_back.append(step)
        self.buffer.begin(step, step)
        self._train_next()

    def _kill_orchestrator(self):
        if self.journal is not None:
            own = self.buffer
            told = own.step, own.version, own.waiting, own.accepted, own.num_started
            self.buffer = GroupBuffer(self.config, self.journal)
            own = self.buffer
            assert (own.step, own.version, own.waiting, own.accepted, own.num_started) == told
            assert own.running == 0
            self.again.clear()

    def _check(self, batch):
        """That all of a batch may be learnt from, which depends on what happened and on nothing that the buffer says."""
        config, group_size = self.config, self.config.group
        assert len(batch) == config.batch_groups
        assert [own.order for own in batch] == sorted(own.order for own in batch)
        for own in batch:
            assert len(own.members) == group_size
            first = list(dict.fromkeys(one.rollout_id for one in own.members))
            assert 2 * len(first) > group_size and len(own.baseline) == len(first)
            oldest = []
            assert not self.lost & set(first)
            for one in own.members:
                assert one.reward.value is not None and one.group_id == own.group_id
                for version, lineage in self.lineages[one.rollout_id]:
                    assert all(version <= step for step in self.went_back[lineage:])
                    oldest.append(version)
            assert own.staleness == self.step - min(oldest) <= config.max_staleness
            assert max(oldest) <= self.step

    def owed(self):
        """How many task numbers are to be admitted again."""
        return len(self.again) + len(self.buffer.pop_resamples())
