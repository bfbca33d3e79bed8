"""Reads and writes routed experts as int4 in files: "pack-quantized" of compressed-tensors, which engines read.

Instead of an expert's `weight` [out in] a file has, under the same name (github.com/vllm-project/
compressed-tensors, compressors/pack_quantized):

    weight_packed  int32[out, ceil(in / 8)]: integer 8 i + j of a row, plus 8, in bits 4 j .. 4 j + 3 of
                   entry i; the last entry is padded with 0
    weight_scale   [out, in / group], float32 here: a weight is its integer times its group's scale
    weight_shape   int64[2]: out, in

config.json has a `quantization_config` that names the layers that are not quantised. Engines that store scales in
their compute dtype round them.
"""

import dataclasses
import re
import reprlib
from typing import Any

import jax
import numpy as np

from glm5_jax.checkpoint.hf_names import StoredTensor, check_scales
from pallas_kernels.w4a8_matmul.quantize import round_w4

_EXPERT = re.compile(
    r"(.*\.mlp\.experts\.\d+\.(?:gate|up|down)_proj\.weight)(_packed|_scale|_shape)?"
)
_PER_ENTRY, _OFFSET = 8, 8
_KINDS = {"_packed": ("I32",), "_scale": ("BF16", "F16", "F32"), "_shape": ("I32", "I64")}

# All modules except the routed experts, by the engines' names, including two projections that engines fuse.
_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*mlp\.gate$",
    "re:.*eh_proj.*",
]
# Fields of quantization_config with the values that can be read, the written one first. (): any value, because the field
# does not affect the format. Other fields must be empty.
_FIELDS = {
    "": {
        "quant_method": ("compressed-tensors",),
        "format": ("pack-quantized",),
        "quantization_status": ("compressed", None),
        "kv_cache_scheme": (None,),
        "config_groups": (),
        "ignore": (),
        "version": (),
        "global_compression_ratio": (),
    },
    "config_groups.": {
        "targets": (),
        "input_activations": (None,),
        "output_activations": (None,),
        "format": ("pack-quantized", None),
        "weights": (),
    },
    "config_groups.weights.": {
        "num_bits": (4,),
        "type": ("int", None),
        "symmetric": (True, None),
        "strategy": ("group", None),
        "dynamic": (False, None),
        "actorder": (None,),
        "group_size": (),
        "observer": (),
        "observer_kwargs": (),
        "scale_dtype": (),
        "zp_dtype": (),
    },
}
_FIX = (
    "of quantised checkpoints only routed experts in compressed-tensors' pack-quantized int4, symmetric and "
    "in groups, can be read; dequantise others to bfloat16 first"
)


def config_of(group: int) -> dict:
    """Returns the `quantization_config` of files whose routed experts are int4 with a scale per `group` inputs."""

    def written(part):
        return {name: values[0] for name, values in _FIELDS[part].items() if values}

    weights = written("config_groups.weights.") | {"group_size": group}
    groups = {"group_0": written("config_groups.") | {"targets": ["Linear"], "weights": weights}}
    return written("") | {"config_groups": groups, "ignore": list(_IGNORE)}


def problem_of(config: Any) -> str | None:
    """Returns why files with this `quantization_config` cannot be read, or None.

    The names of the tensors show which layers are packed, so `ignore` is not checked.
    """
    groups = config.get("config_groups") if isinstance(config, dict) else None
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    wrong = []
    if not (
        isinstance(config, dict)
        and isinstance(groups, dict)
        and isinstance(first, dict)
        and isinstance(weights, dict)
        and len(groups) == 1
    ):
        wrong = [f"quantization_config is {reprlib.repr(config)}"]
    else:
        for (part, known), fields in zip(_FIELDS.items(), (config, first, weights)):
            for name in sorted({*known, *fields}):
                value, values = fields.get(name), known.get(name, (None, {}))
                if values and value not in values:
                    wrong.append(f"quantization_config.{part}{name} is {reprlib.repr(value)}")
        size = weights.get("group_size")
        if not isinstance(size, int) or size < 1:
            wrong.append(f"quantization_config.config_groups.weights.group_size is {size!r}")
    return f"{', '.join(wrong)}; {_FIX}" if wrong else None


def is_expert(name: str) -> bool:
    """Returns True if an HF tensor is a matrix of a routed expert, which is packed."""
    match = _EXPERT.fullmatch(name)
    return bool(match) and match[2] is None


def layout(shape: tuple[int, ...], group: int) -> list[tuple]:
    """Returns (shape, dtype) of the three tensors of a weight [out in]."""
    out, inputs = shape
    return [
        ((out, -(-inputs // _PER_ENTRY)), np.dtype(np.int32)),
        ((out, inputs // group), np.dtype(np.float32)),
        ((2,), np.dtype(np.int64)),
    ]


def names_of(name: str) -> list[str]:
    """Returns the names of the three tensors of a packed weight."""
    return [name + suffix for suffix in _KINDS]


_round = jax.jit(round_w4, static_argnames="group")


def pack(name: str, weight: np.ndarray, group: int) -> dict[str, np.ndarray]:
    """Quantises a weight [out in] on the default device, as training does, and returns its three tensors."""
    return pack_integers(name, *(np.asarray(x).T for x in _round(weight.T, group=group)))


def pack_integers(name: str, q: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the three tensors of integers q [out in] from -8 to 7 and their scale [out, in / group]."""
    inputs = q.shape[1]
    padded = np.zeros((len(q), -(-inputs // _PER_ENTRY) * _PER_ENTRY), np.uint8)
    padded[:, :inputs] = q + _OFFSET
    entries = (padded[:, ::2] | padded[:, 1::2] << 4).view("<i4")
    parts = entries, np.ascontiguousarray(scale), np.array(q.shape, np.int64)
    return dict(zip(names_of(name), parts))


def unpack_integers(entries: np.ndarray) -> np.ndarray:
    """Returns int8[out, 8 n] of packed int32[out n]; the padding of the last entry becomes -8."""
    pairs = np.ascontiguousarray(entries).view(np.uint8)
    q = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(entries), -1)
    return q.astype(np.int8) - _OFFSET


def read_integers(entries_of_rows: Any, rows: slice, columns: slice) -> np.ndarray:
    """Returns int8 for these rows and columns of a packed weight [out in].

    entries_of_rows: packed int32[out n], indexed with slices.
    """
    entries, inside = _read_entries(entries_of_rows, rows, columns, _PER_ENTRY)
    return unpack_integers(entries)[:, inside]


def _read_entries(stored, rows: slice, columns: slice, per: int) -> tuple[np.ndarray, slice]:
    """Returns the entries of these columns, `per` columns an entry, and the slice of the columns within them."""
    first, last = columns.start // per, -(-columns.stop // per)
    inside = slice(columns.start - first * per, columns.stop - first * per)
    return np.ascontiguousarray(stored[rows, first:last]), inside


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """Packed weight [out in] in files; indexing with slices reads that part in float32.

    Raises ValueError if a part has scales that are negative or not finite.

    Attributes:
      name: name of the weight, for errors.
      packed, scale: stored tensors.
      shape: shape of the weight, (out, in).
      kind: safetensors' name of the dtype that it is read as.
      dtype: the same as NumPy dtype.
    """

    name: str
    packed: StoredTensor
    scale: StoredTensor
    shape: tuple[int, int]
    kind: str = "F32"
    dtype: np.dtype = np.dtype(np.float32)

    def __getitem__(self, index) -> np.ndarray:
        rows, columns = index
        group = self.shape[1] // self.scale.shape[1]
        q = read_integers(self.packed, rows, columns).astype(np.float32)
        scale, inside = _read_entries(self.scale, rows, columns, group)
        check_scales(names_of(self.name)[1], scale)
        return q * np.repeat(scale.astype(np.float32), group, axis=1)[:, inside]


def join_packed(stored: dict) -> tuple[dict, list[str]]:
    """Replaces the three tensors of each routed expert by a `PackedWeight` under the name of the weight.

    stored: {name: tensor with `.shape` and `.kind`, indexed with slices}. Returns the new dict and the problems, one text
    each.
    """
    out, problems = dict(stored), []
    for name in stored:
        match = _EXPERT.fullmatch(name)
        if not match or match[2] != "_packed":
            continue
        weight, names = match[1], names_of(match[1])
        missing = [n for n in names if n not in stored]
        if missing or weight in stored:
            wrong = f"without {', '.join(missing)}" if missing else f"beside {weight}"
            problems.append(f"{name} {wrong}; fetch the checkpoint again")
            continue
        packed, scale, shape = parts = [out.pop(n) for n in names]
        kinds = [p.kind in _KINDS[suffix] for suffix, p in zip(_KINDS, parts)]
        size = tuple(shape[:].tolist()) if kinds[2] and shape.shape == (2,) else (0, 0)
        if not all(kinds) or not _fit(packed.shape, scale.shape, size):
            shapes = ", ".join(f"{n} {p.kind}{list(p.shape)}" for n, p in zip(names, parts))
            problems.append(f"{shapes} are no weight of {list(size)}; fetch the checkpoint again")
        out[weight] = PackedWeight(name=weight, packed=packed, scale=scale, shape=size)
    return out, problems


def _fit(packed: tuple, scale: tuple, size: tuple[int, int]) -> bool:
    """Returns True if tensors of these shapes form a weight of that size."""
    out, inputs = size
    groups = scale[1] if len(scale) == 2 and scale[0] == out else 0
    return packed == (out, -(-inputs // _PER_ENTRY)) and groups > 0 and inputs % groups == 0
