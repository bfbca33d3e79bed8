"""Random orthogonal bases, and products with them whose bits do not depend on how a weight is sharded.

A Hadamard basis is applied by additions in a fixed order: the doublings of Sylvester's construction, then the matrix of
Paley's. A device with any part of a weight's rows therefore computes the same bits as one with all of them, in
size * (log2(doublings) + base) additions a row instead of size**2 multiplications.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.numerics import accum_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Basis:
    """Orthogonal matrix.

    Attributes:
      matrix: float64[size size].
      signs: signs [size] of the rows of a Hadamard matrix that make up `matrix`; None: it has another form.
    """

    matrix: np.ndarray
    signs: np.ndarray | None = None


def random_basis(size: int, seed: int | Sequence[int]) -> Basis:
    """Returns a random orthogonal matrix.

    It is a Hadamard matrix with random signs if one of this size is known, because that spreads a channel evenly.
    Otherwise it is drawn uniformly.
    """
    draw = np.random.default_rng(seed)
    known = hadamard(size)
    if known is not None:
        signs = draw.choice([-1.0, 1.0], size)
        return Basis(signs[:, None] * known / np.sqrt(size), signs)
    q, r = np.linalg.qr(draw.standard_normal((size, size)))
    return Basis(q * np.sign(np.diag(r)))


@functools.cache
def hadamard(size: int) -> np.ndarray | None:
    """Returns a Hadamard matrix by Sylvester's doubling or Paley's construction, or None if neither gives one."""
    if size == 1:
        return np.ones((1, 1))
    half = hadamard(size // 2) if size % 2 == 0 else None
    if half is not None:
        return np.block([[half, half], [half, -half]])
    prime = size - 1
    if prime % 4 != 3 or any(prime % i == 0 for i in range(2, int(prime**0.5) + 1)):
        return None
    squares = {i * i % prime for i in range(1, prime)}
    character = np.array([0] + [1 if i in squares else -1 for i in range(1, prime)])
    index = np.arange(prime)
    out = np.ones((size, size))
    out[1:, 0] = -1
    out[1:, 1:] = character[(index[:, None] - index) % prime] + np.eye(prime)
    return out


def times_basis(w: Array, basis: Basis, *, dim: int, size: int) -> Array:
    """Multiplies the first `size` numbers along dimension `dim` of a weight by an orthogonal matrix."""
    inner = accum_dtype(w.dtype)
    if basis.signs is None:
        return _times_matrix(w, jnp.asarray(basis.matrix, inner), dim=dim, size=size)
    # The program contains no product that is added: one that rounds once would change bits.
    return _times_hadamard(w, jnp.asarray(basis.signs, inner), dim=dim, size=size)


@functools.partial(jax.jit, static_argnames=("dim", "size"))
def _times_matrix(w: Array, matrix: Array, *, dim: int, size: int) -> Array:
    head, tail = jnp.split(w, [size], axis=dim)
    head = jnp.tensordot(head.astype(matrix.dtype), matrix, (dim, 0), precision="highest")
    head = jnp.moveaxis(head, -1, dim).astype(w.dtype)
    return jnp.concatenate([head, tail], axis=dim)


@functools.partial(jax.jit, static_argnames=("dim", "size"))
def _times_hadamard(w: Array, signs: Array, *, dim: int, size: int) -> Array:
    head, tail = jnp.split(w, [size], axis=dim)
    rows = jnp.moveaxis(head.astype(signs.dtype), dim, -1)
    rows = times_hadamard(rows * signs) * jnp.asarray(1 / np.sqrt(size), signs.dtype)
    head = jnp.moveaxis(rows, -1, dim).astype(w.dtype)
    return jnp.concatenate([head, tail], axis=dim)


def times_hadamard(x: Float[Array, "... size"]) -> Float[Array, "... size"]:
    """Returns x @ hadamard(size). Raises ValueError if no such matrix is known."""
    size = x.shape[-1]
    if size == 1:
        return x
    if size % 2 == 0 and hadamard(size // 2) is not None:
        first, second = jnp.split(x, 2, axis=-1)
        halves = jnp.stack([first + second, first - second], axis=-2)
        return times_hadamard(halves).reshape(x.shape)
    matrix = hadamard(size)
    if matrix is None:
        raise ValueError(f"no Hadamard matrix of size {size} is known")
    total = jnp.zeros_like(x)
    for i, row in enumerate(matrix):
        total = total + x[..., i, None] * jnp.asarray(row, x.dtype)  # the products are exact
    return total
