"""Replays recorded chats to several ranks with different ways of routing their requests.

A rank is an engine without its device: the engine's own scheduler, pages and prefix cache. The tokens that the device
would sample are given to it from the recording. Time passes in engine steps, which all ranks make together.
"""

import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from experiments.benchmarks.agent_traces import Trace, TraceTurn
from glm5_jax.inference.request import Handle, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Limits, Scheduler, Sequence
from glm5_jax.rl.rollouts.router import RouterConfig, SessionRouter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Ranks, load and events of a replay. Raises ValueError for values out of range.

    Attributes:
      ranks: number of ranks.
      in_flight: number of concurrent chats; the next one starts when one ends.
      cache: capacity of a rank's pages, as a multiple of the tokens at the ends of its share of the concurrent chats;
        infinite: all tokens.
      page_size: tokens of a page.
      max_num_seqs: maximum number of requests that a rank decodes at once.
      prefill_chunk: maximum tokens of prompts that a rank prefills in a step.
      tool_steps: mean duration of a tool, in steps; each call's is sampled (exponentially).
      lost, added: shares of all chats that have ended when a rank is lost, and when it returns with an empty cache; lost
        None: never.
      full: share of the mean number of chats from which a returned rank counts as full again.
      look_steps: steps between two snapshots of the ranks.
      seed: seed of the chats' names and of the tools' durations.
    """

    ranks: int = 8
    in_flight: int = 128  # of the run with a known cache hit rate of 0.96 (miles, GLM-5.2)
    cache: float = 2.0
    page_size: int = 64
    max_num_seqs: int = 64
    prefill_chunk: int = 512
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
                f"a rank is lost at {self.lost} and returns at {self.added} of the chats; give shares in this order"
            )
        if self.ranks < 2:
            raise ValueError("there is 1 rank, and none may be lost then; use lost=None")

    @property
    def names(self) -> list[str]:
        """Names of the ranks."""
        return [f"http://10.0.0.1:8000@{number}" for number in range(self.ranks)]

    def num_pages(self, traces: Iterable[Trace]) -> int:
        """Returns the number of pages of a rank."""
        ends = [len(trace[-1].prompt) + len(trace[-1].output) for trace in traces]
        if math.isinf(self.cache):
            return sum(-(-end // self.page_size) for end in ends) + self.in_flight
        share = self.in_flight / self.ranks * float(np.mean(ends))
        return math.ceil(self.cache * share / self.page_size)


class RoutingPolicy(Protocol):
    """Protocol of routing policies, as of `rl.rollouts.router.SessionRouter`."""

    def route(self, session: str) -> str: ...
    def release(self, session: str) -> None: ...
    def remove(self, rank: str) -> list[str]: ...
    def add(self, rank: str) -> None: ...


class RoundRobinRouting:
    """Sends each request to the next rank."""

    def __init__(self, ranks: Iterable[str]):
        self._ranks, self._count = list(ranks), itertools.count()

    def route(self, session: str) -> str:
        """Returns the rank of a session's next request, see `SessionRouter`."""
        return self._ranks[next(self._count) % len(self._ranks)]

    def release(self, session: str) -> None:
        """Does nothing, because no state is kept."""

    def remove(self, rank: str) -> list[str]:
        """Removes a rank. Returns an empty list, because no session has a rank."""
        self._ranks.remove(rank)
        return []

    def add(self, rank: str) -> None:
        """Appends a rank."""
        self._ranks.append(rank)


class RandomRouting(RoundRobinRouting):
    """Sends each request to a random rank."""

    def __init__(self, ranks: Iterable[str], seed: int):
        super().__init__(ranks)
        self._draw = random.Random(seed)

    def route(self, session: str) -> str:
        return self._draw.choice(self._ranks)


class HashRouting(SessionRouter):
    """Consistent hashing only: without a bound, and without memory of a session's rank."""

    def __init__(self, ranks: Iterable[str]):
        super().__init__(ranks, RouterConfig(bound=1e9))

    def route(self, session: str) -> str:
        rank = super().route(session)
        self.release(session)
        return rank


class Rank:
    """An engine's scheduler with its pages and prefixes.

    Attributes:
      reads: {running sequence: prompt tokens computed for it}.
    """

    def __init__(self, num_pages: int, config: ReplayConfig):
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            prefill_chunk=config.prefill_chunk,
            max_batched_tokens=config.prefill_chunk,
        )
        self._scheduler = Scheduler(num_pages, config.page_size, limits)
        self._outputs: dict[Sequence, tuple[int, ...]] = {}
        self.reads: dict[Sequence, int] = {}

    def submit(self, turn: TraceTurn) -> Sequence:
        """Adds a request. Raises TooLong for one that its pages can never hold."""
        limit = len(turn.prompt) + len(turn.output)
        self._scheduler.check(limit)
        handle = Handle(Request(turn.prompt, Sampling(max_tokens=len(turn.output))))
        sequence = Sequence(
            handle=handle, ids=list(turn.prompt), limit=limit, seed=0, prefix_namespace=0
        )
        self._outputs[sequence], self.reads[sequence] = turn.output, 0
        self._scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[Sequence, int]]:
        """Makes a step of the engine. Returns the sequences that ended, each with its computed prompt tokens.

        Tokens that were computed twice count twice.
        """
        work, finished = self._scheduler.schedule(), []
        for item in work.prefills:
            self.reads[item.sequence] += item.count
        for item in (*work.decodes, *work.prefills):
            if not item.is_sampled:
                continue
            sequence = item.sequence
            count = len(sequence.ids) - sequence.num_prompt
            self._scheduler.update_from_output(item, [self._outputs[sequence][count]])
            if len(sequence.ids) == sequence.limit:
                self._scheduler.remove(sequence)
                del self._outputs[sequence]
                finished.append((sequence, self.reads.pop(sequence)))
        return finished


class ReplayedRequest(NamedTuple):
    """An answered request.

    Attributes:
      chat, turn: numbers of chat and turn.
      prompt: tokens of the prompt.
      new: tokens of the prompt after all tokens of the previous turn.
      cached: tokens found in the cache.
      read: computed tokens, including those lost with a rank or preempted.
    """

    chat: int
    turn: int
    prompt: int
    new: int
    cached: int
    read: int


class RankSnapshot(NamedTuple):
    """State of the available ranks at a step.

    Attributes:
      step: number of the step.
      ended: number of chats that have ended.
      chats: concurrent chats by the rank of their last request.
      tokens: tokens of these requests.
    """

    step: int
    ended: int
    chats: dict[str, int]
    tokens: dict[str, int]


@dataclasses.dataclass(kw_only=True)
class ReplayResult:
    """Result of a replay.

    Attributes:
      requests: all requests, in the order of their ends.
      looks: a snapshot every `look_steps`, while chats wait to start.
      placed: {name of a chat in flight: rank} when a rank was lost.
      moved: number of chats on that rank.
      strayed: number of chats that changed their rank without having been on the lost one.
      lost, added: steps when the rank was lost and returned; None: never.
      filled: step when it was first full again; None: never.
    """

    requests: list[ReplayedRequest] = dataclasses.field(default_factory=list)
    looks: list[RankSnapshot] = dataclasses.field(default_factory=list)
    placed: dict[str, str] = dataclasses.field(default_factory=dict)
    moved: int = 0
    strayed: int = 0
    lost: int | None = None
    added: int | None = None
    filled: int | None = None

    @property
    def read(self) -> int:
        """Computed prompt tokens."""
        return sum(request.read for request in self.requests)

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the cache."""
        return hit_rate(self.requests)

    @property
    def stretches(self) -> list[list[RankSnapshot]]:
        """Snapshots before a rank was lost, while it was missing, and after it was full again."""
        lost, added, filled = (
            math.inf if step is None else step for step in (self.lost, self.added, self.filled)
        )
        spans = (0, lost), (lost, added), (filled, math.inf)
        return [[look for look in self.looks if a <= look.step < b] for a, b in spans]


def hit_rate(requests: Collection[ReplayedRequest]) -> float:
    """Returns the share of the prompt tokens of requests that were found in the cache."""
    return sum(request.cached for request in requests) / sum(request.prompt for request in requests)


def skew(looks: Iterable[RankSnapshot], field: str = "chats") -> float:
    """Returns the fullest rank's chats or tokens over the mean, averaged over snapshots; NaN for none."""
    counts = [list(getattr(look, field).values()) for look in looks]
    ratios = [max(values) * len(values) / sum(values) for values in counts]
    return float(np.mean(ratios)) if ratios else math.nan


def replay(traces: list[Trace], routing: RoutingPolicy, config: ReplayConfig) -> ReplayResult:
    """Replays all chats from their first request to the last. routing: policy that knows the ranks by `config.names`."""
    return _Replay(traces, routing, config).run()


class _Replay:
    def __init__(self, traces: list[Trace], routing: RoutingPolicy, config: ReplayConfig):
        self._traces, self._routing, self._config = traces, routing, config
        self._pages = config.num_pages(traces)
        self._ranks = {name: Rank(self._pages, config) for name in config.names}
        draw = random.Random(config.seed)
        self._names = [f"{draw.getrandbits(128):032x}" for _ in traces]
        rate = 1 / config.tool_steps
        self._waits = [[1 + int(draw.expovariate(rate)) for _ in trace] for trace in traces]
        self._next = [0] * len(traces)  # next turn of each chat
        self._last: dict[int, str] = {}  # rank of the last request of each chat in flight
        self._due: dict[int, list[int]] = collections.defaultdict(
            list
        )  # chats by the step of their next request
        self._running: dict[Sequence, int] = {}  # chat of each running sequence
        self._wasted: collections.Counter = (
            collections.Counter()
        )  # tokens computed on the lost rank
        self._moved: set[int] = set()
        self._strayed: set[int] = set()
        self._num_started = self._num_ended = self._step = 0
        self._result = ReplayResult()

    def run(self) -> ReplayResult:
        config, result, count = self._config, self._result, len(self._traces)
        lost = config.names[config.ranks // 2]
        while self._num_ended < count:
            while (
                self._num_started < count and self._num_started - self._num_ended < config.in_flight
            ):
                self._due[self._step].append(self._num_started)
                self._num_started += 1
            for chat in self._due.pop(self._step, ()):
                self._submit(chat)
            for rank in list(self._ranks.values()):
                for sequence, read in rank.step():
                    self._finish_turn(sequence, read)
            if config.lost is not None:
                if result.lost is None and self._num_ended >= config.lost * count:
                    self._lose(lost)
                elif lost not in self._ranks and self._num_ended >= config.added * count:
                    self._ranks[lost] = Rank(self._pages, config)
                    self._routing.add(lost)
                    result.added = self._step
            if self._num_started < count and self._step % config.look_steps == 0:
                self._take_snapshot(lost)
            self._step += 1
        result.strayed = len(self._strayed)
        return result

    def _submit(self, chat: int) -> None:
        name = self._routing.route(self._names[chat])
        before = self._last.get(chat)
        if before not in (None, name):
            if chat in self._moved:
                self._moved.remove(chat)
            else:
                self._strayed.add(chat)
        self._last[chat] = name
        sequence = self._ranks[name].submit(self._traces[chat][self._next[chat]])
        self._running[sequence] = chat

    def _finish_turn(self, sequence: Sequence, read: int) -> None:
        chat = self._running.pop(sequence)
        trace, turn = self._traces[chat], self._next[chat]
        before = trace[turn - 1].prompt + trace[turn - 1].output if turn else ()
        prompt = trace[turn].prompt
        cached = sequence.handle.cached_tokens
        assert cached is not None, "a request that has ended was prefilled"
        self._result.requests.append(
            ReplayedRequest(
                chat,
                turn,
                len(prompt),
                len(prompt) - len(before),
                cached,
                read + self._wasted.pop(chat, 0),
            )
        )
        self._next[chat] += 1
        if self._next[chat] == len(trace):
            self._num_ended += 1
            del self._last[chat]
            self._routing.release(self._names[chat])
        else:
            self._due[self._step + self._waits[chat][turn]].append(chat)

    def _lose(self, name: str) -> None:
        """Removes a rank with its pages. Its running requests are submitted again."""
        self._result.lost = self._step
        self._result.placed = {self._names[chat]: rank for chat, rank in self._last.items()}
        self._moved = {chat for chat, rank in self._last.items() if rank == name}
        self._result.moved = len(self._moved)
        self._routing.remove(name)
        for sequence, read in self._ranks.pop(name).reads.items():
            chat = self._running.pop(sequence)
            self._wasted[chat] += read
            self._due[self._step + 1].append(chat)

    def _take_snapshot(self, lost: str) -> None:
        chats, tokens = dict.fromkeys(self._ranks, 0), dict.fromkeys(self._ranks, 0)
        for chat, rank in self._last.items():
            if rank in chats:  # requests of the lost rank may not be submitted again yet
                trace = self._traces[chat]
                chats[rank] += 1
                tokens[rank] += len(trace[min(self._next[chat], len(trace) - 1)].prompt)
        self._result.looks.append(RankSnapshot(self._step, self._num_ended, chats, tokens))
        if self._result.added is not None and self._result.filled is None:
            if chats[lost] >= self._config.full * sum(chats.values()) / len(chats):
                self._result.filled = self._step


def slopes(requests: Iterable[ReplayedRequest]) -> tuple[float, float, float]:
    """Fits a request's computed tokens by least squares over all but first turns.

    Returns (intercept, slope per new token, slope per token of earlier turns).
    """
    later_requests = [request for request in requests if request.turn]
    columns = np.array(
        [(1.0, request.new, request.prompt - request.new) for request in later_requests]
    )
    solution, *_ = np.linalg.lstsq(
        columns, np.array([request.read for request in later_requests], float), rcond=None
    )
    intercept, new, earlier = map(float, solution)
    return intercept, new, earlier
