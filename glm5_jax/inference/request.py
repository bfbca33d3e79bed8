"""What an engine is asked, and what it has answered so far."""

import dataclasses
import threading
from collections.abc import Callable
from typing import NamedTuple

from glm5_jax.inference.sampling import Sampling

STOP, LENGTH, CANCELLED, DEADLINE = FINISHES = ("stop", "length", "cancelled", "deadline")


@dataclasses.dataclass(frozen=True)
class Request:
    """Token ids to continue. Construction refuses an empty prompt and values out of range (ValueError).

    Attributes:
      ids: the prompt.
      sampling: how tokens are drawn, and what ends them.
      deadline: seconds from its submission after which it ends with what it has; None: no limit.
    """

    ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    deadline: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "ids", tuple(map(int, self.ids)))
        if not self.ids:
            raise ValueError("the prompt is empty; give at least one token")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline} s; it must be positive")


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
      tokens: the reply so far.
      finish_reason: None until it has ended; see `Completion`.
      cached_tokens: of the prompt, found in the cache; None before it was begun.
    """

    def __init__(self, request: Request, listener: Callable[["Handle"], None] | None = None):
        """listener: called by the engine's thread whenever tokens have come, and when it has ended."""
        self.request = request
        self.tokens: list[Token] = []
        self.finish_reason: str | None = None
        self.stopped_by: int | str | None = None
        self.cached_tokens: int | None = None
        self.listener = listener
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends it with the engine's next step; nothing happens if it has ended."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    @property
    def completion(self) -> Completion:
        """The reply; ValueError before it has ended."""
        if self.finish_reason is None:
            raise ValueError("the request has not ended; step the engine until it has")
        return Completion(
            [token.id for token in self.tokens],
            [token.logprob for token in self.tokens],
            [token.version for token in self.tokens],
            [token.top for token in self.tokens],
            self.finish_reason,
            self.stopped_by,
            self.cached_tokens or 0,
        )
