"""Describes the weights of a push to engines: tensors under their HF names with checksums, and their version.

    FOLDER/120/manifest.json      next to the safetensors files that `save_hf` writes

A push over the network sends the same contents. The checksum of all tensors is the hash of their names, dtypes, shapes
and checksums. So equal weights have equal checksums, however and in whatever order they were transferred.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from glm5_jax.checkpoint import hf_names, models
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5, quant
from glm5_jax.parallel import tree
from glm5_jax.runtime.files import read_text

FILE = "manifest.json"
_MAX_LISTED = 20  # tensors that an error lists


class Tensor(NamedTuple):
    """Description of a tensor.

    Attributes:
      dtype: name of the dtype.
      shape: shape in HF's layout.
      checksum: checksum of the bytes; None: not known yet.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str | None = None


@dataclasses.dataclass
class Manifest:
    """Description of one version of a model's weights.

    Attributes:
      version: number of optimiser steps that produced these weights.
      arithmetic: fields that determine what the model computes (`ModelConfig.arithmetic`).
      tensors: descriptions of the tensors by HF name.
    """

    version: int
    arithmetic: Mapping[str, object]
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, cfg: ModelConfig, version: int, dtype: DTypeLike | None = None) -> "Manifest":
        """Returns the manifest of all weights of a model as they are transferred, without checksums.

        The tensors are in the order of `named_tensors`. dtype: see `transfer_dtypes`.
        """
        table = hf_names.by_name(
            hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg))
        )
        kinds = transfer_dtypes(cfg, dtype)
        tensors = {
            name: Tensor(kinds[piece.path].name, piece.view.shape)
            for name, (piece, *_) in table.items()
        }
        return cls(version, cfg.arithmetic, tensors)

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds a tensor with its checksum."""
        self.tensors[name] = Tensor(array.dtype.name, array.shape, checksum(array))

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        tensors = self.tensors.values()
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in tensors)

    @property
    def checksum(self) -> str:
        """The checksum of all tensors together; each must have its checksum."""
        lines = (f"{name} {' '.join(map(str, x))}\n" for name, x in sorted(self.tensors.items()))
        return _hash("".join(lines).encode())

    def check(self, cfg: ModelConfig) -> None:
        """Raises ValueError with the differences, unless the tensors fit a model of cfg."""
        wanted = _layout(cfg)
        lines = [f"missing: {n} {list(s)}" for n, (s, _) in wanted.items() if n not in self.tensors]
        for name, tensor in self.tensors.items():
            if name not in wanted:
                lines.append(f"unknown: {name} {list(tensor.shape)}")
                continue
            shape, kinds = wanted[name]
            if tensor.shape != shape:
                lines.append(f"wrong shape: {name} is {list(tensor.shape)}, not {list(shape)}")
            if tensor.dtype not in kinds:
                lines.append(f"wrong dtype: {name} is {tensor.dtype}, not {' or '.join(kinds)}")
        theirs = {k: _tuples(v) for k, v in self.arithmetic.items()}
        if diff := models.config_diff(theirs, cfg.arithmetic):
            lines.append(f"another model: {models.format_diff(diff)}")
        if lines:
            more = len(lines) - _MAX_LISTED
            lines = lines[:_MAX_LISTED] + [f"and {more} more"] * (more > 0)
            raise ValueError(
                f"version {self.version} does not fit the served model; {'; '.join(lines)}"
            )

    def save(self, folder: pathlib.Path) -> None:
        """Writes `manifest.json`."""
        content = dataclasses.asdict(self) | {"checksum": self.checksum}
        content["tensors"] = {name: tensor._asdict() for name, tensor in self.tensors.items()}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, folder: str | os.PathLike) -> "Manifest":
        """Reads the manifest of a folder. Raises ValueError if it is missing or invalid."""
        file = pathlib.Path(folder) / FILE
        try:
            content = json.loads(read_text(file))
            tensors = {
                name: Tensor(tensor["dtype"], tuple(tensor["shape"]), tensor["checksum"])
                for name, tensor in content["tensors"].items()
            }
            manifest = cls(int(content["version"]), dict(content["arithmetic"]), tensors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is not a manifest: {type(error).__name__} {error}") from None
        if manifest.checksum != content.get("checksum"):
            raise ValueError(f"{file} does not match its checksum; push it again")
        return manifest


def read_version(path: str | os.PathLike) -> int:
    """Returns the version of a folder that was pushed, 0 for any other folder."""
    return Manifest.read(path).version if (pathlib.Path(path) / FILE).exists() else 0


def checksum(array: np.ndarray) -> str:
    """Returns the checksum of an array's bytes in C order."""
    return _hash(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _hash(data) -> str:
    # 128 bits are enough to distinguish any two arrays. Most CPUs have instructions for SHA-256.
    return hashlib.sha256(data).hexdigest()[:32]


def transfer_dtypes(cfg: ModelConfig, dtype: DTypeLike | None = None) -> dict[str, np.dtype]:
    """Returns {path: dtype in which that weight is transferred}.

    It is the dtype to which an engine of cfg would cast the weight, so that no weight is cast twice. dtype: replaces
    that of cfg. Weights that the engine needs in float32 stay so: routers, and experts that become int4.
    """
    narrow, wide = jnp.dtype(cfg.dtype if dtype is None else dtype), np.dtype(np.float32)
    return {
        path: wide if _is_wide(path, cfg) else narrow
        for path in tree.flatten(glm5.abstract_params(cfg))
    }


def _is_wide(path: str, cfg: ModelConfig) -> bool:
    routed = cfg.int4_group is not None and tree.matches_any(quant.ROUTED, path)
    return "router/" in path or routed


@functools.lru_cache(maxsize=8)
def _layout(cfg: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Returns {tensor: (shape, accepted dtypes)} for an engine of cfg."""
    narrow = jnp.dtype(cfg.dtype).name
    return {
        piece.name: (
            piece.view.shape,
            ("float32",) if _is_wide(piece.path, cfg) else tuple({narrow: 0, "float32": 0}),
        )
        for piece in hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg))
    }


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
