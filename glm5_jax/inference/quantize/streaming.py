"""Converts a model that is larger than memory: each weight is read and converted when it is written.

    leaves = converted_leaves(models.open_leaves(CHECKPOINT)[1], converter)
    save_hf(leaves, OUT, cfg=converter.cfg)

One layer of a weight, or one expert, is in memory at a time. A large weight that stays plain, such as the embedding, is
converted in parts.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from glm5_jax.checkpoint.hf_names import StoredTensor
from glm5_jax.inference.quantize.recipe import WeightConverter
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, is_compound, unflatten

MAX_NUMBERS = 2**27  # of a plain weight that are converted at once; our choice


class ConvertedArray:
    """Array of a converted weight, whose layers and experts are converted when they are read.

    Attributes:
      shape, dtype: shape and dtype of the full array.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        depth: int,
        convert: Callable[[tuple[int, ...]], np.ndarray],
    ):
        """depth: number of dimensions of layers and experts. convert: returns the array of one layer and expert."""
        self.shape, self.dtype = shape, dtype
        self._depth, self._convert = depth, convert

    def __getitem__(self, at: int | tuple[int, ...]) -> np.ndarray:
        """Returns the part of a layer, or of a layer's expert."""
        at = at if isinstance(at, tuple) else (at,)
        if len(at) >= self._depth:
            return self._convert(at[: self._depth])[at[self._depth :]]
        rest = self.shape[len(at) : self._depth]
        parts = [self._convert((*at, *i)) for i in itertools.product(*map(range, rest))]
        return np.stack(parts).reshape(*rest, *parts[0].shape)


class _Unit(NamedTuple):
    """Weight of one layer or expert: its path, and the indices of both. None: there is none, or w has all."""

    path: str
    layer: int | None
    expert: int | None


def converted_leaves(sources: Mapping[str, StoredTensor], converter: WeightConverter) -> PyTree:
    """Returns the tree of converted weights, with a `ConvertedArray` in place of each array.

    sources: weights by path; indexing with slices reads a part.
    """
    # On the host, because an array that is created while a shape is traced cannot be used later.
    norms = functools.cache(lambda path: np.asarray(_read(sources[path])))
    letters = flatten(glm5.axis_letters(converter.cfg))

    def read_norm(path: str) -> jax.Array:
        return jnp.asarray(norms(path))

    @functools.lru_cache(maxsize=1)  # the arrays of a leaf are read one after the other
    def convert(unit: _Unit) -> list[np.ndarray]:
        return _convert(sources[converter.source(unit.path)], unit, converter, read_norm)

    def leaf(path: str, abstract: jax.ShapeDtypeStruct) -> Any:
        names = letters[path].split()
        has_layers, has_experts = names[0] == "l", "/experts/" in path
        depth = has_layers + has_experts
        lead, source = abstract.shape[:depth], sources[converter.source(path)]

        def unit_at(at: tuple[int, ...]) -> _Unit:
            return _Unit(
                path, at[0] if has_layers else None, at[has_layers] if has_experts else None
            )

        shape = source.shape[depth:]
        w = jax.ShapeDtypeStruct(shape, source.dtype)
        first = unit_at((0,) * depth)
        unit = jax.eval_shape(
            lambda w: converter.convert(path, w, read_norm, first.layer, first.expert), w
        )
        arrays, structure = jax.tree.flatten(unit)
        return jax.tree.unflatten(
            structure,
            [
                ConvertedArray(
                    (*lead, *x.shape), x.dtype, depth, lambda at, i=i: convert(unit_at(at))[i]
                )
                for i, x in enumerate(arrays)
            ],
        )

    abstract = flatten(glm5.abstract_params(converter.cfg))
    return unflatten({path: leaf(path, x) for path, x in abstract.items()})


def num_bytes_of(leaves: PyTree) -> int:
    """Returns the bytes of all arrays of a tree."""
    return sum(
        math.prod(x.shape) * np.dtype(x.dtype).itemsize
        for leaf in flatten(leaves).values()
        for x in (jax.tree.leaves(leaf) if is_compound(leaf) else [leaf])
    )


def _convert(
    source: StoredTensor,
    unit: _Unit,
    converter: WeightConverter,
    read_norm: Callable[[str], jax.Array],
) -> list[np.ndarray]:
    """Returns the arrays of one converted weight."""
    path, layer, expert = unit
    lead = tuple(slice(i, i + 1) for i in (layer, expert) if i is not None)
    shape = source.shape[len(lead) :]
    converted = []
    for part in _parts(path, shape, layer, converter):
        w = source[(*lead, *part)]
        w = jnp.asarray(w.reshape(w.shape[len(lead) :]))
        leaf = converter.convert(path, w, read_norm, layer, expert)
        converted.append([np.asarray(x) for x in jax.tree.leaves(leaf)])
        del w, leaf
    if len(converted) == 1:
        return converted[0]
    dim = _divided_dim(path, layer, converter)
    return [np.concatenate([arrays[0] for arrays in converted], dim)]


def _parts(
    path: str, shape: tuple[int, ...], layer: int | None, converter: WeightConverter
) -> Iterator[tuple[slice, ...]]:
    """Yields the index of each part of a weight that is converted at once."""
    dim = _divided_dim(path, layer, converter)
    size = math.prod(shape)
    if dim is None or size <= MAX_NUMBERS:
        yield tuple(slice(0, n) for n in shape)
        return
    step = max(1, MAX_NUMBERS * shape[dim] // size)
    for first in range(0, shape[dim], step):
        rest = [slice(0, n) for n in shape]
        rest[dim] = slice(first, min(first + step, shape[dim]))
        yield tuple(rest)


def _divided_dim(path: str, layer: int | None, converter: WeightConverter) -> int | None:
    """Returns the dimension along which a weight may be converted in parts; None: there is none."""
    if not converter.is_plain(path) or converter.source(path) != path:
        return None
    undivided = converter.undivided_dims(path, layer)
    num_dims = len(converter.unit_letters(path, layer).split())
    return next((dim for dim in range(num_dims) if dim not in undivided), None)


def _read(source: StoredTensor) -> np.ndarray:
    return source[tuple(slice(0, n) for n in source.shape)]
