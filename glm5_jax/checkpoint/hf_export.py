"""Writes the parameter tree as a HuggingFace checkpoint that transformers and serving engines read.

Tensor names are the released ones (one tensor per expert, MTP layer after the last decoder layer). Host memory peaks
at one shard file. The folder gets its name after it is complete. On a pod all processes call `save_hf`: one tensor at a
time is gathered on their devices, and each process writes other files at the same time.
"""

import dataclasses
import functools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.typing import DTypeLike
from jaxtyping import PyTree
from safetensors.numpy import save_file

from glm5_jax.checkpoint import hf_config, hf_fp8, hf_int4, hf_names, hf_quantised
from glm5_jax.checkpoint.manifest import Manifest, Tensor
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.parallel import multihost, tree
from glm5_jax.parallel.sharding import fetch_slice
from pallas_kernels.quantized_weights import Int4

_log = logging.getLogger(__name__)
_SPARE_BYTES = 2**20  # disk space in addition to the tensors: headers and json files


def save_hf(
    model: glm5.Glm5 | PyTree,
    out: str | os.PathLike,
    *,
    cfg: ModelConfig | None = None,
    tokenizer: Any = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    max_shard_bytes: float = 5e9,
    manifest: Manifest | None = None,
    fp8_block: tuple[int, int] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes config.json, generation_config.json and safetensors files (with an index if there are several).

    All processes of a pod must call it.

    - model: a `Glm5`, or a parameter tree together with its cfg.
    - tokenizer: object with `save(folder)`; None: no tokenizer is written.
    - dtype: dtype of every tensor, or {path: dtype of that leaf}; None: each tensor has its leaf's dtype. So tensors
      that `load_hf` converted to a common dtype are not written bitwise as they were. The router bias is always
      float32.
    - max_shard_bytes: maximum size of a file. A larger tensor gets a separate file.
    - manifest: receives every tensor in all processes, and is saved next to the files.
    - fp8_block: rows and columns of a block of FP8 weights, (128, 128) in the released files (`hf_fp8`); None: no FP8.
    - overwrite: whether to replace a model at out, after all of the new one is written. No other folder is replaced.

    The routed experts of a model with `int4_group` are quantised and written as int4 (`hf_int4`). Quantised and rotated
    leaves are written as they are (`hf_quantised`).

    Raises ValueError, before it writes anything, if out is not empty (see overwrite), the disk is too small or the tree
    is not that of cfg. Raises OSError if writing fails; then it deletes what it wrote.
    """
    # The config, and the layout of every tensor in files.
    if cfg is None:
        if not isinstance(model, glm5.Glm5):
            raise ValueError("save_hf of a parameter tree needs its config: pass cfg=")
        cfg = model.cfg
    if dtype is not None and not isinstance(dtype, Mapping):
        cfg = dataclasses.replace(cfg, dtype=jnp.dtype(dtype).name)
    config = hf_config.to_hf(cfg)
    if (cfg.latent_norm_eps, cfg.index_norm_eps) != (1e-6, 1e-6):
        _log.warning(
            "latent_norm_eps %g and index_norm_eps %g: transformers computes with 1e-6 for both",
            cfg.latent_norm_eps,
            cfg.index_norm_eps,
        )
    params = glm5.params_of(model) if isinstance(model, glm5.Glm5) else model
    leaves = _check_leaves(params, cfg)
    pieces = hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg))
    table = hf_names.by_name(pieces)
    packed = {n for n in table if cfg.int4_group is not None and hf_int4.is_expert(n)}
    quantised = hf_quantised.config_of(leaves, pieces)
    if quantised is not None:
        config["quantization_config"] = quantised
    if fp8_block is not None:
        if packed or quantised is not None:
            raise ValueError("fp8_block is for plain weights; these are int4 or int8 already")
        config["quantization_config"] = hf_fp8.config_of(table, fp8_block)
    weights = _Weights(
        leaves=leaves,
        table=table,
        kinds={n: _dtype(p[0], leaves, None if n in packed else dtype) for n, p in table.items()},
        packed=packed,
        group=hf_quantised.group_of(quantised) if quantised else cfg.int4_group,
        fp8_block=fp8_block,
    )
    written = {name: weights.layout(name) for name in table}
    sizes = {
        name: sum(int(np.prod(shape)) * kind.itemsize for shape, kind in parts.values())
        for name, parts in written.items()
    }
    # Everything goes to a partial folder first.
    out = pathlib.Path(out).absolute()
    process = multihost.broadcast_from_first(os.getpid)  # all processes must use the same folder
    partial = out.parent / f".{out.name}.{process}.partial"
    files = _divide(sizes, max_shard_bytes)

    def begin():
        _check_target(out, sum(sizes.values()) + _SPARE_BYTES, overwrite)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def finish():
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {
                    part: file
                    for file, names in files.items()
                    for name in names
                    for part in written[name]
                },
            }
            _write(partial / "model.safetensors.index.json", index)
        _write(partial / "config.json", config)
        _write(partial / "generation_config.json", _generation(cfg))
        # safetensors makes files readable to their owner only, whatever the umask.
        for file in files:
            shutil.copymode(partial / "config.json", partial / file)
        if tokenizer is not None:
            tokenizer.save(partial)
        if manifest is not None:
            manifest.save(partial)
        _move(partial, out)

    multihost.run_on_first(begin)
    try:
        # As many files at a time as there are processes: each collects the tensors of one.
        names_of_files, number = list(files.items()), jax.process_index()
        for start in range(0, len(files), jax.process_count()):
            tensors: dict[str, np.ndarray] = {}
            group = names_of_files[start : start + jax.process_count()]
            for writer, (_, names) in enumerate(group):
                for name in names:
                    tensors |= weights.tensors(name, is_writer=writer == number)
            write = functools.partial(_save, tensors, partial / group[number % len(group)][0])
            multihost.run_on_all(write if number < len(group) else lambda: None)
            if manifest is not None:
                entries = {name: Tensor.of(tensor) for name, tensor in tensors.items()}
                for of_process in multihost.all_gather_objects(entries):
                    manifest.tensors |= {n: Tensor.from_json(x) for n, x in of_process.items()}
            del tensors, write  # frees them before those of the next files are gathered
        multihost.run_on_first(finish)
    except OSError as error:
        raise OSError(f"writing {out} failed ({error}); nothing was left there") from error
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Weights:
    """Weights of a model by HF name, with the form in which files hold each.

    Attributes:
      leaves: leaves of the parameter tree by path.
      table: pieces of leaves by HF name.
      kinds: dtype of each weight that is not quantised, by HF name.
      packed: HF names of the weights that are written as int4.
      group: group size of int4; None: no weight is int4.
      fp8_block: rows and columns of a block of FP8 weights; None: no weight is FP8.
    """

    leaves: dict[str, Any]
    table: Mapping[str, list[hf_names.Piece]]
    kinds: Mapping[str, Any]
    packed: set[str]
    group: int | None
    fp8_block: tuple[int, int] | None

    def layout(self, name: str) -> dict[str, tuple]:
        """Returns {tensor: (shape, dtype)} of the tensors that hold a weight."""
        piece = self.table[name][0]
        if self.fp8_block is not None and hf_fp8.is_fp8_weight(name):
            return hf_fp8.layout(name, piece.view.shape, self.fp8_block)
        leaf = Int4 if name in self.packed else type(self.leaves[piece.path])
        return hf_quantised.layout(leaf, piece, self.kinds[name], self.group)

    def tensors(self, name: str, is_writer: bool) -> dict[str, np.ndarray]:
        """Returns the tensors that hold a weight; none if this process is not their writer, but it must call it."""
        piece, kind = self.table[name][0], self.kinds[name]
        if tree.is_compound(leaf := self.leaves[piece.path]):
            tensors = hf_quantised.tensors(leaf, piece, _on_host, kind)
            return tensors if is_writer else {}
        if not is_writer:
            for part in self.table[name]:
                _gather(self.leaves[part.path], part.at)
            return {}
        tensor = _tensor(self.table[name], self.leaves, kind)
        if self.fp8_block is not None and hf_fp8.is_fp8_weight(name):
            return dict(zip(self.layout(name), hf_fp8.quantise(tensor, self.fp8_block)))
        if name not in self.packed:
            return {name: tensor}
        assert self.group is not None, "only a model with int4_group has packed weights"
        return hf_int4.pack(name, tensor, self.group)


def named_tensors(
    params: PyTree, cfg: ModelConfig, dtype: Mapping
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (HF name, tensor) of all plain weights, one at a time.

    dtype: dtype of each leaf by its path. All processes of a pod must iterate over it, and each gets all tensors.
    Raises ValueError if the tree is not that of cfg.
    """
    leaves = _check_leaves(params, cfg)
    pieces = hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg))
    yield from tensors_of(leaves, pieces, dtype)


def tensors_of(
    leaves: Mapping[str, Any], pieces: list[hf_names.Piece], dtype: Mapping | DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (HF name, tensor) of the tensors that consist of these pieces of plain leaves, one at a time.

    leaves: {path: leaf}. dtype: dtype of every tensor, or {path: dtype}. All processes of a pod must iterate over it.
    """
    for name, parts in hf_names.by_name(pieces).items():
        yield name, _tensor(parts, leaves, _dtype(parts[0], leaves, dtype))


def _check_leaves(params, cfg: ModelConfig) -> dict[str, jax.Array]:
    """Returns {path: leaf}. Raises ValueError with the differences, unless the leaves are those of cfg."""
    leaves, expected = tree.flatten(params), tree.flatten(glm5.abstract_params(cfg))
    lines = [f"missing: {p} {list(x.shape)}" for p, x in expected.items() if p not in leaves]
    lines += [f"unexpected: {p} {list(x.shape)}" for p, x in leaves.items() if p not in expected]
    for path in sorted(set(leaves) & set(expected)):
        if leaves[path].shape != expected[path].shape:
            shape = list(expected[path].shape)
            lines.append(f"wrong shape: {path} is {list(leaves[path].shape)}, expected {shape}")
    if lines:
        raise ValueError("the parameters cannot be exported:\n  " + "\n  ".join(lines))
    return leaves


def _check_target(out: pathlib.Path, needed: int, overwrite: bool) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not overwrite:
            raise ValueError(
                f"{out} is not an empty folder; choose another, remove it, or replace a model with overwrite=True"
            )
        if not _is_model(out):
            raise ValueError(
                f"{out} has other contents than a model's files; choose another or remove it"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ValueError(
            f"the checkpoint needs {needed / 1e9:.3f} GB and {out.parent} has {free / 1e9:.3f} GB free; "
            "free some or choose another disk"
        )


def _is_model(out: pathlib.Path) -> bool:
    """Returns True if a folder has the files of a model, and no folders, so that it can be replaced."""
    if out.is_symlink() or not out.is_dir() or not all(path.is_file() for path in out.iterdir()):
        return False
    return (out / "config.json").exists() and any(out.glob("model*.safetensors"))


def _move(partial: pathlib.Path, out: pathlib.Path) -> None:
    """Moves a finished folder to its place, and deletes the model that was there."""
    if not out.exists() or not any(out.iterdir()):
        os.rename(partial, out)
        return
    old = partial.with_suffix(".old")
    os.rename(out, old)
    os.rename(partial, out)
    shutil.rmtree(old)


def _divide(sizes: dict[str, int], limit: float) -> dict[str, list[str]]:
    """Returns {file name: tensor names}, in order; a file has at most `limit` bytes or one tensor."""
    groups, used = [[]], 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _dtype(piece: hf_names.Piece, leaves, dtype) -> np.dtype:
    if piece.path.endswith(hf_names.FLOAT32):
        return np.dtype(np.float32)
    if isinstance(dtype, Mapping):
        return jnp.dtype(dtype[piece.path])
    return jnp.dtype(leaves[piece.path].dtype if dtype is None else dtype)


def _tensor(pieces: list[hf_names.Piece], leaves, dtype) -> np.ndarray:
    """Assembles one HF tensor on the host from all leaves that hold a part of it."""
    tensor = np.empty(pieces[0].view.shape, dtype)
    for piece in pieces:
        piece.view.of(tensor)[...] = _on_host(leaves[piece.path], piece.at)
    return tensor


def _gather(leaf, at: tuple[int, ...]) -> None:
    """Does the part of this process in `_on_host` of another one."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # CPU devices run programs that nothing waits for in any order, but the processes must run theirs in the same.
        jax.block_until_ready(fetch_slice(leaf, at))


def _on_host(leaf, at: tuple[int, ...]) -> np.ndarray:
    """Returns `leaf[at]` on the host; each shard is sliced on its device."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf[at])  # reads only this part of a leaf that is larger than memory
    if not leaf.is_fully_addressable:
        return np.asarray(fetch_slice(leaf, at))
    part = np.empty(leaf.shape[len(at) :], leaf.dtype)
    for shard in leaf.addressable_shards:
        bounds = [s.indices(n) for s, n in zip(shard.index, leaf.shape)]
        if shard.replica_id == 0 and all(b[0] <= i < b[1] for i, b in zip(at, bounds)):
            inside = tuple(i - b[0] for i, b in zip(at, bounds))
            # On CPU the shard is in host memory already, and slicing it there needs no compilation.
            data = np.asarray(shard.data) if shard.device.platform == "cpu" else shard.data
            part[shard.index[len(at) :]] = data[inside]
    return part


def _generation(cfg: ModelConfig) -> dict:
    """Returns the sampling defaults of the released models (their generation_config.json)."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "eos_token_id": list(cfg.eos_token_id) or None,
        "pad_token_id": cfg.pad_token_id,
    }


def _save(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def _write(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
