"""Routed experts as int4 in files: "pack-quantized" of compressed-tensors, which the engines read.

Instead of an expert's `weight` [out in] a file has, under the same name (github.com/vllm-project/
compressed-tensors, compressors/pack_quantized):

    weight_packed  int32[out, ceil(in / 8)]: integer 8 i + j of a row, plus 8, in bits 4 j .. 4 j + 3 of
                   entry i; what fills up the last entry is 0
    weight_scale   [out, in / group], float32 here: a weight is its integer times its group's scale
    weight_shape   int64[2]: out, in

and config.json a `quantization_config` that names the layers without it. Engines that keep scales in
their compute dtype round them.
"""

import dataclasses
import re
import reprlib

import jax
import numpy as np

from pallas_kernels.w4a8_matmul.quantize import round_w4

_EXPERT = re.compile(
    r"(.*\.mlp\.experts\.\d+\.(?:gate|up|down)_proj\.weight)(_packed|_scale|_shape)?"
)
_PER_ENTRY, _OFFSET = 8, 8
_KINDS = {"_packed": ("I32",), "_scale": ("BF16", "F16", "F32"), "_shape": ("I32", "I64")}

# Everything but the routed experts, as engines call it, two projections that they join included.
_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*mlp\.gate$",
    "re:.*eh_proj.*",
]
# The fields of quantization_config with the values that can be read, first the one that is written;
# (): any, as it does not say how the files are. Other fields must be empty.
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
    """`quantization_config` of files whose routed experts are int4 with `group` inputs to a scale."""

    def written(part):
        return {name: values[0] for name, values in _FIELDS[part].items() if values}

    weights = written("config_groups.weights.") | {"group_size": group}
    groups = {"group_0": written("config_groups.") | {"targets": ["Linear"], "weights": weights}}
    return written("") | {"config_groups": groups, "ignore": list(_IGNORE)}


def problem_of(config) -> str | None:
    """Why files with this `quantization_config` cannot be read, or None; which layers are packed they
    say themselves."""
    groups = config.get("config_groups") if isinstance(config, dict) else None
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    wrong = []
    if not isinstance(weights, dict) or len(groups) != 1:
        wrong = [f"quantization_config is {reprlib.repr(config)}"]
    else:
        for (part, known), given in zip(_FIELDS.items(), (config, first, weights)):
            for name in sorted({*known, *given}):
                value, values = given.get(name), known.get(name, (None, {}))
                if values and value not in values:
                    wrong.append(f"quantization_config.{part}{name} is {reprlib.repr(value)}")
        size = weights.get("group_size")
        if not isinstance(size, int) or size < 1:
            wrong.append(f"quantization_config.config_groups.weights.group_size is {size!r}")
    return f"{', '.join(wrong)}; {_FIX}" if wrong else None


def is_expert(name: str) -> bool:
    """Whether this HF tensor is what is packed: a matrix of a routed expert."""
    match = _EXPERT.fullmatch(name)
    return bool(match) and match[2] is None


def layout(shape: tuple[int, int], group: int) -> list[tuple]:
    """(shape, dtype) of the three tensors of a weight [out in]."""
    out, inputs = shape
    return [
        ((out, -(-inputs // _PER_ENTRY)), np.dtype(np.int32)),
        ((out, inputs // group), np.dtype(np.float32)),
        ((2,), np.dtype(np.int64)),
    ]


def names_of(name: str) -> list[str]:
    """The tensors that stand for a packed weight."""
    return [name + suffix for suffix in _KINDS]


_round = jax.jit(round_w4, static_argnames="group")


def pack(name: str, weight: np.ndarray, group: int) -> dict[str, np.ndarray]:
    """The three tensors of a weight [out in], quantised on the default device, as training does there."""
    return packed(name, *(np.asarray(x).T for x in _round(weight.T, group=group)))


def packed(name: str, q: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
    """The three tensors of integers q [out in] from -8 to 7 and their scale [out, in / group]."""
    inputs = q.shape[1]
    filled = np.zeros((len(q), -(-inputs // _PER_ENTRY) * _PER_ENTRY), np.uint8)
    filled[:, :inputs] = q + _OFFSET
    entries = (filled[:, ::2] | filled[:, 1::2] << 4).view("<i4")
    parts = entries, np.ascontiguousarray(scale), np.array(q.shape, np.int64)
    return dict(zip(names_of(name), parts))


def integers(entries: np.ndarray) -> np.ndarray:
    """int8[out, 8 n] of packed int32[out n]: the numbers that fill up the last entry are -8."""
    pairs = np.ascontiguousarray(entries).view(np.uint8)
    q = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(entries), -1)
    return q.astype(np.int8) - _OFFSET


def read_integers(packed, rows: slice, columns: slice) -> np.ndarray:
    """int8 of these rows and columns of a weight [out in], of packed [out n] that is indexed with slices."""
    entries, inside = _around(packed, rows, columns, _PER_ENTRY)
    return integers(entries)[:, inside]


def _around(stored, rows: slice, columns: slice, per: int) -> tuple[np.ndarray, slice]:
    """What stands for these columns, `per` of them in each entry of a row, and where they are among its own."""
    first, last = columns.start // per, -(-columns.stop // per)
    inside = slice(columns.start - first * per, columns.stop - first * per)
    return np.ascontiguousarray(stored[rows, first:last]), inside


@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight [out in] in files; indexing it with slices reads those of its numbers, in float32.

    packed, scale: things with `.shape` that give arrays when they are indexed with slices.
    """

    packed: object
    scale: object
    shape: tuple[int, int]
    kind: str = "F32"  # what it is read as, by safetensors' name
    dtype: np.dtype = np.dtype(np.float32)

    def __getitem__(self, index) -> np.ndarray:
        rows, columns = index
        group = self.shape[1] // self.scale.shape[1]
        q = read_integers(self.packed, rows, columns).astype(np.float32)
        scale, inside = _around(self.scale, rows, columns, group)
        return q * np.repeat(scale.astype(np.float32), group, axis=1)[:, inside]


def unpacked(stored: dict) -> tuple[dict, list[str]]:
    """(stored tensors, a `Packed` for each routed expert's three under the name of its weight, problems).

    stored: {name: tensor with `.shape` and `.kind`, indexed with slices}.
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
            found = ", ".join(f"{n} {p.kind}{list(p.shape)}" for n, p in zip(names, parts))
            problems.append(f"{found} are no weight of {list(size)}; fetch the checkpoint again")
        out[weight] = Packed(packed, scale, size)
    return out, problems


def _fit(packed: tuple, scale: tuple, size: tuple[int, int]) -> bool:
    """Whether tensors of these shapes make a weight of that size."""
    out, inputs = size
    groups = scale[1] if len(scale) == 2 and scale[0] == out else 0
    return packed == (out, -(-inputs // _PER_ENTRY)) and groups > 0 and inputs % groups == 0
