"""What ends a reply: a token, a text, or its length."""

from collections.abc import Collection

from glm5_jax.inference.request import LENGTH, STOP
from glm5_jax.inference.sampling import Sampling
from glm5_jax.text.tokenizer import Detokenizer, Tokenizer


class Stops:
    """Watches one reply, token by token."""

    def __init__(
        self,
        sampling: Sampling,
        most: int,
        ends: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
    ):
        """most: tokens that the reply may have. ends: ids that end every reply, unless sampling ignores them.
        tokenizer: for stop texts, which need one."""
        self._ids = {*sampling.stop_ids, *(() if sampling.ignore_eos else ends)}
        self._left, self._texts = most, sampling.stop
        self._detokenizer = Detokenizer(tokenizer, errors="replace") if sampling.stop else None
        # The token after which texts count, until it has come; the blanks behind it are no content yet.
        self._stop_after, self._skips_blanks = sampling.stop_after, sampling.stop_after is not None
        self._said = ""

    def feed(self, token: int) -> tuple[str, int | str | None] | None:
        """(finish_reason, the token or the text that ended it) if the reply ends behind this token, else None."""
        self._left -= 1
        found = token if token in self._ids else self._text(token)
        if found is not None:
            return STOP, found
        return None if self._left > 0 else (LENGTH, None)

    def _text(self, token: int) -> str | None:
        """The stop text that is whole with a token, of several the first."""
        if self._detokenizer is None:
            return None
        if self._stop_after is not None:
            self._stop_after = None if token == self._stop_after else self._stop_after
            return None
        before = max(0, len(self._said) - max(map(len, self._texts)) + 1)
        text = self._detokenizer.feed([token])
        self._said += text if self._said or not self._skips_blanks else text.lstrip()
        found = [(at, text) for text in self._texts if (at := self._said.find(text, before)) >= 0]
        return min(found)[1] if found else None
