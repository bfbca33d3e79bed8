"""Reads prompts of requests as token ids, and refuses what is too long before it is encoded or copied.

A text has at least as many tokens as its bytes divided by the longest token. Where that does not decide, a long text is
counted block by block, which ends as soon as there are too many: encoding 15 MB at once takes 20 s and 2 GB.
"""

from collections.abc import Iterator, Sequence

from glm5_jax.core.json_body import WHOLE_BYTES, Limits, NumberList
from glm5_jax.core.server import ApiError
from glm5_jax.inference.request import TokenIds
from glm5_jax.text.tokenizer import Tokenizer

MAX_PROMPTS = 2048  # of one body
MAX_VALUES = 50_000  # of one body; a list of numbers counts as one
_ESCAPED = 6  # bytes that one byte of a text takes in JSON at most, as \u0041
_BLOCK = 2**14  # characters that are counted at once
# Cutting a text into blocks adds tokens at the cuts, far fewer than a quarter.
_SURPLUS = 1.25


class PromptReader:
    """Reads the prompts of one model.

    Attributes:
      limits: bounds of a body, by which it is refused while it is read.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None):
        """max_length: tokens of a prompt and its reply; None: no limit."""
        self._tokenizer, self._max_length = tokenizer, max_length
        names = max((len(name.encode()) for name in tokenizer.special_ids), default=1)
        self._longest = max(int(tokenizer.token_bytes().max()), names)
        if max_length is None:
            self.limits = Limits()
        else:
            text_bytes = max(WHOLE_BYTES, _ESCAPED * self._longest * max_length)
            num_numbers = max(WHOLE_BYTES, max_length)
            self.limits = Limits(text_bytes, num_numbers, MAX_VALUES, "context_length_exceeded")

    def split(self, value, param: str) -> Sequence:
        """Returns the prompts of a field: of a text, texts, ids or lists of ids. Raises ApiError for too many."""
        is_one = isinstance(value, str | NumberList) or (
            value and isinstance(value[0], int | float)
        )
        prompts = [value] if is_one else value
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise ApiError(
                f"{param} has {len(prompts)} prompts; give 1 to {MAX_PROMPTS}", param=param
            )
        return prompts

    def read(self, prompt, param: str) -> TokenIds:
        """Returns the token ids of one prompt. Raises ApiError."""
        if isinstance(prompt, str):
            self.check_text(prompt, param)
            try:
                return TokenIds(self._tokenizer.encode(prompt))
            except ValueError as error:
                raise ApiError(str(error), param=param) from None
        if not isinstance(prompt, list | NumberList):
            raise ApiError(
                f"{param} must be text or a list of token ids, or a list of either", param=param
            )
        self._check_count(len(prompt), param)
        try:
            return TokenIds(_integers(prompt))
        except ValueError as error:
            raise ApiError(f"{param}: {error}", param=param) from None

    def is_long(self, num_characters: int) -> bool:
        """Returns whether a text of this length may have to be counted before it is encoded."""
        most = self._max_length
        return most is not None and 4 * num_characters > max(_BLOCK, most)

    def check_text(self, text: str, param: str) -> None:
        """Raises ApiError if a text has more tokens than a sequence may have, as far as blocks of it show.

        A text whose first block says that it fills less than half of a sequence is not counted to its end.
        """
        if not self.is_long(len(text)):
            return
        size, most = sum(map(len, _blocks(text))), self._max_length
        self._check_count(-(-size // self._longest), param, "at least ")
        count = done = 0
        for block in _blocks(text):
            count, done = count + len(self._tokenizer.encode(block.decode())), done + len(block)
            self._check_count(int(count / _SURPLUS), param, "at least ")
            if count * size < done * most / 2:
                return

    def _check_count(self, count: int, param: str, about: str = "") -> None:
        if self._max_length is not None and count >= self._max_length:
            raise ApiError(
                f"the prompt has {about}{count} tokens; with a reply at most {self._max_length} are possible",
                code="context_length_exceeded",
                param=param,
            )


def _blocks(text: str) -> Iterator[bytes]:
    """Yields a text in UTF-8, block by block."""
    for first in range(0, len(text), _BLOCK):
        yield text[first : first + _BLOCK].encode("utf-8", "replace")


def num_characters(value) -> int:
    """Returns the characters of all texts in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(num_characters, value.values()))
    return sum(map(num_characters, value)) if isinstance(value, list | tuple) else 0


def _integers(values) -> Iterator[int]:
    """Yields the ids of a list. Raises ValueError for what is no whole number."""
    for value in values:
        if type(value) is int:
            yield value
        elif type(value) is float and value.is_integer():
            yield int(value)
        else:
            raise ValueError(f"{str(value)[:40]} is no token id; give whole numbers")
