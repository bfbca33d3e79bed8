"""Encodes a structure and arrays as one message: two lengths, the head as MessagePack, and the bytes of the arrays.

The head is the structure with the dtypes and shapes of the arrays. Receivers know the type of the structure.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

_LENGTHS = struct.Struct("!IQ")  # bytes of the head, and of the arrays
LENGTHS_SIZE = _LENGTHS.size
Head = TypeVar("Head")


def encode(head: msgspec.Struct, arrays: Sequence[np.ndarray] = ()) -> bytes:
    """Returns the message of a structure and arrays."""
    data = msgspec.msgpack.encode((head, [(a.dtype.name, a.shape) for a in arrays]))
    lengths = _LENGTHS.pack(len(data), sum(a.nbytes for a in arrays))
    return b"".join([lengths, data, *(a.tobytes() for a in arrays)])


def lengths(data: bytes) -> tuple[int, int]:
    """Returns the bytes of the head and of the arrays, from the first LENGTHS_SIZE bytes of a message."""
    return _LENGTHS.unpack(data)


class ArrayMessages(Generic[Head]):
    """Decoder of messages whose structure has a given type."""

    def __init__(self, head: Any):
        """head: type of the structure, or a union of types with tags."""
        self._decoder = msgspec.msgpack.Decoder(tuple[head, list[tuple[str, tuple[int, ...]]]])

    def read(self, read: Callable[[int], bytes]) -> tuple[Head, list[np.ndarray]]:
        """Reads one message and returns its structure and arrays.

        read: returns the next bytes of a stream, exactly as many as it is asked for.
        """
        head_bytes, body_bytes = lengths(read(LENGTHS_SIZE))
        return self.decode(read(head_bytes), read(body_bytes))

    def decode(self, head: bytes, body: bytes) -> tuple[Head, list[np.ndarray]]:
        """Returns the structure and the arrays of a head and a body. Raises ValueError if they do not match."""
        structure, types = self._decoder.decode(head)
        return structure, list(_split(body, types))


def _split(body: bytes, types: Iterable[tuple[str, tuple[int, ...]]]) -> Iterable[np.ndarray]:
    """Yields the arrays in the bytes of a message."""
    start = 0
    for name, shape in types:
        try:
            dtype = np.dtype(name)
            count = math.prod(shape)
            yield np.frombuffer(body, dtype, count, start).reshape(shape)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"an array of {name:.40} {shape} cannot be read: {error}") from None
        start += count * dtype.itemsize
