"""Describes the weights that a trainer offers: their arrays, the boxes of each, and the processes that hold these.

Arrays are named by the path of their leaf, and by their field if the leaf has several, as in
"moe_layers/experts/gate.packed". The checksum of all weights is the hash of the arrays' names, dtypes, shapes and
fingerprints. It does not depend on how they are sharded.

A trainer of adapters (model/lora.py) offers the frozen weights and the adapters. An engine merges them as it loads them,
and keeps the frozen ones in host memory, so that later pushes send it the adapters only.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from jax.sharding import Sharding
from jaxtyping import PyTree

from glm5_jax.inference.engine_weights import EngineWeights
from glm5_jax.inference.request_bodies import Version
from glm5_jax.model.lora import is_adapter
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel.boxes import Box
from glm5_jax.parallel.tree import is_compound, unflatten
from glm5_jax.runtime.json_structs import Count, JsonStruct
from pallas_kernels.quantized_weights import Fp8, Int4, Int8

FIELD = "."  # between the path of a leaf and the name of one of its arrays
_CLASSES = {
    frozenset(field.name for field in dataclasses.fields(kind)): kind
    for kind in (Int8, Int4, Fp8, RotatedNorm)
}
_MAX_UINT32 = 2**32 - 1
_Word = Annotated[int, msgspec.Meta(ge=0, le=_MAX_UINT32)]


class ArrayOffer(JsonStruct, kw_only=True, frozen=True):
    """Array of an offer.

    Attributes:
      dtype: name of the dtype.
      shape: shape of the full array.
      fingerprint: fingerprint of the full array (`parallel.fingerprint`).
      boxes: distinct boxes that divide the array.
      owners: numbers of the processes that hold each box.
    """

    dtype: str
    shape: tuple[Count, ...]
    fingerprint: tuple[_Word, _Word]
    boxes: tuple[Box, ...]
    owners: tuple[tuple[Count, ...], ...]


class Offer(JsonStruct, kw_only=True, frozen=True):
    """Weights that the processes of a trainer offer.

    Attributes:
      version: number of optimiser steps that produced these weights.
      arithmetic: fields that determine what the model computes (`ModelConfig.arithmetic`).
      arrays: arrays by name.
      base: checksum of other weights that the processes hold, to send changes against; None: none.
      lora_scale: factor of the products of adapters, which are among the arrays; None: there are no adapters.
    """

    version: Version
    arithmetic: dict[str, Any]
    arrays: dict[str, ArrayOffer]
    base: str | None = None
    lora_scale: float | None = None

    @property
    def checksum(self) -> str:
        """The checksum of all weights."""
        return _checksum(self.arrays, "" if self.lora_scale is None else f"{self.lora_scale}\n")

    @property
    def frozen(self) -> dict[str, ArrayOffer]:
        """The arrays that are no adapters."""
        return {name: array for name, array in self.arrays.items() if not is_adapter(name)}

    @property
    def frozen_checksum(self) -> str:
        """The checksum of the arrays that are no adapters."""
        return _checksum(self.frozen)


def _checksum(arrays: Mapping[str, ArrayOffer], first: str = "") -> str:
    lines = (
        f"{name} {array.dtype} {array.shape} {array.fingerprint}\n"
        for name, array in sorted(arrays.items())
    )
    return hashlib.sha256((first + "".join(lines)).encode()).hexdigest()[:32]


def named_arrays(path: str, leaf: Any) -> dict[str, Any]:
    """Returns {name: array} of a leaf, which may consist of several arrays."""
    if not is_compound(leaf):
        return {path: leaf}
    weight: Any = leaf  # of a class that is a dataclass
    return {
        f"{path}{FIELD}{field.name}": getattr(weight, field.name)
        for field in dataclasses.fields(weight)
    }


def join_arrays(arrays: Mapping[str, Any]) -> PyTree:
    """Returns the tree of {name: array}, the opposite of `named_arrays`. Raises ValueError for unknown fields."""
    leaves: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        path, _, field = name.partition(FIELD)
        if field:
            fields.setdefault(path, {})[field] = array
        else:
            leaves[path] = array
    for path, of_leaf in fields.items():
        kind = _CLASSES.get(frozenset(of_leaf))
        if kind is None or path in leaves:
            raise ValueError(
                f"{path} is offered as {sorted(of_leaf)}, which is no quantised weight"
            )
        leaves[path] = kind(**of_leaf)
    return unflatten(leaves)


def target_shardings(weights: EngineWeights, names: Iterable[str]) -> dict[str, Sharding]:
    """Returns the sharding of each offered array on an engine's devices. Names that it lacks are left out.

    A plain array that becomes a quantised weight gets the sharding of a plain weight. Adapters are small: every device
    gets all of them.
    """
    targets = {}
    for path, leaf in weights.abstract.items():
        targets |= {name: x.sharding for name, x in named_arrays(path, leaf).items()}
        targets[path] = leaf.sharding if not is_compound(leaf) else weights.plain_sharding(path)
    everywhere = weights.replicated_sharding
    targets |= {name: everywhere for name in names if is_adapter(name)}
    return {name: targets[name] for name in names if name in targets}
