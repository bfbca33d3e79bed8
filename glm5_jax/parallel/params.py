"""Declaring weights: name, axis letters and initialiser on one line.

    class Mla(nnx.Module):
        def __init__(self, declare):
            self.q_b = declare.normal("q_b", "q n hr")

Shapes follow from the letters; inside a stack of layers a leading `l` is added. The caller chooses what a
declaration yields (`Declare.make`): random arrays, shapes only, or the arrays of a loaded checkpoint.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import PyTree

from glm5_jax.parallel.tree import flatten


class NonTrainableBuffer(nnx.Variable):
    """State that the forward reads and no gradient changes (the router's balancing bias)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """Declaration of one weight.

    Attributes:
      path: path in the parameter tree, names joined by "/".
      letters: axis letters of the dimensions, separated by spaces.
      shape: shape, with the leading dimension of a layer stack.
      dtype: dtype of the parameter.
      std, mean: parameters of the normal distribution that it is initialised from.
      layers: absolute layer numbers along the leading dimension; None: not in a layer stack.
    """

    path: str
    letters: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    std: float
    mean: float
    layers: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declare:
    """Declares the weights of one module; `child` and `stack` open the modules inside it.

    Attributes:
      sizes: size of each axis letter.
      make: function from a declaration to the value of its variable.
      std: standard deviation of matrices.
      dtype: dtype of the parameters.
      path: path of the module in the tree.
      layers: absolute layer numbers of the stack; None: no stack.
    """

    sizes: dict[str, int]
    make: Callable[[Weight], object]
    std: float
    dtype: jnp.dtype
    path: str = ""
    layers: tuple[int, ...] | None = None

    def child(self, name: str, **sizes: int) -> "Declare":
        """Returns the `Declare` of a submodule; sizes replace or extend those of this module."""
        path = f"{self.path}/{name}" if self.path else name
        return dataclasses.replace(self, path=path, sizes={**self.sizes, **sizes})

    def stack(self, layers: Iterable[int]) -> "Declare":
        """Returns the `Declare` of a stack of these layers."""
        return dataclasses.replace(self, layers=tuple(layers))

    def normal(self, name: str, letters: str) -> nnx.Param:
        """Declares a matrix drawn from normal(0, std), where std is `initializer_range`."""
        return nnx.Param(**self._weight(name, letters, self.std, 0.0, self.dtype))

    def normal_around(self, name: str, letters: str, mean: float, std: float) -> nnx.Param:
        """Declares a weight drawn from normal(mean, std), for vectors and convolutions with other constants."""
        return nnx.Param(**self._weight(name, letters, std, mean, self.dtype))

    def ones(self, name: str, letters: str) -> nnx.Param:
        """Declares a weight that starts at one."""
        return nnx.Param(**self._weight(name, letters, 0.0, 1.0, self.dtype))

    def zeros(self, name: str, letters: str) -> nnx.Param:
        """Declares a weight that starts at zero."""
        return nnx.Param(**self._weight(name, letters, 0.0, 0.0, self.dtype))

    def buffer(self, name: str, letters: str, dtype: DTypeLike) -> NonTrainableBuffer:
        """Declares zeros that no gradient reaches."""
        return NonTrainableBuffer(**self._weight(name, letters, 0.0, 0.0, dtype))

    def _weight(self, name, letters, std, mean, dtype):
        shape = tuple(self.sizes[x] for x in letters.split())
        if self.layers is not None:
            shape, letters = (len(self.layers), *shape), f"l {letters}"
        weight = Weight(
            path=f"{self.path}/{name}" if self.path else name,
            letters=letters,
            shape=shape,
            dtype=dtype,
            std=std,
            mean=mean,
            layers=self.layers,
        )
        return {"value": self.make(weight), "letters": letters}


def random_values(key: jax.Array) -> Callable[[Weight], jax.Array]:
    """Returns a `make` that draws initial values, for use under `jax.jit`.

    The key of a weight is folded from its path and layer number. So neither the order of declarations nor
    the depth of the model changes a weight.
    """

    def make(weight: Weight):
        if weight.std == 0.0:
            return jnp.full(weight.shape, weight.mean, weight.dtype)
        weight_key = jax.random.fold_in(key, zlib.crc32(weight.path.encode()))
        shape = weight.shape if weight.layers is None else weight.shape[1:]

        def draw_layer(layer):
            value = jax.random.normal(jax.random.fold_in(weight_key, layer), shape, jnp.float32)
            return (weight.mean + weight.std * value).astype(weight.dtype)

        return (
            draw_layer(0)
            if weight.layers is None
            else jax.vmap(draw_layer)(jnp.asarray(weight.layers))
        )

    return make


def random_values_at_once(key: jax.Array) -> Callable[[Weight], jax.Array]:
    """Returns a `make` that draws the values of `random_values` without jit.

    Draws share a few compiled lengths, because one program for all leaves takes longer to compile than a
    small model to train.
    """

    def make(weight: Weight):
        if weight.std == 0.0:
            return jnp.full(weight.shape, weight.mean, weight.dtype)
        weight_key = jax.random.fold_in(key, zlib.crc32(weight.path.encode()))
        shape = weight.shape if weight.layers is None else weight.shape[1:]
        count = math.prod(shape)

        def draw_layer(layer):
            # Counter-based keys: the first values of a longer draw are those of a shorter one.
            draw = _normal(
                jax.random.fold_in(weight_key, layer), 1 << max(count - 1, 1).bit_length()
            )
            return np.asarray(draw)[:count].reshape(shape)

        values = (
            draw_layer(0)
            if weight.layers is None
            else np.stack([draw_layer(i) for i in weight.layers])
        )
        return jnp.asarray(weight.mean + weight.std * values, weight.dtype)

    return make


_normal = jax.jit(lambda key, n: jax.random.normal(key, (n,), jnp.float32), static_argnums=1)


def shapes_only(weight: Weight) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a weight, without allocating memory."""
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype)


def values_from(tree: PyTree) -> Callable[[Weight], jax.Array]:
    """Returns a `make` that takes arrays by path from a nested dict.

    It raises ValueError if an array is missing or has another shape.
    """
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
