"""Decides when a reply ends: at a stop token, a stop text or its maximum length."""

from collections.abc import Collection

from glm5_jax.inference.request import LENGTH, STOP
from glm5_jax.inference.sampling import Sampling
from glm5_jax.text.tokenizer import Detokenizer, Tokenizer


class StopChecker:
    """Checks one reply, token by token."""

    def __init__(
        self,
        sampling: Sampling,
        max_tokens: int,
        eos_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
    ):
        """Creates the checker of a new reply.

        max_tokens: maximum tokens of the reply. eos_ids: tokens that end every reply, unless `sampling.ignore_eos`.
        tokenizer: decodes tokens; needed only for stop texts. Raises ValueError for stop texts without one.
        """
        self._ids = {*sampling.stop_ids, *(() if sampling.ignore_eos else eos_ids)}
        self._num_left, self._texts = max_tokens, sampling.stop
        self._detokenizer: Detokenizer | None = None
        if sampling.stop:
            if tokenizer is None:
                raise ValueError("stop texts need a tokenizer; give one")
            self._detokenizer = Detokenizer(tokenizer, errors="replace")
        self._late_ids = frozenset(sampling.late_stop_ids)
        # Stop texts and late tokens count only after this token; None: they count now.
        self._stop_after, self._skips_blanks = sampling.stop_after, sampling.stop_skips_blanks
        # Text so far, as much of its end as may be the start of a stop text.
        self._tail, self._tail_size = "", max(map(len, sampling.stop), default=1) - 1

    def feed(self, token: int) -> tuple[str, int | str | None] | None:
        """Returns (finish_reason, token or text that ended the reply) if it ends with this token, else None."""
        self._num_left -= 1
        match = token if token in self._ids else self._match_late(token)
        if match is not None:
            return STOP, match
        return None if self._num_left > 0 else (LENGTH, None)

    def _match_late(self, token: int) -> int | str | None:
        """Returns this token or the first stop text that it completes, if that counts already, else None."""
        if self._stop_after is not None:
            self._stop_after = None if token == self._stop_after else self._stop_after
            return None
        if token in self._late_ids:
            return token
        if self._detokenizer is None:
            return None
        return self._match_text(self._detokenizer.feed([token]))

    def _match_text(self, text: str) -> str | None:
        """Returns the first stop text that the text of a token completes, or None."""
        if self._skips_blanks:
            text = text.lstrip()
            self._skips_blanks = not text
        text = self._tail + text
        self._tail = text[len(text) - self._tail_size :] if len(text) > self._tail_size else text
        matches = [(at, stop) for stop in self._texts if (at := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None
