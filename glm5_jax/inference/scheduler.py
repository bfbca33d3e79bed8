"""Which sequences run next, and in which pages: the host's side of a step, which touches no array.

Requests are admitted in the order they came, as long as there are slots and pages for their prompts. Every
step decodes all that are ready for it and prefills parts of the others. Work is handed out before the tokens
of the work before have come back: a sequence's next token is then known to the device alone, its place
to both. Where pages run out, prefixes that nobody uses go first, then the sequence that was admitted last: it
gives its pages back and is computed again later.
"""

import collections
import dataclasses
from typing import NamedTuple

from glm5_jax.inference.pages import OutOfPages, PagePool
from glm5_jax.inference.radix import PrefixCache
from glm5_jax.inference.request import Handle, TooLong


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request while it is served.

    Attributes:
      handle: what its user holds.
      ids: the prompt and the tokens that have come back.
      limit: tokens at most, the prompt's included.
      seed: of its draws.
      space: of prefixes that it shares (`PrefixCache`); None: it shares none.
      slot: where the device keeps its newest token; None while it waits.
      pages: that hold its tokens, in order.
      computed: tokens that are in the pages once the work handed out is done; with drafts, at most.
      flying: tokens drawn by work that has not come back; with drafts, at most.
      ready: whether the device has its newest token.
    """

    handle: Handle
    ids: list[int]
    limit: int
    seed: int
    space: int | None
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    flying: int = 0
    ready: bool = False

    @property
    def total(self) -> int:
        """Tokens, those still under way included."""
        return len(self.ids) + self.flying

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.handle.request.ids)


class Prefill(NamedTuple):
    """Tokens start .. start + count of a sequence to read; draws: whether the token behind is drawn."""

    sequence: Sequence
    start: int
    count: int
    draws: bool


class Decode(NamedTuple):
    """One token of a sequence to read, given, or None: the device's. draws: whether what comes behind is new."""

    sequence: Sequence
    given: int | None
    draws: bool


class Work(NamedTuple):
    """A step: the decodes, which come first, and the prefills."""

    decodes: list[Decode]
    prefills: list[Prefill]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of a step. Construction refuses values that are not positive (ValueError).

    Attributes:
      max_batch: sequences that are decoded at once.
      chunk: tokens of one sequence that are read at once.
      step_tokens: tokens that are read in a step, of all sequences.
      aligned: whether every token is always computed among the same others, whatever else is served: prompts in
        chunks that begin at multiples of `chunk`, replies one by one, and what is shared are chunks of prompts.
      num_draft: tokens that a decode may add beside the one that it must.
    """

    max_batch: int = 16
    chunk: int = 512
    step_tokens: int = 1024
    aligned: bool = False
    num_draft: int = 0

    def __post_init__(self):
        for name in ("max_batch", "chunk", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.num_draft < 0:
            raise ValueError(f"num_draft is {self.num_draft}; it must not be negative")
        if self.aligned and self.num_draft:
            raise ValueError(
                f"num_draft is {self.num_draft}: a token would be computed among as many others as drafts are kept; "
                "use num_draft=0 with batch_invariant"
            )


class Scheduler:
    """Owner of the slots and pages of one group of devices that share them.

    Attributes:
      pool: the pages.
      prefixes: what they hold that a later request may begin with.
      num_preempted: how often a sequence gave its pages back before it had ended.
      admits: whether those who have not begun are given pages.
    """

    def __init__(self, num_pages: int, page_size: int, limits: Limits):
        if limits.aligned and limits.chunk % page_size:
            raise ValueError(
                f"chunk {limits.chunk} is no multiple of page_size {page_size}, which batch_invariant needs"
            )
        self.pool = PagePool(num_pages)
        self.prefixes = PrefixCache(self.pool, page_size)
        self.num_preempted = 0
        self.admits = True
        self._size, self._limits = page_size, limits
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: list[Sequence] = []  # in the order of their admission
        self._slots = list(reversed(range(limits.max_batch)))

    @property
    def num_waiting(self) -> int:
        """Sequences without pages."""
        return len(self._waiting)

    @property
    def num_begun(self) -> int:
        """Sequences that have pages, or had some."""
        return sum(map(_has_begun, self.sequences))

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with pages, the one admitted first at the front."""
        return tuple(self._running)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that have not ended."""
        return (*self._running, *self._waiting)

    def check(self, num_tokens: int) -> None:
        """TooLong if so many tokens would not fit into all pages together."""
        room = len(self.pool) * self._size
        if num_tokens > room:
            raise TooLong(
                f"{num_tokens} tokens, those to come included, exceed the {room} that the cache holds; shorten the "
                "prompt, lower max_tokens or raise num_pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence behind those that wait."""
        self._waiting.append(sequence)

    def adopt(self, sequence: Sequence) -> bool:
        """Gives a slot and pages to a sequence that is ready elsewhere; False if there is no room for it."""
        if not self._slots:
            return False
        try:
            sequence.pages = self._take(self._num_pages(sequence.computed + 1))
        except OutOfPages:
            return False
        sequence.slot = self._slots.pop()
        self._running.append(sequence)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is; what it computed stays for others while there is room."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._release(sequence)

    def schedule(self) -> Work:
        """The next step's work, which counts as handed out."""
        decodes = [one for sequence in self.running if (one := self._decode(sequence))]
        for one in decodes:
            most = 1 + self._num_draft(one)
            one.sequence.computed += most
            one.sequence.flying += most * one.draws
            one.sequence.ready |= one.draws
        self._admit()
        return Work(decodes, self._prefills())

    def came_back(self, work: Decode | Prefill, tokens: list[int]) -> None:
        """Takes what work that draws has drawn: a token, of a decode with drafts up to num_draft more."""
        sequence, most = work.sequence, 1 + self._num_draft(work)
        sequence.ids += tokens
        sequence.flying -= most
        if sequence.slot is not None:
            sequence.computed -= most - len(tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages; it waits in front of all others to be computed again."""
        self._release(sequence)
        sequence.computed, sequence.ready = 0, False
        self._waiting.appendleft(sequence)
        self.num_preempted += 1

    def renew(self, old: int, version: int, anew: bool) -> None:
        """The weights are new, and prefixes of the old ones are forgotten; anew: what runs is computed again."""
        if anew:
            for sequence in reversed(self.running):
                self.preempt(sequence)
        for sequence in self.sequences:
            sequence.space = version if sequence.slot is None else None
        self.prefixes.clear(old)

    def _num_draft(self, work: Decode | Prefill) -> int:
        return self._limits.num_draft if isinstance(work, Decode) and work.draws else 0

    def _decode(self, sequence: Sequence) -> Decode | None:
        """A running sequence's next token, if it is its turn and has room."""
        if sequence.slot is None or sequence.total >= sequence.limit:
            return None
        at, given = sequence.computed, None
        if not sequence.ready:
            # A reply that is computed again, one by one as the first time.
            if not self._limits.aligned or at < sequence.num_prompt:
                return None
            given = sequence.ids[at]
        found = Decode(sequence, given, given is None or at == len(sequence.ids) - 1)
        room = min(at + 1 + self._num_draft(found), sequence.limit)
        return found if self._grow(sequence, room) else None

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Gives a running sequence pages for so many tokens; False if it lost its own instead."""
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
        """Gives slots and pages to those who wait, in order. One that begins as another that is being read waits
        for what it can share, and lets others pass."""
        skipped = []
        while self._waiting and self._slots and len(skipped) < self._limits.max_batch:
            sequence = self._waiting.popleft()
            if not (self.admits or _has_begun(sequence)):
                skipped.append(sequence)
                continue
            if sequence.flying:  # pre-empted, and its last tokens are not back
                skipped.append(sequence)
                continue
            known = self._known(sequence)
            if self._is_being_read(sequence, len(known) * self._size):
                self.pool.drop(known)
                skipped.append(sequence)
                continue
            try:
                missing = self._num_pages(sequence.total + 1) - len(known)
                sequence.pages = known + self._take(missing)
            except OutOfPages:
                self.pool.drop(known)
                self._waiting.appendleft(sequence)
                break
            sequence.computed = len(known) * self._size
            sequence.slot = self._slots.pop()
            if sequence.handle.cached_tokens is None:
                sequence.handle.cached_tokens = sequence.computed
            self._running.append(sequence)
        self._waiting.extendleft(reversed(skipped))

    def _known(self, sequence: Sequence) -> list[int]:
        """Pages, held, with the beginning of a sequence. Its last token is not among them: it is computed, as
        something must be to draw the next."""
        if sequence.space is None:
            return []
        pages = self.prefixes.match(self._key(sequence.ids[:-1]), sequence.space)
        if self._limits.aligned:
            whole = self._limits.chunk // self._size
            spare = pages[len(pages) // whole * whole :]
            self.pool.drop(spare)
            pages = pages[: len(pages) - len(spare)]
        return pages

    def _is_being_read(self, sequence: Sequence, known: int) -> bool:
        """Whether a running sequence reads what this one could share beyond its known tokens."""
        unit = self._limits.chunk if self._limits.aligned else self._size
        end = known + unit + bool(self._limits.num_draft)  # see `_key`
        if sequence.space is None or end >= len(sequence.ids):
            return False
        begin = sequence.ids[:end]
        return any(
            other.computed < min(end, other.num_prompt)
            and other.space == sequence.space
            and other.ids[:end] == begin
            for other in self._running
        )

    def _prefills(self) -> list[Prefill]:
        left, found = self._limits.step_tokens, []
        for sequence in self._running:
            start, end = sequence.computed, len(sequence.ids)
            if self._limits.aligned:
                end = min(end, sequence.num_prompt)
            if sequence.ready or start >= end:
                continue
            if left <= 0:
                break
            chunk = self._limits.chunk
            most = chunk - start % chunk if self._limits.aligned else min(chunk, left)
            end = min(end, start + most)
            draws = end == len(sequence.ids)
            found.append(Prefill(sequence, start, end - start, draws))
            left -= end - start
            sequence.computed = end
            sequence.ready = draws
            sequence.flying += draws
            self._share(sequence)
        return found

    def _share(self, sequence: Sequence) -> None:
        """Lets others begin with what a sequence has computed."""
        if sequence.space is None:
            return
        end = sequence.computed
        if self._limits.aligned:
            end = min(end, sequence.num_prompt)
            end -= end % self._limits.chunk
        elif sequence.ready:
            # What is drafted from is written one decode later (steps.py).
            end = min(end, len(sequence.ids) - self._limits.num_draft)
        ids = self._key(sequence.ids[:end])
        self.prefixes.insert(ids, sequence.pages, sequence.space)

    def _key(self, ids: list[int]) -> list:
        """What prefixes are found by. Of an MTP layer a place holds the token behind it too."""
        return list(zip(ids, ids[1:])) if self._limits.num_draft else ids

    def _release(self, sequence: Sequence) -> None:
        # Work handed out may still write into the pages: it comes before whatever is handed out later.
        self._share(sequence)
        self.pool.drop(sequence.pages)
        self._slots.append(sequence.slot)
        self._running.remove(sequence)
        sequence.pages, sequence.slot = [], None

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self._size)


def _has_begun(sequence: Sequence) -> bool:
    return sequence.handle.cached_tokens is not None
