"""Runs an experiment file.

    python -m launch.run --experiment=experiments/pretrain.py:tiny --workdir=DIR

--experiment is FILE.py:VARIANT. Any of its fields can be set with --experiment.FIELD=VALUE, for example
--experiment.train.steps=50. --workdir is the folder of all outputs (default: workdir/FILE_VARIANT); the same command
continues a run that was stopped or killed. serve.py only reads and has no workdir.

Exit codes:
  0   the run is finished
  1   the run had to stop; the reason is printed
  2   a user's error, printed in one line before training starts
  75  SIGTERM or Ctrl-C to any process: the state since the last checkpoint is saved, all processes exit, and launchers
      restart them. A second signal ends the process without saving.

On a pod start the same command on every host, with a workdir that all hosts see and --distributed=auto (TPU pods, Slurm,
MPI and Kubernetes are recognised). Elsewhere use --distributed=HOST:PORT,N,I for process I of N; process 0 is on HOST.
launch/local.py, on_ray.py, slurm.py and gke.py do this and restart processes that die.

The number of processes may change between two starts if one axis of the mesh is -1. The batches and their contents stay
the same (`DataConfig.num_shards`); on fewer devices each has more rows, step.rows_per_device of them at a time.
"""

import dataclasses
import importlib.util
import inspect
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from absl import flags
from ml_collections import config_flags

from glm5_jax.runtime.config_flags import check_path, to_frozen, to_mutable
from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import clean_logging, print_error
from launch import xla_flags

EXAMPLE = "--experiment=experiments/pretrain.py:tiny"


def main(argv: list[str]) -> int:
    """Runs the experiment and returns the exit code; argv[0] is the program's name."""
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    clean_logging()
    xla_flags.reserve_gpu_memory(os.environ)
    try:
        with PreemptionGuard(ends=True):
            command = parse(argv)
            if command.distributed:
                join_pod(command.distributed)
    except (ValueError, flags.Error) as error:
        return _fail(error, 2)
    if run := getattr(command.module, "run", None):
        return run(command.config, *([command.workdir] if has_workdir(command.module) else []))
    serve = getattr(command.module, "serve", None)
    if serve and (code := serve(command.config, command.workdir)) is not None:
        return code
    # All processes of a pod save and end together, so that none loses its progress.
    with PreemptionGuard(ends=True, unsaved=bool(command.distributed)) as stop:
        return run_config(command.module, command.config, command.workdir, stop)


class Command(NamedTuple):
    """Parsed command line.

    Attributes:
      module: module of the experiment.
      config: its config with the flags applied.
      workdir: folder of the run.
      distributed: how to join the processes of a pod; None: a single process.
    """

    module: ModuleType
    config: object
    workdir: pathlib.Path
    distributed: str | None


def parse(argv: list[str]) -> Command:
    """Parses the program's arguments. Raises ValueError or flags.Error, with the fix in the first line."""
    spec = spec_of(argv)
    module, config = load(spec)
    mutable = to_mutable(config)
    check_fields("experiment", mutable, argv)
    values = define(mutable, argv)
    rest = values(argv)
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; every flag is --NAME=VALUE")
    name = spec.removesuffix(".py").replace(".py:", "_").replace(":", "_").replace(",", "_")
    distributed = values["distributed"].value
    if distributed and hasattr(module, "run"):
        fix = "start one on each host without the flag, and a router in front of them"
        fix = "leave the flag out" if has_workdir(module) else fix
        raise ValueError(
            f"--distributed={distributed}: {spec.partition(':')[0]} runs in one process; {fix}"
        )
    workdir = values["workdir"].value
    if workdir and hasattr(module, "run") and not has_workdir(module):
        raise ValueError(
            f"--workdir={workdir}: {spec.partition(':')[0]} writes nothing and has no workdir; to read this folder use "
            f"--experiment.checkpoint={workdir}"
        )
    workdir = workdir or f"workdir/{pathlib.Path(name).name}"
    try:
        config = to_frozen(values["experiment"].value)
    except ValueError as error:
        raise ValueError(f"--experiment.{error}") from None
    return Command(module, config, pathlib.Path(workdir), distributed)


def has_workdir(module: ModuleType) -> bool:
    """Returns whether the `run` function of an experiment module takes a workdir."""
    return "workdir" in inspect.signature(module.run).parameters


def join_pod(distributed: str) -> None:
    """Joins the processes of a pod, after which jax sees the devices of all. Raises ValueError."""
    import jax  # imported late, so that a mistyped flag fails at once

    if distributed == "auto":
        from launch import local  # which imports this module

        gpus = local.this_machine().devices if _has_its_host(os.environ) else []
        try:
            jax.distributed.initialize(local_device_ids=range(len(gpus)) if gpus else None)
        except ValueError as error:
            raise ValueError(
                f"--distributed=auto: neither a TPU pod nor Slurm, MPI or Kubernetes is recognised here ({error}); use "
                "HOST:PORT,N,I"
            ) from None
        return
    try:
        address, count, index = distributed.split(",")
        if not (":" in address and 0 <= int(index) < int(count)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--distributed={distributed}; use auto or HOST:PORT,N,I with 0 <= I < N"
        ) from None
    # Without this, jax would detect the scheduler and give each process one GPU.
    options = dict(cluster_detection_method="deactivate")
    jax.distributed.initialize(address, int(count), int(index), **options)


def _has_its_host(environment: Mapping[str, str]) -> bool:
    """Returns whether Slurm or MPI started this process as the only one of its host.

    Such a process takes all GPUs of its host. jax would take one, because it expects a process for each GPU.
    """
    if "SLURM_NTASKS" in environment:
        return environment["SLURM_NTASKS"] == environment.get("SLURM_STEP_NUM_NODES")
    return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


def check_fields(name: str, mutable, argv: list[str]) -> None:
    """Raises ValueError if a flag --NAME.FIELD names no field of the mutable config."""
    for arg in argv[1:]:
        if arg.lstrip("-").startswith(f"{name}."):
            path = arg.lstrip("-").removeprefix(f"{name}.").split("=")[0]
            try:
                check_path(mutable, path)
            except ValueError as error:
                raise ValueError(f"--{name}.{path}: {error}") from None


def define(mutable, argv: list[str]) -> flags.FlagValues:
    """Returns the flags of the program for an experiment."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_dataclass(
        "experiment",
        mutable,
        "the experiment, FILE.py:VARIANT",
        flag_values=values,
        sys_argv=argv,
        parse_fn=lambda _: mutable,
    )
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.DEFINE_string(
        "distributed",
        None,
        "auto or HOST:PORT,N,I: join the processes of a pod",
        flag_values=values,
    )
    return values


def load(spec: str) -> tuple[ModuleType, object]:
    """Returns the module of "FILE.py:VARIANT" and the config of its `get_config(VARIANT)`."""
    file, _, variant = spec.partition(":")
    path = pathlib.Path(file)
    if not path.is_file() or path.suffix != ".py":
        files = pathlib.Path("experiments").glob("*.py")
        experiments = sorted(str(p) for p in files if "\ndef get_config(" in p.read_text())
        hint = (
            f"; there are {', '.join(experiments)}"
            if experiments
            else "; give the path of a Python file"
        )
        raise ValueError(f"{file} is not the file of an experiment{hint}")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{file} has no get_config(variant), so it is not an experiment")
    return module, module.get_config(variant) if variant else module.get_config()


def spec_of(argv: list[str]) -> str:
    """Returns the value of --experiment, FILE.py:VARIANT. Raises ValueError if it is missing."""
    for i, arg in enumerate(argv):
        name, _, value = arg.partition("=")
        if name in ("--experiment", "-experiment"):
            value = value or (argv[i + 1] if i + 1 < len(argv) else "")
            if value:
                return value
    raise ValueError(f"no experiment given; try {EXAMPLE}")


def run_config(module: ModuleType, config, workdir: pathlib.Path, stop: PreemptionGuard) -> int:
    """Runs all stages of a config in order; returns the exit code."""
    # Imported late, so that a mistyped flag fails at once.
    import jax

    from glm5_jax.checkpoint.store import SaveError
    from glm5_jax.parallel import multihost
    from glm5_jax.runtime.console import ProgressBar
    from glm5_jax.training import lifecycle_report, report
    from glm5_jax.training.metrics import TrainingStopped

    evaluator = getattr(module, "evaluator", None)
    stages = list(stages_of(config, workdir))

    def make_stage(stage: _Stage, before):
        """Returns the checked stage. Raises `_StageConfigError` on all hosts if one of them fails, with the user's error."""
        training = failure = None
        try:
            training = stage.config.make_stage(stage.folder, evaluator, before)
        except (ValueError, OSError) as error:
            failure = error
        try:
            multihost.raise_on_all(failure)
        except (ValueError, OSError) as error:
            where = f"{stage.folder.name}: " if len(stages) > 1 else ""
            raise _StageConfigError(f"{where}{error}") from None
        return training

    try:
        if len(stages) > 1:
            # All stages are checked before the first one trains.
            before = None
            with ProgressBar(len(stages), unit="stage") as bar:
                for index, stage in enumerate(stages):
                    bar.update(index, f"checking {stage.folder.name}")
                    before = make_stage(stage, before if stage.follows else None)
                    before.close()
        minutes = getattr(module, "minutes", lambda _: {})(config)
        if minutes:
            print(
                f"time budget         {clock_of(60 * sum(minutes.values()))}, on two CPU cores: {shares_of(minutes)}"
            )
        run_start = time.monotonic()
        for stage in stages:
            stage_start = time.monotonic()
            training = make_stage(stage, None)
            program_flags = getattr(stage.config, "programs", tuple)()
            if program_flags and not training.is_finished:
                training.close()
                if code := run_programs(program_flags, stage.folder):
                    return code
            trains_in_process = training.is_finished or not program_flags
            summary = training.run() if trains_in_process else report.summarise(stage.folder)
            if not training.is_finished:
                step = training.saved_step
                print(f"stopped after step {step}; the same command goes on from there")
                return EXIT_RESTART
            print(f"\n{summary}")
            last = stage is stages[-1]
            if last and (finish := getattr(module, "finish", None)):
                finish(config, workdir)
            if len(stages) > 1 and jax.process_index() == 0:
                now, planned = time.monotonic(), minutes.get(stage.folder.name)
                budget_text = f" of {clock_of(60 * planned)}" if planned else ""
                print(
                    f"time                {clock_of(now - stage_start)}{budget_text}, {clock_of(now - run_start)} in all"
                )
                done = [s.folder for s in stages if (s.folder / "config.json").exists()]
                print(f"all stages          {lifecycle_report.write_page(workdir, done)}")
            if not last and multihost.any_process(stop):
                print(f"stopped after {stage.folder.name}; the same command goes on from there")
                return EXIT_RESTART
    except (SaveError, TrainingStopped) as error:
        return _fail(error, 1)
    except _StageConfigError as error:
        return _fail(error, 2)
    return 0


def run_programs(program_flags: tuple[str, ...], workdir: pathlib.Path) -> int:
    """Runs a stage of several programs on this machine and returns the exit code.

    The programs get only CPUs, because this process holds all accelerators until it ends.
    """
    import jax

    from launch import local  # which imports this module

    program_flags = (*program_flags, f"--workdir={workdir}")
    if jax.process_count() > 1 or jax.default_backend() != "cpu":
        launch_command = f"python -m launch.local {shlex.join(program_flags)} (or launch.slurm, launch.gke, launch.on_ray)"
        message = (
            "this stage is several programs, and this program holds the accelerators; train it with"
        )
        return _fail(f"{workdir.name}: {message} {launch_command}, then this command goes on", 1)
    return local.main(["launch.local", *program_flags])


class _StageConfigError(Exception):
    """Raised for a stage whose config cannot be trained."""


class _Stage(NamedTuple):
    """Stage of a run: its config, its folder, and whether it starts from the weights of the stage before it."""

    config: object
    folder: pathlib.Path
    follows: bool


def stages_of(config, workdir: pathlib.Path):
    """Yields the stages of a config in order, each with the checkpoints of the previous ones filled in."""
    from glm5_jax.training.experiment import StageConfig

    if isinstance(config, StageConfig):
        yield _Stage(config, workdir, False)
        return
    folders: dict[str, str] = {}
    for field in dataclasses.fields(config):
        stage = getattr(config, field.name)
        if stage is None:
            continue
        follows = bool(folders) and stage.checkpoint is None
        stage, folder = stage.continue_from(folders), workdir / field.name
        folders[field.name] = str(folder)
        yield _Stage(stage, folder, follows)


def clock_of(seconds: float) -> str:
    """Writes seconds as MINUTES:SECONDS."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def shares_of(minutes: Mapping[str, float]) -> str:
    """Writes the minutes of each name as a list of clocks."""
    return ", ".join(f"{name} {clock_of(60 * value)}" for name, value in minutes.items())


def _fail(error: Exception | str, code: int) -> int:
    print_error(error)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
