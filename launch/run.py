"""Runs an experiment file.

    python -m launch.run --experiment=experiments/pretrain.py:tiny --workdir=DIR

--experiment is FILE.py:VARIANT; any field of it can be set with --experiment.FIELD=VALUE (for example
--experiment.train.steps=50). --workdir is where everything goes (default: workdir/FILE_VARIANT); the
same command goes on with a run that was stopped or killed. (serve.py only reads; it has none.) An error of the user is one line and
exit code 2, before anything is trained; a run that had to stop says why and exits with 1. SIGTERM or Ctrl-C, to any process,
is answered at once: what was learnt since the last checkpoint is saved (a second one ends the process without), and all exit with 75,
which launchers take for "start again".

On a pod start the same command on every host, with a workdir that all of them see and
--distributed=auto (TPU pods, Slurm, MPI and Kubernetes are recognised), or elsewhere
--distributed=HOST:PORT,N,I for process I of N, of which process 0 is on HOST. launch/local.py, on_ray.py, slurm.py and gke.py
do that, and start again what dies. The processes of a run may become fewer, or more, from one start to the next, where the mesh says
-1 for one of its axes: batches and what they hold stay the same (`DataConfig.streams`); of fewer devices each has
more rows, of which step.rows_per_device are there at once.
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

from glm5_jax.core.editable import check_path, editable, freeze
from glm5_jax.core.placement import AGAIN
from glm5_jax.core.stopping import StopSignal
from launch import xla_flags

EXAMPLE = "--experiment=experiments/pretrain.py:tiny"


def main(argv: list[str]) -> int:
    """Exit code of the program with these arguments (the program's name first)."""
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    xla_flags.claim(os.environ)
    try:
        with StopSignal(ends=True):
            command = parse(argv)
            if command.distributed:
                join_pod(command.distributed)
    except (ValueError, flags.Error) as error:
        return _fail(error, 2)
    if run := getattr(command.module, "run", None):
        return run(command.config, *([command.workdir] if _writes(command.module) else []))
    serve = getattr(command.module, "serve", None)
    if serve and (code := serve(command.config, command.workdir)) is not None:
        return code
    # What others of a pod have made must not be lost either: they all end together.
    with StopSignal(ends=True, unsaved=bool(command.distributed)) as stop:
        return run_config(command.module, command.config, command.workdir, stop)


class Command(NamedTuple):
    """What the arguments ask for: an experiment module, its config with the flags applied, the folder
    of the run, and how to join a pod (None: one process)."""

    module: ModuleType
    config: object
    workdir: pathlib.Path
    distributed: str | None


def parse(argv: list[str]) -> Command:
    """Reads the program's arguments; ValueError or flags.Error say in their first line what to do."""
    spec = spec_of(argv)
    module, config = load(spec)
    twin = editable(config)
    check_fields("experiment", twin, argv)
    values = define(twin, argv)
    rest = values(argv)
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; every flag is --NAME=VALUE")
    name = spec.removesuffix(".py").replace(".py:", "_").replace(":", "_").replace(",", "_")
    pod = values["distributed"].value
    if pod and hasattr(module, "run"):
        instead = "start one on each host without the flag, and a router in front of them"
        instead = "leave the flag out" if _writes(module) else instead
        raise ValueError(
            f"--distributed={pod}: {spec.partition(':')[0]} runs in one process; {instead}"
        )
    workdir = values["workdir"].value
    if workdir and hasattr(module, "run") and not _writes(module):
        raise ValueError(
            f"--workdir={workdir}: {spec.partition(':')[0]} writes nothing and has no workdir; what it reads is "
            f"--experiment.checkpoint={workdir}"
        )
    workdir = workdir or f"workdir/{pathlib.Path(name).name}"
    try:
        config = freeze(values["experiment"].value)
    except ValueError as error:
        raise ValueError(f"--experiment.{error}") from None
    return Command(module, config, pathlib.Path(workdir), pod)


def _writes(module: ModuleType) -> bool:
    """Whether what a module runs by itself has a workdir."""
    return "workdir" in inspect.signature(module.run).parameters


def join_pod(pod: str) -> None:
    """Waits for the other processes; from then on jax knows the devices of all. ValueError."""
    import jax  # here, so that a mistyped flag is answered at once

    if pod == "auto":
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
        address, count, index = pod.split(",")
        if not (":" in address and 0 <= int(index) < int(count)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--distributed={pod}; use auto or HOST:PORT,N,I with 0 <= I < N"
        ) from None
    # Nothing is left for a scheduler to say, which would give each process one GPU.
    deactivated = dict(cluster_detection_method="deactivate")
    jax.distributed.initialize(address, int(count), int(index), **deactivated)


def _has_its_host(environment: Mapping[str, str]) -> bool:
    """Whether Slurm or MPI has started this process as the only one of its host: then it takes all GPUs there, where jax would take
    one, as it expects a process for each."""
    if "SLURM_NTASKS" in environment:
        return environment["SLURM_NTASKS"] == environment.get("SLURM_STEP_NUM_NODES")
    return environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


def check_fields(name: str, twin, argv: list[str]) -> None:
    """ValueError if one of the flags --NAME.FIELD names no field of an editable config."""
    for arg in argv[1:]:
        if arg.lstrip("-").startswith(f"{name}."):
            path = arg.lstrip("-").removeprefix(f"{name}.").split("=")[0]
            try:
                check_path(twin, path)
            except ValueError as error:
                raise ValueError(f"--{name}.{path}: {error}") from None


def define(twin, argv: list[str]) -> flags.FlagValues:
    """The flags of the program for an experiment."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_dataclass(
        "experiment",
        twin,
        "the experiment, FILE.py:VARIANT",
        flag_values=values,
        sys_argv=argv,
        parse_fn=lambda _: twin,
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
    """The module of "FILE.py:VARIANT" and what its `get_config(VARIANT)` returns."""
    file, _, variant = spec.partition(":")
    path = pathlib.Path(file)
    if not path.is_file() or path.suffix != ".py":
        files = pathlib.Path("experiments").glob("*.py")
        there = sorted(str(p) for p in files if "\ndef get_config(" in p.read_text())
        hint = f"; there are {', '.join(there)}" if there else "; give the path of a Python file"
        raise ValueError(f"{file} is no experiment's file{hint}")
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{file} has no get_config(variant), so it is no experiment")
    return module, module.get_config(variant) if variant else module.get_config()


def spec_of(argv: list[str]) -> str:
    """What --experiment is, FILE.py:VARIANT; ValueError if it is missing."""
    for i, arg in enumerate(argv):
        name, _, value = arg.partition("=")
        if name in ("--experiment", "-experiment"):
            value = value or (argv[i + 1] if i + 1 < len(argv) else "")
            if value:
                return value
    raise ValueError(f"no experiment given; try {EXAMPLE}")


def run_config(module: ModuleType, config, workdir: pathlib.Path, stop: StopSignal) -> int:
    """Runs all stages of a config in order; returns the exit code."""
    # Imported here so that a mistyped flag is answered at once.
    import jax

    from glm5_jax.checkpoint.store import SaveError
    from glm5_jax.core import hosts
    from glm5_jax.core.console import ProgressBar
    from glm5_jax.training import handovers, report
    from glm5_jax.training.metrics import TrainingStopped

    evaluator = getattr(module, "evaluator", None)
    stages = list(stages_of(config, workdir))

    def ready(stage: _Stage, before):
        """The stage, checked, on all hosts or on none: `_Refused` says what the user has to mend."""
        made = problem = None
        try:
            made = stage.config.stage(stage.folder, evaluator, before)
        except (ValueError, OSError) as error:
            problem = error
        try:
            hosts.agree(problem)
        except (ValueError, OSError) as error:
            where = f"{stage.folder.name}: " if len(stages) > 1 else ""
            raise _Refused(f"{where}{error}") from None
        return made

    try:
        if len(stages) > 1:
            # What is wrong with the last stage is said before the first one trains.
            before = None
            with ProgressBar(len(stages), unit="stage") as bar:
                for number, stage in enumerate(stages):
                    bar.update(number, f"checking {stage.folder.name}")
                    before = ready(stage, before if stage.follows else None)
                    before.close()
        budget = getattr(module, "minutes", lambda _: {})(config)
        if budget:
            print(
                f"time budget         {clock_of(60 * sum(budget.values()))}, on two CPU cores: {shares_of(budget)}"
            )
        first = time.monotonic()
        for stage in stages:
            began = time.monotonic()
            training = ready(stage, None)
            words = getattr(stage.config, "programs", tuple)()
            if words and not training.finished:
                training.close()
                if code := run_programs(words, stage.folder):
                    return code
            here = training.finished or not words
            summary = training.run() if here else report.summarise(stage.folder)
            if not training.finished:
                step = training.saved_step
                print(f"stopped after step {step}; the same command goes on from there")
                return AGAIN
            print(f"\n{summary}")
            last = stage is stages[-1]
            if last and (finish := getattr(module, "finish", None)):
                finish(config, workdir)
            if len(stages) > 1 and jax.process_index() == 0:
                now, planned = time.monotonic(), budget.get(stage.folder.name)
                of = f" of {clock_of(60 * planned)}" if planned else ""
                print(
                    f"time                {clock_of(now - began)}{of}, {clock_of(now - first)} in all"
                )
                done = [s.folder for s in stages if (s.folder / "config.json").exists()]
                print(f"all stages          {handovers.write_page(workdir, done)}")
            if not last and hosts.anyone(stop):
                print(f"stopped after {stage.folder.name}; the same command goes on from there")
                return AGAIN
    except (SaveError, TrainingStopped) as error:
        return _fail(error, 1)
    except _Refused as error:
        return _fail(error, 2)
    return 0


def run_programs(words: tuple[str, ...], workdir: pathlib.Path) -> int:
    """Runs a stage of several programs on this machine; the exit code. They get CPUs alone, as this process holds all
    accelerators until it ends."""
    import jax

    from launch import local  # which imports this module

    words = (*words, f"--workdir={workdir}")
    if jax.process_count() > 1 or jax.default_backend() != "cpu":
        start = f"python -m launch.local {shlex.join(words)} (or launch.slurm, launch.gke, launch.on_ray)"
        told = "this stage is several programs, on accelerators that this one holds; train it with"
        return _fail(f"{workdir.name}: {told} {start}, then this command goes on", 1)
    return local.main(["launch.local", *words])


class _Refused(Exception):
    """A stage that cannot be trained as it was asked for."""


class _Stage(NamedTuple):
    """A stage's config, its folder, and whether it starts from the weights of the one before."""

    config: object
    folder: pathlib.Path
    follows: bool


def stages_of(config, workdir: pathlib.Path):
    """Every stage in order, each `after` those before it."""
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
        stage, folder = stage.after(folders), workdir / field.name
        folders[field.name] = str(folder)
        yield _Stage(stage, folder, follows)


def clock_of(seconds: float) -> str:
    """Writes seconds as MINUTES:SECONDS."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def shares_of(minutes: Mapping[str, float]) -> str:
    """Writes the minutes of each name as a list of clocks."""
    return ", ".join(f"{name} {clock_of(60 * own)}" for name, own in minutes.items())


def _fail(error: Exception | str, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
