"""Computes checksums of arrays, which show whether bits have changed on disk.

Orbax stores the bytes of arrays without a checksum of its own. A flipped bit, or a page of zeros after a power failure,
would be restored in silence. The checksums are those of `parallel.fingerprint`, which are equal on all meshes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from glm5_jax.parallel import multihost, tree
from glm5_jax.parallel.fingerprint import box_fingerprint, read_fingerprint


def checksums(arrays: PyTree) -> dict[str, list[int]]:
    """Returns the checksum of each array by path. In a pod all processes must call it."""
    # Each is read before the next is computed: on a CPU, programs with collectives that run at once block each other.
    return {path: [*read_fingerprint(_numbers(x))] for path, x in tree.flatten(arrays).items()}


def changed_arrays(arrays: PyTree, saved: Mapping[str, list[int]]) -> list[str]:
    """Returns the paths of arrays with another checksum than the saved one; arrays without a saved one are left out."""
    known = {path: x for path, x in tree.flatten(arrays).items() if path in saved}
    return [path for path, pair in checksums(tree.unflatten(known)).items() if pair != saved[path]]


class ReadChecksums:
    """Checksums of arrays that are read in parts, each at most once by this process or in the same boxes by others.

    saved: checksums of the arrays by name.
    """

    def __init__(self, saved: Mapping[str, Sequence[int]]):
        self._saved = saved
        self._read: dict[str, dict[str, tuple[int, int, int]]] = {}  # size and checksum by box

    def add(self, name: str, starts: Sequence[int], part: np.ndarray, shape: Sequence[int]) -> None:
        """Adds a part that was read. starts: index of its first entry in each dimension."""
        box = f"{list(starts)} {list(part.shape)}"
        if name not in self._saved or box in self._read.get(name, {}):
            return
        numbers = part.astype(np.uint8) if part.dtype == bool else part
        one, other = box_fingerprint(numbers, starts, shape)
        self._read.setdefault(name, {})[box] = part.size, one, other

    def changed(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns the arrays of these sizes that all processes have read in full, with another checksum than the saved one.

        In a pod all processes must call it.
        """
        boxes: dict[str, dict[str, Sequence[int]]] = {}
        for read in multihost.all_gather_objects(self._read):
            for name, parts in read.items():
                boxes.setdefault(name, {}).update(parts)
        sums = {name: np.sum([*parts.values()], axis=0) for name, parts in boxes.items()}
        return [
            name
            for name, (size, *pair) in sums.items()
            if size == sizes[name] and [int(x) % 2**32 for x in pair] != list(self._saved[name])
        ]


def _numbers(x: Any) -> jax.Array:
    """Returns the numbers of an array: of random keys their data, of truth values zeros and ones."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.uint8) if x.dtype == bool else x
