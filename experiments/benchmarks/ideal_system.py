"""Rollouts whose environments and engines take known times, and what a system without any overhead makes of them.

The workload says how long everything takes; `ideal` counts in discrete events what trainer, hub, engines and environments then
do, by the hub's own rules of admission: what a real system can come near to, and never pass.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.rl.admission import BufferConfig, must_wait, room
from glm5_jax.rl.repair import repaired
from glm5_jax.rl.sessions import seed_of

Span = tuple[float, float]


class Turn(NamedTuple):
    """Of a rollout: seconds until its environment has answered, then tokens of the reply."""

    seconds: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """What takes how long. Construction refuses values out of range (ValueError).

    Attributes:
      name: for people.
      group, batch_groups, max_staleness, pacing: see `rl.admission.BufferConfig`; max_staleness=0 is the synchronous trainer.
      turns: of a rollout, each an answer of the environment and a reply to it.
      seconds, sigma, limit: of an answer: the median and the spread of its logarithm, which is normal; it ends at the limit,
        as tools do.
      tokens: of a reply, fewest and most, all alike.
      engines, slots, speed: how many there are, replies that one writes at once, and tokens of each in a second.
      learn, push: seconds of an update, and until the engines have its weights.
    """

    name: str
    group: int = 4
    batch_groups: int = 8
    max_staleness: int = 4
    pacing: bool = True
    turns: int = 4
    seconds: float = 0.25
    sigma: float = 0.5
    limit: float = 4.5
    tokens: tuple[int, int] = (8, 24)
    engines: int = 2
    slots: int = 28
    speed: float = 32.0
    learn: float = 1.3
    push: float = 0.2

    def __post_init__(self):
        self.buffer()
        for name in ("turns", "seconds", "limit", "engines", "slots", "speed"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("sigma", "learn", "push"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        fewest, most = self.tokens
        if not 3 <= fewest <= most:
            raise ValueError(
                f"tokens is {self.tokens}; a reply has at least 3, one of which is no text"
            )

    def buffer(self) -> BufferConfig:
        """The hub's."""
        running = (self.max_staleness + 1) * self.batch_groups
        own = self.group, self.batch_groups, self.max_staleness, running, self.pacing
        return BufferConfig(*own)

    def scaled(self, factor: float) -> "Workload":
        """The same with all seconds multiplied. ValueError."""
        if not factor > 0:
            raise ValueError(f"the scale is {factor}; it must be positive")
        times = {
            name: factor * getattr(self, name) for name in ("seconds", "limit", "learn", "push")
        }
        return dataclasses.replace(self, speed=self.speed / factor, **times)

    def synchronous(self) -> "Workload":
        """The same for a trainer that waits for all that it has asked for."""
        return dataclasses.replace(self, max_staleness=0)

    def rollout(self, seed: int) -> tuple[Turn, ...]:
        """What the rollout with this seed, which the hub gives it, meets."""
        draw = np.random.default_rng(seed)
        fewest, most = self.tokens
        seconds = self.seconds * np.exp(self.sigma * draw.standard_normal(self.turns))
        tokens = draw.integers(fewest, most + 1, self.turns)
        return tuple(map(Turn, np.minimum(seconds, self.limit).tolist(), tokens.tolist()))


class Update(NamedTuple):
    """Of the trainer, when it asked for the batch, had it, had learnt from it, and the engines had its weights."""

    asked: float
    came: float
    learnt: float
    pushed: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What a system did, in seconds from any beginning.

    Attributes:
      updates: one by one.
      replies, answers: from when to when each was written by an engine, or thought about by an environment.
      ages: of each update, those of the members that it learnt from, in steps.
      met: of each update, seconds of environments that these members had met.
      dropped, padded: groups that were not learnt from, and members that are copies.
      cores: that each program kept busy.
    """

    updates: Sequence[Update]
    replies: Sequence[Span]
    answers: Sequence[Span]
    ages: Sequence[Sequence[int]]
    met: Sequence[Sequence[float]]
    dropped: int = 0
    padded: int = 0
    cores: dict[str, float] = dataclasses.field(default_factory=dict)

    def window(self, first: int) -> Span:
        """From the end of the first updates, in which the system fills, to that of the last."""
        if not 1 <= first < len(self.updates):
            raise ValueError(f"there are {len(self.updates)} updates; make more than {first}")
        return self.updates[first - 1].pushed, self.updates[-1].pushed

    def rate(self, first: int) -> float:
        """Updates a second, the first ones left out."""
        begin, end = self.window(first)
        return (len(self.updates) - first) / (end - begin)

    def waiting(self, first: int) -> float:
        """The share of its time that the trainer waits for batches."""
        begin, end = self.window(first)
        return sum(own.came - own.asked for own in self.updates[first:]) / (end - begin)


def used(spans: Sequence[Span], window: Span) -> float:
    """How many of the spans there are at once, on average over the window."""
    begin, end = window
    inside = (max(0.0, min(b, end) - max(a, begin)) for a, b in spans)
    return sum(inside) / (end - begin)


def joined(spans: Sequence[Span]) -> list[Span]:
    """The time that any of the spans covers."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


Attempts = Callable[[int, int, int], Sequence[Turn]]


def ideal(workload: Workload, updates: int, seed: int = 0, attempts: Attempts | None = None) -> Run:
    """So many updates of a system in which nothing else takes time than what the workload says, with one queue in front of
    the slots of all engines. attempts: what the rollout at a place in line, try and place in its group meets (default: as
    a hub with this seed would have it)."""
    return _Ideal(workload, seed, attempts).run(updates)


@dataclasses.dataclass(eq=False)
class _Rollout:
    """left: turns that have not begun; version: of the engines at its first token; met: seconds of its environment."""

    group: "_Group"
    left: Iterator[Turn]
    met: float
    version: int | None = None


@dataclasses.dataclass(eq=False)
class _Group:
    """version: of the engines when it was admitted; left: rollouts that have not ended."""

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
        self._attempts = attempts or (lambda *own: workload.rollout(seed_of(seed, *own)))
        self._now, self._events, self._ties = 0.0, [], itertools.count()
        self._free, self._queue = workload.engines * workload.slots, collections.deque()
        self._step = self._version = self._next = 0
        self._running: set[_Group] = set()
        self._waiting: set[_Group] = set()
        self._owed: list[tuple[int, int]] = []
        self._busy, self._asked = False, 0.0  # of the trainer
        self._run = Run([], [], [], [], [])
        self._dropped = self._padded = 0

    def run(self, updates: int) -> Run:
        self._admit()
        while len(self._run.updates) < updates:
            self._now, _, act, args = heapq.heappop(self._events)
            act(*args)
        return dataclasses.replace(self._run, dropped=self._dropped, padded=self._padded)

    def _after(self, seconds: float, act: Callable, *args) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._ties), act, args))

    # -- rollouts ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        config = self._config
        own = self._step, self._version, len(self._waiting), len(self._running)
        for _ in range(room(config, *own)):
            if self._owed:
                order, tries = self._owed.pop(0)
            else:
                order, tries, self._next = self._next, 0, self._next + 1
            group = _Group(order, tries, self._version, config.group)
            self._running.add(group)
            for place in range(config.group):
                turns = self._attempts(order, tries, place)
                met = sum(turn.seconds for turn in turns)
                group.members.append(_Rollout(group, iter(turns), met))
            for rollout in group.members:
                self._go_on(rollout)

    def _go_on(self, rollout: _Rollout) -> None:
        turn = next(rollout.left, None)
        if turn is not None:
            self._run.answers.append((self._now, self._now + turn.seconds))
            self._after(turn.seconds, self._ask, rollout, turn.tokens)
            return
        group = rollout.group
        group.left -= 1
        if not group.left:
            self._running.remove(group)
            self._waiting.add(group)
            self._drop_old([group])
            self._take()

    def _ask(self, rollout: _Rollout, tokens: int) -> None:
        self._queue.append((rollout, tokens))
        self._serve()

    def _serve(self) -> None:
        while self._free and self._queue:
            rollout, tokens = self._queue.popleft()
            if rollout.version is None:
                rollout.version = self._version
            seconds = tokens / self._workload.speed
            self._free -= 1
            self._run.replies.append((self._now, self._now + seconds))
            self._after(seconds, self._replied, rollout)

    def _replied(self, rollout: _Rollout) -> None:
        self._free += 1
        self._serve()
        self._go_on(rollout)

    # -- the trainer ---------------------------------------------------------------------------------------

    def _valid(self, group: _Group) -> list[_Rollout]:
        oldest = self._step - self._config.max_staleness
        return [one for one in group.members if one.version >= oldest]

    def _drop_old(self, groups: Iterable[_Group]) -> None:
        """Their places in line are filled again."""
        for group in groups:
            if repaired(range(len(self._valid(group))), self._config.group) is None:
                self._waiting.remove(group)
                self._owed.append((group.order, group.tries + 1))
                self._dropped += 1
        self._admit()

    def _take(self) -> None:
        """The next batch, if the trainer is free and there is one."""
        if self._busy:
            return
        config = self._config
        self._drop_old(sorted(self._waiting, key=lambda own: own.order))
        free = sorted(self._waiting, key=lambda own: own.rank)
        batch, rest = free[: config.batch_groups], free[config.batch_groups :]
        if len(batch) < config.batch_groups:
            return
        later = [own.rank for own in rest], [own.rank for own in self._running]
        if must_wait(config, self._step, batch[-1].rank, *later):
            return
        self._busy = True
        batch.sort(key=lambda own: own.order)
        members = [one for group in batch for one in self._valid(group)]
        self._padded += config.batch_groups * config.group - len(members)
        self._run.ages.append([self._step - one.version for one in members])
        self._run.met.append([one.met for one in members])
        learnt = self._now + self._workload.learn
        pushed = learnt + self._workload.push
        self._run.updates.append(Update(self._asked, self._now, learnt, pushed))
        self._after(learnt - self._now, self._learnt, batch)

    def _learnt(self, batch: list[_Group]) -> None:
        """The hub hears of it, then the engines get the weights."""
        self._waiting.difference_update(batch)
        self._step += 1
        self._after(self._workload.push, self._pushed)

    def _pushed(self) -> None:
        self._version += 1
        self._busy, self._asked = False, self._now
        self._admit()
        self._take()
