"""Boxes of arrays: the parts that devices hold, and how the parts of one sharding are assembled from those of another.

A box has a (start, stop) for each dimension. The distinct boxes of a sharding divide the array.
"""

import collections
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

Box = tuple[tuple[int, int], ...]
MAX_PLACED = 2**28  # numbers of a box that `place` reads at once; our choice


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of an index of slices."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def size_of(box: Box) -> int:
    """Returns the number of entries in a box."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the common part of two boxes; None if there is none."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def slices_in(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the index of a box in an array that holds the outer box. Raises ValueError if it is not inside."""
    if intersect(inner, outer) != inner:
        raise ValueError(f"{format_box(inner)} is not inside {format_box(outer)}")
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer))


def split(box: Box, max_size: int) -> Iterator[Box]:
    """Yields parts of a box, each of at most `max_size` entries. The first dimensions are divided first."""
    size = size_of(box)
    dim = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), None)
    if size <= max_size or dim is None:
        yield box
        return
    start, stop = box[dim]
    step = max(1, max_size * (stop - start) // size)
    for first in range(start, stop, step):
        part = (*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :])
        yield from split(part, max_size)


def cover(needed: Box, offered: Sequence[Box]) -> list[tuple[int, Box]]:
    """Returns (index of the offered box, common part) of all offered boxes that overlap with the needed one.

    offered: disjoint boxes. Raises ValueError if they do not cover the needed box.
    """
    common = ((i, intersect(needed, box)) for i, box in enumerate(offered))
    parts = [(i, part) for i, part in common if part is not None]
    if sum(size_of(part) for _, part in parts) != size_of(needed):
        raise ValueError(f"{format_box(needed)} is not covered by the boxes that are offered")
    return parts


def process_boxes(sharding: Sharding, shape: Sequence[int]) -> dict[Box, list[int]]:
    """Returns the distinct boxes of a sharding, each with the processes that hold it, in order."""
    owners: dict[Box, set[int]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        assert index is not None, "a device of the sharding has an index"
        owners[box_of(index, shape)].add(device.process_index)
    return {box: sorted(processes) for box, processes in owners.items()}


def local_boxes(sharding: Sharding, shape: Sequence[int]) -> dict[Box, list[Any]]:
    """Returns the distinct boxes of this process's devices, each with these devices."""
    holders: dict[Box, list[Any]] = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        assert index is not None, "a device of the sharding has an index"
        holders[box_of(index, shape)].append(device)
    return dict(holders)


def place(
    shape: Sequence[int], read: Callable[[list[slice]], np.ndarray], sharding: Sharding
) -> jax.Array:
    """Creates an array from its boxes. Each number is read once and copied to all its devices of this process.

    A large box is read in parts, which are joined on the devices.
    """
    arrays = []
    for box, devices in local_boxes(sharding, shape).items():
        parts = list(split(box, MAX_PLACED))
        joined: list[Any] = []
        for part_box in parts:
            part = read([slice(*bounds) for bounds in part_box])
            placed = [jax.device_put(part, device) for device in devices]
            if len(parts) == 1:
                joined = placed
            else:
                sizes = [stop - start for start, stop in box]
                joined = joined or [jnp.zeros(sizes, part.dtype, device=d) for d in devices]
                starts = [one.start for one in slices_in(part_box, box)]
                joined = [_write(array, new, starts) for array, new in zip(joined, placed)]
            # Free the part before the next one is read. Three things may hold it: the transfer, this name, and jax's
            # list of host buffers to release, which Python's garbage collector empties.
            jax.block_until_ready(joined)
            del part, placed
            gc.collect(0)
        arrays += joined
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)


@functools.partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, part: jax.Array, starts: list[int]) -> jax.Array:
    """Writes a part of an array in place."""
    return lax.dynamic_update_slice(array, part, starts)


def format_box(box: Box) -> str:
    """Formats a box for a URL, as in "0:4,2:8"."""
    return ",".join(f"{start}:{stop}" for start, stop in box)


def parse_box(text: str) -> Box:
    """Returns the box of a text of `format_box`. Raises ValueError if it is none."""
    try:
        box = tuple(tuple(map(int, part.split(":"))) for part in text.split(",")) if text else ()
        if all(len(bounds) == 2 and 0 <= bounds[0] < bounds[1] for bounds in box):
            return tuple((start, stop) for start, stop in box)
    except ValueError:
        pass
    raise ValueError(f"{text[:100]!r} is no box; give one such as 0:4,2:8")
