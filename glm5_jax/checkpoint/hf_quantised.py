"""Stores quantised and rotated weights in files, in the formats of compressed-tensors where it has one.

The format is "mixed-precision". Each kind of leaf has one format, under a weight's name NAME [out in]:

    Int8         int-quantized     NAME int8, NAME_scale float32[out, 1]
    Int4         pack-quantized    NAME_packed, NAME_scale, NAME_shape (`hf_int4`)
    RotatedNorm  (ours only)       NAME, and with `.weight` replaced by `.rotation` [d d], which rotates the stream back

config.json names the layers of the first two formats, whose inputs are quantised to int8 per token. Engines read such
files, but none rotates a stream back: only `hf_import.load_quantised` reads those of a rotated model.
"""

import dataclasses
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from glm5_jax.checkpoint import hf_int4, hf_names
from glm5_jax.model.rotated_norm import RotatedNorm
from pallas_kernels.quantized_weights import CompositeWeight, Int4, Int8
from pallas_kernels.w4a8_matmul.quantize import pack_int4, unpack_int4

FORMAT = "mixed-precision"
_SCALE, _WEIGHT, _ROTATION = "_scale", ".weight", ".rotation"
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_COMMON = {"type": "int", "symmetric": True, "dynamic": False}


def config_of(leaves: dict, table: list[hf_names.Piece]) -> dict | None:
    """Returns the `quantization_config` of files with these {path: leaf}; None if no leaf is quantised.

    Raises ValueError if experts have different group sizes.
    """
    targets = {Int8: set(), Int4: set()}
    groups = {leaf.group for leaf in leaves.values() if isinstance(leaf, Int4)}
    if len(groups) > 1:
        raise ValueError(f"experts in groups of {sorted(groups)}; quantise all of them with one")
    for piece in table:
        if (kind := type(leaves[piece.path])) in targets:
            module = re.escape(piece.name.removesuffix(_WEIGHT))
            targets[kind].add("re:" + re.sub(r"\d+", r"\\d+", module) + "$")
    config = _config(sorted(targets[Int8]), sorted(targets[Int4]), max(groups, default=None))
    return config if config["config_groups"] else None


def _config(int8: list[str], int4: list[str], group: int | None) -> dict:
    def scheme(targets, form, **weights):
        inputs = {"input_activations": _INPUTS, "output_activations": None}
        return inputs | {"targets": targets, "format": form, "weights": _COMMON | weights}

    parts = []
    if int8:
        parts.append(scheme(int8, "int-quantized", num_bits=8, strategy="channel"))
    if int4:
        parts.append(scheme(int4, "pack-quantized", num_bits=4, strategy="group", group_size=group))
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [],
        "config_groups": {f"group_{i}": part for i, part in enumerate(parts)},
    }


def group_of(config: Any) -> int | None:
    """Returns the group size of int4 weights in a `quantization_config` of `config_of`; None: it has no int4 weights.

    Raises ValueError for any other config.
    """
    try:
        targets, group = {8: [], 4: []}, None
        for part in config["config_groups"].values():
            targets[part["weights"]["num_bits"]] = part["targets"]
            group = part["weights"].get("group_size", group)
        if config == _config(targets[8], targets[4], group):
            return group
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError(
        f"quantization_config is {reprlib.repr(config)}, but save_hf writes another one for quantised models; "
        "use load_hf for plain weights and experts in int4"
    )


def layout(
    kind: type | None, piece: hf_names.Piece, dtype: DTypeLike, group: int | None
) -> dict[str, tuple]:
    """Returns {tensor: (shape, dtype)} in files for a piece of a leaf.

    - kind: class of the leaf; None, and any class besides those of the module's table: a plain leaf.
    - dtype: dtype of tensors that are not quantised.
    - group: group size of int4.
    """
    name, shape = piece.name, piece.view.shape
    if kind is Int8:
        scale = (shape[0], 1), np.dtype(np.float32)
        return {name: (shape, np.dtype(np.int8)), name + _SCALE: scale}
    if kind is Int4:
        assert group is not None, "int4 weights have a group"
        return dict(zip(hf_int4.names_of(name), hf_int4.layout(shape, group)))
    if kind is RotatedNorm:
        return {name: (shape, dtype), _rotation(name): (2 * shape, dtype)}
    return {name: (shape, dtype)}


def _rotation(name: str) -> str:
    return name.removesuffix(_WEIGHT) + _ROTATION


def tensors(
    leaf: CompositeWeight, piece: hf_names.Piece, on_host: Callable, dtype: DTypeLike
) -> dict[str, np.ndarray]:
    """Returns the tensors of one piece of a leaf.

    on_host(array, at): returns array[at] on the host. dtype: dtype of tensors that are not quantised.
    """
    name, view = piece.name, piece.view
    if isinstance(leaf, Int8):
        q = np.empty(view.shape, np.int8)
        view.of(q)[...] = on_host(leaf.q, piece.at)
        return {name: q, name + _SCALE: on_host(leaf.scale, piece.at).reshape(-1, 1)}
    if isinstance(leaf, Int4):
        q = np.asarray(_unpack(on_host(leaf.packed, piece.at), group=leaf.group)).T
        return hf_int4.pack_integers(name, q, on_host(leaf.scale, piece.at).T)
    assert isinstance(leaf, RotatedNorm), f"{type(leaf).__name__} has no form in files"
    weight, back = on_host(leaf.weight, piece.at), on_host(leaf.back, piece.at)
    return {name: weight.astype(dtype), _rotation(name): back.astype(dtype)}


def leaf_kinds(table: list[hf_names.Piece], stored: Mapping[str, Any]) -> dict[str, type | None]:
    """Returns {path: class of the leaf, None for a plain one}, from names and dtypes of the stored tensors."""
    kinds = {}
    for piece in table:
        kind, name = None, piece.name
        if hf_int4.names_of(name)[0] in stored:
            kind = Int4
        elif _rotation(name) in stored:
            kind = RotatedNorm
        elif name in stored and stored[name].kind == "I8":
            kind = Int8
        kinds[piece.path] = kinds.get(piece.path) or kind
    return kinds


@dataclasses.dataclass(frozen=True)
class TensorReader:
    """Array in files.

    Attributes:
      shape: shape of the array.
      read: function that reads the part within the ranges, a slice(start, stop) per dimension.
    """

    shape: tuple[int, ...]
    read: Callable[[Sequence[slice]], np.ndarray]


def tensor_readers(
    kind: Callable[..., CompositeWeight],
    pieces: list[hf_names.Piece],
    stored: Mapping[str, Any],
    shape: tuple[int, ...],
    group: int | None,
) -> CompositeWeight:
    """Returns a leaf of this class and shape with a `TensorReader` in place of each array.

    pieces, stored: its pieces, and the stored tensors that hold them. Readers of int4 read full groups of rows.
    """

    def reader(shape, dtype, read):
        return TensorReader(shape, lambda ranges: hf_names.fill(pieces, ranges, dtype, read))

    if kind is RotatedNorm:
        [name] = {piece.name for piece in pieces}
        arrays = (stored[n] for n in (name, _rotation(name)))
        return kind(*(TensorReader(x.shape, lambda ranges, x=x: x[tuple(ranges)]) for x in arrays))
    # Int8: scales have the shape of the output channels.
    if kind is Int8:
        lead, outputs = shape[: len(pieces[0].at)], pieces[0].view.dims[0]

        def channels(piece, ranges):
            view = hf_names.View(piece.view.dims[:1], tuple(f.letter for f in outputs))
            name = piece.name + _SCALE
            scale = hf_names.check_scales(name, stored[name][...])
            return view.of(scale.reshape(-1), ranges)

        scales = (*lead, *(f.size for f in outputs))
        return kind(
            reader(shape, np.int8, lambda piece, ranges: piece.view.of(stored[piece.name], ranges)),
            reader(scales, np.float32, channels),
        )
    # Int4: the leaf is transposed, [inputs, outputs], with two inputs per byte.
    assert group is not None, "int4 weights have a group"
    *lead, inputs, n = shape

    def integers(piece, ranges):
        rows, columns = ranges
        entries = stored[hf_int4.names_of(piece.name)[0]]
        inputs = slice(2 * rows.start, 2 * rows.stop)
        return _pack(hf_int4.read_integers(entries, columns, inputs).T, group=group)

    def factors(piece, ranges):
        name = hf_int4.names_of(piece.name)[1]
        return hf_names.check_scales(name, stored[name][tuple(reversed(ranges))]).T

    return kind(
        reader((*lead, inputs // 2, n), np.int8, integers),
        reader((*lead, inputs // group, n), np.float32, factors),
    )


_pack = jax.jit(pack_int4, static_argnames="group")
_unpack = jax.jit(unpack_int4, static_argnames="group")
