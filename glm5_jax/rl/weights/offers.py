"""Copies a trainer's weights into host memory, each process its own shards, and describes them for engines.

With a `WeightConverter` the weights are rotated and quantised first, one layer at a time, on the trainer's devices. A device
then converts full rows and groups of a weight, so that the bits are those of one device with the whole weight.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree

from glm5_jax.checkpoint.engine_dtypes import transfer_dtypes
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine_weights import check_params
from glm5_jax.inference.quantize.recipe import WeightConverter
from glm5_jax.inference.shards.offer import ArrayOffer, Offer, named_arrays
from glm5_jax.inference.shards.store import Shards
from glm5_jax.model import glm5
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel.boxes import Box, box_of, process_boxes
from glm5_jax.parallel.fingerprint import read_fingerprint
from glm5_jax.parallel.tree import flatten, is_compound


def make_offer(
    params: PyTree,
    cfg: ModelConfig,
    version: int,
    dtype: str | None = None,
    base: Shards | None = None,
    converter: WeightConverter | None = None,
    frozen: Mapping[str, ArrayOffer] | None = None,
) -> tuple[Offer, Shards]:
    """Returns the offer of a trainer's weights, and the shards that this process holds.

    Weights are cast or converted one at a time. All processes of a pod call it, and get the same offer.

    Args:
      params: parameters of a model of cfg.
      version: version of the weights.
      dtype: dtype of the plain weights (`transfer_dtypes`).
      base: shards of the last offer, of which engines may pull the changes; None: none.
      converter: converts the weights to those of quantised engines; None: they stay plain.
      frozen: the frozen arrays of an earlier offer, which all engines hold, so that only adapters are copied; None: all
        weights are copied.

    Raises ValueError if the parameters are not those of cfg.
    """
    check_params(params, cfg)
    offered_cfg = cfg if converter is None else converter.cfg
    dtypes, copies = transfer_dtypes(offered_cfg, dtype), _Copies()
    copies.offers |= frozen or {}
    if converter is None:
        for path, leaf in flatten(params).items():
            if frozen is not None and path in frozen:
                continue
            copies.add(path, _cast(jnp.asarray(leaf), dtypes[path]))
    else:
        for path, layer, num_layers, leaf in _converted(params, converter):
            is_plain = not is_compound(leaf) or isinstance(leaf, RotatedNorm)
            for name, array in named_arrays(path, leaf).items():
                array = _cast(array, dtypes[path] if is_plain else array.dtype)
                copies.add(name, array, layer, num_layers)
    offer = Offer(
        version=version,
        arithmetic=dict(offered_cfg.arithmetic),
        arrays=copies.offers,
        base=base and base.checksum,
        lora_scale=cfg.lora.scale if cfg.lora.rank else None,
    )
    return offer, Shards(offer.checksum, copies.boxes)


class _Copies:
    """Copies of arrays in host memory.

    Attributes:
      offers: descriptions of the arrays by name.
      boxes: this process's boxes of each array.
    """

    def __init__(self):
        self.offers: dict[str, ArrayOffer] = {}
        self.boxes: dict[str, dict[Box, np.ndarray]] = {}

    def add(
        self, name: str, array: jax.Array, layer: int | None = None, num_layers: int = 0
    ) -> None:
        """Copies an array, or one layer of it. layer: index of the layer among `num_layers`; None: it has none."""
        if layer is not None:
            array = jnp.expand_dims(array, 0)
        first, shape = layer or 0, (*array.shape,)
        owners = {
            _shifted(box, first): processes
            for box, processes in process_boxes(array.sharding, shape).items()
        }
        fingerprint = read_fingerprint(array, first)
        before = self.offers.get(name)
        if before is not None:
            (a, b), (c, d) = fingerprint, before.fingerprint
            fingerprint = (a + c) % 2**32, (b + d) % 2**32
        self.offers[name] = ArrayOffer(
            dtype=array.dtype.name,
            shape=shape if layer is None else (num_layers, *shape[1:]),
            fingerprint=fingerprint,
            boxes=(*(before.boxes if before else ()), *owners),
            owners=(*(before.owners if before else ()), *map(tuple, owners.values())),
        )
        shards = {box_of(shard.index, shape): shard.data for shard in array.addressable_shards}
        for data in shards.values():
            data.copy_to_host_async()
        boxes = self.boxes.setdefault(name, {})
        boxes |= {_shifted(box, first): np.asarray(data) for box, data in shards.items()}


def _shifted(box: Box, first: int) -> Box:
    """Returns the box in an array that begins `first` entries earlier."""
    if not first:
        return box
    (start, stop), *rest = box
    return (start + first, stop + first), *rest


def num_bytes_of(offer: Offer) -> int:
    """Returns the bytes of all offered weights."""
    arrays = offer.arrays.values()
    return sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in arrays)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(x: Array, dtype: np.dtype) -> Array:
    """Returns a copy of an array in another dtype, on the same devices.

    It is a copy in any case, because the trainer's next step overwrites its weights.
    """
    return jnp.copy(x.astype(dtype))


def _converted(
    params: PyTree, converter: WeightConverter
) -> Iterator[tuple[str, int | None, int, Any]]:
    """Yields (path, layer in its stack or None, number of layers, converted leaf) of all weights."""
    flat, letters = flatten(params), flatten(glm5.axis_letters(converter.cfg))
    for path, abstract in flatten(glm5.abstract_params(converter.cfg)).items():
        source = jnp.asarray(flat[converter.source(path)])
        is_stack = letters[path].startswith("l ")
        for layer in range(abstract.shape[0]) if is_stack else (None,):
            w = _whole_rows(source, layer, converter.undivided_dims(path, layer))
            leaf = converter.convert(path, w, flat.__getitem__, layer)
            yield path, layer, abstract.shape[0], leaf


def _whole_rows(x: jax.Array, layer: int | None, undivided: tuple[int, ...]) -> jax.Array:
    """Returns x, or one layer of it, sharded along other dimensions than these."""
    if not isinstance(x.sharding, NamedSharding):
        return x if layer is None else x[layer]
    shape = x.shape if layer is None else x.shape[1:]
    sharding = _sharding_without(x.sharding.mesh, shape, undivided)
    return _resharding(sharding, layer is not None)(x, layer or 0)


def _sharding_without(mesh, shape: tuple[int, ...], undivided: tuple[int, ...]) -> NamedSharding:
    """Returns a sharding over as many axes of the mesh as possible that does not divide these dimensions."""
    claimed: list[list[str]] = [[] for _ in shape]
    for axis, size in mesh.shape.items():
        for dim, axes in enumerate(claimed):
            parts = size * math.prod(mesh.shape[a] for a in axes)
            if size > 1 and dim not in undivided and shape[dim] % parts == 0:
                axes.append(axis)
                break
    return NamedSharding(mesh, P(*(tuple(axes) or None for axes in claimed)))


@functools.cache
def _resharding(sharding: NamedSharding, is_stack: bool):
    """Returns the program that reshards an array, or one layer of it."""
    return jax.jit(lambda x, layer: x[layer] if is_stack else x, out_shardings=sharding)
