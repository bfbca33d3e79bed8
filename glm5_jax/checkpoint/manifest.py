"""What weights are pushed as: tensors under their HF names, each with its checksum, and their version.

    FOLDER/120/manifest.json      beside the safetensors files that `save_hf` writes

A push over the network tells the same. The checksum of all tensors is one of their names, dtypes, shapes and checksums:
the same weights have the same one, however they travelled and in whatever order.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from glm5_jax.checkpoint import hf_names, models
from glm5_jax.config import ModelConfig
from glm5_jax.core import tree
from glm5_jax.model import glm5, quant

FILE = "manifest.json"
_LISTED = 20  # tensors of an error


class Tensor(NamedTuple):
    """What is told of a tensor; checksum: None before it is known."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str | None = None


@dataclasses.dataclass
class Manifest:
    """Attributes:
    version: of the weights, the optimiser steps that made them.
    arithmetic: what a model computes with them (`ModelConfig.arithmetic`).
    tensors: by HF name.
    """

    version: int
    arithmetic: Mapping[str, object]
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, cfg: ModelConfig, version: int, dtype=None) -> "Manifest":
        """Of all weights of a model, in the order of `named_tensors`, as they travel; without checksums."""
        table = hf_names.by_name(hf_names.pieces(cfg, glm5.letters(cfg), glm5.abstract(cfg)))
        kinds = travelling(cfg, dtype)
        tensors = {
            name: Tensor(kinds[piece.path].name, piece.view.shape)
            for name, (piece, *_) in table.items()
        }
        return cls(version, cfg.arithmetic, tensors)

    def add(self, name: str, array: np.ndarray) -> None:
        """A tensor, from its numbers."""
        self.tensors[name] = Tensor(array.dtype.name, array.shape, checksum(array))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        own = self.tensors.values()
        return sum(math.prod(tensor.shape) * jnp.dtype(tensor.dtype).itemsize for tensor in own)

    @property
    def checksum(self) -> str:
        """Of all tensors together, which have theirs."""
        told = (f"{name} {' '.join(map(str, own))}\n" for name, own in sorted(self.tensors.items()))
        return _hashed("".join(told).encode())

    def check(self, cfg: ModelConfig) -> None:
        """ValueError that lists what a model of cfg does not have, or has otherwise."""
        wanted = _layout(cfg)
        lines = [f"missing: {n} {list(s)}" for n, (s, _) in wanted.items() if n not in self.tensors]
        for name, own in self.tensors.items():
            if name not in wanted:
                lines.append(f"unknown: {name} {list(own.shape)}")
                continue
            shape, kinds = wanted[name]
            if own.shape != shape:
                lines.append(f"wrong shape: {name} is {list(own.shape)}, not {list(shape)}")
            if own.dtype not in kinds:
                lines.append(f"wrong dtype: {name} is {own.dtype}, not {' or '.join(kinds)}")
        theirs = {k: _tuples(v) for k, v in self.arithmetic.items()}
        if odd := models.differences(theirs, cfg.arithmetic):
            lines.append(f"another model: {models.told(odd)}")
        if lines:
            more = len(lines) - _LISTED
            lines = lines[:_LISTED] + [f"and {more} more"] * (more > 0)
            raise ValueError(
                f"version {self.version} is not of the model that is served; {'; '.join(lines)}"
            )

    def save(self, folder: pathlib.Path) -> None:
        """Writes `manifest.json`."""
        told = dataclasses.asdict(self) | {"checksum": self.checksum}
        told["tensors"] = {name: own._asdict() for name, own in self.tensors.items()}
        (folder / FILE).write_text(json.dumps(told, indent=1) + "\n")

    @classmethod
    def read(cls, folder) -> "Manifest":
        """Of a folder; ValueError if there is none, or what is there is none."""
        file = pathlib.Path(folder) / FILE
        try:
            content = json.loads(file.read_text("utf-8"))
            tensors = {
                name: Tensor(own["dtype"], tuple(own["shape"]), own["checksum"])
                for name, own in content["tensors"].items()
            }
            found = cls(int(content["version"]), dict(content["arithmetic"]), tensors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no manifest: {type(error).__name__} {error}") from None
        if found.checksum != content.get("checksum"):
            raise ValueError(f"{file} does not have the checksum that it tells; push it again")
        return found


def version_of(path) -> int:
    """The version of a folder that was pushed, 0 of any other."""
    return Manifest.read(path).version if (pathlib.Path(path) / FILE).exists() else 0


def checksum(array: np.ndarray) -> str:
    """Of an array's bytes, in C order."""
    return _hashed(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _hashed(data) -> str:
    # Half of it: 128 bits tell any two apart. SHA-256 has instructions of its own on most CPUs.
    return hashlib.sha256(data).hexdigest()[:32]


def travelling(cfg: ModelConfig, dtype=None) -> dict[str, np.dtype]:
    """{path: dtype in which that weight travels}: the one that an engine of cfg would cast it to, so that nothing is
    cast twice; dtype: instead of cfg's. What the engine computes with in float32, routers and experts that become
    int4, stays float32."""
    narrow, wide = jnp.dtype(cfg.dtype if dtype is None else dtype), np.dtype(np.float32)
    return {
        path: wide if _is_wide(path, cfg) else narrow for path in tree.flatten(glm5.abstract(cfg))
    }


def _is_wide(path: str, cfg: ModelConfig) -> bool:
    routed = cfg.int4_group is not None and tree.found(quant.ROUTED, path)
    return "router/" in path or routed


@functools.lru_cache(maxsize=8)
def _layout(cfg: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """{tensor: (shape, dtypes that it may have)} of what an engine of cfg takes."""
    narrow = jnp.dtype(cfg.dtype).name
    return {
        piece.name: (
            piece.view.shape,
            ("float32",) if _is_wide(piece.path, cfg) else tuple({narrow: 0, "float32": 0}),
        )
        for piece in hf_names.pieces(cfg, glm5.letters(cfg), glm5.abstract(cfg))
    }


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
