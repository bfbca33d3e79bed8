"""`Engine`: many requests at once over one paged cache, from the same forward that trains.

    engine = Engine(model, tokenizer)
    handle = engine.submit(Request(ids, Sampling(max_tokens=100)))
    while engine.step():
        ...
    handle.completion

A step sends off the next work before that of the last step has come back, so that the host prepares one while
the device computes the other. One thread owns an engine; handles may be read and cancelled from any.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from glm5_jax.inference.counts import Counts
from glm5_jax.inference.request import (
    CANCELLED,
    DEADLINE,
    FAILED,
    Completion,
    EngineConfig,
    Handle,
    Paused,
    Request,
    Token,
    TooLong,
)
from glm5_jax.inference.runner import Carried, Computation, Part, Runner, WeightsLost
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Decode, Prefill, Scheduler, Sequence as Running
from glm5_jax.inference.steps import MAX_BIAS, Drew, sized
from glm5_jax.inference.stops import Stops
from glm5_jax.model import glm5
from glm5_jax.model.plan import Plan
from glm5_jax.text.tokenizer import Tokenizer

FINISH, KEEP, RECOMPUTE = POLICIES = ("finish", "keep", "recompute")
DEPTH = 1  # steps under way while the next is prepared
_log = logging.getLogger(__name__)


class _Flight(NamedTuple):
    """A step under way, and the version of the weights that draw it."""

    parts: list[Part]
    version: int


class Engine:
    """Serves a model.

    Attributes:
      cfg, version: of the model, and of its weights as `update_weights` was told.
      max_length: tokens that a prompt and its reply may have.
      paused: whether nothing more is sent off.
      is_drained: whether no more requests are taken.
      counts: what has been done so far.
    """

    def __init__(
        self,
        model: glm5.Glm5,
        tokenizer: Tokenizer | None = None,
        *,
        page_size: int = 64,
        num_pages: int | None = None,
        max_batch: int = 16,
        max_length: int | None = None,
        chunk: int = 512,
        step_tokens: int | None = None,
        short_prompt: int = 32,
        num_draft: int = 0,
        batch_invariant: bool = False,
        index_cache: str | None = None,
        latent_cache: str | None = None,
        token_chunk: int | None = None,
        vocab_block: int | None = None,
        replicated: bool = False,
        max_bias: int = MAX_BIAS,
        seed: int | None = None,
        version: int = 0,
        plan: Plan = Plan(),
    ):
        """model: on its mesh, if it has one. tokenizer: for stop texts and the ids that end a reply (without:
        those of the model's config).

        page_size: tokens of a page. num_pages: of each group of devices that hold other sequences (default: for
        max_batch sequences of max_length). max_batch: sequences decoded at once, in each group. max_length: of a
        prompt and its reply (default: the model's positions). chunk: tokens of a prompt read at once; step_tokens: in
        a step, of all prompts (default: chunk). short_prompt: prompts of so many tokens or less are read together, each
        as if it had as many; fewer cost less, and one program more. num_draft: tokens that the MTP layer drafts for every
        decode, kept or not so that what is drawn has the same distribution (4 in paper table 2). batch_invariant: every
        reply has the same bits whatever else is served; slower. index_cache, latent_cache: "int8" or "fp8", in which
        the pages hold index keys and latents (`init_pages`); None: in the model's dtype. token_chunk, vocab_block: on a mesh,
        tokens of a device that travel to the experts at a time, and of the vocabulary whose embedding it brings together
        (`Plan`). replicated: whether every device of a mesh has all weights but routed experts, embedding and head; otherwise
        a part of them, and each step gathers them over the network. max_bias: tokens in a request's logit_bias at most.
        seed: of the seeds of requests that bring none; None: fresh ones. ValueError for what cannot be.
        """
        sizes = page_size, num_pages, max_batch, max_length, chunk, step_tokens, short_prompt
        kinds = num_draft, batch_invariant, index_cache, latent_cache
        cuts = token_chunk, vocab_block, replicated
        cfg, options = model.cfg, EngineConfig(*sizes, *kinds, *cuts, seed)
        self._shape, limits = sized(cfg, options, max_bias)
        max_length = max_length or cfg.max_position_embeddings
        self.cfg, self._tokenizer, self.max_length = cfg, tokenizer, max_length
        self._runner = Runner(model, self._shape, options.plan(plan))
        self._schedulers = [
            Scheduler(self._shape.num_pages, page_size, limits) for _ in range(self._runner.groups)
        ]
        self._flights: collections.deque[_Flight] = collections.deque()
        self._live: dict[Running, _Live] = {}
        self._cancelled: collections.deque[Running] = collections.deque()
        self._deadlines: list[tuple[float, int, weakref.ref]] = []
        self._numbers = itertools.count()
        self._parcels: collections.deque[Parcel] = collections.deque()
        self._ends = frozenset(tokenizer.eos_ids if tokenizer else cfg.eos_token_id)
        self._seeds = np.random.default_rng(seed)
        self.paused = self.is_drained = False
        self.version = version
        self.counts = Counts(accepted=[0] * (num_draft + 1))

    def submit(self, request: Request, listener: Callable[[Handle], None] | None = None) -> Handle:
        """Takes a request; listener: see `Handle`. ValueError if it can never be served."""
        if self.is_drained:
            raise ValueError("the engine is drained and takes no requests; make another")
        limit = self.check(request)
        handle, sampling = Handle(request, listener), request.sampling
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(2**63))
        sequence = Running(handle, list(request.ids), limit, seed, self.version)
        group = self._choose(sequence) if request.group is None else request.group
        stops = Stops(sampling, limit - len(request.ids), self._ends, self._tokenizer)
        self._live[sequence] = _Live(group, stops)
        self._watch(sequence)
        self._schedulers[group].add(sequence)
        self.counts.num_requests += 1
        self.counts.prompt_tokens += len(request.ids)
        return handle

    def check(self, request: Request) -> int:
        """Tokens that a request may have, prompt included; ValueError if it can never be served. From any thread."""
        sampling, v = request.sampling, self.cfg.vocab_size
        prompt = (request.ids.lowest, request.ids.highest)
        for ids, name in ((prompt, "the prompt"), (sampling.logit_bias, "logit_bias")):
            if wrong := [i for i in ids if not 0 <= i < v]:
                raise ValueError(f"{name} has the token id {wrong[0]}; ids are from 0 to {v - 1}")
        if (most := self._shape.max_bias) < len(sampling.logit_bias):
            raise ValueError(
                f"logit_bias has {len(sampling.logit_bias)} tokens; at most {most} are possible"
            )
        if request.group is not None and request.group >= self.num_groups:
            raise ValueError(
                f"data-parallel group {request.group} is not there; there are {self.num_groups}, numbered from 0"
            )
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop texts need a tokenizer; give the engine one, or use stop_ids")
        num = len(request.ids)
        if num >= self.max_length:
            raise TooLong(
                f"the prompt has {num} tokens; with a reply at most {self.max_length} are possible"
            )
        if sampling.max_tokens is None:
            room = self._shape.num_pages * self._shape.page_size
            limit = max(num + 1, min(self.max_length, room))
        else:
            limit = num + sampling.max_tokens
            if limit > self.max_length:
                raise TooLong(
                    f"a prompt of {num} tokens and max_tokens {sampling.max_tokens} exceed the "
                    f"{self.max_length} that are possible; shorten one of them"
                )
        self._schedulers[0].check(limit)
        return limit

    def step(self) -> bool:
        """Sends off the next work and takes what has come back; whether anything is left to do."""
        began = time.perf_counter()
        self._end_those_due()
        self._unpack()
        parts = []
        if not self.paused:
            works = [scheduler.schedule() for scheduler in self._schedulers]
            self.counts.read_tokens += sum(one.count for work in works for one in work.prefills)
            parts = self._runner.launch(works)
        if parts:
            if self._flights:
                # Its last part ends last.
                last = self._flights[-1].parts[-1].drew.count
                self.counts.num_overlapped += not last.is_ready()
            self._flights.append(_Flight(parts, self.version))
            self.counts.num_steps += 1
        self.counts.host_seconds += time.perf_counter() - began
        while len(self._flights) > (DEPTH if parts else 0):
            self._receive()
        return bool(self._live)

    def release(self, handle: Handle) -> "Parcel":
        """Takes a request out of this engine once its prompt is read, for another engine's `adopt`: one reads
        prompts, the other decodes. Steps until it can be; ValueError if it ends before, is not here, or the engine
        is paused."""
        if self.paused:
            raise ValueError("the engine is paused, so no prompt is read; resume it first")
        [sequence] = [own for own in self._live if own.handle is handle] or [None]
        while sequence in self._live and not (sequence.ready and sequence.slot is not None):
            self.step()
        self._land()
        if sequence not in self._live:
            raise ValueError("the request has ended, or is none of this engine's")
        live = self._live.pop(sequence)
        carried = self._runner.fetch(live.group, sequence)
        self._schedulers[live.group].remove(sequence)
        live.group = None
        return Parcel(sequence, live, carried, self.version)

    def adopt(self, parcel: "Parcel") -> None:
        """Goes on with what another engine released, as soon as there is room. ValueError if the parcel is of other
        weights or another kind of engine."""
        theirs, mine = parcel.sequence.limit, self.max_length
        if parcel.version != self.version:
            raise ValueError(
                f"the parcel is of version {parcel.version}, this engine's is {self.version}"
            )
        if theirs > mine:
            raise ValueError(f"the request may have {theirs} tokens, at most {mine} are possible")
        self._runner.check(parcel.carried)
        self._schedulers[0].check(theirs)
        self._parcels.append(parcel)
        self._live[parcel.sequence] = parcel.live
        self._watch(parcel.sequence)

    def _unpack(self) -> None:
        """Gives room to what was adopted, in the order it came."""
        while self._parcels:
            parcel = self._parcels[0]
            if parcel.sequence in self._live:
                group = max(
                    range(len(self._schedulers)), key=lambda g: self._schedulers[g].pool.num_free
                )
                if not self._schedulers[group].adopt(parcel.sequence):
                    return
                parcel.live.group = group
                self._runner.store(group, parcel.sequence, parcel.carried)
            self._parcels.popleft()

    def _unpacked_anew(self, sequence: Running, version: int) -> None:
        """Has what was adopted, and has no room yet, computed from its beginning."""
        if sequence in self._live:
            sequence.computed, sequence.ready, sequence.space = 0, False, version
            self._live[sequence].group = group = self._choose(sequence)
            self._schedulers[group].add(sequence)

    def _land(self) -> None:
        """Takes all that is under way."""
        while self._flights:
            self._receive()

    def warm(self, show: bool = False) -> None:
        """Compiles all programs that requests without top_logprobs can need. show: a progress bar."""
        self._runner.warm(show)

    def generate(
        self, prompts: Iterable[Sequence[int]], sampling: Sampling | Sequence[Sampling] = Sampling()
    ) -> list[Completion]:
        """The replies to prompts of token ids, with one sampling for all or one for each. Nothing is begun if one
        of them cannot be served (ValueError)."""
        prompts = list(prompts)
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(sampling)} samplings")
        if self.paused:
            raise ValueError("the engine is paused; resume it first")
        requests = [Request(ids, own) for ids, own in zip(prompts, sampling)]
        for request in requests:
            self.check(request)
        handles = [self.submit(request) for request in requests]
        while self.step():
            pass
        return [handle.completion for handle in handles]

    def pause(self) -> None:
        """Nothing more is sent off; what is under way comes back with the next step."""
        self.paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self.paused = False

    def fail(self) -> None:
        """Ends all that was submitted as failed, without the device, and takes nothing more."""
        self.is_drained = True
        for sequence in list(self._live):
            self._end(sequence, FAILED)

    def drain(self) -> None:
        """Ends all that was submitted, and takes nothing more."""
        self.is_drained, self.paused = True, False
        while self.step():
            pass

    def update_weights(self, params, version: int, policy: str = FINISH) -> None:
        """Replaces the weights, in place; every token after it has the new version.

        params: a tree as `glm5.params_of` gives it; `core.tree.Lazy` leaves are made some at a time. Plain weights take
        the place of quantised ones quantised alike. policy, for what is under way: "finish" ends it first, while nothing
        new begins; "keep" goes on from what the old weights computed; "recompute" computes all of it again with the new
        ones. Prefixes of the old weights are forgotten. ValueError for another tree, other shapes or another policy; the
        engine is then as before. WeightsLost if it breaks off in between; the engine has then failed.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; use one of {', '.join(POLICIES)}")
        self._runner.check_params(params)
        if policy == FINISH:
            if self.paused and self._num_begun:
                raise Paused("the engine is paused, so nothing finishes; use keep or recompute")
            self._finish()
        try:
            self._runner.load(params)
        except WeightsLost:
            self.fail()
            raise
        for scheduler in self._schedulers:
            scheduler.renew(self.version, version, policy == RECOMPUTE)
        for parcel in self._parcels:
            if policy == RECOMPUTE:
                self._unpacked_anew(parcel.sequence, version)
            else:
                parcel.sequence.space = None
        if policy == RECOMPUTE:
            self._parcels.clear()
        self.version = version

    @property
    def computation(self) -> Computation:
        """By what it computes now, for those who compute the same."""
        return self._runner.computation

    @property
    def description(self) -> dict:
        """What it was made with, in plain values."""
        return {**dataclasses.asdict(self._shape), "max_length": self.max_length}

    @property
    def num_groups(self) -> int:
        """Groups of devices that hold other sequences, each with pages and prefixes of its own: data-parallel ranks."""
        return len(self._schedulers)

    @property
    def num_free_pages(self) -> int:
        """Pages, of all groups, that nothing uses; those of prefixes that could be had count as used."""
        return sum(scheduler.pool.num_free for scheduler in self._schedulers)

    @property
    def num_cached_pages(self) -> int:
        """Pages that hold prefixes."""
        return sum(len(scheduler.prefixes) for scheduler in self._schedulers)

    @property
    def num_running(self) -> int:
        """Requests with pages."""
        return sum(len(scheduler.running) for scheduler in self._schedulers)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for some."""
        return sum(scheduler.num_waiting for scheduler in self._schedulers)

    @property
    def num_preempted(self) -> int:
        """How often a request had to give its pages back."""
        return sum(scheduler.num_preempted for scheduler in self._schedulers)

    @property
    def _num_begun(self) -> int:
        """Requests that have or had pages: those that gave theirs back must end as well."""
        return len(self._parcels) + sum(own.num_begun for own in self._schedulers)

    def _choose(self, sequence: Running) -> int:
        """The group that knows most of a prompt, and of those the one with the least to do."""

        def merit(group):
            scheduler = self._schedulers[group]
            known = scheduler.prefixes.count(sequence.ids, sequence.space)
            return known, -sum(one.total for one in scheduler.sequences)

        groups = range(len(self._schedulers))
        return 0 if len(groups) == 1 else max(groups, key=merit)

    def _watch(self, sequence: Running) -> None:
        """Has a sequence ended here when it is cancelled or late."""
        # A deque may be appended to from any thread.
        sequence.handle.on_cancel = functools.partial(self._cancelled.append, sequence)
        if (seconds := sequence.handle.request.deadline) is not None:
            until = sequence.handle.submitted + seconds
            # Weakly: most have ended long before.
            heapq.heappush(self._deadlines, (until, next(self._numbers), weakref.ref(sequence)))

    def _end_those_due(self) -> None:
        while self._cancelled:
            sequence = self._cancelled.popleft()
            if sequence in self._live:
                self._end(sequence, CANCELLED)
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            *_, late = heapq.heappop(self._deadlines)
            if (sequence := late()) in self._live:
                self._end(sequence, DEADLINE)

    def _receive(self) -> None:
        """Waits for the oldest step under way and takes what it has drawn."""
        flight, began = self._flights.popleft(), time.perf_counter()
        parts = [(part.rows, jax.tree.map(np.asarray, part.drew)) for part in flight.parts]
        ready = time.perf_counter()
        self.counts.waiting_seconds += ready - began
        for where, drew in parts:
            for row, work in where:
                if work.sequence in self._live:
                    try:
                        self._take(work, drew, row, flight.version)
                    except Exception:  # ends this request, and no other
                        _log.exception("a request has failed")
                        if work.sequence in self._live:
                            self._end(work.sequence, FAILED)
        self.counts.host_seconds += time.perf_counter() - ready

    def _take(self, work: Decode | Prefill, drew: Drew, row: int, version: int) -> None:
        """Gives a sequence what it has drawn, up to what ends it."""
        sequence, sampling = work.sequence, work.sequence.handle.request.sampling
        live, handle, drawn = self._live[sequence], sequence.handle, drew.drawn
        count = int(drew.count[row])
        tokens, logprobs = (a[row, :count].tolist() for a in (drawn.tokens, drawn.logprobs))
        if isinstance(work, Decode) and self._shape.num_draft:
            self.counts.accepted[count - 1] += 1
        self._schedulers[live.group].came_back(work, tokens)
        told, end = [], None
        for i, (token, logprob) in enumerate(zip(tokens, logprobs)):
            top = ()
            if sampling.top_logprobs:
                ids, values = (a[row, i].tolist() for a in (drawn.top_ids, drawn.top_logprobs))
                top = tuple(zip(ids, values))[: sampling.top_logprobs]
            told.append(Token(token, logprob, version, top))
            end = live.stops.feed(token)
            if end:
                break
        self.counts.new_tokens += len(told)
        if end:
            self._end(sequence, *end, told)
        else:
            handle.tell(told, None)

    def _end(
        self,
        sequence: Running,
        reason: str,
        stopped_by: int | str | None = None,
        told: Iterable[Token] = (),
    ) -> None:
        live, handle = self._live.pop(sequence), sequence.handle
        if live.group is not None:
            self._schedulers[live.group].remove(sequence)
        self.counts.cached_tokens += handle.cached_tokens or 0
        handle.tell(told, reason, stopped_by)

    def _finish(self) -> None:
        """Ends what runs, while nothing new begins."""
        for scheduler in self._schedulers:
            scheduler.admits = False
        while self._flights or self._num_begun:
            self.step()
        for scheduler in self._schedulers:
            scheduler.admits = True


class Parcel(NamedTuple):
    """A request between two engines, and the weights that read its prompt."""

    sequence: Running
    live: "_Live"
    carried: Carried
    version: int


@dataclasses.dataclass
class _Live:
    """What the engine keeps beside a sequence: its group, and what ends it."""

    group: int | None  # None on the way from another engine
    stops: Stops
