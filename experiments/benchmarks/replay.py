"""Recorded chats played to several ranks, by one way or another to route their requests.

A rank is an engine without its device: the engine's own scheduler, pages and prefix cache, to which the tokens are told that the
device would draw. Time goes by in steps of the engines, which all ranks take together.
"""

import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from experiments.benchmarks.agent_traces import Trace, Turn
from glm5_jax.inference.request import Handle, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Limits, Scheduler, Sequence
from glm5_jax.rl.router import Router, RouterConfig


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      ranks: of the engines.
      in_flight: chats at once; where one ends the next begins.
      cache: tokens that a rank's pages hold, over what its share of the chats in flight has at their ends; infinite: all.
      page_size: tokens of a page.
      max_batch: requests that a rank decodes at once.
      chunk: tokens of prompts that a rank reads in a step.
      tool_steps: that a tool takes on average; each call's are drawn (exponentially).
      lost, added: shares of all chats that have ended when a rank is lost, and when it is there again, its cache empty; lost
        None: never.
      full: chats that a rank must have to be called full again, of the mean.
      look_steps: between two looks at what each rank has.
      seed: of the chats' names and of how long tools take.
    """

    ranks: int = 8
    in_flight: int = (
        128  # of the run of which a share of 0.96 found in the cache is known (miles, GLM-5.2)
    )
    cache: float = 2.0
    page_size: int = 64
    max_batch: int = 64
    chunk: int = 512
    tool_steps: float = 20.0
    lost: float | None = 0.3
    added: float = 0.5
    full: float = 0.85
    look_steps: int = 20
    seed: int = 0

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if name not in ("lost", "added", "seed") and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.lost is None:
            return
        if not 0 < self.lost < self.added < 1:
            raise ValueError(
                f"a rank is lost at {self.lost} and there again at {self.added} of the chats; give shares in this order"
            )
        if self.ranks < 2:
            raise ValueError("there is 1 rank, and none may be lost then; use lost=None")

    @property
    def names(self) -> list[str]:
        """Of the ranks."""
        return [f"http://10.0.0.1:8000@{number}" for number in range(self.ranks)]

    def num_pages(self, traces: Iterable[Trace]) -> int:
        """Of a rank."""
        ends = [len(trace[-1].prompt) + len(trace[-1].output) for trace in traces]
        if math.isinf(self.cache):
            return sum(-(-end // self.page_size) for end in ends) + self.in_flight
        share = self.in_flight / self.ranks * float(np.mean(ends))
        return math.ceil(self.cache * share / self.page_size)


class Placing(Protocol):
    """How requests are routed, as `rl.router.Router` describes it."""

    def rank_of(self, session: str) -> str: ...
    def release(self, session: str) -> None: ...
    def lose(self, rank: str) -> list[str]: ...
    def add(self, rank: str) -> None: ...


class RoundRobin:
    """Each request to the next rank."""

    def __init__(self, ranks: Iterable[str]):
        self._ranks, self._count = list(ranks), itertools.count()

    def rank_of(self, session: str) -> str:
        """See `Router`, and so the others."""
        return self._ranks[next(self._count) % len(self._ranks)]

    def release(self, session: str) -> None:
        """Nothing was kept."""

    def lose(self, rank: str) -> list[str]:
        """No session has a rank."""
        self._ranks.remove(rank)
        return []

    def add(self, rank: str) -> None:
        """Behind the others."""
        self._ranks.append(rank)


class Anywhere(RoundRobin):
    """Each request to any rank."""

    def __init__(self, ranks: Iterable[str], seed: int):
        super().__init__(ranks)
        self._draw = random.Random(seed)

    def rank_of(self, session: str) -> str:
        return self._draw.choice(self._ranks)


class Hashing(Router):
    """Consistent hashing alone: no bound, and no memory of where a session was."""

    def __init__(self, ranks: Iterable[str]):
        super().__init__(ranks, RouterConfig(bound=1e9))

    def rank_of(self, session: str) -> str:
        rank = super().rank_of(session)
        self.release(session)
        return rank


class Rank:
    """An engine's scheduler with its pages and prefixes.

    Attributes:
      reads: by sequence that has not ended, the tokens read for it.
    """

    def __init__(self, num_pages: int, config: ReplayConfig):
        limits = Limits(config.max_batch, config.chunk, config.chunk)
        self._scheduler = Scheduler(num_pages, config.page_size, limits)
        self._outputs: dict[Sequence, tuple[int, ...]] = {}
        self.reads: dict[Sequence, int] = {}

    def submit(self, turn: Turn) -> Sequence:
        """Takes a request; TooLong for one that its pages can never hold."""
        most = len(turn.prompt) + len(turn.output)
        self._scheduler.check(most)
        handle = Handle(Request(turn.prompt, Sampling(max_tokens=len(turn.output))))
        sequence = Sequence(handle, list(turn.prompt), most, seed=0, space=0)
        self._outputs[sequence], self.reads[sequence] = turn.output, 0
        self._scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[Sequence, int]]:
        """A step of the engine: what has ended with it, and the tokens that were read for that, whatever was read twice
        included."""
        work, ended = self._scheduler.schedule(), []
        for one in work.prefills:
            self.reads[one.sequence] += one.count
        for one in (*work.decodes, *work.prefills):
            if not one.draws:
                continue
            sequence = one.sequence
            count = len(sequence.ids) - sequence.num_prompt
            self._scheduler.came_back(one, [self._outputs[sequence][count]])
            if len(sequence.ids) == sequence.limit:
                self._scheduler.remove(sequence)
                del self._outputs[sequence]
                ended.append((sequence, self.reads.pop(sequence)))
        return ended


class Asked(NamedTuple):
    """A request that was answered. chat, turn: their numbers; prompt: its tokens; new: of them, behind all that the turn before
    read and wrote; cached: found in the cache; read: computed, what was lost with its rank or preempted included."""

    chat: int
    turn: int
    prompt: int
    new: int
    cached: int
    read: int


class Look(NamedTuple):
    """At a step, of the ranks that are there: chats in flight whose last request they have, and its tokens; ended: chats."""

    step: int
    ended: int
    chats: dict[str, int]
    tokens: dict[str, int]


@dataclasses.dataclass
class Result:
    """What came of a replay.

    Attributes:
      asked: all requests, in the order of their ends.
      looks: of every `look_steps`, as long as chats wait to begin.
      placed: ranks of the chats in flight by their names, when a rank was lost; moved: how many were on that one.
      strayed: chats that changed their rank and were not on the one that was lost.
      lost, added: steps when it was lost and there again; filled: when it first was full.
    """

    asked: list[Asked] = dataclasses.field(default_factory=list)
    looks: list[Look] = dataclasses.field(default_factory=list)
    placed: dict[str, str] = dataclasses.field(default_factory=dict)
    moved: int = 0
    strayed: int = 0
    lost: int | None = None
    added: int | None = None
    filled: int | None = None

    @property
    def read(self) -> int:
        """Tokens that were computed of prompts."""
        return sum(own.read for own in self.asked)

    @property
    def hit_rate(self) -> float:
        """Tokens found in the cache, of all in prompts."""
        return hit_rate(self.asked)

    @property
    def stretches(self) -> list[list[Look]]:
        """Looks before a rank was lost, while there was one less, and from when it was full again."""
        lost, added, filled = (
            math.inf if step is None else step for step in (self.lost, self.added, self.filled)
        )
        spans = (0, lost), (lost, added), (filled, math.inf)
        return [[look for look in self.looks if a <= look.step < b] for a, b in spans]


def hit_rate(asked: Collection[Asked]) -> float:
    """Tokens found in the cache, of all in the prompts of some requests."""
    return sum(own.cached for own in asked) / sum(own.prompt for own in asked)


def skew(looks: Iterable[Look], field: str = "chats") -> float:
    """Of chats or tokens, what the fullest rank has over the mean, on average over looks; NaN for none."""
    counts = [list(getattr(look, field).values()) for look in looks]
    found = [max(own) * len(own) / sum(own) for own in counts]
    return float(np.mean(found)) if found else math.nan


def replay(traces: list[Trace], placing: Placing, config: ReplayConfig) -> Result:
    """All chats from their first request to the last. placing: knows the ranks by `config.names`."""
    return _Replay(traces, placing, config).run()


class _Replay:
    def __init__(self, traces: list[Trace], placing: Placing, config: ReplayConfig):
        self._traces, self._placing, self._config = traces, placing, config
        self._pages = config.num_pages(traces)
        self._ranks = {name: Rank(self._pages, config) for name in config.names}
        draw = random.Random(config.seed)
        self._names = [f"{draw.getrandbits(128):032x}" for _ in traces]
        rate = 1 / config.tool_steps
        self._waits = [[1 + int(draw.expovariate(rate)) for _ in trace] for trace in traces]
        self._next = [0] * len(traces)  # turn of each chat
        self._last: dict[int, str] = {}  # rank of the last request, of chats in flight
        self._due: dict[int, list[int]] = collections.defaultdict(list)  # chats by step
        self._running: dict[Sequence, int] = {}  # their chats
        self._wasted: collections.Counter = collections.Counter()  # read on a rank that was lost
        self._moved: set[int] = set()
        self._strayed: set[int] = set()
        self._begun = self._ended = self._step = 0
        self._result = Result()

    def run(self) -> Result:
        config, result, count = self._config, self._result, len(self._traces)
        lost = config.names[config.ranks // 2]
        while self._ended < count:
            while self._begun < count and self._begun - self._ended < config.in_flight:
                self._due[self._step].append(self._begun)
                self._begun += 1
            for chat in self._due.pop(self._step, ()):
                self._ask(chat)
            for rank in list(self._ranks.values()):
                for sequence, read in rank.step():
                    self._answered(sequence, read)
            if config.lost is not None:
                if result.lost is None and self._ended >= config.lost * count:
                    self._lose(lost)
                elif lost not in self._ranks and self._ended >= config.added * count:
                    self._ranks[lost] = Rank(self._pages, config)
                    self._placing.add(lost)
                    result.added = self._step
            if self._begun < count and self._step % config.look_steps == 0:
                self._look(lost)
            self._step += 1
        result.strayed = len(self._strayed)
        return result

    def _ask(self, chat: int) -> None:
        name = self._placing.rank_of(self._names[chat])
        before = self._last.get(chat)
        if before not in (None, name):
            if chat in self._moved:
                self._moved.remove(chat)
            else:
                self._strayed.add(chat)
        self._last[chat] = name
        sequence = self._ranks[name].submit(self._traces[chat][self._next[chat]])
        self._running[sequence] = chat

    def _answered(self, sequence: Sequence, read: int) -> None:
        chat = self._running.pop(sequence)
        trace, turn = self._traces[chat], self._next[chat]
        before = trace[turn - 1].prompt + trace[turn - 1].output if turn else ()
        prompt = trace[turn].prompt
        self._result.asked.append(
            Asked(
                chat,
                turn,
                len(prompt),
                len(prompt) - len(before),
                sequence.handle.cached_tokens,
                read + self._wasted.pop(chat, 0),
            )
        )
        self._next[chat] += 1
        if self._next[chat] == len(trace):
            self._ended += 1
            del self._last[chat]
            self._placing.release(self._names[chat])
        else:
            self._due[self._step + self._waits[chat][turn]].append(chat)

    def _lose(self, name: str) -> None:
        """A rank is gone with its pages; what ran there is asked again."""
        self._result.lost = self._step
        self._result.placed = {self._names[chat]: rank for chat, rank in self._last.items()}
        self._moved = {chat for chat, rank in self._last.items() if rank == name}
        self._result.moved = len(self._moved)
        self._placing.lose(name)
        for sequence, read in self._ranks.pop(name).reads.items():
            chat = self._running.pop(sequence)
            self._wasted[chat] += read
            self._due[self._step + 1].append(chat)

    def _look(self, lost: str) -> None:
        chats, tokens = dict.fromkeys(self._ranks, 0), dict.fromkeys(self._ranks, 0)
        for chat, rank in self._last.items():
            if rank in chats:  # one on a rank that was lost has not been asked again
                trace = self._traces[chat]
                chats[rank] += 1
                tokens[rank] += len(trace[min(self._next[chat], len(trace) - 1)].prompt)
        self._result.looks.append(Look(self._step, self._ended, chats, tokens))
        if self._result.added is not None and self._result.filled is None:
            if chats[lost] >= self._config.full * sum(chats.values()) / len(chats):
                self._result.filled = self._step


def slopes(asked: Iterable[Asked]) -> tuple[float, float, float]:
    """What a request's read tokens grow by, least squares over all but first turns: (intercept, for each new token, for each
    token of what was said before)."""
    later = [own for own in asked if own.turn]
    columns = np.array([(1.0, own.new, own.prompt - own.new) for own in later])
    found, *_ = np.linalg.lstsq(columns, np.array([own.read for own in later], float), rcond=None)
    return tuple(map(float, found))
