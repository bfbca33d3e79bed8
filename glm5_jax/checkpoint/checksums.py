"""Computes checksums of arrays, which show whether bits have changed on disk.

Orbax stores the bytes of arrays without a checksum of its own. A flipped bit, or a page of zeros after a power failure,
would be restored in silence. The checksums are sums of integers, so they are equal on all meshes and backends.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree, UInt32

from glm5_jax.parallel import tree

_FACTOR = 0x9E3779B1  # odd, about 2^32 divided by the golden ratio, as in Fibonacci hashing


def checksums(arrays: PyTree) -> dict[str, list[int]]:
    """Returns the checksum of each array by path: the sum of its words modulo 2^32, and that of words times weights.

    In a pod all processes must call it.
    """
    sums = {path: _checksum(x, _replicated(x)) for path, x in tree.flatten(arrays).items()}
    return {path: pair.tolist() for path, pair in jax.device_get(sums).items()}


def changed_arrays(arrays: PyTree, saved: Mapping[str, list[int]]) -> list[str]:
    """Returns the paths of arrays with another checksum than the saved one; arrays without a saved one are left out."""
    known = {path: x for path, x in tree.flatten(arrays).items() if path in saved}
    return [path for path, pair in checksums(tree.unflatten(known)).items() if pair != saved[path]]


def _replicated(x) -> NamedSharding | None:
    """Returns the sharding of a result that each device of an array's mesh has; None: there is no mesh."""
    sharding = getattr(x, "sharding", None)
    return NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else None


@functools.partial(jax.jit, static_argnames="sharding")
def _checksum(x: Array | np.ndarray, sharding: NamedSharding | None) -> UInt32[Array, "2"]:
    """Returns both sums of an array. A changed word changes the first, exchanged words change the second."""
    words = _words(jnp.asarray(x))
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * np.uint32(size % 2**32) + lax.broadcasted_iota(
            jnp.uint32, words.shape, axis
        )
    weights = (index * np.uint32(_FACTOR)) | np.uint32(1)
    sums = jnp.stack([jnp.sum(words, dtype=jnp.uint32), jnp.sum(words * weights, dtype=jnp.uint32)])
    return sums if sharding is None else lax.with_sharding_constraint(sums, sharding)


def _words(x: Array) -> UInt32[Array, "..."]:
    """Returns the bits of each number as uint32, of larger numbers with a last dimension of several."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    bits = 8 * x.dtype.itemsize
    if bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)
