"""Loads HuggingFace checkpoints into the parameter tree, streamed onto the devices that own the weights.

A shard is filled from slices of the files (only its rows and columns are read), copied to its devices and freed before
the next one. So host memory, besides the arrays themselves, peaks at one device's shard of the largest leaf plus one HF
tensor.
"""

import collections
import dataclasses
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from glm5_jax.checkpoint import hf_config, hf_fp8, hf_int4, hf_names, hf_quantised
from glm5_jax.checkpoint.hf_files import (
    DTYPES,
    FileTensor,
    config_file,
    folder_of,
    is_same_tensor,
    open_tensors,
    raise_problems,
    read_json_file,
)
from glm5_jax.checkpoint.hub import fetch_checkpoint
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.parallel import boxes, tree

_KINDS = DTYPES | {"I8": np.int8, "I32": np.int32, "I64": np.int64}
_log = logging.getLogger(__name__)


def load_hf(
    path: str | os.PathLike,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    revision: str | None = None,
) -> glm5.Glm5:
    """Loads the model of a HuggingFace folder, of one .safetensors file next to its config.json, or of the hub.

    It loads any glm_moe_dsa or glm4_moe_lite checkpoint: one file or shards with an index, and separate or fused experts.
    The MTP layer may be in the files, in `mtp.safetensors` next to them, or absent (then the model has none).

    - dtype: dtype of weights and computation; None: those of the files and config.json.
    - mesh: mesh on which parallel/sharding.py shards the weights; None: the default device.
    - revision: branch, tag or commit of a repository `owner/name` of the hub; None: its default branch.

    Conversions:

    - Routed experts in int4 (`hf_int4`) become the float32 weights that they represent. A narrower dtype rounds these,
      and then the model no longer quantises them in its computation.
    - FP8 weights (`hf_fp8`) are dequantised to the dtype in config.json.
    - Layers or experts of one leaf that are stored in several dtypes get a dtype that holds all their values exactly. A
      warning names the leaf, because `save_hf` writes it in that dtype.

    Raises ValueError with everything that is wrong with the files.
    """
    path = fetch_checkpoint(path, revision)
    cfg = read_config(path)
    if dtype is not None:
        cfg = dataclasses.replace(cfg, dtype=jnp.dtype(dtype).name)
        if jnp.dtype(dtype).itemsize < 4:
            cfg = dataclasses.replace(cfg, int4_group=None)
    shardings = None if mesh is None else glm5.param_shardings(cfg, mesh)
    params = load_params(path, cfg, shardings=shardings, dtype=dtype)
    return glm5.Glm5(cfg, params=params, mesh=mesh)


def read_config(path: str | os.PathLike) -> ModelConfig:
    """Returns the config of a HuggingFace folder, with the number of MTP layers that its files hold."""
    file = config_file(path)
    cfg = hf_config.from_hf(read_json_file(file), file)
    stored = int(bool(hf_names.mtp_names(cfg, open_tensors(path))))
    if stored < cfg.num_nextn_predict_layers:
        _log.warning("%s holds no MTP layer; the model is loaded without one", path)
    return dataclasses.replace(cfg, num_nextn_predict_layers=stored)


def load_params(
    path: str | os.PathLike,
    cfg: ModelConfig,
    *,
    shardings: PyTree | None = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    may_differ: Sequence[str] = (),
) -> PyTree:
    """Loads the parameter tree of a HuggingFace checkpoint.

    - shardings: tree of shardings (`glm5.param_shardings`); None: the default device.
    - dtype: dtype of every leaf except the router bias, which is float32; or {path: dtype of that leaf}. None: the dtype
      in the files, or, with a warning, one that holds all of a leaf's dtypes.
    - may_differ: patterns. A leaf whose path matches may be missing from the files, and is then not in the tree. A
      tensor whose HF name matches and that cfg lacks is not read.

    An MTP layer that cfg does not have is not read. Raises ValueError, before it loads anything, with all missing,
    unexpected, misshapen and unreadable tensors.
    """
    if dtype is not None and not isinstance(dtype, Mapping):
        has_x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]: jax adds it on import
        if jnp.dtype(dtype).itemsize > 4 and not has_x64:
            raise ValueError(
                f"dtype {jnp.dtype(dtype).name} needs jax_enable_x64; set it or use float32"
            )
    stored, table = _open_all(path, cfg, may_differ)
    by_leaf = collections.defaultdict(list)
    for piece in table:
        by_leaf[piece.path].append(piece)
    dtypes = _dtypes(path, by_leaf, stored, dtype)

    def load(leaf_path, leaf, sharding=None):
        read = functools.partial(_read_shard, by_leaf[leaf_path], stored, dtypes[leaf_path])
        return _place(leaf.shape, read, sharding)

    trees = (glm5.abstract_params(cfg), *(() if shardings is None else (shardings,)))
    present = [{p: x for p, x in tree.flatten(t).items() if p in by_leaf} for t in trees]
    return tree.map_with_path(load, *map(tree.unflatten, present))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafReader:
    """Leaf of the parameter tree in files; indexing with slices reads that part.

    Attributes:
      shape, dtype: shape and dtype of the leaf.
      pieces: its pieces.
      stored: tensors in the files, by HF name.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[hf_names.Piece]
    stored: Mapping[str, hf_names.StoredTensor]

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        return _read_shard(self.pieces, self.stored, self.dtype, index)


def open_leaves(path: str | os.PathLike, cfg: ModelConfig) -> dict[str, LeafReader]:
    """Returns a reader of each leaf of a HuggingFace checkpoint. Raises ValueError with everything that is wrong."""
    stored, table = _open_all(path, cfg)
    by_leaf = collections.defaultdict(list)
    for piece in table:
        by_leaf[piece.path].append(piece)
    dtypes = _dtypes(path, by_leaf, stored, None)
    return {
        leaf: LeafReader(shape=x.shape, dtype=dtypes[leaf], pieces=by_leaf[leaf], stored=stored)
        for leaf, x in tree.flatten(glm5.abstract_params(cfg)).items()
    }


def from_tensors(
    tensors: Mapping[str, Any], cfg: ModelConfig, shardings: PyTree | None = None
) -> PyTree:
    """Returns the parameter tree of HF tensors, as `Lazy` leaves.

    tensors: {HF name: array, or object that returns one when indexed with slices}, with all tensors of cfg. A leaf has
    a dtype that holds all of its tensors. shardings: see `load_params`.
    """
    by_leaf = collections.defaultdict(list)
    for piece in hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg)):
        by_leaf[piece.path].append(piece)

    def lazy(path, leaf, *sharding):
        pieces = by_leaf[path]
        kinds = {np.dtype(tensors[piece.name].dtype) for piece in pieces}
        dtype = functools.reduce(jnp.promote_types, kinds)
        read = functools.partial(_read_shard, pieces, tensors, dtype)
        return tree.Lazy(leaf.shape, dtype, functools.partial(_place, leaf.shape, read, *sharding))

    return tree.map_with_path(
        lazy, glm5.abstract_params(cfg), *(() if shardings is None else (shardings,))
    )


def is_quantised(path: str | os.PathLike) -> bool:
    """Returns True if `save_hf` wrote the folder from a quantised model."""
    file = folder_of(path) / "config.json"
    content = read_json_file(file) if file.exists() else None
    config = content.get("quantization_config") if isinstance(content, dict) else None
    return isinstance(config, dict) and config.get("format") == hf_quantised.FORMAT


def load_quantised(path: str | os.PathLike, mesh: Mesh | None = None) -> glm5.Glm5:
    """Loads a quantised model, bitwise, from a folder that `save_hf` wrote; mesh: see `load_hf`.

    Raises ValueError, before it loads anything, in the cases of `open_quantised`, or if the mesh cannot shard the
    weights.
    """
    cfg, sources = open_quantised(path)
    return glm5.Glm5(cfg, params=load_tensors(cfg, sources, mesh), mesh=mesh)


def load_tensors(cfg: ModelConfig, sources: dict, mesh: Mesh | None = None) -> dict:
    """Loads the parameters of a tree of `TensorReader`s, onto the default device or a mesh."""
    where = () if mesh is None else (glm5.param_shardings(cfg, mesh, sources),)
    return jax.tree.map(lambda x, *at: _place(x.shape, x.read, *at), sources, *where)


def open_quantised(path: str | os.PathLike) -> tuple[ModelConfig, dict]:
    """Opens a folder that `save_hf` wrote from a quantised model.

    Returns its config, and a parameter tree with a `hf_quantised.TensorReader` in place of each array. Raises ValueError
    with everything that is wrong with the files.
    """
    # The config, and the tensors that it implies.
    content = read_json_file(config_file(path))
    if not isinstance(content, dict) or "quantization_config" not in content:
        raise ValueError(f"{path} holds no quantised model; use load_hf")
    group = hf_quantised.group_of(content.pop("quantization_config"))
    stored = open_tensors(path)
    cfg = hf_config.from_hf(content, config_file(path))
    _check_size(path, cfg, stored)
    table = hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg))
    kinds, by_leaf = hf_quantised.leaf_kinds(table, stored), collections.defaultdict(list)
    expected = {}
    for piece in table:
        by_leaf[piece.path].append(piece)
        kind = stored[piece.name].kind if piece.name in stored else "F32"
        plain = jnp.dtype(DTYPES.get(kind, jnp.float32))
        expected |= hf_quantised.layout(kinds[piece.path], piece, plain, group)
    formats = {n: (t.shape, np.dtype(_KINDS.get(t.kind, object))) for n, t in stored.items()}
    raise_problems(
        path,
        [f"missing: {n} {list(shape)}" for n, (shape, _) in expected.items() if n not in formats],
        [f"unexpected: {n} {list(t.shape)}" for n, t in stored.items() if n not in expected],
        [
            f"wrong: {n} is {stored[n].kind}{list(formats[n][0])}, expected {kind.name} {list(shape)}"
            for n, (shape, kind) in expected.items()
            if n in formats and formats[n] != (shape, kind)
        ],
    )
    plain = {p: pieces for p, pieces in by_leaf.items() if kinds[p] is None}
    dtypes = _dtypes(path, plain, stored, None)

    def reader(leaf_path, leaf):
        pieces, kind = by_leaf[leaf_path], kinds[leaf_path]
        if kind is not None:
            return hf_quantised.tensor_readers(kind, pieces, stored, leaf.shape, group)
        read = functools.partial(_read_shard, pieces, stored, dtypes[leaf_path])
        return hf_quantised.TensorReader(leaf.shape, read)

    return cfg, tree.map_with_path(reader, glm5.abstract_params(cfg))


def check_params(path: str | os.PathLike, cfg: ModelConfig, may_differ: Sequence[str] = ()) -> None:
    """Raises the ValueError of `load_params`, from the headers of the files only."""
    _open_all(path, cfg, may_differ)


def _open_all(path, cfg: ModelConfig, may_differ=()):
    """Returns the stored tensors of cfg by name, and the table of pieces that they come from."""
    stored, problems = hf_int4.join_packed(open_tensors(path))
    raise_problems(path, problems)
    if any(tensor.kind == hf_fp8.KIND for tensor in stored.values()):
        stored, problems = hf_fp8.join_scales(stored, _fp8_block(path), cfg.dtype)
        raise_problems(path, problems)
    _check_size(path, cfg, stored)
    unread = set() if cfg.num_nextn_predict_layers else set(hf_names.mtp_names(cfg, stored))
    if unread:
        _log.info("%s holds an MTP layer; the config has none, so it is not loaded", path)
        stored = {name: tensor for name, tensor in stored.items() if name not in unread}
    letters, shapes = glm5.axis_letters(cfg), glm5.abstract_params(cfg)
    fused = hf_names.fused_layers(stored)
    table = hf_names.pieces(cfg, letters, shapes, fused, may_differ)
    held = {piece.path for piece in table if piece.name in stored}
    table = [p for p in table if p.path in held or not tree.matches_any(may_differ, p.path)]
    names = {*hf_names.copies(cfg), *(piece.name for piece in table)}
    stored = {n: t for n, t in stored.items() if n in names or not tree.matches_any(may_differ, n)}
    _check(path, cfg, stored, table)
    return stored, table


def _fp8_block(path) -> tuple[int, int]:
    """Returns the block of FP8 files. Raises ValueError if config.json does not give it."""
    file = config_file(path)
    config = read_json_file(file).get("quantization_config")
    if not hf_fp8.is_fp8(config):
        raise ValueError(
            f"{path} cannot be loaded: its files hold FP8 weights and {file.name} has no quantization_config "
            "with quant_method fp8; fetch it again"
        )
    return tuple(config["weight_block_size"])


def _check_size(path, cfg: ModelConfig, stored: dict[str, FileTensor]) -> None:
    """Raises ValueError if a config describes more layers or experts than the files have tensors.

    Call it before the table of a model's tensors is built, because the table grows with layers and experts.
    """
    sizes = {"num_hidden_layers": cfg.num_hidden_layers}
    if cfg.num_moe_layers and not hf_names.fused_layers(stored):
        sizes["n_routed_experts"] = cfg.n_routed_experts
    for name, size in sizes.items():
        if size > len(stored):
            raise ValueError(
                f"{path} cannot be loaded: config.json says {name} {size}, and the files hold {len(stored)} tensors; "
                "give the config of these files"
            )


def _check(path, cfg: ModelConfig, stored: dict[str, FileTensor], table) -> None:
    expected = {piece.name: piece.view.shape for piece in table}
    copies = {n: o for n, o in hf_names.copies(cfg).items() if n in stored and n not in expected}
    missing = [f"missing: {n} {list(s)}" for n, s in expected.items() if n not in stored]
    unexpected = [
        f"unexpected: {n} {list(t.shape)}"
        for n, t in stored.items()
        if n not in expected and n not in copies
    ]
    misshapen = [
        f"wrong shape: {n} is {list(stored[n].shape)}, expected {list(shape)}"
        for n, shape in expected.items()
        if n in stored and stored[n].shape != shape
    ]
    unreadable = [
        f"dtype {t.kind}: {n}; convert it to {', '.join(DTYPES)} first"
        for n, t in stored.items()
        if t.kind not in DTYPES
    ]
    differing = [
        f"{n} should repeat {original} and does not"
        for n, original in copies.items()
        if original in stored and not is_same_tensor(stored[n], stored[original])
    ]
    raise_problems(path, missing, unexpected, misshapen, unreadable, differing)


def _dtypes(path, by_leaf, stored: dict[str, FileTensor], dtype) -> dict[str, np.dtype]:
    """Returns {leaf: dtype that it is loaded as}. Logs a warning for leaves it widens, if no dtype is requested."""
    chosen, promoted = {}, []
    for leaf, pieces in by_leaf.items():
        kinds = collections.Counter(stored[p.name].dtype for p in pieces)
        if leaf.endswith(hf_names.FLOAT32):
            chosen[leaf] = jnp.dtype(jnp.float32)
        elif dtype is not None:
            chosen[leaf] = jnp.dtype(dtype[leaf] if isinstance(dtype, Mapping) else dtype)
        else:
            chosen[leaf] = functools.reduce(jnp.promote_types, kinds)
        if dtype is None and set(kinds) != {chosen[leaf]}:
            counts = ", ".join(f"{n} {kind.name}" for kind, n in kinds.most_common())
            promoted.append(f"{leaf}: {chosen[leaf].name} from {counts}")
    if promoted:
        _log.warning(
            "%s: these leaves are loaded, and will be exported, in a wider dtype than some of their "
            "tensors have:\n  %s",
            path,
            "\n  ".join(promoted),
        )
    return chosen


def _read_shard(pieces, stored, dtype, ranges) -> np.ndarray:
    """Reads the part of a plain leaf within the ranges."""
    return hf_names.fill(
        pieces, ranges, dtype, lambda piece, part: piece.view.of(stored[piece.name], part)
    )


def _place(shape, read, sharding=None) -> jax.Array:
    """Creates a jax.Array on the default device, or from the boxes of a sharding."""
    if sharding is None:
        return jax.device_put(read([slice(0, n) for n in shape]))
    return boxes.place(shape, read, sharding)
