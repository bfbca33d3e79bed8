"""Parses large JSON bodies in pieces, without blocking other threads or using much memory.

`json.loads` holds the interpreter for 0.3 s on a list of two million token ids, and creates objects of ten times the size
of the text. So a body of more than `MAX_SINGLE_PASS_BYTES` is parsed piece by piece:

- Text is decoded at most `PIECE_BYTES` at a time. Text longer than `JsonLimits.text_bytes` is rejected first.
- A text with one character beyond Latin-1 takes two or four bytes per character in memory. Such texts stay UTF-8, as
  `WideText`, until `JsonLimits.check` has accepted the value.
- A long list of numbers stays text, a `NumberList`, until a caller iterates over it. Its numbers are counted first.
- The other values are few, because `JsonLimits.num_values` bounds them.

Smaller bodies are parsed by `json.loads`, which takes milliseconds.
"""

import codecs
import json
import math
import re
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]: not in typeshed
from typing import Any, NamedTuple

MAX_SINGLE_PASS_BYTES = 2**16  # bodies up to this size are read at once
PIECE_BYTES = 2**16
MAX_VALUES = 50_000  # of a request; an empty list takes 20 times the bytes of its text
MAX_DEPTH = 200
# Bytes of texts with characters beyond Latin-1 in a body, up to which they are decoded immediately.
MAX_WIDE_BYTES = 2**18
_SPACE = re.compile(rb"[ \t\n\r]*")
_NAME = re.compile(rb"true|false|null")
_NAMES = {b"true": True, b"false": False, b"null": None}
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MANY_DIGITS = re.compile(r"(?<![0-9])[0-9]{309}")
_NUMBERS = re.compile(rb"[-+.eE0-9, \t\n\r]*")
# A surrogate pair is matched as one unit, so that no piece ends within it.
_TEXT = re.compile(
    rb'(?:[^"\\\x00-\x1f]{1,4096}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]){1,64}'
)


class TooLarge(ValueError):
    """Raised if a body exceeds its limits.

    Attributes:
      code: code of the `JsonLimits`.
    """

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class JsonLimits(NamedTuple):
    """Limits of the contents of a body; None: no limit.

    Attributes:
      text_bytes: maximum bytes of one text, as written in the body.
      num_numbers: maximum numbers in one list.
      num_values: maximum number of values of all kinds, where a list of numbers counts as one.
      code: code of the error for a body that exceeds a limit.
      check: function that raises an error to reject the value before its `WideText` texts are decoded; None: no check.
        It is called only if there are such texts.
    """

    text_bytes: int | None = None
    num_numbers: int | None = None
    num_values: int | None = None
    code: str = "too_large"
    check: Callable[[Any], None] | None = None


class WideText:
    """Text of a body stored as UTF-8 (`data`), because decoded it takes several bytes per character; `str` decodes it."""

    def __init__(self, data: bytes | bytearray):
        self.data = data

    @classmethod
    def take(cls, parts: list[str]) -> "WideText":
        """Returns the text of parts, each of which is freed as soon as it is copied."""
        data = bytearray()
        for i, part in enumerate(parts):
            data += part.encode("utf-8", "surrogatepass")
            parts[i] = part = ""
        return cls(data)

    def __len__(self) -> int:
        """Returns the number of its bytes."""
        return len(self.data)

    def __str__(self) -> str:
        return self.data.decode("utf-8", "surrogatepass")


class NumberList:
    """Numbers of a list in a body, stored as text. Each iteration parses them piece by piece.

    There is no access by index, because each one would parse all numbers before it.
    """

    def __init__(self, body: bytes, start: int, end: int):
        """start, end: offsets in the body of the text between the brackets."""
        self._body, self._start, self._end = body, start, end
        self._length = body.count(b",", start, end) + 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int | float]:
        offset = self._start
        while offset < self._end:
            end = self._piece_end(offset)
            text = self._body[offset:end].decode("ascii")
            try:
                yield from _loads(f"[{text}]")
            except ValueError as error:
                raise ValueError(f"no valid numbers from byte {offset} on: {error}") from None
            offset = end + 1

    def _piece_end(self, offset: int) -> int:
        """Returns the end of a piece, which is a comma or the end of the list."""
        if self._end - offset <= PIECE_BYTES:
            return self._end
        comma = self._body.find(b",", offset + PIECE_BYTES, self._end)
        return self._end if comma < 0 else comma


def parse(
    body: bytes,
    limits: JsonLimits = JsonLimits(),
    *,
    single_pass_bytes: int = MAX_SINGLE_PASS_BYTES,
) -> Any:
    """Returns the value of a JSON body.

    single_pass_bytes: largest body that is parsed by `json.loads`. Raises ValueError if the body is not JSON,
    RecursionError if it has too many levels, and TooLarge if it exceeds the limits.
    """
    if len(body) <= single_pass_bytes:
        return _loads(body.decode("utf-8"))
    return _Pieces(body, limits).read()


class _Pieces:
    """Parser of one body."""

    def __init__(self, body: bytes, limits: JsonLimits):
        self._body, self._limits = body, limits
        self._at = 0  # offset of the next byte
        self._num_values = self._wide_bytes = 0

    def read(self) -> Any:
        value = self._value(0)
        if self._next() != b"":
            raise self._error("extra data")
        if self._wide_bytes <= MAX_WIDE_BYTES:
            return value
        if self._limits.check is not None:
            self._limits.check(value)
        return _decode_texts(value)

    def _value(self, depth: int) -> Any:
        self._count()
        match self._next():
            case b'"':
                return self._text()
            case b"[":
                return self._list(self._inner(depth))
            case b"{":
                return self._object(self._inner(depth))
        if match := _NAME.match(self._body, self._at):
            self._at = match.end()
            return _NAMES[match[0]]
        if match := _NUMBER.match(self._body, self._at):
            self._at = match.end()
            text = match[0].decode("ascii")
            return _integer(text) if text.lstrip("-").isdigit() else _finite(text)
        raise self._error("a value is expected")

    def _list(self, depth: int) -> Any:
        self._at += 1
        items = []
        if self._next() == b"]":
            self._at += 1
            return items
        if (numbers := self._numbers()) is not None:
            return numbers
        while True:
            items.append(self._value(depth))
            if self._ends(b"]"):
                return items

    def _numbers(self) -> NumberList | None:
        """Reads a list that holds numbers only and is long enough to stay text; None for any other list."""
        match = _NUMBERS.match(self._body, self._at)
        assert match is not None, "the pattern also matches nothing"
        start, end = match.span()
        if end - start < 1024 or self._body[end : end + 1] != b"]":
            return None
        numbers = NumberList(self._body, start, end)
        max_numbers = self._limits.num_numbers
        if max_numbers is not None and len(numbers) > max_numbers:
            raise self._too_large(
                f"a list of {len(numbers)} numbers is too long; at most {max_numbers} fit"
            )
        self._at = end + 1
        return numbers

    def _object(self, depth: int) -> dict:
        self._at += 1
        items = {}
        if self._next() == b"}":
            self._at += 1
            return items
        while True:
            if self._next() != b'"':
                raise self._error("a name in double quotes is expected")
            name = str(self._text())
            if self._next() != b":":
                raise self._error("':' is expected")
            self._at += 1
            items[name] = self._value(depth)
            if self._ends(b"}"):
                return items

    def _text(self) -> str | WideText:
        start = self._at = self._at + 1
        end = self._body.find(b'"', start)
        if 0 <= end - start <= PIECE_BYTES and self._body.find(b"\\", start, end) < 0:
            self._check_text(end - start)
            self._at = end + 1
            text = scanstring(self._body[start : end + 1].decode("utf-8"), 0, True)[0]
            if _is_wide(text) and self._count_wide(end - start):
                return WideText(text.encode("utf-8", "surrogatepass"))
            return text
        decoder = codecs.getincrementaldecoder("utf-8")()
        parts: list[str] = []
        wide: WideText | None = None
        while piece := _TEXT.match(self._body, self._at):
            self._at = piece.end()
            self._check_text(self._at - start)
            text = scanstring(decoder.decode(piece[0]) + '"', 0, True)[0]
            if wide is None and _is_wide(text):
                wide = WideText.take(parts)
            if wide is None:
                parts.append(text)
            else:
                wide.data += text.encode("utf-8", "surrogatepass")
        if self._body[self._at : self._at + 1] != b'"':
            raise self._error("the text does not end, or holds a character that must be escaped")
        decoder.decode(b"", final=True)
        self._at += 1
        if wide is None:
            return "".join(parts)
        return wide if self._count_wide(len(wide)) else str(wide)

    def _count_wide(self, size: int) -> bool:
        """Counts the bytes of a wide text; returns whether it is too many to decode this one yet."""
        self._wide_bytes += size
        return self._wide_bytes > MAX_WIDE_BYTES

    def _check_text(self, size: int) -> None:
        max_bytes = self._limits.text_bytes
        if max_bytes is not None and size > max_bytes:
            raise self._too_large(f"a text of more than {max_bytes} bytes is too long")

    def _ends(self, closing: bytes) -> bool:
        """Reads the byte after a value, and returns True if it closes the container, False if it is a comma."""
        byte = self._next()
        if byte not in (b",", closing):
            raise self._error(f"',' or {closing.decode()!r} is expected")
        self._at += 1
        return byte == closing

    def _next(self) -> bytes:
        match = _SPACE.match(self._body, self._at)
        assert match is not None, "the pattern also matches nothing"
        self._at = match.end()
        return self._body[self._at : self._at + 1]

    def _inner(self, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise RecursionError
        return depth + 1

    def _count(self) -> None:
        self._num_values += 1
        max_values = self._limits.num_values
        if max_values is not None and self._num_values > max_values:
            raise self._too_large(f"the body has more than {max_values} values; send fewer at once")

    def _too_large(self, message: str) -> TooLarge:
        return TooLarge(message, self._limits.code)

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{message} at byte {self._at}")


def _is_wide(text: str) -> bool:
    """Whether the characters of a text take more than a byte each in memory."""
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return True
    return False


def _decode_texts(value: Any) -> Any:
    """Decodes the wide texts of a value in place, and returns the value."""
    if isinstance(value, WideText):
        return str(value)
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, WideText | dict | list):
                value[key] = _decode_texts(item)
    return value


def _loads(text: str) -> Any:
    """Returns the value of JSON. Raises ValueError for numbers, integers included, that overflow a float."""
    # A hook for each integer slows down all parsing, and few bodies have an integer that needs it.
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
    raise ValueError(f"{name} is not a JSON number")
