"""Models by where they are: a run's workdir, one of its checkpoints, or a HuggingFace folder."""

import functools
import json
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence

import jax

from glm5_jax.checkpoint import hf_import, store
from glm5_jax.config import ModelConfig, RopeParameters
from glm5_jax.core import tree
from glm5_jax.model import glm5
from glm5_jax.model.turned import Turned
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.quantised import Int4, Int8

# That one stage of training has otherwise than the one before: dense, then sparse with fewer and fewer keys, then
# with experts as int4.
CHANGED = ("attention", "index_topk", "int4_group")


def load_model(path, mesh=None) -> glm5.Glm5:
    """The model at a path, on its mesh; ValueError that says what is wrong there."""
    path = _there(path)
    if not _is_run(path):
        load = hf_import.load_quantised if hf_import.is_quantised(path) else hf_import.load_hf
        return load(path, mesh=mesh)
    cfg = run_config(path)
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
    check_arithmetic(f"checkpoint {path}", run_config(path), cfg, unshared)
    return functools.partial(store.load_params, path, abstract, unshared)


def check_arithmetic(
    name: str, found: ModelConfig, cfg: ModelConfig, unshared: Sequence[str] = ()
) -> None:
    """ValueError, in which what was found has that name, if its weights compute otherwise in a model of cfg, but for
    what stages change (`CHANGED`) and fields of the model in which a pattern of unshared is found."""
    odd = {
        field: values
        for field, values in differences(found.arithmetic, cfg.arithmetic).items()
        if field not in CHANGED and not tree.found(unshared, f"model.{field}")
    }
    if odd:
        flags = " ".join(
            f"--experiment.model.{field}={theirs}" for field, (theirs, _) in odd.items()
        )
        raise ValueError(
            f"{name} is of a model with {told(odd)}; set {flags}, or, if that is meant to change, "
            f'--experiment.unshared="{tuple(odd)}"'
        )


def differences(theirs: Mapping, ours: Mapping) -> dict[str, tuple]:
    """{field: (of the one that was found, of the one here)} of arithmetic that counts in both and differs."""
    both = sorted(theirs.keys() & ours.keys())
    return {field: (theirs[field], ours[field]) for field in both if theirs[field] != ours[field]}


def told(odd: Mapping[str, tuple]) -> str:
    """`differences` in words."""
    return ", ".join(f"{field} {theirs} (here {ours})" for field, (theirs, ours) in odd.items())


def loader_like(model: glm5.Glm5) -> Callable[[str], dict]:
    """What loads the weights of a path in the place of a model's, to which it does not hold on. They must be of the
    same model, and quantised as its are or not at all; ValueError before anything is loaded."""
    cfg, mesh, kind = model.cfg, model.mesh, _kind_of(glm5.params_of(model))

    def load(path) -> dict:
        path = _there(path)
        quantised = not _is_run(path) and hf_import.is_quantised(path)
        if quantised:
            found, held = hf_import.open_quantised(path)
        else:
            found = run_config(path) if _is_run(path) else hf_import.read_config(path)
            held = glm5.abstract(found)
        if (theirs := _kind_of(held)) != kind:
            raise ValueError(
                f"{path} holds {theirs}, what is served is {kind}; give a folder of that kind, or serve this one anew"
            )
        wanted, given = ({"model": glm5.abstract(one)} for one in (cfg, found))
        store.check_shapes(wanted, given, str(path))
        if odd := differences(found.arithmetic, cfg.arithmetic):
            raise ValueError(
                f"{path} is of a model with {told(odd)}; give one of the model that is served, or serve it anew"
            )
        return (
            hf_import.place(found, held, mesh)
            if quantised
            else open_weights(path, cfg, mesh=mesh)()
        )

    return load


def _kind_of(params) -> str:
    """How a tree of parameters is quantised, in words."""
    leaves = tree.flatten(params).values()
    groups = sorted({leaf.group for leaf in leaves if isinstance(leaf, Int4)})
    kinds = ["weights in 8 bits"] * any(isinstance(leaf, Int8) for leaf in leaves)
    kinds += [f"experts as int4 in groups of {group}" for group in groups]
    kinds += ["rotated ones"] * any(isinstance(leaf, Turned) for leaf in leaves)
    return ", ".join(kinds) or "plain weights"


def is_checkpoint(path) -> bool:
    """Returns whether there is a checkpoint at a path that this process may read."""
    try:
        _there(path)
    except (ValueError, OSError):
        return False
    return True


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
    if not _is_run(path) and path.suffix != ".safetensors" and not (path / "config.json").exists():
        raise ValueError(
            f"{path} is no checkpoint; give a run's workdir, one of its checkpoints/STEP, or an HF folder"
        )
    return path


def _is_run(path: pathlib.Path) -> bool:
    return (path / "checkpoints").is_dir() or (path / "model").is_dir()


def _workdir(path: pathlib.Path) -> pathlib.Path:
    """Of a run's workdir, or of its checkpoints/STEP."""
    return path if (path / "checkpoints").is_dir() else path.absolute().parents[1]


def read_config(path) -> tuple[ModelConfig, bool]:
    """The config of the model at a path, and whether its weights are quantised; ValueError that says what is wrong there."""
    path = _there(path)
    if _is_run(path):
        return run_config(path), False
    return hf_import.read_config(path), hf_import.is_quantised(path)


def run_config(path: pathlib.Path) -> ModelConfig:
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
