"""Models by where they are: a run's workdir, one of its checkpoints, or a HuggingFace folder."""

import functools
import json
import pathlib
import typing
from collections.abc import Callable, Sequence

import jax

from glm5_jax.checkpoint import hf_import, store
from glm5_jax.config import ModelConfig, RopeParameters
from glm5_jax.core import tree
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer

# That one stage of training has otherwise than the one before: dense, then sparse with fewer and fewer keys, then
# with experts as int4.
CHANGED = ("attention", "index_topk", "int4_group")


def load_model(path, mesh=None) -> glm5.Glm5:
    """The model at a path, on its mesh; ValueError that says what is wrong there."""
    path = _there(path)
    if not _is_run(path):
        load = hf_import.load_quantised if hf_import.is_quantised(path) else hf_import.load_hf
        return load(path, mesh=mesh)
    cfg = _run_config(path)
    return glm5.Glm5(cfg, params=open_weights(path, cfg, mesh=mesh)(), mesh=mesh)


def load_tokenizer(path) -> Tokenizer:
    """The tokenizer of the model at a path; ValueError if there is none."""
    path = _there(path)
    return Tokenizer.load(_workdir(path) / "tokenizer" if _is_run(path) else path)


def open_weights(
    path, cfg: ModelConfig, *, mesh=None, unshared: Sequence[str] = ()
) -> Callable[[], dict]:
    """What loads the float32 weights at a path, which is checked before anything is read.

    unshared: patterns of weights that only one of both need have (`store.check_params`), and of fields that may be
    others (`check_arithmetic`). ValueError if they are not there, broken, or of another model.
    """
    path = _there(path)
    if not _is_run(path) and hf_import.is_quantised(path):
        raise ValueError(
            f"{path} holds a quantised model, which is served and not trained; give the one it was made of"
        )
    shardings = mesh and glm5.param_shardings(cfg, mesh)
    if not _is_run(path):
        hf_import.check_params(path, cfg, unshared)
        check_arithmetic(f"checkpoint {path}", hf_import.read_config(path), cfg, unshared)
        load = functools.partial(hf_import.load_params, path, cfg, dtype="float32")
        return functools.partial(load, shardings=shardings, unshared=unshared)
    abstract = glm5.abstract(cfg)
    if shardings is not None:
        abstract = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            abstract,
            shardings,
        )
    store.check_params(path, abstract, unshared)
    check_arithmetic(f"checkpoint {path}", _run_config(path), cfg, unshared)
    return functools.partial(store.load_params, path, abstract, unshared)


def check_arithmetic(
    name: str, found: ModelConfig, cfg: ModelConfig, unshared: Sequence[str] = ()
) -> None:
    """ValueError, in which what was found has that name, if its weights compute otherwise in a model of cfg, but for
    what stages change (`CHANGED`) and fields of the model in which a pattern of unshared is found."""
    theirs, ours = found.arithmetic, cfg.arithmetic
    odd = [
        field
        for field in theirs.keys() & ours.keys()
        if theirs[field] != ours[field]
        and field not in CHANGED
        and not tree.found(unshared, f"model.{field}")
    ]
    if odd:
        told = ", ".join(f"{field} {theirs[field]} (here {ours[field]})" for field in sorted(odd))
        flags = " ".join(f"--experiment.model.{field}={theirs[field]}" for field in sorted(odd))
        raise ValueError(
            f"{name} is of a model with {told}; set {flags}, or, if that is meant to change, "
            f"--experiment.unshared={tuple(sorted(odd))}"
        )


def _there(path) -> pathlib.Path:
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"checkpoint {path} does not exist")
    if path.is_dir() and not _is_run(path) and not (path / "config.json").exists():
        stages = sorted(own.name for own in path.iterdir() if (own / "checkpoints").is_dir())
        if stages:
            raise ValueError(
                f"{path} holds the stages {', '.join(stages)}; give one of them, as in {path / stages[-1]}"
            )
    return path


def _is_run(path: pathlib.Path) -> bool:
    return (path / "checkpoints").is_dir() or (path / "model").is_dir()


def _workdir(path: pathlib.Path) -> pathlib.Path:
    """Of a run's workdir, or of its checkpoints/STEP."""
    return path if (path / "checkpoints").is_dir() else path.absolute().parents[1]


def _run_config(path: pathlib.Path) -> ModelConfig:
    """The model's config as the run wrote it."""
    file = _workdir(path) / "config.json"
    try:
        fields = json.loads(file.read_text("utf-8"))["model"]
        rope = RopeParameters(**fields.pop("rope_parameters"))
        hints = typing.get_type_hints(ModelConfig)
        known = {name: _tuples(fields[name]) for name in hints if name in fields}
        return ModelConfig(rope_parameters=rope, **known)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} holds no config of a run: {error}") from error


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
