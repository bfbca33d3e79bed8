"""Models asynchronous RL in discrete events: rollouts with known durations in a system without overhead.

The workload gives all durations. `ideal` computes what trainer, orchestrator, engines and environments then do, by the orchestrator's
own rules of admission. A real system can approach this but never exceed it.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.rl.orchestrator.group_repair import repair_group
from glm5_jax.rl.orchestrator.staleness import BufferConfig, must_wait, num_admissible
from glm5_jax.rl.rollouts.sessions import derive_seed

Span = tuple[float, float]


class WorkloadTurn(NamedTuple):
    """A turn of a rollout: seconds until its environment answers, then tokens of the reply."""

    answer_s: float
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Durations and sizes of a simulated run. Raises ValueError for values out of range.

    Attributes:
      name: name for people.
      group, batch_groups, max_staleness, pacing: see `rl.orchestrator.staleness.BufferConfig`; max_staleness=0 is the synchronous
        trainer.
      turns: turns of a rollout, each an answer of the environment and a reply to it.
      median_answer_s, sigma: median of an answer's log-normal duration in seconds, and standard deviation of its
        logarithm.
      max_answer_s: time limit, at which an answer ends like a tool, in seconds.
      tokens: fewest and most tokens of a reply, uniformly distributed.
      engines, slots, speed: number of engines, concurrent replies of each, and tokens of each reply per second.
      update_s, push_s: seconds of an update, and of a push of its weights to the engines.
    """

    name: str
    group: int = 4
    batch_groups: int = 8
    max_staleness: int = 4
    pacing: bool = True
    turns: int = 4
    median_answer_s: float = 0.25
    sigma: float = 0.5
    max_answer_s: float = 4.5
    tokens: tuple[int, int] = (8, 24)
    engines: int = 2
    slots: int = 28
    speed: float = 32.0
    update_s: float = 1.3
    push_s: float = 0.2

    def __post_init__(self):
        self.buffer()
        for name in ("turns", "median_answer_s", "max_answer_s", "engines", "slots", "speed"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("sigma", "update_s", "push_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        lowest, highest = self.tokens
        if not 3 <= lowest <= highest:
            raise ValueError(
                f"tokens is {self.tokens}; a reply has at least 3, because some of them are not text"
            )

    def buffer(self) -> BufferConfig:
        """Returns the configuration of the orchestrator's buffer."""
        running = (self.max_staleness + 1) * self.batch_groups
        return BufferConfig(
            group=self.group,
            batch_groups=self.batch_groups,
            max_staleness=self.max_staleness,
            max_running=running,
            pacing=self.pacing,
        )

    def scaled(self, factor: float) -> "Workload":
        """Returns the workload with all durations multiplied. Raises ValueError if the factor is not positive."""
        if not factor > 0:
            raise ValueError(f"the scale is {factor}; it must be positive")
        times = {
            name: factor * getattr(self, name)
            for name in ("median_answer_s", "max_answer_s", "update_s", "push_s")
        }
        return dataclasses.replace(self, speed=self.speed / factor, **times)

    def synchronous(self) -> "Workload":
        """Returns the workload of a synchronous trainer."""
        return dataclasses.replace(self, max_staleness=0)

    def rollout(self, seed: int) -> tuple[WorkloadTurn, ...]:
        """Returns the turns of the rollout with this seed, which the orchestrator assigns."""
        rng = np.random.default_rng(seed)
        lowest, highest = self.tokens
        durations = self.median_answer_s * np.exp(self.sigma * rng.standard_normal(self.turns))
        tokens = rng.integers(lowest, highest + 1, self.turns)
        return tuple(
            map(WorkloadTurn, np.minimum(durations, self.max_answer_s).tolist(), tokens.tolist())
        )


class Update(NamedTuple):
    """Times of an update: batch requested, batch received, update done, and weights pushed to the engines."""

    requested: float
    received: float
    updated: float
    pushed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemRun:
    """Record of a run, in seconds from an arbitrary origin.

    Attributes:
      updates: all updates, in order.
      replies, answers: start and end of each reply of an engine, and of each answer of an environment.
      ages: for each update, the ages of its members, in steps.
      met: for each update, the environment seconds of its members.
      dropped, padded: number of groups that were not trained on, and of members that are copies.
      cores: number of cores that each program kept busy.
    """

    updates: list[Update]
    replies: list[Span]
    answers: list[Span]
    ages: list[list[int]]
    met: list[list[float]]
    dropped: int = 0
    padded: int = 0
    cores: dict[str, float] = dataclasses.field(default_factory=dict)

    def window(self, first: int) -> Span:
        """Returns the span from the end of the first updates, in which the system fills, to the end of the last."""
        if not 1 <= first < len(self.updates):
            raise ValueError(f"there are {len(self.updates)} updates; make more than {first}")
        return self.updates[first - 1].pushed, self.updates[-1].pushed

    def rate(self, first: int) -> float:
        """Returns updates per second, without the first ones."""
        begin, end = self.window(first)
        return (len(self.updates) - first) / (end - begin)

    def waiting(self, first: int) -> float:
        """Returns the share of its time that the trainer waits for batches."""
        begin, end = self.window(first)
        return sum(update.received - update.requested for update in self.updates[first:]) / (
            end - begin
        )


def mean_concurrency(spans: Sequence[Span], window: Span) -> float:
    """Returns the mean number of concurrent spans over the window."""
    begin, end = window
    inside = (max(0.0, min(b, end) - max(a, begin)) for a, b in spans)
    return sum(inside) / (end - begin)


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Returns the union of the spans, as disjoint spans."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


Attempts = Callable[[int, int, int], Sequence[WorkloadTurn]]


def ideal(
    workload: Workload, updates: int, seed: int = 0, attempts: Attempts | None = None
) -> SystemRun:
    """Returns a run of `updates` updates without overhead, with one queue for the slots of all engines.

    Args:
      workload: durations and sizes.
      updates: number of updates.
      seed: seed of the orchestrator.
      attempts: returns the turns of a rollout by (order of its group, try, index in the group); None: those that an orchestrator
        with this seed would assign.
    """
    return _Ideal(workload, seed, attempts).run(updates)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Rollout:
    """State of a rollout.

    Attributes:
      group: its group.
      left: remaining turns.
      met: total seconds of its environment.
      version: weight version of the engines at its first token; None: no token yet.
    """

    group: "_Group"
    left: Iterator[WorkloadTurn]
    met: float
    version: int | None = None

    def age(self, step: int) -> int:
        """Returns the age of its first token at a step of the trainer."""
        assert self.version is not None, "a rollout that has ended has tokens"
        return step - self.version


@dataclasses.dataclass(eq=False, kw_only=True)
class _Group:
    """State of a group.

    Attributes:
      order, tries: its order of admission, and the number of dropped groups of this order before it.
      version: weight version of the engines when it was admitted.
      left: number of unfinished rollouts.
      members: its rollouts.
    """

    order: int
    tries: int
    version: int
    left: int
    members: list[_Rollout] = dataclasses.field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        return self.version, self.order


class _Ideal:
    def __init__(self, workload: Workload, seed: int, attempts: Attempts | None):
        self._workload, self._config = workload, workload.buffer()
        self._attempts = attempts or (lambda *key: workload.rollout(derive_seed(seed, *key)))
        self._now, self._events, self._ties = 0.0, [], itertools.count()
        self._free, self._queue = workload.engines * workload.slots, collections.deque()
        self._step = self._version = self._next = 0
        self._running: set[_Group] = set()
        self._waiting: set[_Group] = set()
        self._to_resample: list[tuple[int, int]] = []
        self._busy, self._requested_at = False, 0.0  # of the trainer
        self._run = SystemRun(updates=[], replies=[], answers=[], ages=[], met=[])
        self._dropped = self._padded = 0

    def run(self, updates: int) -> SystemRun:
        self._admit()
        while len(self._run.updates) < updates:
            self._now, _, act, args = heapq.heappop(self._events)
            act(*args)
        return dataclasses.replace(self._run, dropped=self._dropped, padded=self._padded)

    def _schedule(self, seconds: float, act: Callable, *args) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._ties), act, args))

    # -- rollouts ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        config = self._config
        counts = self._step, self._version, len(self._waiting), len(self._running)
        for _ in range(num_admissible(config, *counts)):
            if self._to_resample:
                order, tries = self._to_resample.pop(0)
            else:
                order, tries, self._next = self._next, 0, self._next + 1
            group = _Group(order=order, tries=tries, version=self._version, left=config.group)
            self._running.add(group)
            for index in range(config.group):
                turns = self._attempts(order, tries, index)
                met = sum(turn.answer_s for turn in turns)
                group.members.append(_Rollout(group=group, left=iter(turns), met=met))
            for rollout in group.members:
                self._next_turn(rollout)

    def _next_turn(self, rollout: _Rollout) -> None:
        turn = next(rollout.left, None)
        if turn is not None:
            self._run.answers.append((self._now, self._now + turn.answer_s))
            self._schedule(turn.answer_s, self._enqueue, rollout, turn.tokens)
            return
        group = rollout.group
        group.left -= 1
        if not group.left:
            self._running.remove(group)
            self._waiting.add(group)
            self._drop_old([group])
            self._start_update()

    def _enqueue(self, rollout: _Rollout, tokens: int) -> None:
        self._queue.append((rollout, tokens))
        self._start_replies()

    def _start_replies(self) -> None:
        while self._free and self._queue:
            rollout, tokens = self._queue.popleft()
            if rollout.version is None:
                rollout.version = self._version
            seconds = tokens / self._workload.speed
            self._free -= 1
            self._run.replies.append((self._now, self._now + seconds))
            self._schedule(seconds, self._finish_reply, rollout)

    def _finish_reply(self, rollout: _Rollout) -> None:
        self._free += 1
        self._start_replies()
        self._next_turn(rollout)

    # -- the trainer ---------------------------------------------------------------------------------------

    def _valid(self, group: _Group) -> list[_Rollout]:
        oldest = self._config.max_staleness
        return [rollout for rollout in group.members if rollout.age(self._step) <= oldest]

    def _drop_old(self, groups: Iterable[_Group]) -> None:
        """Drops groups without enough valid rollouts; their tasks are sampled again."""
        for group in groups:
            if repair_group(range(len(self._valid(group))), self._config.group) is None:
                self._waiting.remove(group)
                self._to_resample.append((group.order, group.tries + 1))
                self._dropped += 1
        self._admit()

    def _start_update(self) -> None:
        """Starts the next update if the trainer is free and a batch is ready."""
        if self._busy:
            return
        config = self._config
        self._drop_old(sorted(self._waiting, key=lambda group: group.order))
        free = sorted(self._waiting, key=lambda group: group.rank)
        batch, rest = free[: config.batch_groups], free[config.batch_groups :]
        if len(batch) < config.batch_groups:
            return
        later = [group.rank for group in rest], [group.rank for group in self._running]
        if must_wait(config, self._step, batch[-1].rank, *later):
            return
        self._busy = True
        batch.sort(key=lambda group: group.order)
        members = [rollout for group in batch for rollout in self._valid(group)]
        self._padded += config.batch_groups * config.group - len(members)
        self._run.ages.append([rollout.age(self._step) for rollout in members])
        self._run.met.append([rollout.met for rollout in members])
        updated = self._now + self._workload.update_s
        pushed = updated + self._workload.push_s
        self._run.updates.append(Update(self._requested_at, self._now, updated, pushed))
        self._schedule(updated - self._now, self._finish_update, batch)

    def _finish_update(self, batch: list[_Group]) -> None:
        """Reports the update to the orchestrator, then pushes the weights to the engines."""
        self._waiting.difference_update(batch)
        self._step += 1
        self._schedule(self._workload.push_s, self._finish_push)

    def _finish_push(self) -> None:
        self._version += 1
        self._busy, self._requested_at = False, self._now
        self._admit()
        self._start_update()
