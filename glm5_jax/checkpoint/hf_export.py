"""The parameter tree as a HuggingFace checkpoint that transformers and the serving engines read.

Tensor names are the released ones (one tensor per expert, MTP layer after the last decoder layer).
Host memory peaks at one shard file; the folder appears under its name only when it is complete. On a
pod all processes call `save_hf`, one tensor at a time is brought together, and the first one writes.
"""

import dataclasses
import functools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from glm5_jax.checkpoint import hf_config, hf_int4, hf_names, hf_quantised
from glm5_jax.checkpoint.manifest import Manifest
from glm5_jax.config import ModelConfig
from glm5_jax.core import hosts, tree
from glm5_jax.core.sharding import on_every_host
from glm5_jax.model import glm5
from pallas_kernels.quantised import Int4

_log = logging.getLogger(__name__)
_SPARE = 2**20  # bytes of disk beside the tensors: headers and json files


def save_hf(
    model,
    out,
    *,
    cfg: ModelConfig | None = None,
    tokenizer=None,
    dtype=None,
    max_shard_bytes: float = 5e9,
    manifest: Manifest | None = None,
) -> None:
    """Writes config.json, generation_config.json and safetensors files (with an index if several).
    All processes of a pod must call it.

    model: a `Glm5`, or a parameter tree together with its cfg. tokenizer: anything with
    `save(folder)`. dtype: of every tensor but the router bias, which is float32, or {path: that of the
    leaf}; by default each has its leaf's, so what `load_hf` had to bring to one dtype is not written
    bitwise as it was. The routed experts of a model with `int4_group` are written as int4 (`hf_int4`),
    quantised as they are. A tensor larger than max_shard_bytes gets a file of its own. manifest: told of
    every tensor and saved beside them, on a pod by the first process. What is quantised or rotated is
    written as it is (`hf_quantised`). ValueError, before anything is written, if out is not empty, the
    disk too small or the tree not that of cfg; OSError if writing fails, and then nothing is left
    behind.
    """
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
    leaves = _checked(params, cfg)
    pieces = hf_names.pieces(cfg, glm5.letters(cfg), glm5.abstract(cfg))
    table = hf_names.by_name(pieces)
    packed = {n for n in table if cfg.int4_group is not None and hf_int4.is_expert(n)}
    kinds = {n: _dtype(p[0], leaves, None if n in packed else dtype) for n, p in table.items()}
    quantised = hf_quantised.config_of(leaves, pieces)
    if quantised is not None:
        config["quantization_config"] = quantised
    group = hf_quantised.group_of(quantised) if quantised else cfg.int4_group
    written = {}
    for name, (piece, *_) in table.items():
        leaf = Int4 if name in packed else type(leaves[piece.path])
        written[name] = hf_quantised.layout(leaf, piece, kinds[name], group)
    sizes = {
        name: sum(int(np.prod(shape)) * kind.itemsize for shape, kind in parts.values())
        for name, parts in written.items()
    }
    out = pathlib.Path(out).absolute()
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"

    files = _divide(sizes, max_shard_bytes)

    def begin():
        _check_target(out, sum(sizes.values()) + _SPARE)
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
        for file in files:  # safetensors makes its own readable to nobody else, whatever the umask
            shutil.copymode(partial / "config.json", partial / file)
        if tokenizer is not None:
            tokenizer.save(partial)
        if manifest is not None:
            manifest.save(partial)
        os.rename(partial, out)

    first = jax.process_index() == 0

    def tensors_of(name):
        piece = table[name][0]
        if tree.is_compound(leaf := leaves[piece.path]):
            return hf_quantised.tensors(leaf, piece, _on_host, kinds[name])
        tensor = _tensor(table[name], leaves, kinds[name])
        if not first:
            return {}
        return hf_int4.pack(name, tensor, group) if name in packed else {name: tensor}

    hosts.first_does(begin)
    try:
        for file, names in files.items():
            tensors = {}
            for name in names:
                tensors |= tensors_of(name)
            if manifest is not None:
                for name, tensor in tensors.items():
                    manifest.add(name, tensor)
            write = functools.partial(_save, tensors, partial / file)
            hosts.first_does(write)
            del tensors, write  # the next file's would be gathered beside them
        hosts.first_does(finish)
    except OSError as error:
        raise OSError(f"writing {out} failed ({error}); nothing was left there") from error
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)


def named_tensors(params, cfg: ModelConfig, dtype: Mapping) -> Iterator[tuple[str, np.ndarray]]:
    """(HF name, tensor) of all plain weights, one at a time; dtype: of each leaf by its path. All processes of a pod must go
    through them, and each has all. ValueError if the tree is not that of cfg."""
    leaves = _checked(params, cfg)
    table = hf_names.by_name(hf_names.pieces(cfg, glm5.letters(cfg), glm5.abstract(cfg)))
    for name, pieces in table.items():
        yield name, _tensor(pieces, leaves, _dtype(pieces[0], leaves, dtype))


def _checked(params, cfg: ModelConfig) -> dict[str, jax.Array]:
    """{path: leaf}; ValueError that lists leaves which cfg does not have, or has otherwise."""
    leaves, expected = tree.flatten(params), tree.flatten(glm5.abstract(cfg))
    lines = [f"missing: {p} {list(x.shape)}" for p, x in expected.items() if p not in leaves]
    lines += [f"unexpected: {p} {list(x.shape)}" for p, x in leaves.items() if p not in expected]
    for path in sorted(set(leaves) & set(expected)):
        if leaves[path].shape != expected[path].shape:
            shape = list(expected[path].shape)
            lines.append(f"wrong shape: {path} is {list(leaves[path].shape)}, expected {shape}")
    if lines:
        raise ValueError("the parameters cannot be exported:\n  " + "\n  ".join(lines))
    return leaves


def _check_target(out: pathlib.Path, needed: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; choose another or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ValueError(
            f"the checkpoint needs {needed / 1e9:.3f} GB and {out.parent} has {free / 1e9:.3f} GB free; "
            "free some or choose another disk"
        )


def _divide(sizes: dict[str, int], limit: float) -> dict[str, list[str]]:
    """{file name: tensor names}, in order, each file at most `limit` bytes or one tensor."""
    groups, filled = [[]], 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
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
    """One HF tensor on the host, from all leaves that have a part of it."""
    tensor = np.empty(pieces[0].view.shape, dtype)
    for piece in pieces:
        piece.view.of(tensor)[...] = _on_host(leaves[piece.path], piece.at)
    return tensor


def _on_host(leaf, at: tuple[int, ...]) -> np.ndarray:
    """`leaf[at]` from the shards that hold it; each is sliced where it lives."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[at]
    if not leaf.is_fully_addressable:
        return on_every_host(leaf, at)
    part = np.empty(leaf.shape[len(at) :], leaf.dtype)
    for shard in leaf.addressable_shards:
        bounds = [s.indices(n) for s, n in zip(shard.index, leaf.shape)]
        if shard.replica_id == 0 and all(b[0] <= i < b[1] for i, b in zip(at, bounds)):
            inside = tuple(i - b[0] for i, b in zip(at, bounds))
            # On CPU the shard is host memory already, and slicing it there compiles nothing.
            data = np.asarray(shard.data) if shard.device.platform == "cpu" else shard.data
            part[shard.index[len(at) :]] = data[inside]
    return part


def _generation(cfg: ModelConfig) -> dict:
    """Sampling defaults of the released models (their generation_config.json)."""
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
