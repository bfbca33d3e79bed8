"""Reads and writes FP8 weights in the form of the released GLM-5-FP8 checkpoints (and of DeepSeek-V3's).

A linear weight NAME [out in] is stored as two tensors:

    NAME             float8_e4m3fn[out, in]
    NAME_scale_inv   float32[ceil(out / m), ceil(in / n)]: a weight is its FP8 number times its block's scale

config.json has a `quantization_config` with the block (m, n), 128 x 128 in the released files, and the modules that
keep their dtype. Reading multiplies in float32 and rounds once to the dtype in config.json. Writing uses max |w| / 448
of a block as its scale, where 448 is the largest number of float8_e4m3fn.

Source: huggingface.co/zai-org/GLM-5-FP8 (config.json, headers) and transformers 5.23, `finegrained_fp8`.
"""

import dataclasses
import re
import reprlib
from collections.abc import Iterable
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from glm5_jax.checkpoint.hf_names import StoredTensor, check_scales

SCALE = "_scale_inv"
KIND = "F8_E4M3"  # safetensors' name of the dtype
BLOCK = (128, 128)
DTYPE = jnp.dtype(jnp.float8_e4m3fn)
MAX = float(jnp.finfo(DTYPE).max)

# Matrices that the release keeps in its compute dtype, by the end of the module's name.
_PLAIN = (
    "embed_tokens",
    "lm_head",
    "mlp.gate",
    "indexer.weights_proj",
    "eh_proj",
    "shared_head.head",
)
_FIELDS = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("float", "ue8m0", None),
}
_LISTS = ("modules_to_not_convert", "ignored_layers")


def is_fp8(config: Any) -> TypeGuard[dict]:
    """Returns True if a `quantization_config` describes files in this form."""
    return isinstance(config, dict) and config.get("quant_method") == "fp8"


def problem_of(config: dict) -> str | None:
    """Returns why files with this `quantization_config` cannot be read, or None."""
    wrong = []
    for name, value in config.items():
        if name in _FIELDS:
            if value not in _FIELDS[name]:
                wrong.append(f"quantization_config.{name} is {reprlib.repr(value)}")
        elif name != "weight_block_size" and name not in _LISTS:
            wrong.append(f"quantization_config.{name} is unknown")
    block = config.get("weight_block_size")
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        wrong.append(f"quantization_config.weight_block_size is {reprlib.repr(block)}")
    if not wrong:
        return None
    fix = "FP8 files are read if they are e4m3 with a scale for each block; dequantise others to bfloat16 first"
    return f"{', '.join(wrong)}; {fix}"


def config_of(names: Iterable[str], block: tuple[int, int] = BLOCK) -> dict:
    """Returns the `quantization_config` of files with these HF names, whose `is_fp8_weight` weights are FP8."""
    plain = sorted(
        {n.removesuffix(".weight") for n in names if _is_matrix(n) and not is_fp8_weight(n)}
    )
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": plain,
    }


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and not re.search(r"norm\.weight$", name)


def is_fp8_weight(name: str) -> bool:
    """Returns True if the release stores the HF tensor `name` as FP8: all linear weights except a few."""
    return _is_matrix(name) and not name.removesuffix(".weight").endswith(_PLAIN)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight [out in]: one per block, partial blocks included."""
    return tuple(-(-size // width) for size, width in zip(shape, block))


def layout(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> dict[str, tuple]:
    """Returns {tensor: (shape, dtype)} of the two tensors of a weight [out in]."""
    scale = scale_shape(shape, block), np.dtype(np.float32)
    return {name: (shape, DTYPE), name + SCALE: scale}


def _spread(scale: np.ndarray, block: tuple[int, int], rows: slice, columns: slice) -> np.ndarray:
    """Returns the scale of each number in these rows and columns; scale: scales of the blocks that overlap them."""
    for axis, (part, width) in enumerate(zip((rows, columns), block)):
        index = np.arange(part.start, part.stop) // width - part.start // width
        scale = np.take(scale, index, axis=axis - 2)
    return scale


def quantise(weight: np.ndarray, block: tuple[int, int] = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Quantises a weight [out in] to (float8_e4m3fn[out in], float32 scales). A block of zeros has the scale 1."""
    weight = np.asarray(weight, np.float32)
    out, inputs = (slice(0, n) for n in weight.shape)
    (m, n), (rows, columns) = block, scale_shape(weight.shape, block)
    padded = np.zeros((rows * m, columns * n), np.float32)
    padded[out, inputs] = np.abs(weight)
    largest = padded.reshape(rows, m, columns, n).max((1, 3))
    scale = np.where(largest > 0, largest / np.float32(MAX), np.float32(1))
    scaled = weight / _spread(scale, block, out, inputs)
    return np.clip(scaled, -MAX, MAX).astype(DTYPE), scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise:
    """Weight [... out in] in FP8 files; indexing with slices reads that part, dequantised.

    Raises ValueError if a part has scales or numbers that are not finite, or negative scales.

    Attributes:
      name: name of the weight, for errors.
      values, scale: stored tensors, which return arrays when indexed with slices.
      block: rows and columns of a block.
      kind, dtype: dtype that the numbers are rounded to, by safetensors' name and for NumPy.
    """

    name: str
    values: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    kind: str
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.values.shape

    def __getitem__(self, index) -> np.ndarray:
        bounds = (slice(*s.indices(n)[:2]) for s, n in zip(index, self.shape, strict=True))
        *outer, rows, columns = bounds
        around = [slice(s.start // n, -(-s.stop // n)) for s, n in zip((rows, columns), self.block)]
        scale = check_scales(self.name + SCALE, self.scale[(*outer, *around)].astype(np.float32))
        values = self.values[(*outer, rows, columns)].astype(np.float32)
        with np.errstate(over="ignore"):
            numbers = values * _spread(scale, self.block, rows, columns)
        if not np.isfinite(numbers).all():
            raise ValueError(f"{self.name} holds NaN or infinity; fetch the checkpoint again")
        return numbers.astype(self.dtype)


_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def join_scales(stored: dict, block: tuple[int, int], dtype: str) -> tuple[dict, list[str]]:
    """Replaces each FP8 weight and its scales by one `Blockwise`. Returns (stored tensors, problems).

    stored: {name: tensor with `.shape` and `.kind`, indexed with slices}. dtype: dtype in config.json.
    """
    out, problems = dict(stored), []
    kind = _KINDS.get(dtype, "F32")
    for name, values in stored.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) not in stored:
            problems.append(
                f"{name} without {name.removesuffix(SCALE)}; fetch the checkpoint again"
            )
        if values.kind != KIND:
            continue
        scale = out.pop(name + SCALE, None)
        if scale is None:
            problems.append(f"{name} without {name + SCALE}; fetch the checkpoint again")
            continue
        shape = values.shape
        wanted = (*shape[:-2], *scale_shape(shape[-2:], block)) if len(shape) > 1 else ()
        if scale.kind not in ("F32", "BF16") or scale.shape != wanted:
            problems.append(
                f"{name + SCALE} is {scale.kind}{list(scale.shape)}; {name} {list(shape)} in blocks of "
                f"{block[0]} x {block[1]} needs F32{list(wanted)}"
            )
            continue
        out[name] = Blockwise(
            name=name,
            values=values,
            scale=scale,
            block=block,
            kind=kind,
            dtype=jnp.dtype(dtype),
        )
    return out, problems
