"""Reads the command line of `launch.run`: an experiment, its fields, the workdir and the pod.

1. `expand` writes the short form, `pretrain:tiny --train.steps=50`, in the long form,
   `--experiment=pretrain:tiny --experiment.train.steps=50`. All programs accept both.
2. `check_source` checks the names of the variant and the fields in the source, so that a misspelt one is answered
   before jax is imported.
3. `parse` loads the experiment's file, defines a flag for each field of its config, and applies the flags.

The launchers read the same command line with flags of their own (launch/run_plan.py).
"""

import dataclasses
import importlib.util
import inspect
import os
import pathlib
import re
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from glm5_jax.runtime.config_fields import check_path, tree_of
from glm5_jax.runtime.config_flags import to_frozen, to_mutable
from launch import experiment_files, rehearsal
from launch.imports import paused_collector

EXAMPLE = "pretrain:tiny"
PROGRAM_FLAGS = {
    "experiment": "the experiment, NAME:VARIANT or FILE.py:VARIANT",
    "workdir": "folder of the run",
    "distributed": "auto or HOST:PORT,N,I: join the processes of a pod",
    "stage": "name of the only stage to train, of an experiment with several",
}


class Command(NamedTuple):
    """Parsed command line.

    Attributes:
      module: module of the experiment.
      config: its config with the flags applied.
      workdir: folder of the run.
      distributed: how to join the processes of a pod; None: a single process.
      stage: name of the only stage to train (launch/stage_plan.py); None: all stages.
    """

    module: ModuleType
    config: Any
    workdir: pathlib.Path
    distributed: str | None
    stage: str | None = None


def parse(argv: list[str], launcher_flags: Iterable[str] = ()) -> Command:
    """Parses the program's arguments. Raises ValueError or flags.Error, with the fix in the first line.

    launcher_flags: names of other flags, which a misspelt one may mean.
    """
    known = {*PROGRAM_FLAGS, *launcher_flags}
    check_source(argv, known)
    argv = expand(argv)
    spec = spec_of(argv)
    module, config = load(spec)
    has_fields = dataclasses.is_dataclass(config)
    mutable = to_mutable(config if has_fields else _NoFields())
    check_fields("experiment", mutable, argv, known)
    values = define(mutable, argv)
    rest = values(argv)
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; every flag is --NAME=VALUE")
    distributed, workdir = values["distributed"].value, values["workdir"].value
    if not (
        hasattr(module, "roles") and launcher_flags
    ):  # a launcher keeps its logs in the workdir
        _check_run_flags(module, spec.partition(":")[0], distributed, workdir)
    if not workdir:
        name = spec.removesuffix(".py").replace(".py:", "_").replace(":", "_").replace(",", "_")
        workdir = f"workdir/{pathlib.Path(name).name}"
    try:
        config = to_frozen(values["experiment"].value) if has_fields else config
    except ValueError as error:
        raise ValueError(f"--experiment.{error}") from None
    if _names_checkpoint_only(config, argv):
        config = dataclasses.replace(config, model_of_checkpoint=True)
    if os.environ.get(rehearsal.VARIABLE):
        from launch.rehearsal import substitution  # imported late, because it imports jax

        config = substitution.replace_sizes(config, module.get_config, spec.partition(":")[2])
    return Command(module, config, pathlib.Path(workdir), distributed, values["stage"].value)


def _names_checkpoint_only(config: Any, argv: list[str]) -> bool:
    """Returns whether the flags name a checkpoint, but no field of a model except those that the stage changes."""
    if not hasattr(config, "model_of_checkpoint") or config.checkpoint is None:
        return False
    paths = [_name(word).removeprefix("experiment.") for word in argv[1:]]
    changes = tuple(f"model.{name}" for name in config.model_changes)
    names_model = any(path.startswith("model.") and not path.startswith(changes) for path in paths)
    return "checkpoint" in paths and "model_of_checkpoint" not in paths and not names_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoFields:
    """Stands for the config of an ablation whose arms have no flags."""


def expand(argv: list[str], launcher_flags: flags.FlagValues | None = None) -> list[str]:
    """Returns the arguments in the long form.

    The first word without dashes becomes --experiment=WORD, and --FIELD=VALUE or --FIELD VALUE becomes
    --experiment.FIELD=VALUE.

    launcher_flags: flags of a launcher, which are no fields.
    """
    switches = _switches(launcher_flags)
    names = {*PROGRAM_FLAGS, *switches, *(launcher_flags or ())}
    expanded, words = argv[:1], argv[1:]
    has_experiment = any(_name(word) == "experiment" for word in words if _is_flag(word))
    while words:
        word = words.pop(0)
        if not _is_flag(word):
            expanded.append(word if has_experiment else f"--experiment={word}")
            has_experiment = True
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and name not in switches and words and not _is_flag(words[0]):
            equals, value = "=", words.pop(0)
        if name not in names:
            name = f"experiment.{name.removeprefix('experiment.')}"
        expanded.append(f"--{name}{equals}{value}")
    return expanded


def _switches(launcher_flags: flags.FlagValues | None) -> set[str]:
    """Returns the names of the boolean flags, --NAME and --noNAME, which take no separate value."""
    if launcher_flags is None:
        return set()
    names = [name for name in launcher_flags if launcher_flags[name].boolean]
    return {*names, *(f"no{name}" for name in names)}


def _is_flag(word: str) -> bool:
    """Returns whether a word is a flag, and not a value such as -1 or -1e-3."""
    return re.match(r"--?[^\W\d]", word) is not None


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def check_source(argv: list[str], known: Collection[str] = PROGRAM_FLAGS.keys()) -> None:
    """Checks the names of the experiment, its variant and its fields without importing it.

    known: names of flags that are no fields, to offer for a misspelt one.

    Raises ValueError, with the most similar name, for an unknown one. What the source leaves open is left to
    `parse`.
    """
    expanded = expand(argv)
    experiment, variant = experiment_files.find(spec_of(expanded))
    if extra := [word for word in expanded[1:] if not _is_flag(word)]:
        raise ValueError(f"unexpected argument {extra[0]!r}; every flag is --NAME=VALUE")
    tree = experiment_files.field_tree(experiment.path, variant)
    if tree is None:
        return
    for word in argv[1:]:
        name = _name(word)
        if not _is_flag(word) or name in PROGRAM_FLAGS:
            continue
        path = name.removeprefix("experiment.")
        if not experiment_files.is_certain(tree, path):
            continue
        try:
            check_path(tree, path, f"--{name.removesuffix(path)}", known)
        except ValueError as error:
            raise ValueError(f"--{name}: {error}") from None


def _check_run_flags(
    module: ModuleType, file: str, distributed: str | None, workdir: str | None
) -> None:
    """Raises ValueError for a flag that an experiment with a `run` function cannot use."""
    if not hasattr(module, "run"):
        return
    if distributed and not hasattr(module, "roles"):
        raise ValueError(
            f"--distributed={distributed}: {file} runs in one process; leave the flag out"
        )
    if workdir and not has_workdir(module):
        raise ValueError(
            f"--workdir={workdir}: {file} writes nothing and has no workdir; to read this folder use "
            f"--experiment.checkpoint={workdir}"
        )


def has_workdir(module: ModuleType) -> bool:
    """Returns whether the `run` function of an experiment module takes a workdir."""
    return "workdir" in inspect.signature(module.run).parameters


def check_fields(name: str, mutable, argv: list[str], known: Collection[str] = ()) -> None:
    """Raises ValueError if a flag --NAME.FIELD names no field of the mutable config; known: as in `check_source`."""
    tree = tree_of(mutable)
    for arg in argv[1:]:
        if arg.lstrip("-").startswith(f"{name}."):
            path = _name(arg).removeprefix(f"{name}.")
            try:
                check_path(tree, path, f"--{name}.", known)
            except ValueError as error:
                raise ValueError(f"--{name}.{path}: {error}") from None


def define(mutable, argv: list[str]) -> flags.FlagValues:
    """Returns the flags of the program for an experiment."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_dataclass(
        "experiment",
        mutable,
        PROGRAM_FLAGS["experiment"],
        flag_values=values,
        sys_argv=argv,
        parse_fn=lambda _: mutable,
    )
    for name in ("workdir", "distributed", "stage"):
        flags.DEFINE_string(name, None, PROGRAM_FLAGS[name], flag_values=values)
    return values


def load(spec: str) -> tuple[ModuleType, Any]:
    """Returns the module of an experiment and the config of its `get_config(VARIANT)`."""
    path, variant = experiment_files.locate(spec)
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(module_spec)
    with paused_collector():
        module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} has no get_config(variant), so it is not an experiment")
    return module, module.get_config(variant) if variant else module.get_config()


def spec_of(argv: list[str]) -> str:
    """Returns the value of --experiment in the long form. Raises ValueError if it is missing."""
    for i, arg in enumerate(argv):
        name, _, value = arg.partition("=")
        if name in ("--experiment", "-experiment"):
            value = value or (argv[i + 1] if i + 1 < len(argv) else "")
            if value:
                return value
    raise ValueError(f"no experiment given; try {EXAMPLE}. `glm5 list` shows all")
