"""Fingerprints of arrays, which do not depend on their sharding."""

import functools
from collections.abc import Sequence

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


_MAX_NUMPY = 1 << 16  # numbers; for more a compiled program is faster


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
    starts = [first, *[0] * (x.ndim - 1)] if x.ndim else []
    return _sum_box(jnp, _bits(x), starts, x.shape)


def box_fingerprint(x: np.ndarray, starts: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """Returns what a box adds to the fingerprint of an array of another shape, computed on the CPU.

    The sum over boxes that make up the array, modulo 2**32, is the array's fingerprint.

    x: numbers of the box. starts: index of its first entry in each dimension of the array.
    """
    cpu = _cpu_device() if x.size > _MAX_NUMPY else None
    if cpu is None and x.dtype.itemsize <= 4:
        bits = np.ascontiguousarray(x).view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)
        with np.errstate(over="ignore"):  # of arrays without dimensions
            one, other = map(int, _sum_box(np, bits, starts, shape))
        return one, other
    with jax.default_device(cpu):
        one, other = map(int, _box_on_cpu(x, np.asarray(starts, np.uint32), tuple(shape)))
    return one, other


@functools.partial(jax.jit, static_argnames="shape")
def _box_on_cpu(x: Array, starts: Array, shape: tuple[int, ...]) -> UInt32[Array, "2"]:
    return _sum_box(jnp, _bits(x), list(starts), shape)


@functools.cache
def _cpu_device():
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return None


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype(jnp.uint32)


def _sum_box(xp, bits, starts: Sequence, shape: Sequence[int]):
    """Returns the sums over a box. xp: jax.numpy or numpy. bits: bits of each number, with a last axis of words if it has several."""
    position = xp.zeros(bits.shape, xp.uint32)
    words = bits.ndim - len(shape)
    sizes = zip((*shape, *bits.shape[bits.ndim - words :]), (*starts, *[0] * words))
    for dim, (size, start) in enumerate(sizes):
        index = xp.arange(bits.shape[dim], dtype=xp.uint32) + xp.asarray(start, xp.uint32)
        index = index.reshape([-1 if d == dim else 1 for d in range(bits.ndim)])
        position = position * xp.uint32(size % 2**32) + index
    return xp.stack(
        [
            xp.sum(_mix(xp, bits ^ _mix(xp, position + xp.uint32(salt))), dtype=xp.uint32)
            for salt in (1, 0x85EBCA6B)
        ]
    )


def _mix(xp, h):
    """Returns uint32 whose bits all depend on all bits of h (finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ (h >> xp.uint32(shift))) * xp.uint32(factor)
    return h
