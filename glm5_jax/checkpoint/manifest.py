"""Describes the weights of a push through a folder: tensors under their HF names with checksums, and their version.

    FOLDER/120/manifest.json      next to the safetensors files that `save_hf` writes

The checksum of all tensors is the hash of their names, dtypes, shapes and checksums. So equal weights have equal
checksums, in whatever order they were written.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from glm5_jax.checkpoint import hf_names, models
from glm5_jax.checkpoint.engine_dtypes import accepted_dtypes
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
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

    @classmethod
    def of(cls, array: np.ndarray) -> "Tensor":
        """Returns the description of an array, with its checksum."""
        return cls(array.dtype.name, array.shape, checksum(array))

    @classmethod
    def from_json(cls, fields: Sequence) -> "Tensor":
        """Returns the description whose fields are in a list."""
        dtype, shape, text = fields
        return cls(dtype, tuple(shape), text)


Layout = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]


class Description(Protocol):
    """Description of a tensor or an array."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Version(Protocol):
    """Version of a model's weights; `Manifest` documents the attributes."""

    @property
    def version(self) -> int: ...

    @property
    def arithmetic(self) -> Mapping[str, object]: ...


def check_fit(
    weights: Version, tensors: Mapping[str, Description], expected: Layout, cfg: ModelConfig
) -> None:
    """Raises ValueError with the differences, unless a version's tensors fit an engine of cfg.

    expected: {name: (shape, accepted dtypes)} of the tensors that the engine needs.
    """
    lines = [f"missing: {n} {list(s)}" for n, (s, _) in expected.items() if n not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            lines.append(f"unknown: {name} {list(tensor.shape)}")
            continue
        shape, kinds = expected[name]
        if tensor.shape != shape:
            lines.append(f"wrong shape: {name} is {list(tensor.shape)}, not {list(shape)}")
        if tensor.dtype not in kinds:
            lines.append(f"wrong dtype: {name} is {tensor.dtype}, not {' or '.join(kinds)}")
    theirs = {k: _tuples(v) for k, v in weights.arithmetic.items()}
    if diff := models.config_diff(theirs, cfg.arithmetic):
        lines.append(f"another model: {models.format_diff(diff)}")
    if lines:
        more = len(lines) - _MAX_LISTED
        lines = lines[:_MAX_LISTED] + [f"and {more} more"] * (more > 0)
        raise ValueError(
            f"version {weights.version} does not fit the served model; {'; '.join(lines)}"
        )


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

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds a tensor with its checksum."""
        self.tensors[name] = Tensor.of(array)

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
        check_fit(self, self.tensors, _layout(cfg), cfg)

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


@functools.lru_cache(maxsize=8)
def _layout(cfg: ModelConfig) -> Layout:
    """Returns {tensor: (shape, accepted dtypes)} for an engine of cfg."""
    return {
        piece.name: (piece.view.shape, accepted_dtypes(piece.path, cfg))
        for piece in hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg))
    }


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
