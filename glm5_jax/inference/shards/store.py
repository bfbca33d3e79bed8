"""Holds boxes of arrays in host memory, and encodes parts of them for a transfer."""

import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from glm5_jax.parallel.boxes import Box, intersect, slices_in

FULL, CHANGES, SAME = "full", "changes", "same"  # forms of an encoded part


class EncodedPart(NamedTuple):
    """Part of an array as it is sent.

    Attributes:
      form: FULL: all numbers. CHANGES: a bit for each number, then the numbers that differ from the base. SAME: nothing.
      data: bytes.
      crc: CRC-32 of the bytes.
    """

    form: str
    data: bytes | memoryview
    crc: int


class Shards:
    """Boxes of the arrays of one version of weights. Any thread may read and write.

    Attributes:
      checksum: checksum of the version.
    """

    def __init__(
        self,
        checksum: str,
        arrays: Mapping[str, Mapping[Box, np.ndarray]],
        is_complete: bool = True,
    ):
        """arrays: boxes by array. is_complete: whether they have their numbers; False: `write` adds them."""
        self.checksum = checksum
        self._arrays = {name: dict(boxes) for name, boxes in arrays.items()}
        self._written: set[tuple[str, Box]] | None = None if is_complete else set()
        self._reused: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """The bytes of all boxes."""
        return sum(x.nbytes for boxes in self._arrays.values() for x in boxes.values())

    def missing(self) -> Iterator[tuple[str, Box]]:
        """Yields (array, box) of the boxes that are to be written."""
        for name, boxes in self._arrays.items():
            if name not in self._reused:
                yield from ((name, box) for box in boxes)

    def reuse(self, other: "Shards", name: str) -> None:
        """Takes the boxes of an array from complete shards that have the same numbers."""
        self._arrays[name] = other._arrays[name]
        self._reused.add(name)

    def read(self, name: str, box: Box) -> np.ndarray | None:
        """Returns the numbers of a box inside one of the boxes; None: there is none, or it is not written yet."""
        if self._is_awaited(name) and (name, box) not in (self._written or ()):
            return None
        for outer, array in self._arrays.get(name, {}).items():
            if len(outer) == len(box) and intersect(box, outer) == box:
                return array[slices_in(box, outer)]
        return None

    def is_awaited(self, name: str, box: Box) -> bool:
        """Returns whether a box that cannot be read now may be written later."""
        if not self._is_awaited(name):
            return False
        boxes = self._arrays.get(name, {})
        return any(len(outer) == len(box) and intersect(box, outer) == box for outer in boxes)

    def _is_awaited(self, name: str) -> bool:
        return self._written is not None and name not in self._reused

    def write(self, name: str, outer: Box, box: Box, part: np.ndarray) -> None:
        """Writes the numbers of a box that is inside the box `outer`."""
        self._arrays[name][outer][slices_in(box, outer)] = part
        if self._written is not None:
            self._written.add((name, box))

    def mark_complete(self) -> None:
        """Makes all boxes readable, after every part of them was written."""
        self._written = None

    def discard(self, name: str) -> None:
        """Frees the boxes of an array."""
        self._arrays.pop(name, None)


def encode(part: np.ndarray, base: np.ndarray | None) -> EncodedPart:
    """Encodes a part in the shortest form. base: the same part of other weights; None: the receiver has none."""
    part = np.ascontiguousarray(part).reshape(-1)
    form, data = FULL, part.view(np.uint8).data  # no copy, if the part is contiguous
    if base is not None:
        changed = _bits(part) != _bits(np.ascontiguousarray(base).reshape(-1))
        values = part[changed]
        mask = np.packbits(changed)
        if not len(values):
            form, data = SAME, b""
        elif mask.nbytes + values.nbytes < part.nbytes:
            form, data = CHANGES, mask.tobytes() + values.view(np.uint8).tobytes()
    return EncodedPart(form, data, zlib.crc32(data))


def decode(
    encoded: EncodedPart, shape: tuple[int, ...], dtype: np.dtype, base: np.ndarray | None
) -> np.ndarray:
    """Returns the part. Raises ValueError if its bytes are not those that were sent, or it has another size."""
    form, data, crc = encoded
    if zlib.crc32(data) != crc:
        raise ValueError("the bytes have another checksum than was sent")
    if form == FULL:
        _check_size(len(data), int(np.prod(shape)) * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape)
    if base is None or base.shape != shape or form not in (CHANGES, SAME):
        raise ValueError(f"the form {form!r} does not fit the weights that are held")
    if form == SAME:
        return base
    out = np.array(base, order="C").reshape(-1)
    mask = np.frombuffer(data, np.uint8, min(len(data), -(-out.size // 8)))
    changed = np.unpackbits(mask, count=min(out.size, 8 * len(mask))).astype(bool)
    _check_size(len(data), len(mask) + int(changed.sum()) * dtype.itemsize)
    out[np.flatnonzero(changed)] = np.frombuffer(data, dtype, offset=len(mask))
    return out.reshape(shape)


def _check_size(size: int, expected: int) -> None:
    if size != expected:
        raise ValueError(f"{size} bytes arrived, not {expected}")


def _bits(x: np.ndarray) -> np.ndarray:
    """Returns the bits as integers, so that zeros of different sign differ and equal NaNs are equal."""
    return x.view(f"u{x.itemsize}")
