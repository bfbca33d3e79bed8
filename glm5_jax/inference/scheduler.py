"""Schedules sequences and allocates their pages: the host's part of a step, without arrays.

1. Requests are admitted in order of arrival while slots and pages for their prompts are free.
2. Each step decodes all sequences that are ready for it and prefills parts of the others.
3. When pages run out, unused prefixes are evicted first. Then the sequence that was admitted last is preempted: it
   frees its pages and is computed again later.

A step is scheduled before the tokens of the one before have arrived. Only the device then knows a sequence's next
token, while the host knows its position.
"""

import collections
import dataclasses
from typing import NamedTuple

from glm5_jax.inference.constraints import ReplyConstraint
from glm5_jax.inference.pages import OutOfPages, PagePool
from glm5_jax.inference.radix import PrefixCache
from glm5_jax.inference.request import Handle, TooLong

MAX_SCORED_TOKENS = 256  # of a prefill that keeps the logits of all positions


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
    """Request that is being served.

    Attributes:
      handle: the user's view of it.
      ids: prompt and the tokens that have arrived from the device.
      limit: maximum tokens, including the prompt.
      seed: seed of its random numbers.
      prefix_namespace: namespace of its shared prefixes (`PrefixCache`); None: it shares none.
      slot: slot on the device; None while it waits.
      pages: pages of its tokens, in order.
      num_computed_tokens: tokens in its pages after all scheduled work; an upper bound with drafts.
      num_in_flight: tokens that scheduled work draws and that have not arrived; an upper bound with drafts.
      is_ready: whether the device has its newest token.
      constraint: state of the rules of its reply; None: it has none.
    """

    handle: Handle
    ids: list[int]
    limit: int
    seed: int
    prefix_namespace: int | None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    is_ready: bool = False
    constraint: ReplyConstraint | None = None

    @property
    def total(self) -> int:
        """Number of tokens, including those in flight."""
        return len(self.ids) + self.num_in_flight

    @property
    def device_slot(self) -> int:
        """Slot on the device of a sequence that does not wait."""
        assert self.slot is not None, "the sequence waits"
        return self.slot

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.handle.request.ids)


class Prefill(NamedTuple):
    """Part of a prompt to read.

    Attributes:
      sequence: sequence that is read.
      start: position of its first token.
      count: number of tokens.
      is_sampled: whether the token after them is drawn.
    """

    sequence: Sequence
    start: int
    count: int
    is_sampled: bool


class Decode(NamedTuple):
    """One token of a sequence to read.

    Attributes:
      sequence: sequence that is read.
      forced_token: id to read; None: the newest on the device.
      is_sampled: whether the drawn token is new.
    """

    sequence: Sequence
    forced_token: int | None
    is_sampled: bool


class ScheduledStep(NamedTuple):
    """Work of one step: decodes, which run first, and prefills."""

    decodes: list[Decode]
    prefills: list[Prefill]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one step. Raises ValueError unless all sizes are positive.

    Attributes:
      max_num_seqs: maximum sequences decoded at once.
      prefill_chunk: maximum prompt tokens of one sequence.
      max_batched_tokens: maximum prompt tokens of all sequences together.
      batch_invariant: whether each token is always computed in the same shape, independent of other requests. Chunks of
        prompts then begin at multiples of `prefill_chunk`, replies are computed one token at a time, and only full
        chunks of prompts are shared.
      num_speculative_tokens: maximum tokens that a decode adds to its one token.
    """

    max_num_seqs: int = 16
    prefill_chunk: int = 512
    max_batched_tokens: int = 1024
    batch_invariant: bool = False
    num_speculative_tokens: int = 0

    def __post_init__(self):
        for name in ("max_num_seqs", "prefill_chunk", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.num_speculative_tokens < 0:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must not be negative"
            )
        if self.batch_invariant and self.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}: the shape that a token is computed in would "
                "depend on the accepted drafts; "
                "use num_speculative_tokens=0 with batch_invariant"
            )


class Scheduler:
    """Owns the slots and pages of one data-parallel rank.

    Attributes:
      pool: its pages.
      prefixes: pages that later requests can share.
      num_preempted: number of preemptions.
      is_admitting: whether requests that have not started are admitted.
    """

    def __init__(self, num_pages: int, page_size: int, limits: Limits):
        if limits.batch_invariant and limits.prefill_chunk % page_size:
            raise ValueError(
                f"prefill_chunk {limits.prefill_chunk} is no multiple of page_size {page_size}, as batch_invariant "
                "requires"
            )
        self.pool = PagePool(num_pages)
        self.prefixes = PrefixCache(self.pool, page_size)
        self.num_preempted = 0
        self.is_admitting = True
        self._size, self._limits = page_size, limits
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: list[Sequence] = []  # in order of admission
        self._slots = list(reversed(range(limits.max_num_seqs)))

    @property
    def num_waiting(self) -> int:
        """Number of sequences without pages."""
        return len(self._waiting)

    @property
    def num_started(self) -> int:
        """Number of sequences that have, or had, pages."""
        return sum(map(_has_started, self.sequences))

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with pages, in order of admission."""
        return tuple(self._running)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All sequences that have not ended."""
        return (*self._running, *self._waiting)

    def check(self, num_tokens: int) -> None:
        """Raises TooLong if a sequence of `num_tokens` tokens would not fit into all pages together."""
        room = len(self.pool) * self._size
        if num_tokens > room:
            raise TooLong(
                f"{num_tokens} tokens, including the reply, exceed the {room} that the cache holds; shorten the "
                "prompt, lower max_tokens or raise num_pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Appends a sequence to the queue."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a running or waiting sequence. Its prefix stays in the cache until it is evicted."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._release(sequence)

    def schedule(self) -> ScheduledStep:
        """Returns the work of the next step and updates the state as if it were done."""
        decodes = [one for sequence in self.running if (one := self._decode(sequence))]
        for one in decodes:
            num_tokens = 1 + self._num_drafts(one)
            one.sequence.num_computed_tokens += num_tokens
            one.sequence.num_in_flight += num_tokens * one.is_sampled
            one.sequence.is_ready |= one.is_sampled
        self._admit()
        return ScheduledStep(decodes, self._prefills())

    def count_prefix(self, ids: list[int], namespace: int | None) -> int:
        """Returns the number of cached pages of a prompt's prefix."""
        return self.prefixes.count(self._key(ids), namespace)

    def hold_prefix(self, ids: list[int], namespace: int) -> list[int]:
        """Returns the cached pages of a prompt's prefix, held for the caller, who drops them."""
        return self.prefixes.match(self._key(ids), namespace)

    def add_prefix(
        self, ids: list[int], namespace: int, start: int, count: int
    ) -> tuple[int, list[int]]:
        """Adds pages of a prompt's prefix that another engine has computed.

        Returns the index of the first added page in the prompt, and the pages, whose contents must be written before
        later work is launched. There are fewer than `count` where some are cached already, and none if the pages
        before `start` are not cached or there is no room.
        """
        key = self._key(ids)
        cached = self.prefixes.match(key, namespace)
        end = min(start + count, len(key) // self._size)
        if not start <= len(cached) < end:
            self.pool.drop(cached)
            return start, []
        try:
            added = self._take(end - len(cached))
        except OutOfPages:
            added = []
        if added:
            self.prefixes.insert(key[: end * self._size], [*cached, *added], namespace)
        self.pool.drop([*cached, *added])
        return len(cached), added

    def update_from_output(self, work: Decode | Prefill, tokens: list[int]) -> None:
        """Appends the tokens of finished work: one, or with drafts up to num_speculative_tokens more."""
        sequence, max_tokens = work.sequence, 1 + self._num_drafts(work)
        sequence.ids += tokens
        sequence.num_in_flight -= max_tokens
        if sequence.slot is not None:
            sequence.num_computed_tokens -= max_tokens - len(tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's pages and puts it at the front of the queue, to be computed again."""
        self._release(sequence)
        sequence.num_computed_tokens, sequence.is_ready = 0, False
        self._waiting.appendleft(sequence)
        self.num_preempted += 1

    def on_weights_updated(self, old: int, version: int, recompute: bool) -> None:
        """Clears the prefixes of the old version.

        recompute: whether running sequences are computed again with the new weights.
        """
        if recompute:
            for sequence in reversed(self.running):
                self.preempt(sequence)
        for sequence in self.sequences:
            sequence.prefix_namespace = version if sequence.slot is None else None
        self.prefixes.clear(old)

    def _num_drafts(self, work: Decode | Prefill) -> int:
        return (
            self._limits.num_speculative_tokens
            if isinstance(work, Decode) and work.is_sampled
            else 0
        )

    def _decode(self, sequence: Sequence) -> Decode | None:
        """Returns the decode of a running sequence.

        None if it needs a prefill, is complete, has no pages, or its next mask depends on tokens in flight.
        """
        if sequence.slot is None or sequence.total >= sequence.limit:
            return None
        if sequence.constraint and sequence.constraint.must_wait(sequence.num_in_flight):
            return None
        at, forced_token = sequence.num_computed_tokens, None
        if not sequence.is_ready:
            # A batch-invariant reply is recomputed one token at a time, as it was computed first.
            if not self._limits.batch_invariant or at < sequence.num_prompt:
                return None
            forced_token = sequence.ids[at]
        is_sampled = forced_token is None or at == len(sequence.ids) - 1
        work = Decode(sequence, forced_token, is_sampled)
        room = min(at + 1 + self._num_drafts(work), sequence.limit)
        return work if self._grow(sequence, room) else None

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Allocates pages for `tokens` tokens of a running sequence. Returns False if it was preempted instead."""
        while (missing := self._num_pages(tokens) - len(sequence.pages)) > 0:
            try:
                sequence.pages += self._take(missing)
            except OutOfPages:
                last = self._running[-1]
                self.preempt(last)
                if last is sequence:
                    return False
        return True

    def _take(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            self.prefixes.evict(count - self.pool.num_free)
        return self.pool.take(count)

    def _admit(self) -> None:
        """Admits waiting sequences in order.

        A sequence whose prefix is being prefilled by another waits until it can share it; later ones may overtake it.
        """
        skipped = []
        while self._waiting and self._slots and len(skipped) < self._limits.max_num_seqs:
            sequence = self._waiting.popleft()
            if not (self.is_admitting or _has_started(sequence)):
                skipped.append(sequence)
                continue
            if sequence.num_in_flight:  # it was preempted, and its last tokens have not arrived
                skipped.append(sequence)
                continue
            cached = self._match_prefix(sequence)
            if self._is_prefix_in_progress(sequence, len(cached) * self._size):
                self.pool.drop(cached)
                skipped.append(sequence)
                continue
            try:
                missing = self._num_pages(sequence.total + 1) - len(cached)
                sequence.pages = cached + self._take(missing)
            except OutOfPages:
                self.pool.drop(cached)
                self._waiting.appendleft(sequence)
                break
            sequence.num_computed_tokens = len(cached) * self._size
            sequence.slot = self._slots.pop()
            if sequence.handle.cached_tokens is None:
                sequence.handle.cached_tokens = sequence.num_computed_tokens
            self._running.append(sequence)
        self._waiting.extendleft(reversed(skipped))

    def _match_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the cached pages of a sequence's prefix, held for it.

        The last token is never among them, because drawing the next token needs its hidden state.
        """
        if sequence.prefix_namespace is None or sequence.handle.scores_prompt:
            return []
        pages = self.prefixes.match(self._key(sequence.ids[:-1]), sequence.prefix_namespace)
        if self._limits.batch_invariant:
            pages_per_chunk = self._limits.prefill_chunk // self._size
            spare = pages[len(pages) // pages_per_chunk * pages_per_chunk :]
            self.pool.drop(spare)
            pages = pages[: len(pages) - len(spare)]
        return pages

    def _is_prefix_in_progress(self, sequence: Sequence, num_cached: int) -> bool:
        """Returns whether a running sequence prefills tokens that this one could share after its cached ones."""
        unit = self._limits.prefill_chunk if self._limits.batch_invariant else self._size
        end = num_cached + unit + bool(self._limits.num_speculative_tokens)  # see `_key`
        if sequence.prefix_namespace is None or end >= len(sequence.ids):
            return False
        if sequence.handle.scores_prompt:
            return False
        begin = sequence.ids[:end]
        return any(
            other.num_computed_tokens < min(end, other.num_prompt)
            and other.prefix_namespace == sequence.prefix_namespace
            and other.ids[:end] == begin
            for other in self._running
        )

    def _prefills(self) -> list[Prefill]:
        """Returns the prefills of a step, in order of admission, within max_batched_tokens."""
        left, prefills = self._limits.max_batched_tokens, []
        for sequence in self._running:
            start, end = sequence.num_computed_tokens, len(sequence.ids)
            if self._limits.batch_invariant:
                end = min(end, sequence.num_prompt)
            if sequence.is_ready or start >= end:
                continue
            if left <= 0:
                break
            # Chunks are aligned if batch-invariant, and otherwise use up what is left of the step.
            chunk = self._limits.prefill_chunk
            is_aligned = self._limits.batch_invariant
            if sequence.handle.scores_prompt and not is_aligned:
                chunk = min(chunk, MAX_SCORED_TOKENS)
            end = min(end, start + (chunk - start % chunk if is_aligned else min(chunk, left)))
            is_sampled = end == len(sequence.ids)
            prefills.append(Prefill(sequence, start, end - start, is_sampled))
            # The state is updated as if the prefill were done.
            left -= end - start
            sequence.num_computed_tokens = end
            sequence.is_ready = is_sampled
            sequence.num_in_flight += is_sampled
            self._share(sequence)
        return prefills

    def _share(self, sequence: Sequence) -> None:
        """Inserts the computed pages of a sequence into the prefix cache."""
        if sequence.prefix_namespace is None:
            return
        end = sequence.num_computed_tokens
        if self._limits.batch_invariant:
            end = min(end, sequence.num_prompt)
            end -= end % self._limits.prefill_chunk
        elif sequence.is_ready:
            # The MTP layer's pages are written one decode later (steps.py).
            end = min(end, len(sequence.ids) - self._limits.num_speculative_tokens)
        ids = self._key(sequence.ids[:end])
        self.prefixes.insert(ids, sequence.pages, sequence.prefix_namespace)

    def _key(self, ids: list[int]) -> list:
        """Returns the keys of a prefix. With an MTP layer, pages also depend on the next token of each position."""
        return list(zip(ids, ids[1:])) if self._limits.num_speculative_tokens else ids

    def _release(self, sequence: Sequence) -> None:
        # Scheduled work may still write into these pages. It runs before all work that is scheduled later.
        self._share(sequence)
        self.pool.drop(sequence.pages)
        self._slots.append(sequence.device_slot)
        self._running.remove(sequence)
        sequence.pages, sequence.slot = [], None

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self._size)


def _has_started(sequence: Sequence) -> bool:
    return sequence.handle.cached_tokens is not None
