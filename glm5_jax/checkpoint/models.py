"""Loads models by path: a run's workdir, one of its checkpoints, or a HuggingFace folder."""

import dataclasses
import functools
import json
import os
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import Mesh

from glm5_jax.checkpoint import hf_import, store
from glm5_jax.config import LoraConfig, ModelConfig, RopeParameters
from glm5_jax.model import glm5, lora
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel import tree
from glm5_jax.runtime.files import read_text
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.quantized_weights import Int4, Int8

# Fields that a training stage may change relative to the previous one: attention becomes sparse, with fewer and fewer
# keys, and experts become int4.
CHANGED_BY_STAGES = ("attention", "index_topk", "int4_group")


def load_model(
    path: str | os.PathLike, mesh: Mesh | None = None, trained: ModelConfig | None = None
) -> glm5.Glm5:
    """Loads the model at a path onto a mesh, with the adapters of a run merged.

    trained: config of the model that a trainer makes of these weights, and whose numbers an engine must compute; its
    fields `CHANGED_BY_STAGES` replace those of the checkpoint. None, or a quantised checkpoint: nothing is replaced.

    Raises ValueError if there is none or it is broken.
    """
    path = _check_path(path)
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


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer of the model at a path. Raises ValueError if there is none."""
    path = _check_path(path)
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
    path = _check_path(path)
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
        hf_import.check_params(path, stored, may_differ)
        check_arithmetic(f"checkpoint {path}", hf_import.read_config(path), cfg, may_differ)
        load = functools.partial(hf_import.load_params, path, stored, dtype=dtypes)
        return functools.partial(load, shardings=shardings, may_differ=may_differ)
    if shardings is not None:
        abstract = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            abstract,
            shardings,
        )
    store.check_params(path, abstract, may_differ)
    check_arithmetic(f"checkpoint {path}", run_config(path), cfg, may_differ)
    return functools.partial(store.load_params, path, abstract, may_differ)


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

    The function holds no reference to the model. It raises ValueError, before it loads anything, unless the weights are
    of the same model and quantised in the same way.
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


def _check_path(path) -> pathlib.Path:
    """Returns the path of a checkpoint. Raises ValueError if there is none."""
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"checkpoint {path} does not exist")
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
    path = _check_path(path)
    if _is_run(path):
        return lora.without_adapters(run_config(path)), False
    return hf_import.read_config(path), hf_import.is_quantised(path)


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
