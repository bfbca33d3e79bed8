"""Encodes values as JSON, a large one in pieces, so that other threads of the process run in between.

`json.dumps` holds the interpreter until it is done: 0.2 s for the log-probs of 8,000 tokens with 20 alternatives each,
which blocks an event loop. A thread that encodes the same value in pieces lets the loop run after each piece.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_MAX_DEPTH = 4  # of the containers that are encoded in pieces, such as the choices of a reply
_RUN_LENGTH = 64  # items of a list that are encoded in one piece


def json_bytes(value: Any) -> bytes:
    """Encodes a value as JSON on one line; structs of msgspec become objects without the fields that have their default.

    Unpaired surrogates become "?", numbers that are not finite null.
    """
    try:
        text = _dump(value)
    except ValueError:
        text = _dump(_finite(value))
    return text.encode("utf-8", "replace")


def _dump(value: Any) -> str:
    return json.dumps(
        value,
        ensure_ascii=False,
        separators=(",", ":"),
        allow_nan=False,
        default=msgspec.to_builtins,
    )


def _finite(value: Any) -> Any:
    """Returns a value with None instead of Infinity and NaN, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, msgspec.Struct):
        return _finite(msgspec.to_builtins(value))
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def encode_in_pieces(value: Any) -> bytes:
    """Returns the result of `json_bytes`; call it in a thread other than that of the event loop."""
    return b"".join(_pieces(value, _MAX_DEPTH))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Yields the JSON of a value in pieces; depth: levels of containers that may be split."""
    if depth and isinstance(value, Mapping):
        yield b"{"
        for i, (name, item) in enumerate(value.items()):
            yield b"," * (i > 0) + json_bytes(name) + b":"
            yield from _pieces(item, depth - 1)
        yield b"}"
    elif isinstance(value, list | tuple):
        yield b"["
        has_containers = depth and value and isinstance(value[0], Mapping | list | tuple)
        step = 1 if has_containers else _RUN_LENGTH
        for start in range(0, len(value), step):
            yield b"," * (start > 0)
            if has_containers:
                yield from _pieces(value[start], depth - 1)
            else:
                yield json_bytes(value[start : start + step])[1:-1]
        yield b"]"
    else:
        yield json_bytes(value)
