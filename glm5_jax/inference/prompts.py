"""Reads prompts of requests as token ids, and refuses those that are too long before they are encoded or copied.

1. The number of tokens is at least the number of bytes divided by those of the longest token.
2. If that is not conclusive, a text with many more bytes than tokens are possible is encoded block by block until there
   are too many tokens. Encoding 15 MB at once would take 20 s and 2 GB.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from glm5_jax.inference.request import TokenIds
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.runtime.json_body import (
    MAX_SINGLE_PASS_BYTES,
    MAX_VALUES,
    JsonLimits,
    NumberList,
    WideText,
)
from glm5_jax.text.messages import describe
from glm5_jax.text.tokenizer import Tokenizer

MAX_PROMPTS = 2048  # of one body
_ESCAPED = 6  # maximum bytes of JSON for one byte of a text, as \u0041
_BLOCK = 2**14  # characters that are encoded at once
_MAX_PARAM = 100  # characters of a field's name in an error
# Splitting a text into blocks adds tokens at the splits, far fewer than a quarter.
_SURPLUS = 1.25
# Bytes for each possible token, up to which a text is encoded at once: it has at most a token for each byte.
_BYTES_PER_TOKEN = 4


class PromptReader:
    """Reader of the prompts for one model.

    Attributes:
      limits: limits of a body, checked while it is read.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None):
        """max_length: maximum tokens of a prompt and its reply; None: no limit."""
        self._tokenizer, self._max_length = tokenizer, max_length
        names = max((len(name.encode()) for name in tokenizer.special_ids), default=1)
        self._longest = max(int(tokenizer.token_bytes().max()), names)
        if max_length is None:
            self.limits = JsonLimits()
        else:
            text_bytes = max(MAX_SINGLE_PASS_BYTES, _ESCAPED * self._longest * max_length)
            num_numbers = max(MAX_SINGLE_PASS_BYTES, max_length)
            code = "context_length_exceeded"
            self.limits = JsonLimits(text_bytes, num_numbers, MAX_VALUES, code, self._check_body)

    def split(self, value: Any, param: str) -> list:
        """Splits a field (a text, texts, ids or lists of ids) into prompts. Raises ApiError for too many."""
        if not isinstance(value, str | list | NumberList):
            raise ApiError(
                f"{param}: {describe(value)} is not of type 'string', 'array'", param=param
            )
        is_one = isinstance(value, str | NumberList) or (
            value and isinstance(value[0], int | float)
        )
        prompts = [value] if is_one else list(value)
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise ApiError(
                f"{param} has {len(prompts)} prompts; give 1 to {MAX_PROMPTS}", param=param
            )
        return prompts

    def read(self, prompt: str | list | NumberList, param: str) -> TokenIds:
        """Returns the token ids of one prompt. Raises ApiError if it is invalid or too long."""
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
        """Returns whether a text of this length must be checked before it is encoded."""
        maximum = self._max_length
        return maximum is not None and 4 * num_characters > max(_BLOCK, maximum)

    def check_text(self, text: str, param: str) -> None:
        """Raises ApiError if a text has too many tokens to be encoded at once."""
        self._check_texts([text], param)

    def _check_body(self, body) -> None:
        """Raises ApiError if a body's messages together, or any of its other texts, are too long."""
        if not isinstance(body, dict):
            return
        for param, value in body.items():
            texts = list(_texts(value))
            for group in [texts] if param == "messages" else [[text] for text in texts]:
                self._check_texts(group, param[:_MAX_PARAM])

    def _check_texts(self, texts: Sequence[str | WideText], param: str) -> None:
        maximum = self._max_length
        if maximum is None or not self.is_long(sum(map(len, texts))):
            return
        # The bound by the longest token.
        size = sum(map(len, _blocks(texts)))
        self._check_count(-(-size // self._longest), param, "at least ")
        if size <= _BYTES_PER_TOKEN * maximum:
            return
        # Counts block by block. All blocks count, because the first ones say nothing about the others.
        count = 0
        for block in _blocks(texts):
            count += len(self._tokenizer.encode(block.decode("utf-8", "replace")))
            self._check_count(int(count / _SURPLUS), param, "at least ")

    def _check_count(self, count: int, param: str, about: str = "") -> None:
        if self._max_length is not None and count >= self._max_length:
            raise ApiError(
                f"the prompt has {about}{count} tokens; with a reply at most {self._max_length} are possible",
                code="context_length_exceeded",
                param=param,
            )


def _blocks(texts: Sequence[str | WideText]) -> Iterator[bytes]:
    """Yields blocks of texts in UTF-8; a block may end within a character."""
    for text in texts:
        for first in range(0, len(text), _BLOCK):
            if isinstance(text, WideText):
                yield bytes(text.data[first : first + _BLOCK])
            else:
                yield text[first : first + _BLOCK].encode("utf-8", "replace")


def _texts(value) -> Iterator[str | WideText]:
    """Yields all texts of a JSON value."""
    if isinstance(value, str | WideText):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def num_characters(value: Any) -> int:
    """Returns the number of characters of all names, texts and numbers in a JSON value, about those of its JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(num_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_characters, value))
    return len(str(value))


def _integers(values) -> Iterator[int]:
    """Yields the ids of a list as int. Raises ValueError for a value that is no whole number."""
    for value in values:
        if type(value) is int:
            yield value
        elif type(value) is float and value.is_integer():
            yield int(value)
        else:
            raise ValueError(f"{str(value)[:40]} is no token id; give whole numbers")
