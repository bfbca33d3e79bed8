"""Declaring weights: name, axis letters and initialiser on one line.

    class Mla(nnx.Module):
        def __init__(self, declare):
            self.q_b = declare.normal("q_b", "q n hr")

Shapes follow from the letters; inside a stack of layers a leading `l` is added. What a declaration
yields is the caller's choice: random arrays, shapes only, or the arrays of a loaded checkpoint.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.core.tree import flatten


class Buffer(nnx.Variable):
    """State that the forward reads and no gradient changes (the router's balancing bias)."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """One declaration: its path in the tree, shape, dtype and initial distribution."""

    path: str
    letters: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    std: float
    mean: float
    layers: tuple[int, ...] | None  # absolute numbers of the layers in the leading dimension


@dataclasses.dataclass(frozen=True)
class Declare:
    """Declares the weights of one module; `child` and `stack` open the modules inside it."""

    sizes: dict[str, int]
    make: Callable[[Weight], object]
    std: float
    dtype: jnp.dtype
    path: str = ""
    layers: tuple[int, ...] | None = None

    def child(self, name: str, **sizes: int) -> "Declare":
        path = f"{self.path}/{name}" if self.path else name
        return dataclasses.replace(self, path=path, sizes={**self.sizes, **sizes})

    def stack(self, layers) -> "Declare":
        return dataclasses.replace(self, layers=tuple(layers))

    def normal(self, name: str, letters: str) -> nnx.Param:
        """normal(0, std): the initialisation of every matrix (initializer_range)."""
        return nnx.Param(**self._weight(name, letters, self.std, 0.0, self.dtype))

    def around(self, name: str, letters: str, mean: float, std: float) -> nnx.Param:
        """normal(mean, std), for what is no matrix and has numbers of its own."""
        return nnx.Param(**self._weight(name, letters, std, mean, self.dtype))

    def ones(self, name: str, letters: str) -> nnx.Param:
        return nnx.Param(**self._weight(name, letters, 0.0, 1.0, self.dtype))

    def zeros(self, name: str, letters: str) -> nnx.Param:
        return nnx.Param(**self._weight(name, letters, 0.0, 0.0, self.dtype))

    def buffer(self, name: str, letters: str, dtype) -> Buffer:
        """Zeros that no gradient reaches."""
        return Buffer(**self._weight(name, letters, 0.0, 0.0, dtype))

    def _weight(self, name, letters, std, mean, dtype):
        shape = tuple(self.sizes[x] for x in letters.split())
        if self.layers is not None:
            shape, letters = (len(self.layers), *shape), f"l {letters}"
        weight = Weight(
            f"{self.path}/{name}" if self.path else name,
            letters,
            shape,
            dtype,
            std,
            mean,
            self.layers,
        )
        return {"value": self.make(weight), "letters": letters}


def random_values(key: jax.Array) -> Callable[[Weight], jax.Array]:
    """Initial values, for use under `jax.jit`. A key is folded from path and layer number, so neither
    the order of declarations nor the depth of the model changes a weight."""

    def make(weight: Weight):
        if weight.std == 0.0:
            return jnp.full(weight.shape, weight.mean, weight.dtype)
        own = jax.random.fold_in(key, zlib.crc32(weight.path.encode()))
        shape = weight.shape if weight.layers is None else weight.shape[1:]

        def one(layer):
            value = jax.random.normal(jax.random.fold_in(own, layer), shape, jnp.float32)
            return (weight.mean + weight.std * value).astype(weight.dtype)

        return one(0) if weight.layers is None else jax.vmap(one)(jnp.asarray(weight.layers))

    return make


def random_values_at_once(key: jax.Array) -> Callable[[Weight], jax.Array]:
    """The values of `random_values` without jit: draws share a few compiled lengths, where one
    program for all leaves takes longer to compile than a small model to train."""

    def make(weight: Weight):
        if weight.std == 0.0:
            return jnp.full(weight.shape, weight.mean, weight.dtype)
        own = jax.random.fold_in(key, zlib.crc32(weight.path.encode()))
        shape = weight.shape if weight.layers is None else weight.shape[1:]
        count = math.prod(shape)

        def one(layer):
            # Counter-based keys: the first values of a longer draw are those of a shorter one.
            draw = _normal(jax.random.fold_in(own, layer), 1 << max(count - 1, 1).bit_length())
            return np.asarray(draw)[:count].reshape(shape)

        values = one(0) if weight.layers is None else np.stack([one(i) for i in weight.layers])
        return jnp.asarray(weight.mean + weight.std * values, weight.dtype)

    return make


_normal = jax.jit(lambda key, n: jax.random.normal(key, (n,), jnp.float32), static_argnums=1)


def shapes_only(weight: Weight) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a weight; no memory is touched."""
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype)


def given_values(tree) -> Callable[[Weight], jax.Array]:
    """The arrays of a nested dict by path; ValueError on a missing one or another shape."""
    flat = flatten(tree)

    def make(weight: Weight):
        if weight.path not in flat:
            raise ValueError(f"parameter {weight.path} is missing from the tree")
        value = flat[weight.path]
        if tuple(value.shape) != weight.shape:
            raise ValueError(
                f"parameter {weight.path} has shape {tuple(value.shape)}, expected {weight.shape}"
            )
        return value

    return make
