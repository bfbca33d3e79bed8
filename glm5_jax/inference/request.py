"""What an engine is made with, what it is asked, and what it has answered so far."""

import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from glm5_jax.inference.sampling import Sampling, as_integer
from glm5_jax.model.cache import check_formats
from glm5_jax.model.plan import Plan

STOP, LENGTH, CANCELLED, DEADLINE = "stop", "length", "cancelled", "deadline"
FAILED = "failed"  # the engine could not go on with it
_log = logging.getLogger(__name__)
# All weights but routed experts and those with a row or a column of each token.
REPLICATED = (r"^(?!embed/|lm_head/)(?!.*/experts/)",)


class Paused(ValueError):
    """Something would wait for a paused engine for ever."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of `Engine`, which says what they mean."""

    page_size: int = 64
    num_pages: int | None = None
    max_batch: int = 16
    max_length: int | None = None
    chunk: int = 512
    step_tokens: int | None = None
    short_prompt: int = 32
    num_draft: int = 0
    batch_invariant: bool = False
    index_cache: str | None = None
    latent_cache: str | None = None
    token_chunk: int | None = None
    vocab_block: int | None = None
    replicated: bool = False
    seed: int | None = None

    def __post_init__(self):
        check_formats(self.index_cache, self.latent_cache)
        self.plan()

    def plan(self, base: Plan = Plan()) -> Plan:
        """How an engine carries out its forward, otherwise as `base` has it."""
        found = {"token_chunk": self.token_chunk, "vocab_block": self.vocab_block}
        given = {name: value for name, value in found.items() if value is not None}
        replicated = REPLICATED if self.replicated else base.replicated
        return dataclasses.replace(base, few_tokens=True, replicated=replicated, **given)


class TooLong(ValueError):
    """A prompt, or a prompt and its reply, exceed what a sequence or the cache can hold."""


class TokenIds(tuple):
    """Token ids of a prompt, checked once however many requests share them. Raises ValueError for what is no integer.

    Attributes:
      lowest, highest: the smallest and the largest id; 0 if there is none.
    """

    def __new__(cls, ids: Iterable[int]):
        try:
            made = super().__new__(cls, map(operator.index, ids))
        except TypeError as error:
            raise ValueError(f"the prompt has a token that is no integer: {error}") from None
        made.lowest, made.highest = min(made, default=0), max(made, default=0)
        return made


@dataclasses.dataclass(frozen=True)
class Request:
    """Token ids to continue. Construction refuses an empty prompt and values out of range (ValueError).

    Attributes:
      ids: the prompt.
      sampling: how tokens are drawn, and what ends them.
      deadline: seconds from its submission after which it ends with what it has; None: no limit.
      group: of the engine's `num_groups`, the one that serves it, for a caller who knows where its beginning is; None:
        the engine chooses.
    """

    ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    deadline: float | None = None
    group: int | None = None

    def __post_init__(self):
        if not isinstance(self.ids, TokenIds):
            object.__setattr__(self, "ids", TokenIds(self.ids))
        if not self.ids:
            raise ValueError("the prompt is empty; give at least one token")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline} s; it must be positive")
        if self.group is not None:
            object.__setattr__(self, "group", as_integer("group", self.group))
        if self.group is not None and self.group < 0:
            raise ValueError(f"group is {self.group}; groups are numbered from 0")


class Token(NamedTuple):
    """A token of a reply: logprob as of `sampling.draw`, in nats; version of the weights that drew it; top: the
    likeliest tokens in its place with their log-probs, as many as asked for."""

    id: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


class Completion(NamedTuple):
    """A finished reply: ids with the end token, if one ended it; their logprobs and versions; top as of `Token`;
    finish_reason: "stop", "length", "cancelled" or "deadline"; stopped_by: the token or the text that ended it;
    cached_tokens: of the prompt, found in the cache."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    top: list[tuple[tuple[int, float], ...]]
    finish_reason: str
    stopped_by: int | str | None
    cached_tokens: int


class Handle:
    """A submitted request. The engine's thread writes it, any thread may read.

    Attributes:
      request: what was asked.
      cached_tokens: of the prompt, found in the cache; None before it was begun.
      submitted, first, ended: seconds of `time.monotonic`; first: when its first token came. None before.
      stopped_by: see `Completion`.
      on_cancel: the engine's, called by whoever cancels.
    """

    def __init__(self, request: Request, listener: Callable[["Handle"], None] | None = None):
        """listener: called by the engine's thread whenever tokens have come, and when it has ended."""
        self.request = request
        self.cached_tokens: int | None = None
        self.submitted, self.first, self.ended = time.monotonic(), None, None
        self.stopped_by: int | str | None = None
        self._listener = listener
        self._tokens: list[Token] = []
        # In one assignment: whoever sees the last token sees that it was the last.
        self._told: tuple[int, str | None] = (0, None)
        self.on_cancel: Callable[[], None] | None = None

    def tell(
        self,
        tokens: Iterable[Token],
        finish_reason: str | None,
        stopped_by: int | str | None = None,
    ) -> None:
        """For the engine: what has come, and whether that is all."""
        self._tokens += tokens
        now = time.monotonic()
        if self._tokens and self.first is None:
            self.first = now
        if finish_reason:
            self.ended, self.stopped_by = now, stopped_by
        self._told = (len(self._tokens), finish_reason)
        if self._listener:
            try:
                self._listener(self)
            except Exception:  # the caller's fault, which must not end the engine
                _log.exception("the listener of a request has failed")

    def since(self, count: int) -> tuple[list[Token], str | None]:
        """(tokens behind the first `count`, finish_reason), which belong together."""
        end, reason = self._told
        return self._tokens[count:end], reason

    @property
    def tokens(self) -> list[Token]:
        """The reply so far."""
        return self.since(0)[0]

    @property
    def finish_reason(self) -> str | None:
        """None until it has ended; see `Completion`."""
        return self._told[1]

    def cancel(self) -> None:
        """Ends it with the engine's next step; nothing happens if it has ended."""
        if self.on_cancel:
            self.on_cancel()

    @property
    def completion(self) -> Completion:
        """The reply; ValueError before it has ended."""
        tokens, reason = self.since(0)
        if reason is None:
            raise ValueError("the request has not ended; step the engine until it has")
        return Completion(
            [token.id for token in tokens],
            [token.logprob for token in tokens],
            [token.version for token in tokens],
            [token.top for token in tokens],
            reason,
            self.stopped_by,
            self.cached_tokens or 0,
        )
