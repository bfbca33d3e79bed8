"""Options of an engine, its requests and their replies."""

import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from glm5_jax.inference.constraints import ReplyRules
from glm5_jax.inference.quantize.table import FP8
from glm5_jax.inference.sampling import Sampling, as_integer
from glm5_jax.model.cache import check_formats
from glm5_jax.model.execution import ExecutionConfig

STOP, LENGTH, CANCELLED, DEADLINE = "stop", "length", "cancelled", "deadline"
FAILED = "failed"  # an error in the engine ended the request
_log = logging.getLogger(__name__)
# All weights except routed experts, embedding and head.
REPLICATED = (r"^(?!embed/|lm_head/)(?!.*/experts/)",)


class Paused(ValueError):
    """Raised instead of waiting forever for a paused engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `Engine`. Raises ValueError for an unknown format of the cache.

    Attributes:
      page_size: tokens of a page.
      num_pages: pages of each data-parallel rank; None: enough for max_num_seqs sequences of max_length.
      max_num_seqs: maximum sequences decoded at once on each data-parallel rank.
      max_length: maximum tokens of a prompt and its reply; None: the model's positions.
      prefill_chunk: maximum tokens of one prompt in a step.
      max_batched_tokens: maximum prompt tokens of a step; None: prefill_chunk.
      min_prefill_bucket: prompts up to this length are padded to it and read together. A lower number computes
        fewer padded tokens and needs one more program.
      num_speculative_tokens: tokens that the MTP layer drafts for each decode (4 in paper table 2). They are
        accepted such that the distribution of replies stays the same.
      batch_invariant: whether the bits of a reply are independent of other requests; slower.
      quantization: "fp8" for block-wise FP8 weights (GLM-5 3.6.2), to which plain weights of the checkpoint and of pushes
        are converted; None: the weights stay as they are.
      index_cache, latent_cache: format of index keys and latents in the pages, "int8" or "fp8" (`init_pages`);
        None: the model's dtype.
      token_chunk, vocab_block: tokens of a device that are sent to the experts at a time, and vocabulary entries
        whose embedding is gathered at a time, on a mesh (`ExecutionConfig`); None: as of `Engine`'s execution.
      replicated: whether each device of a mesh has all weights except routed experts, embedding and head. Otherwise
        each step gathers them over the network.
      seed: seed of the seeds of requests that have none; None: random.
      warms_prompt_logprobs: whether a warm-up also compiles the programs that compute log-probs of prompts. Otherwise
        the first such requests delay all others.
      moves_pages: whether a warm-up also compiles the programs that move pages of prompts from engines that prefill to
        engines that decode (inference/kv_transfer).
    """

    page_size: int = 64
    num_pages: int | None = None
    max_num_seqs: int = 16
    max_length: int | None = None
    prefill_chunk: int = 512
    max_batched_tokens: int | None = None
    min_prefill_bucket: int = 32
    num_speculative_tokens: int = 0
    batch_invariant: bool = False
    quantization: str | None = None
    index_cache: str | None = None
    latent_cache: str | None = None
    token_chunk: int | None = None
    vocab_block: int | None = None
    replicated: bool = False
    seed: int | None = None
    warms_prompt_logprobs: bool = True
    moves_pages: bool = False

    def __post_init__(self):
        check_formats(self.index_cache, self.latent_cache)
        if self.quantization not in (None, FP8):
            raise ValueError(
                f"quantization is {self.quantization!r}; use {FP8} or None. W4A8 is a form of checkpoints, which "
                "experiments/quantise.py writes"
            )
        self.execution()

    def execution(self, base: ExecutionConfig = ExecutionConfig()) -> ExecutionConfig:
        """Returns the execution options of the engine's forward, with those not set here taken from `base`."""
        options = {"token_chunk": self.token_chunk, "vocab_block": self.vocab_block}
        changed = {name: value for name, value in options.items() if value is not None}
        replicated = REPLICATED if self.replicated else base.replicated_weights
        return dataclasses.replace(
            base, keep_vocab_sharded=True, replicated_weights=replicated, **changed
        )


class TooLong(ValueError):
    """Raised if a prompt, or a prompt and its reply, exceed the maximum length or the cache."""


class TokenIds(tuple):
    """Token ids of a prompt, checked once for all requests that share them.

    Raises ValueError for a value that is not an integer.

    Attributes:
      lowest, highest: smallest and largest id; 0 if the prompt is empty.
    """

    lowest: int
    highest: int

    def __new__(cls, ids: Iterable[int]):
        try:
            self = super().__new__(cls, map(operator.index, ids))
        except TypeError as error:
            raise ValueError(f"the prompt has a token that is no integer: {error}") from None
        self.lowest, self.highest = min(self, default=0), max(self, default=0)
        return self


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompt to continue. Raises ValueError for an empty prompt and for values out of range.

    Attributes:
      ids: token ids of the prompt.
      sampling: sampling parameters and stop conditions.
      timeout_s: time limit from submission, in seconds; the reply then ends with its tokens so far. None: no limit.
      dp_rank: data-parallel rank that serves it, such as the one that caches its prefix; None: the engine chooses.
      rules: rules that the reply must follow, enforced by masks; None: none.
    """

    ids: Sequence[int]
    sampling: Sampling = Sampling()
    _: dataclasses.KW_ONLY
    timeout_s: float | None = None
    dp_rank: int | None = None
    rules: ReplyRules | None = None

    def __post_init__(self):
        if not isinstance(self.ids, TokenIds):
            object.__setattr__(self, "ids", TokenIds(self.ids))
        if not self.ids:
            raise ValueError("the prompt is empty; give at least one token")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive")
        if self.dp_rank is not None:
            object.__setattr__(self, "dp_rank", as_integer("dp_rank", self.dp_rank))
        if self.dp_rank is not None and self.dp_rank < 0:
            raise ValueError(f"dp_rank is {self.dp_rank}; ranks are numbered from 0")

    @property
    def id_range(self) -> tuple[int, int]:
        """Lowest and highest token id of the prompt."""
        assert isinstance(self.ids, TokenIds)
        return self.ids.lowest, self.ids.highest


class Token(NamedTuple):
    """Token of a reply.

    Attributes:
      id: token id.
      logprob: log-prob in nats, see `sampling.draw`.
      version: version of the weights that drew it.
      top: (id, log-prob) of the most likely tokens at its position, as many as requested.
    """

    id: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


class Completion(NamedTuple):
    """Finished reply.

    Attributes:
      ids: token ids, including the end token if one ended it.
      logprobs, versions, top: see `Token`.
      finish_reason: "stop", "length", "cancelled", "deadline" or "failed".
      stopped_by: token or text that ended it; None if neither did.
      cached_tokens: number of prompt tokens read from the cache.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    top: list[tuple[tuple[int, float], ...]]
    finish_reason: str
    stopped_by: int | str | None
    cached_tokens: int


class Handle:
    """Submitted request. The engine's thread writes it; any thread may read it.

    Attributes:
      request: the request.
      cached_tokens: number of prompt tokens read from the cache; None until the prompt is scheduled.
      submitted_at: time of submission, in seconds of `time.monotonic`.
      first_token_at: time of the first token; None before it.
      ended_at: time of the end; None before it.
      stopped_by: see `Completion`.
      prompt_tokens: tokens of the prompt from the second on with their log-probs, if the request wants them.
      cancel_callback: function of the engine that cancels the request.
    """

    def __init__(
        self,
        request: Request,
        listener: Callable[["Handle"], None] | None = None,
        submitted_at: float | None = None,
    ):
        """Creates the handle of a request.

        listener: called by the engine's thread after each new output and at the end.
        submitted_at: see `Handle`; None: now.
        """
        self.request = request
        self.cached_tokens: int | None = None
        self.submitted_at = time.monotonic() if submitted_at is None else submitted_at
        self.first_token_at = self.ended_at = None
        self.stopped_by: int | str | None = None
        self.prompt_tokens: list[Token] = []
        self._listener = listener
        self._tokens: list[Token] = []
        # (number of tokens, finish_reason) in one assignment, so that readers see the last token and the end together.
        self._progress: tuple[int, str | None] = (0, None)
        self.cancel_callback: Callable[[], None] | None = None

    def append_output(
        self,
        tokens: Iterable[Token],
        finish_reason: str | None,
        stopped_by: int | str | None = None,
    ) -> None:
        """Appends tokens and, unless `finish_reason` is None, ends the reply. Only the engine calls it."""
        self._tokens += tokens
        now = time.monotonic()
        if self._tokens and self.first_token_at is None:
            self.first_token_at = now
        if finish_reason:
            self.ended_at, self.stopped_by = now, stopped_by
        self._progress = (len(self._tokens), finish_reason)
        if self._listener:
            try:
                self._listener(self)
            except Exception:  # an error of the caller must not end the engine
                _log.exception("the listener of a request has failed")

    def tokens_after(self, count: int) -> tuple[list[Token], str | None]:
        """Returns the tokens after the first `count` and the finish reason, of one moment."""
        end, reason = self._progress
        return self._tokens[count:end], reason

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of the prompt are still to be computed."""
        num_scored = len(self.prompt_tokens)
        return self.request.sampling.prompt_logprobs and num_scored < len(self.request.ids) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return self._progress[0]

    @property
    def tokens(self) -> list[Token]:
        """Tokens of the reply so far."""
        return self.tokens_after(0)[0]

    @property
    def finish_reason(self) -> str | None:
        """Reason of the end, see `Completion`; None before the end."""
        return self._progress[1]

    def cancel(self) -> None:
        """Ends the reply with the engine's next step. Does nothing if it has ended."""
        if self.cancel_callback:
            self.cancel_callback()

    @property
    def completion(self) -> Completion:
        """Finished reply. Raises ValueError before the end."""
        tokens, reason = self.tokens_after(0)
        if reason is None:
            raise ValueError("the request has not ended; step the engine until it has")
        return Completion(
            ids=[token.id for token in tokens],
            logprobs=[token.logprob for token in tokens],
            versions=[token.version for token in tokens],
            top=[token.top for token in tokens],
            finish_reason=reason,
            stopped_by=self.stopped_by,
            cached_tokens=self.cached_tokens or 0,
        )
