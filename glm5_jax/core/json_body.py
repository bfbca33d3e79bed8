"""Reads the JSON of a body in pieces, so that a large one neither blocks other threads nor grows in memory.

`json.loads` holds the interpreter for 0.3 s on a list of two million token ids, and makes objects of ten times the size of
the text. Here a body of more than `WHOLE_BYTES` is read piece by piece:

- text is decoded up to `PIECE_BYTES` at a time, and refused before that if it is longer than `Limits.text_bytes`;
- a list of many numbers stays text, a `NumberList`, until somebody iterates over it. How many there are is counted first;
- what is left are few values, as `Limits.num_values` bounds them.

Smaller bodies are read by `json.loads`, which takes milliseconds.
"""

import codecs
import json
import math
import re
from collections.abc import Iterator, Sequence
from json.decoder import scanstring
from typing import Any, NamedTuple

WHOLE_BYTES = 2**16  # bodies up to this size are read at once
PIECE_BYTES = 2**16
MAX_DEPTH = 200
_SPACE = re.compile(rb"[ \t\n\r]*")
_NAME = re.compile(rb"true|false|null")
_NAMES = {b"true": True, b"false": False, b"null": None}
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MANY_DIGITS = re.compile(r"(?<![0-9])[0-9]{309}")
_NUMBERS = re.compile(rb"[-+.eE0-9, \t\n\r]*")
# A surrogate pair is one step, so that no piece ends within it.
_TEXT = re.compile(
    rb'(?:[^"\\\x00-\x1f]{1,4096}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]){1,64}'
)


class TooLarge(ValueError):
    """A body has more of something than its limits allow; code: of the `Limits`."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class Limits(NamedTuple):
    """Bounds of what a body may hold; None: no bound.

    Attributes:
      text_bytes: bytes of one text, as they are written in the body.
      num_numbers: numbers of one list.
      num_values: values of all kinds, where a list of numbers counts as one.
      code: code of the error for a body that exceeds them.
    """

    text_bytes: int | None = None
    num_numbers: int | None = None
    num_values: int | None = None
    code: str = "too_large"


class NumberList(Sequence):
    """List of numbers of a body, still as text. It is read piece by piece whenever it is iterated over."""

    def __init__(self, body: bytes, start: int, end: int):
        """start, end: bytes of the body between the brackets."""
        self._body, self._start, self._end = body, start, end
        self._length = body.count(b",", start, end) + 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        return list(self)[index]

    def __iter__(self) -> Iterator[int | float]:
        at = self._start
        while at < self._end:
            end = self._piece_end(at)
            text = self._body[at:end].decode("ascii")
            try:
                yield from _loads(f"[{text}]")
            except ValueError as error:
                raise ValueError(f"byte {at} and what follows are no numbers: {error}") from None
            at = end + 1

    def _piece_end(self, at: int) -> int:
        """Returns the end of a piece, which is a comma or the end of the list."""
        if self._end - at <= PIECE_BYTES:
            return self._end
        found = self._body.find(b",", at + PIECE_BYTES, self._end)
        return self._end if found < 0 else found


def parse(body: bytes, limits: Limits = Limits(), *, whole_bytes: int = WHOLE_BYTES) -> Any:
    """Returns the value of a body of JSON.

    Raises ValueError for what is no JSON, RecursionError for too many levels, TooLarge for what exceeds the limits.
    whole_bytes: size up to which a body is read at once.
    """
    if len(body) <= whole_bytes:
        return _loads(body.decode("utf-8"))
    return _Pieces(body, limits).read()


class _Pieces:
    """Reader of one body; `at` is the byte that comes next."""

    def __init__(self, body: bytes, limits: Limits):
        self._body, self._limits, self._at = body, limits, 0
        self._num_values = 0

    def read(self) -> Any:
        value = self._value(0)
        if self._next() != b"":
            raise self._error("extra data")
        return value

    def _value(self, depth: int) -> Any:
        self._count()
        match self._next():
            case b'"':
                return self._text()
            case b"[":
                return self._list(self._inner(depth))
            case b"{":
                return self._object(self._inner(depth))
        if found := _NAME.match(self._body, self._at):
            self._at = found.end()
            return _NAMES[found[0]]
        if found := _NUMBER.match(self._body, self._at):
            self._at = found.end()
            text = found[0].decode("ascii")
            return _integer(text) if text.lstrip("-").isdigit() else _finite(text)
        raise self._error("a value is expected")

    def _list(self, depth: int) -> Any:
        self._at += 1
        found = []
        if self._next() == b"]":
            self._at += 1
            return found
        if (numbers := self._numbers()) is not None:
            return numbers
        while True:
            found.append(self._value(depth))
            if self._ends(b"]"):
                return found

    def _numbers(self) -> NumberList | None:
        """Returns a list of nothing but numbers that is long enough to be left as it is."""
        start, end = self._at, _NUMBERS.match(self._body, self._at).end()
        if end - start < 1024 or self._body[end : end + 1] != b"]":
            return None
        numbers = NumberList(self._body, start, end)
        most = self._limits.num_numbers
        if most is not None and len(numbers) > most:
            raise self._too_large(
                f"a list of {len(numbers)} numbers is too long; at most {most} fit"
            )
        self._at = end + 1
        return numbers

    def _object(self, depth: int) -> dict:
        self._at += 1
        found = {}
        if self._next() == b"}":
            self._at += 1
            return found
        while True:
            if self._next() != b'"':
                raise self._error("a name in double quotes is expected")
            name = self._text()
            if self._next() != b":":
                raise self._error("':' is expected")
            self._at += 1
            found[name] = self._value(depth)
            if self._ends(b"}"):
                return found

    def _text(self) -> str:
        start = self._at = self._at + 1
        end = self._body.find(b'"', start)
        if 0 <= end - start <= PIECE_BYTES and self._body.find(b"\\", start, end) < 0:
            self._check_text(end - start)
            self._at = end + 1
            return scanstring(self._body[start : end + 1].decode("utf-8"), 0, True)[0]
        decoder, parts = codecs.getincrementaldecoder("utf-8")(), []
        while piece := _TEXT.match(self._body, self._at):
            self._at = piece.end()
            self._check_text(self._at - start)
            parts.append(scanstring(decoder.decode(piece[0]) + '"', 0, True)[0])
        if self._body[self._at : self._at + 1] != b'"':
            raise self._error("the text does not end, or holds a character that must be escaped")
        decoder.decode(b"", final=True)
        self._at += 1
        return "".join(parts)

    def _check_text(self, size: int) -> None:
        most = self._limits.text_bytes
        if most is not None and size > most:
            raise self._too_large(f"a text of more than {most} bytes is too long")

    def _ends(self, closing: bytes) -> bool:
        """Takes what follows a value: the end of its container, or a comma."""
        found = self._next()
        if found not in (b",", closing):
            raise self._error(f"',' or {closing.decode()!r} is expected")
        self._at += 1
        return found == closing

    def _next(self) -> bytes:
        self._at = _SPACE.match(self._body, self._at).end()
        return self._body[self._at : self._at + 1]

    def _inner(self, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise RecursionError
        return depth + 1

    def _count(self) -> None:
        self._num_values += 1
        most = self._limits.num_values
        if most is not None and self._num_values > most:
            raise self._too_large(f"the body has more than {most} values; send fewer at once")

    def _too_large(self, message: str) -> TooLarge:
        return TooLarge(message, self._limits.code)

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{message} at byte {self._at}")


def _loads(text: str) -> Any:
    """Returns the value of JSON. Raises ValueError for numbers that no float can hold, integers among them."""
    # A hook for each integer slows all parsing down, and few bodies have an integer that needs it.
    parse_int = _integer if _MANY_DIGITS.search(text) else None
    return json.loads(text, parse_int=parse_int, parse_float=_finite, parse_constant=_no_constant)


def _integer(text: str) -> int:
    _finite(text)
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is out of the range of numbers")
    return value


def _no_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")
