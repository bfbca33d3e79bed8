"""Computes checksums of arrays, which show whether bits have changed on disk.

Orbax stores the bytes of arrays without a checksum of its own. A flipped bit, or a page of zeros after a power failure,
would be restored in silence. The checksums are those of `parallel.fingerprint`, which are equal on all meshes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from glm5_jax.parallel import tree
from glm5_jax.parallel.fingerprint import read_fingerprint


def checksums(arrays: PyTree) -> dict[str, list[int]]:
    """Returns the checksum of each array by path. In a pod all processes must call it."""
    # Each is read before the next is computed: on a CPU, programs with collectives that run at once block each other.
    return {path: [*read_fingerprint(_numbers(x))] for path, x in tree.flatten(arrays).items()}


def changed_arrays(arrays: PyTree, saved: Mapping[str, list[int]]) -> list[str]:
    """Returns the paths of arrays with another checksum than the saved one; arrays without a saved one are left out."""
    known = {path: x for path, x in tree.flatten(arrays).items() if path in saved}
    return [path for path, pair in checksums(tree.unflatten(known)).items() if pair != saved[path]]


def _numbers(x: Any) -> jax.Array:
    """Returns the numbers of an array: of random keys their data, of truth values zeros and ones."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.uint8) if x.dtype == bool else x
