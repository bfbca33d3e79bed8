"""Loads models by path: a run's workdir, one of its checkpoints, a HuggingFace folder, or owner/name of the hub."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from glm5_jax.checkpoint import hf_import, hf_names, store
from glm5_jax.checkpoint.engine_dtypes import transfer_dtypes
from glm5_jax.checkpoint.hub import fetch_checkpoint
from glm5_jax.config import LoraConfig, ModelConfig, RopeParameters
from glm5_jax.model import glm5, lora
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel import boxes, tree
from glm5_jax.runtime.files import read_text
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.quantized_weights import Int4, Int8

# Fields that a training stage may change relative to the previous one: attention becomes sparse, with fewer and fewer
# keys, and experts become int4.
CHANGED_BY_STAGES = ("attention", "index_topk", "int4_group")
# Sizes by which a reader knows a model.
_SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "n_routed_experts",
    "vocab_size",
)
_READ_NUMBERS = 2**27  # of a weight that are read at once in their stored dtype


def load_model(
    path: str | os.PathLike, mesh: Mesh | None = None, trained: ModelConfig | None = None
) -> glm5.Glm5:
    """Loads the model at a path onto a mesh, with the adapters of a run merged.

    trained: config of the model that a trainer makes of these weights, and whose numbers an engine must compute; its
    fields `CHANGED_BY_STAGES` replace those of the checkpoint. None, or a quantised checkpoint: nothing is replaced.

    Raises ValueError if there is none or it is broken.
    """
    path = _find_path(path)
    if trained is not None:
        stored, is_quantised = read_config(path)
        changes = {name: getattr(trained, name) for name in CHANGED_BY_STAGES}
        cfg = dataclasses.replace(stored, **changes)
        if cfg != stored and not is_quantised:
            return glm5.Glm5(cfg, params=open_weights(path, cfg, mesh=mesh)(), mesh=mesh)
    if not _is_run(path):
        load = hf_import.load_quantised if hf_import.is_quantised(path) else hf_import.load_hf
        return load(path, mesh=mesh)
    cfg = lora.without_adapters(run_config(path))
    return glm5.Glm5(cfg, params=open_weights(path, cfg, mesh=mesh)(), mesh=mesh)


def load_served_model(
    path: str | os.PathLike,
    mesh: Mesh | None = None,
    trained: ModelConfig | None = None,
    convert: Callable[[ModelConfig, str, jax.Array], typing.Any] | None = None,
) -> glm5.Glm5:
    """Loads the model at a path for an engine: like `load_model`, in the dtypes of the engine's computation.

    Host memory peaks at one device's shard of the largest leaf in that dtype, and one layer of that in the stored dtype.

    convert: converts each weight (config, path, weight) as soon as it is on the devices; None: they stay as they are. A
    quantised checkpoint and a run with adapters are not converted.
    """
    path = _find_path(path)
    cfg, is_quantised = read_config(path)
    if is_quantised or _has_adapters(path):
        return load_model(path, mesh, trained)
    if trained is not None:
        changes = {name: getattr(trained, name) for name in CHANGED_BY_STAGES}
        cfg = dataclasses.replace(cfg, **changes)
    leaves, dtypes = _open_leaves(path, cfg), transfer_dtypes(cfg)
    shardings = {} if mesh is None else tree.flatten(glm5.param_shardings(cfg, mesh))

    def load(leaf_path: str) -> typing.Any:
        leaf, dtype = leaves[leaf_path], dtypes[leaf_path]

        def read(ranges: Sequence[slice]) -> np.ndarray:
            first, *rest = ranges
            part = np.empty([r.stop - r.start for r in ranges], dtype)
            step = max(1, _READ_NUMBERS * len(part) // max(1, part.size))
            for start in range(first.start, first.stop, step):
                rows = slice(start, min(start + step, first.stop))
                part[rows.start - first.start : rows.stop - first.start] = leaf[(rows, *rest)]
            return part

        if mesh is None:
            w = jax.device_put(read([slice(0, n) for n in leaf.shape]))
        else:
            w = boxes.place(leaf.shape, read, shardings[leaf_path])
        return w if convert is None else convert(cfg, leaf_path, w)

    params = tree.unflatten({leaf_path: load(leaf_path) for leaf_path in leaves})
    if isinstance(leaves, store.StoredArrays):
        leaves.check_bits()
    return glm5.Glm5(cfg, params=params, mesh=mesh)


def open_leaves(
    path: str | os.PathLike,
) -> tuple[ModelConfig, Mapping[str, hf_names.StoredTensor]]:
    """Returns the config of the plain model at a path, and its weights by path, which are read when they are indexed.

    Only a run with adapters is loaded at once, because they are merged. Raises ValueError if there is none, or it is
    broken or quantised.
    """
    path = _find_path(path)
    cfg, is_quantised = read_config(path)
    if is_quantised:
        raise ValueError(f"{path} is quantised already; give the model before quantisation")
    if _has_adapters(path):
        return cfg, tree.flatten(glm5.params_of(load_model(path)))
    return cfg, _open_leaves(path, cfg)


def _open_leaves(path: pathlib.Path, cfg: ModelConfig) -> Mapping[str, hf_names.StoredTensor]:
    """Returns the weights of a plain model without adapters. Raises ValueError if they are not those of cfg."""
    if _is_run(path):
        return store.open_arrays(path, glm5.abstract_params(cfg))
    return hf_import.open_leaves(path, cfg)


def _has_adapters(path: pathlib.Path) -> bool:
    return _is_run(path) and bool(run_config(path).lora.rank)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer of the model at a path. Raises ValueError if there is none."""
    path = _find_path(path)
    return Tokenizer.load(_workdir(path) / "tokenizer" if _is_run(path) else path)


def open_weights(
    path: str | os.PathLike,
    cfg: ModelConfig,
    *,
    mesh: Mesh | None = None,
    may_differ: Sequence[str] = (),
) -> Callable[[], dict]:
    """Checks the weights at a path, and returns a function that loads them in the dtypes of `glm5.abstract_params`.

    These are float32, and that of the computation for weights that adapters freeze (`model.lora`). Adapters of a run
    are loaded if cfg has the same ones, and merged into its other weights if not. New ones are not in the tree.

    may_differ: patterns of weights that one side may lack (`store.check_params`), and of config fields that may differ
    (`check_arithmetic`). Raises ValueError if the weights are missing, broken, or of another model.
    """
    path = _find_path(path)
    if not _is_run(path) and hf_import.is_quantised(path):
        raise ValueError(
            f"{path} holds a quantised model, which cannot be trained; give the model that it was quantised from"
        )
    held = run_config(path).lora if _is_run(path) else LoraConfig()
    if held.rank and held != cfg.lora:
        return _open_merged(path, cfg, held, mesh, may_differ)
    stored = cfg if held.rank else lora.without_adapters(cfg)
    paths = tree.flatten(glm5.abstract_params(stored))
    abstract = {p: x for p, x in tree.flatten(glm5.abstract_params(cfg)).items() if p in paths}
    dtypes, abstract = {p: x.dtype for p, x in abstract.items()}, tree.unflatten(abstract)
    shardings = mesh and glm5.param_shardings(stored, mesh)
    if not _is_run(path):
        theirs = hf_import.read_config(path)
        with _naming_sizes(path, theirs, cfg):
            hf_import.check_params(path, stored, may_differ)
        check_arithmetic(f"checkpoint {path}", theirs, cfg, may_differ)
        load = functools.partial(hf_import.load_params, path, stored, dtype=dtypes)
        return functools.partial(load, shardings=shardings, may_differ=may_differ)
    if shardings is not None:
        abstract = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            abstract,
            shardings,
        )
    theirs = run_config(path)
    with _naming_sizes(path, theirs, cfg):
        store.check_params(path, abstract, may_differ)
    check_arithmetic(f"checkpoint {path}", theirs, cfg, may_differ)
    return functools.partial(store.load_params, path, abstract, may_differ)


@contextlib.contextmanager
def _naming_sizes(path: pathlib.Path, theirs: ModelConfig, ours: ModelConfig) -> Iterator[None]:
    """Turns the error of a check of weights into one that names the sizes of both models, where these differ."""
    try:
        yield
    except ValueError as error:
        sizes = ({name: getattr(cfg, name) for name in _SIZES} for cfg in (theirs, ours))
        if diff := config_diff(*sizes):
            raise ValueError(
                f"checkpoint {path} is of another model, with {format_diff(diff)}; to train that model, set "
                "--experiment.model_of_checkpoint=True"
            ) from error
        raise


def _open_merged(
    path: pathlib.Path,
    cfg: ModelConfig,
    held: LoraConfig,
    mesh: Mesh | None,
    may_differ: Sequence[str],
) -> Callable[[], dict]:
    """Returns a function that loads a run's weights with its adapters merged, for a cfg without these."""
    stored = dataclasses.replace(cfg, lora=held, dtype="float32", int4_group=None)
    load = open_weights(path, stored, mesh=mesh, may_differ=may_differ)
    abstract = tree.flatten(glm5.abstract_params(cfg))

    def load_merged() -> dict:
        merged = lora.merge_adapters(load(), stored)
        return tree.map_with_path(lambda p, x: x.astype(abstract[p].dtype), merged)

    return load_merged


def check_arithmetic(
    name: str, checkpoint_cfg: ModelConfig, cfg: ModelConfig, may_differ: Sequence[str] = ()
) -> None:
    """Raises ValueError if weights of checkpoint_cfg compute something else in a model of cfg.

    name: name of the checkpoint in the error. Two kinds of fields may differ: those that stages change
    (`CHANGED_BY_STAGES`), and those that a pattern of may_differ matches (as "model.FIELD").
    """
    diff = {
        field: values
        for field, values in config_diff(checkpoint_cfg.arithmetic, cfg.arithmetic).items()
        if field not in CHANGED_BY_STAGES and not tree.matches_any(may_differ, f"model.{field}")
    }
    if diff:
        flags = " ".join(
            f"--experiment.model.{field}={theirs}" for field, (theirs, _) in diff.items()
        )
        raise ValueError(
            f"{name} is of a model with {format_diff(diff)}; set {flags}, or, if that is meant to change, "
            f'--experiment.may_differ="{tuple(diff)}"'
        )


def config_diff(theirs: Mapping, ours: Mapping) -> dict[str, tuple]:
    """Returns {field: (theirs, ours)} for the arithmetic fields that both have and that differ."""
    both = sorted(theirs.keys() & ours.keys())
    return {field: (theirs[field], ours[field]) for field in both if theirs[field] != ours[field]}


def format_diff(diff: Mapping[str, tuple]) -> str:
    """Formats the result of `config_diff` for an error message."""
    return ", ".join(f"{field} {theirs} (here {ours})" for field, (theirs, ours) in diff.items())


def make_weight_loader(model: glm5.Glm5) -> Callable[[str], dict]:
    """Returns a function that loads the weights at a path as a replacement for a model's weights.

    The function holds no reference to the model, and downloads nothing. It raises ValueError, before it loads
    anything, unless the weights are of the same model and quantised in the same way.
    """
    cfg, mesh, kind = model.cfg, model.mesh, _kind_of(glm5.params_of(model))

    def load(path) -> dict:
        path = _check_path(path)
        quantised = not _is_run(path) and hf_import.is_quantised(path)
        if quantised:
            path_cfg, held = hf_import.open_quantised(path)
        else:
            path_cfg = read_config(path)[0]
            held = glm5.abstract_params(path_cfg)
        if (theirs := _kind_of(held)) != kind:
            raise ValueError(
                f"{path} holds {theirs}, the served model has {kind}; give a folder of that kind, or restart the server "
                "with this one"
            )
        expected, stored = ({"model": glm5.abstract_params(one)} for one in (cfg, path_cfg))
        store.check_shapes(expected, stored, str(path))
        if diff := config_diff(path_cfg.arithmetic, cfg.arithmetic):
            raise ValueError(
                f"{path} is of a model with {format_diff(diff)}; give weights of the served model, or restart the "
                "server with this one"
            )
        return (
            hf_import.load_tensors(path_cfg, held, mesh)
            if quantised
            else open_weights(path, cfg, mesh=mesh)()
        )

    return load


def _kind_of(params) -> str:
    """Describes how a tree of parameters is quantised."""
    leaves = tree.flatten(params).values()
    groups = sorted({leaf.group for leaf in leaves if isinstance(leaf, Int4)})
    kinds = ["weights in 8 bits"] * any(isinstance(leaf, Int8) for leaf in leaves)
    kinds += [f"experts as int4 in groups of {group}" for group in groups]
    kinds += ["rotated ones"] * any(isinstance(leaf, RotatedNorm) for leaf in leaves)
    return ", ".join(kinds) or "plain weights"


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Returns True if there is a checkpoint at a path that this process may read."""
    try:
        _check_path(path)
    except (ValueError, OSError):
        return False
    return True


def _find_path(path: str | os.PathLike) -> pathlib.Path:
    """Returns the local path of a checkpoint, which may be a repository of the hub. Raises ValueError."""
    return _check_path(fetch_checkpoint(path))


def _check_path(path) -> pathlib.Path:
    """Returns the path of a checkpoint. Raises ValueError if there is none."""
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(
            f"checkpoint {path} does not exist; give a run's workdir, one of its checkpoints/STEP, or an HF folder"
        )
    if path.is_dir() and not _is_run(path) and not (path / "config.json").exists():
        stages = sorted(p.name for p in path.iterdir() if (p / "checkpoints").is_dir())
        if stages:
            raise ValueError(
                f"{path} holds the stages {', '.join(stages)}; give one of them, as in {path / stages[-1]}"
            )
    if not _is_run(path) and path.suffix != ".safetensors" and not (path / "config.json").exists():
        raise ValueError(
            f"{path} is not a checkpoint; give a run's workdir, one of its checkpoints/STEP, or an HF folder"
        )
    return path


def _is_run(path: pathlib.Path) -> bool:
    return (path / "checkpoints").is_dir() or (path / "model").is_dir()


def _workdir(path: pathlib.Path) -> pathlib.Path:
    """Returns the workdir of a path that is a run's workdir or one of its checkpoints/STEP."""
    return path if (path / "checkpoints").is_dir() else path.absolute().parents[1]


def read_config(path: str | os.PathLike) -> tuple[ModelConfig, bool]:
    """Returns the config of the model that `load_model` loads, and whether its weights are quantised.

    Raises ValueError if there is no model or it is broken.
    """
    path = _find_path(path)
    if _is_run(path):
        return lora.without_adapters(run_config(path)), False
    if hf_import.is_quantised(path):
        return hf_import.open_quantised(path)[0], True
    return hf_import.read_config(path), False


def run_config(path: pathlib.Path) -> ModelConfig:
    """Returns the model's config that the run wrote. Raises ValueError if it cannot be read."""
    file = _workdir(path) / "config.json"
    try:
        fields = json.loads(read_text(file))["model"]
        rope = RopeParameters(**fields.pop("rope_parameters"))
        adapters = LoraConfig(**fields.pop("lora", {}))
        hints = typing.get_type_hints(ModelConfig)
        known: dict[str, typing.Any] = {
            name: _tuples(fields[name]) for name in hints if name in fields
        }
        return ModelConfig(rope_parameters=rope, lora=adapters, **known)
    except FileNotFoundError as error:
        raise ValueError(
            f"{_workdir(path)} holds no checkpoint of a run: it has no config.json"
        ) from error
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} holds no config of a run: {error}") from error


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
