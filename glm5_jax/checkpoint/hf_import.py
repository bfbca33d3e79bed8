"""HuggingFace checkpoints into the parameter tree, streamed onto the devices that own the weights.

Host memory beyond the arrays themselves peaks at one device's shard of the largest leaf plus one HF
tensor: a shard is filled from slices of the files (only the rows and columns it holds are read),
handed to its devices and dropped before the next one is begun.
"""

import collections
import dataclasses
import functools
import gc
import json
import logging
import math
import pathlib
import reprlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from glm5_jax.checkpoint import hf_config, hf_int4, hf_names, hf_quantised
from glm5_jax.config import ModelConfig
from glm5_jax.core import tree
from glm5_jax.model import glm5

_DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
_KINDS = _DTYPES | {"I8": np.int8, "I32": np.int32, "I64": np.int64}
_LISTED = 50  # lines per kind of problem in an error
_COMPARED_BYTES = 2**24  # at a time, where a tensor repeats another
_log = logging.getLogger(__name__)


def load_hf(path, dtype=None, mesh=None) -> glm5.Glm5:
    """The model of a HuggingFace folder (or of one .safetensors file with its config.json beside it).

    Any glm_moe_dsa or glm4_moe_lite checkpoint: one file or shards with an index, experts one by one
    or fused, MTP layer in the files, in `mtp.safetensors` beside them, or absent (then the model has
    none). dtype: of weights and computation; by default as the files and config.json say. mesh: the
    weights arrive sharded by core/sharding.py. ValueError that lists everything wrong with the files.

    Routed experts that the files hold as int4 (`hf_int4`) are the float32 weights they stand for. A
    narrower dtype rounds those: they are then no longer quantised again when the model computes.

    Layers or experts that share a leaf but are stored in several dtypes get one that holds all their
    values exactly. A warning names the leaf, since `save_hf` writes it in that dtype.
    """
    cfg = read_config(path)
    if dtype is not None:
        cfg = dataclasses.replace(cfg, dtype=jnp.dtype(dtype).name)
        if jnp.dtype(dtype).itemsize < 4:
            cfg = dataclasses.replace(cfg, int4_group=None)
    shardings = None if mesh is None else glm5.param_shardings(cfg, mesh)
    params = load_params(path, cfg, shardings=shardings, dtype=dtype)
    return glm5.Glm5(cfg, params=params, mesh=mesh)


def read_config(path) -> ModelConfig:
    """The config of a HuggingFace folder, with as many MTP layers as its files really hold."""
    file = _config_file(path)
    cfg = hf_config.from_hf(_json(file), file)
    stored = int(bool(hf_names.mtp_names(cfg, _open(path))))
    if stored < cfg.num_nextn_predict_layers:
        _log.warning("%s holds no MTP layer; the model is loaded without one", path)
    return dataclasses.replace(cfg, num_nextn_predict_layers=stored)


def load_params(path, cfg: ModelConfig, *, shardings=None, dtype=None, unshared=()):
    """The parameter tree of a HuggingFace checkpoint.

    shardings: tree of shardings (`glm5.param_shardings`), or None for the default device. dtype: of
    every leaf but the router bias, which is float32; by default each leaf's in the files, or with a
    warning the one that holds all of them. An MTP layer that cfg does not have is left unread. unshared:
    patterns; a leaf whose path has one may be missing from the files and is then not in the tree, and
    a tensor whose HF name has one and that cfg lacks is left unread.
    ValueError that lists missing, unexpected, misshapen and unreadable tensors, before anything is
    loaded.
    """
    if dtype is not None and jnp.dtype(dtype).itemsize > 4 and not jax.config.jax_enable_x64:
        raise ValueError(
            f"dtype {jnp.dtype(dtype).name} needs jax_enable_x64; set it or use float32"
        )
    stored, table = _open_all(path, cfg, unshared)
    by_leaf = collections.defaultdict(list)
    for piece in table:
        by_leaf[piece.path].append(piece)
    dtypes = _dtypes(path, by_leaf, stored, dtype)

    def load(leaf_path, leaf, sharding=None):
        read = functools.partial(_read_shard, by_leaf[leaf_path], stored, dtypes[leaf_path])
        return _place(leaf.shape, read, sharding)

    trees = (glm5.abstract(cfg),) if shardings is None else (glm5.abstract(cfg), shardings)
    there = [{p: x for p, x in tree.flatten(t).items() if p in by_leaf} for t in trees]
    return tree.map_with_path(load, *map(tree.unflatten, there))


def open_tensors(path) -> dict[str, "_Stored"]:
    """{name: tensor} of all files of a folder, with shape and dtype, read where it is indexed with slices. ValueError that
    lists files which cannot be read."""
    return _open(path)


def from_tensors(tensors, cfg: ModelConfig, shardings=None):
    """The parameter tree of {HF name: array, or what gives one where it is indexed with slices}, which has all that cfg
    does, as `Lazy` leaves. A leaf has the dtype that holds all of its tensors; shardings: as for `load_params`."""
    by_leaf = collections.defaultdict(list)
    for piece in hf_names.pieces(cfg, glm5.letters(cfg), glm5.abstract(cfg)):
        by_leaf[piece.path].append(piece)

    def lazy(path, leaf, *sharding):
        pieces = by_leaf[path]
        kinds = {np.dtype(tensors[piece.name].dtype) for piece in pieces}
        dtype = functools.reduce(jnp.promote_types, kinds)
        read = functools.partial(_read_shard, pieces, tensors, dtype)
        return tree.Lazy(leaf.shape, dtype, functools.partial(_place, leaf.shape, read, *sharding))

    return tree.map_with_path(
        lazy, glm5.abstract(cfg), *(() if shardings is None else (shardings,))
    )


def is_quantised(path) -> bool:
    """Whether the folder is one that `save_hf` wrote of a quantised model."""
    file = _folder(path) / "config.json"
    content = _json(file) if file.is_file() else None
    config = content.get("quantization_config") if isinstance(content, dict) else None
    return isinstance(config, dict) and config.get("format") == hf_quantised.FORMAT


def load_quantised(path, mesh=None) -> glm5.Glm5:
    """The quantised model of a folder that `save_hf` wrote of one, bitwise; mesh: as for `load_hf`.

    ValueError as `open_quantised`, or if the mesh cannot cut the weights, before anything is loaded.
    """
    cfg, sources = open_quantised(path)
    return glm5.Glm5(cfg, params=place(cfg, sources, mesh), mesh=mesh)


def place(cfg: ModelConfig, sources: dict, mesh=None) -> dict:
    """The parameters of these `Source`s, on the default device or on a mesh."""
    where = () if mesh is None else (glm5.param_shardings(cfg, mesh, sources),)
    return jax.tree.map(lambda own, *at: _place(own.shape, own.read, *at), sources, *where)


def open_quantised(path) -> tuple[ModelConfig, dict]:
    """(config, parameter tree with a `hf_quantised.Source` for each array) of a folder that `save_hf` wrote of a
    quantised model. ValueError that lists everything wrong with the files.
    """
    content = _json(_config_file(path))
    if not isinstance(content, dict) or "quantization_config" not in content:
        raise ValueError(f"{path} holds no quantised model; use load_hf")
    group = hf_quantised.group_of(content.pop("quantization_config"))
    stored = _open(path)
    cfg = hf_config.from_hf(content, _config_file(path))
    table = hf_names.pieces(cfg, glm5.letters(cfg), glm5.abstract(cfg))
    kinds, by_leaf = hf_quantised.kinds_of(table, stored), collections.defaultdict(list)
    expected = {}
    for piece in table:
        by_leaf[piece.path].append(piece)
        there = stored[piece.name].kind if piece.name in stored else "F32"
        plain = jnp.dtype(_DTYPES.get(there, jnp.float32))
        expected |= hf_quantised.layout(kinds[piece.path], piece, plain, group)
    found = {n: (t.shape, np.dtype(_KINDS.get(t.kind, object))) for n, t in stored.items()}
    _refuse(
        path,
        [f"missing: {n} {list(shape)}" for n, (shape, _) in expected.items() if n not in found],
        [f"unexpected: {n} {list(t.shape)}" for n, t in stored.items() if n not in expected],
        [
            f"wrong: {n} is {stored[n].kind}{list(found[n][0])}, expected {kind.name} {list(shape)}"
            for n, (shape, kind) in expected.items()
            if n in found and found[n] != (shape, kind)
        ],
    )
    plain = {p: own for p, own in by_leaf.items() if kinds[p] is None}
    dtypes = _dtypes(path, plain, stored, None)

    def source(leaf_path, leaf):
        pieces, kind = by_leaf[leaf_path], kinds[leaf_path]
        if kind is not None:
            return hf_quantised.sources(kind, pieces, stored, leaf.shape, group)
        read = functools.partial(_read_shard, pieces, stored, dtypes[leaf_path])
        return hf_quantised.Source(leaf.shape, read)

    return cfg, tree.map_with_path(source, glm5.abstract(cfg))


def check_params(path, cfg: ModelConfig, unshared=()) -> None:
    """ValueError as `load_params`, from the files' headers alone."""
    _open_all(path, cfg, unshared)


def _open_all(path, cfg: ModelConfig, unshared=()):
    """The stored tensors that cfg has, by name, and the table of pieces that they come from."""
    stored, problems = hf_int4.unpacked(_open(path))
    _refuse(path, problems)
    unread = set() if cfg.num_nextn_predict_layers else set(hf_names.mtp_names(cfg, stored))
    if unread:
        _log.info("%s holds an MTP layer; the config has none, so it is not loaded", path)
        stored = {name: tensor for name, tensor in stored.items() if name not in unread}
    letters, shapes = glm5.letters(cfg), glm5.abstract(cfg)
    fused = hf_names.fused_layers(stored)
    table = hf_names.pieces(cfg, letters, shapes, fused, unshared)
    held = {piece.path for piece in table if piece.name in stored}
    table = [p for p in table if p.path in held or not tree.found(unshared, p.path)]
    names = {*hf_names.copies(cfg), *(piece.name for piece in table)}
    stored = {n: t for n, t in stored.items() if n in names or not tree.found(unshared, n)}
    _check(path, cfg, stored, table)
    return stored, table


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in a file; indexing it with slices reads those of its numbers."""

    file: pathlib.Path
    handle: safetensors.safe_open
    name: str
    shape: tuple[int, ...]
    kind: str  # safetensors' name of the dtype

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(_DTYPES[self.kind])

    def __getitem__(self, index) -> np.ndarray:
        return self.handle.get_slice(self.name)[index]


def _config_file(path) -> pathlib.Path:
    file = _folder(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the folder of a HuggingFace checkpoint")
    return file


def _folder(path) -> pathlib.Path:
    path = pathlib.Path(path)
    return path.parent if path.suffix == ".safetensors" else path


def _files(path) -> tuple[list[pathlib.Path], set[str]]:
    """The files of a checkpoint, and the tensor names that its index promises."""
    path, folder = pathlib.Path(path), _folder(path)
    if path.suffix == ".safetensors":
        return [path], set()
    index, promised = folder / "model.safetensors.index.json", {}
    files = [folder / "model.safetensors"]
    if not files[0].exists():
        if not index.is_file():
            raise ValueError(
                f"{path} holds neither model.safetensors nor model.safetensors.index.json; "
                "give the folder of a HuggingFace checkpoint"
            )
        promised = _weight_map(index)
        files = [folder / name for name in sorted(set(promised.values()))]
    beside = folder / "mtp.safetensors"
    return files + [f for f in [beside] if f.exists() and f not in files], set(promised)


def _json(file: pathlib.Path):
    """What a json file holds. ValueError that names the file if it is not JSON in UTF-8."""
    try:
        return json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); fetch it again") from None


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    """{tensor name: file name} of an index. ValueError unless the files are in the index's folder."""
    content = _json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(
            f"{index} is not a safetensors index: it holds {reprlib.repr(content)}, "
            "without a weight_map from tensors to files; fetch it again"
        )
    wrong = {f"{name!r:.200}" for name in names.values() if not _inside(name)}
    fix = "is no .safetensors file in this folder; fetch the index again"
    _refuse(index, [f"weight_map: {name} {fix}" for name in sorted(wrong)])
    return names


def _inside(name) -> bool:
    """Whether an index may name this file: in its folder, by name (a hub's cache links elsewhere)."""
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    path = pathlib.PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def _open(path) -> dict[str, _Stored]:
    """{name: tensor} over all files. ValueError that lists unreadable files and double names."""
    files, promised = _files(path)
    stored, problems = {}, []
    for file in files:
        try:
            handle = safetensors.safe_open(file, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            problems.append(f"{file.name} cannot be read ({error}); fetch it again")
            continue
        for name in handle.keys():
            if name in stored:
                problems.append(f"{name} is both in {stored[name].file.name} and in {file.name}")
            one = handle.get_slice(name)
            stored[name] = _Stored(file, handle, name, tuple(one.get_shape()), one.get_dtype())
    if not problems:
        problems = [f"{n} is in the index but in no file" for n in sorted(promised - set(stored))]
    _refuse(path, problems)
    return stored


def _check(path, cfg: ModelConfig, stored: dict[str, _Stored], table) -> None:
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
        f"dtype {t.kind}: {n}; convert it to {', '.join(_DTYPES)} first"
        for n, t in stored.items()
        if t.kind not in _DTYPES
    ]
    differing = [
        f"{n} should repeat {original} and does not"
        for n, original in copies.items()
        if original in stored and not _same(stored[n], stored[original])
    ]
    _refuse(path, missing, unexpected, misshapen, unreadable, differing)


def _refuse(path, *kinds: list[str]) -> None:
    """ValueError with the lines of all kinds of problems, if there are any."""
    lines = []
    for kind in kinds:
        lines += kind[:_LISTED]
        if len(kind) > _LISTED:
            lines.append(f"... and {len(kind) - _LISTED} more of these")
    if lines:
        raise ValueError(f"{path} cannot be loaded:\n  " + "\n  ".join(lines))


def _same(a: _Stored, b: _Stored) -> bool:
    """Whether two stored tensors are bitwise equal, read in blocks of rows."""
    if (a.shape, a.kind) != (b.shape, b.kind):
        return False
    step = max(1, _COMPARED_BYTES // (4 * math.prod(a.shape[1:])))
    blocks = [slice(i, min(i + step, a.shape[0])) for i in range(0, a.shape[0], step)]
    return all(a[rows].tobytes() == b[rows].tobytes() for rows in blocks)


def _dtypes(path, by_leaf, stored: dict[str, _Stored], dtype) -> dict[str, np.dtype]:
    """{leaf: dtype that it is loaded as}; without a requested one, warns of leaves it widens."""
    chosen, promoted = {}, []
    for leaf, pieces in by_leaf.items():
        found = collections.Counter(stored[p.name].dtype for p in pieces)
        if leaf.endswith(hf_names.FLOAT32):
            chosen[leaf] = jnp.dtype(jnp.float32)
        elif dtype is not None:
            chosen[leaf] = jnp.dtype(dtype)
        else:
            chosen[leaf] = functools.reduce(jnp.promote_types, found)
        if dtype is None and set(found) != {chosen[leaf]}:
            counts = ", ".join(f"{n} {kind.name}" for kind, n in found.most_common())
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
    """The part of a plain leaf within the ranges."""
    return hf_names.fill(
        pieces, ranges, dtype, lambda piece, own: piece.view.of(stored[piece.name], own)
    )


def _place(shape, read, sharding=None) -> jax.Array:
    """A jax.Array from its shards, read once per distinct shard and put on every device that has it."""
    if sharding is None:
        return jax.device_put(read([slice(0, n) for n in shape]))
    owners = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        owners[tuple(s.indices(n)[:2] for s, n in zip(index, shape))].append(device)
    arrays = []
    for bounds, devices in owners.items():
        shard = read([slice(*b) for b in bounds])
        placed = [jax.device_put(shard, device) for device in devices]
        # The shard must be gone before the next is read: not in transfer, not under this name, not
        # in jax's list of host buffers to release, which Python's garbage collector empties.
        jax.block_until_ready(placed)
        del shard
        gc.collect(0)
        arrays += placed
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
