"""Fingerprints of arrays, which do not depend on their sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, UInt32


def read_fingerprint(x: jax.Array, first: int = 0) -> tuple[int, int]:
    """Returns `fingerprint` on the host; all processes that hold x call it."""
    sharding = x.sharding
    function = fingerprint
    if isinstance(sharding, NamedSharding) and not x.is_fully_addressable:
        function = _replicated_fingerprint(sharding.mesh)
    one, other = map(int, np.asarray(function(x, np.uint32(first))))
    return one, other


@functools.cache
def _replicated_fingerprint(mesh: Mesh):
    """Returns `fingerprint` with a result that every process can read."""
    return jax.jit(fingerprint, out_shardings=NamedSharding(mesh, P()))


@jax.jit
def fingerprint(x: Array, first: Array | int = 0) -> UInt32[Array, "2"]:
    """Returns a fingerprint of the bits of an array and their positions.

    It does not depend on the sharding, because sums of integers do not depend on their order. So the fingerprint of an
    array is the sum, modulo 2**32, of those of its parts along the first dimension.

    first: index of x's first entry along the first dimension, if x is a part of an array.
    """
    bits = lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for dim, size in enumerate(bits.shape):
        index = lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        index = index + jnp.asarray(first, jnp.uint32) if dim == 0 else index
        position = position * jnp.uint32(size) + index
    return jnp.stack(
        [
            jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(salt))), dtype=jnp.uint32)
            for salt in (1, 0x85EBCA6B)
        ]
    )


def _mix(h: Array) -> Array:
    """Returns uint32 whose bits all depend on all bits of h (finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return h
