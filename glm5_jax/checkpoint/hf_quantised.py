"""Quantised and rotated weights in files, as compressed-tensors has them where it does ("mixed-precision").

Under a weight's name NAME [out in], in one format for each kind of leaf:

    Int8    int-quantized     NAME int8, NAME_scale float32[out, 1]
    Int4    pack-quantized    NAME_packed, NAME_scale, NAME_shape (`hf_int4`)
    Turned  (ours alone)      NAME, and its `.weight` replaced by `.rotation` [d d], which turns the stream back

config.json names the layers of both formats, whose inputs become int8 per token as they come. Engines read such
files, but none turns a stream back: those of a rotated model are for `hf_import.load_quantised`.
"""

import dataclasses
import re
import reprlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from glm5_jax.checkpoint import hf_int4, hf_names
from glm5_jax.model.turned import Turned
from pallas_kernels.quantised import Compound, Int4, Int8
from pallas_kernels.w4a8_matmul.quantize import pack_int4, unpack_int4

FORMAT = "mixed-precision"
_SCALE, _WEIGHT, _ROTATION = "_scale", ".weight", ".rotation"
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_COMMON = {"type": "int", "symmetric": True, "dynamic": False}


def config_of(leaves: dict, table: list[hf_names.Piece]) -> dict | None:
    """`quantization_config` of files with these {path: leaf}, or None if nothing in them is quantised."""
    targets = {Int8: set(), Int4: set()}
    groups = {leaf.group for leaf in leaves.values() if isinstance(leaf, Int4)}
    if len(groups) > 1:
        raise ValueError(f"experts in groups of {sorted(groups)}; quantise all of them with one")
    for piece in table:
        if (kind := type(leaves[piece.path])) in targets:
            module = re.escape(piece.name.removesuffix(_WEIGHT))
            targets[kind].add("re:" + re.sub(r"\d+", r"\\d+", module) + "$")
    made = _config(sorted(targets[Int8]), sorted(targets[Int4]), max(groups, default=None))
    return made if made["config_groups"] else None


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


def group_of(config) -> int | None:
    """The group of int4 weights (None: there are none) of a `quantization_config` that `config_of` gave.
    ValueError for another one."""
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
        f"quantization_config is {reprlib.repr(config)}, not what save_hf writes of a quantised model; "
        "load_hf reads plain weights and experts in int4"
    )


def layout(kind: type, piece: hf_names.Piece, dtype, group: int | None) -> dict[str, tuple]:
    """{tensor: (shape, dtype)} of what stands in files for a piece of a leaf of this class (any other than those
    of the module: a plain one). dtype: of what is not quantised; group: of int4."""
    name, shape = piece.name, piece.view.shape
    if kind is Int8:
        scale = (shape[0], 1), np.dtype(np.float32)
        return {name: (shape, np.dtype(np.int8)), name + _SCALE: scale}
    if kind is Int4:
        return dict(zip(hf_int4.names_of(name), hf_int4.layout(shape, group)))
    if kind is Turned:
        return {name: (shape, dtype), _rotation(name): (2 * shape, dtype)}
    return {name: (shape, dtype)}


def _rotation(name: str) -> str:
    return name.removesuffix(_WEIGHT) + _ROTATION


def tensors(leaf: Compound, piece: hf_names.Piece, on_host, dtype) -> dict[str, np.ndarray]:
    """The tensors of one of a leaf's pieces. on_host(array, at): that part of an array; dtype: of what is not
    quantised."""
    name, view = piece.name, piece.view
    if isinstance(leaf, Int8):
        q = np.empty(view.shape, np.int8)
        view.of(q)[...] = on_host(leaf.q, piece.at)
        return {name: q, name + _SCALE: on_host(leaf.scale, piece.at).reshape(-1, 1)}
    if isinstance(leaf, Int4):
        q = np.asarray(_unpack(on_host(leaf.packed, piece.at), group=leaf.group)).T
        return hf_int4.packed(name, q, on_host(leaf.scale, piece.at).T)
    weight, back = on_host(leaf.weight, piece.at), on_host(leaf.back, piece.at)
    return {name: weight.astype(dtype), _rotation(name): back.astype(dtype)}


def kinds_of(table: list[hf_names.Piece], stored) -> dict[str, type | None]:
    """{path: class of the leaf, None for a plain one}, as names and dtypes of the stored tensors tell."""
    kinds = {}
    for piece in table:
        kind, name = None, piece.name
        if hf_int4.names_of(name)[0] in stored:
            kind = Int4
        elif _rotation(name) in stored:
            kind = Turned
        elif name in stored and stored[name].kind == "I8":
            kind = Int8
        kinds[piece.path] = kinds.get(piece.path) or kind
    return kinds


@dataclasses.dataclass(frozen=True)
class Source:
    """An array in files. read(ranges): the part of it within one slice(start, stop) per dimension."""

    shape: tuple[int, ...]
    read: Callable[[Sequence[slice]], np.ndarray]


def sources(kind: type, pieces: list[hf_names.Piece], stored, shape, group) -> Compound:
    """The leaf of this class and shape, of its pieces in the stored tensors, with a `Source` for each array. Those
    of int4 are read in whole groups of rows."""

    def source(shape, dtype, read):
        return Source(shape, lambda ranges: hf_names.fill(pieces, ranges, dtype, read))

    if kind is Turned:
        [name] = {piece.name for piece in pieces}
        own = (stored[n] for n in (name, _rotation(name)))
        return Turned(*(Source(x.shape, lambda ranges, x=x: x[tuple(ranges)]) for x in own))
    if kind is Int8:
        lead, outputs = shape[: len(pieces[0].at)], pieces[0].view.dims[0]

        def channels(piece, ranges):
            view = hf_names.View(piece.view.dims[:1], tuple(f.letter for f in outputs))
            return view.of(stored[piece.name + _SCALE][...].reshape(-1), ranges)

        scales = (*lead, *(f.size for f in outputs))
        return Int8(
            source(shape, np.int8, lambda piece, own: piece.view.of(stored[piece.name], own)),
            source(scales, np.float32, channels),
        )
    *lead, inputs, n = shape

    def integers(piece, ranges):
        rows, columns = ranges
        entries = stored[hf_int4.names_of(piece.name)[0]]
        inputs = slice(2 * rows.start, 2 * rows.stop)
        return _pack(hf_int4.read_integers(entries, columns, inputs).T, group=group)

    def factors(piece, ranges):
        return stored[hf_int4.names_of(piece.name)[1]][tuple(reversed(ranges))].T

    return Int4(
        source((*lead, inputs // 2, n), np.int8, integers),
        source((*lead, inputs // group, n), np.float32, factors),
    )


_pack = jax.jit(pack_int4, static_argnames="group")
_unpack = jax.jit(unpack_int4, static_argnames="group")
