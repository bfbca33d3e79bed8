"""Runs the stages of an experiment's config in order, on this machine or as one process of a pod.

All stages are checked before the first one trains. A stage of several programs is handed to launch/local.py.
"""

import pathlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from glm5_jax.checkpoint.store import SaveError
from glm5_jax.parallel import multihost
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.terminal import print_error
from glm5_jax.training import lifecycle_report, report
from glm5_jax.training.metrics import TrainingStopped
from glm5_jax.training.stages import Stage
from launch.stage_plan import PlannedStage, plan_stages


class StageConfigError(Exception):
    """Raised for a stage whose config cannot be trained."""


def run_stages(
    module: ModuleType, config: Any, workdir: pathlib.Path, stop: PreemptionGuard
) -> int:
    """Runs all stages of a config in order; returns the exit code.

    The experiment's module may define `evaluator`, `minutes(config)`, a time budget by stage, and
    `finish(config, workdir)`, called after the last stage.
    """
    runner = _StageRunner(module, config, workdir)
    try:
        return runner.run(stop)
    except (SaveError, TrainingStopped) as error:
        print_error(error)
        return 1
    except StageConfigError as error:
        print_error(error)
        return 2


class _StageRunner:
    """Runs the stages of one config; see `run_stages`."""

    def __init__(self, module: ModuleType, config: Any, workdir: pathlib.Path):
        self._config, self._workdir = config, workdir
        self._stages = list(plan_stages(config, workdir))
        self._evaluator = getattr(module, "evaluator", None)
        self._finish: Callable | None = getattr(module, "finish", None)
        self._minutes: Mapping[str, float] = getattr(module, "minutes", lambda _: {})(config)

    def run(self, stop: PreemptionGuard) -> int:
        if len(self._stages) > 1:
            self._check_all()
        if self._minutes:
            total = clock_of(60 * sum(self._minutes.values()))
            print(f"time budget         {total}, on two CPU cores: {shares_of(self._minutes)}")
        run_start = time.monotonic()
        for stage in self._stages:
            stage_start, is_last = time.monotonic(), stage is self._stages[-1]
            if code := self._run_stage(stage):
                return code
            if is_last and self._finish:
                self._finish(self._config, self._workdir)
            if len(self._stages) > 1 and jax.process_index() == 0:
                now = time.monotonic()
                self._print_progress(stage, now - stage_start, now - run_start)
            if not is_last and multihost.any_process(stop):
                print(f"stopped after {stage.folder.name}; the same command goes on from there")
                return EXIT_RESTART
        return 0

    def _check_all(self) -> None:
        """Checks all stages before the first one trains."""
        before = None
        with ProgressBar(len(self._stages), unit="stage") as bar:
            for index, stage in enumerate(self._stages):
                bar.update(index, f"checking {stage.folder.name}")
                before = self._make_stage(stage, before if stage.follows else None)
                before.close()

    def _make_stage(self, stage: PlannedStage, before: Stage | None = None) -> Stage:
        """Returns the checked stage. Raises StageConfigError on all hosts if one of them fails, with the user's error."""
        training = failure = None
        try:
            training = stage.config.make_stage(stage.folder, self._evaluator, before)
        except (ValueError, OSError) as error:
            failure = error
        try:
            multihost.raise_on_all(failure)
        except (ValueError, OSError) as error:
            raise StageConfigError(self._with_field(str(error), stage)) from None
        assert training is not None  # else this process has a failure
        return training

    def _with_field(self, text: str, stage: PlannedStage) -> str:
        """Returns a message about a stage, of several with the stage's name and its flags."""
        if len(self._stages) == 1:
            return text
        field = stage.folder.name
        return f"{field}: {text.replace('--experiment.', f'--experiment.{field}.')}"

    def _run_stage(self, stage: PlannedStage) -> int:
        """Trains a stage that is not finished and prints its summary. Returns an exit code other than 0 if it has to stop."""
        training = self._make_stage(stage)
        program_flags = getattr(stage.config, "programs", tuple)()
        if program_flags and not training.is_finished:
            training.close()
            if code := run_programs(program_flags, stage.folder):
                return code
        trains_in_process = training.is_finished or not program_flags
        summary = training.run() if trains_in_process else report.summarise(stage.folder)
        if not training.is_finished:
            print(f"stopped after step {training.saved_step}; the same command goes on from there")
            return EXIT_RESTART
        print(f"\n{summary}")
        return 0

    def _print_progress(self, stage: PlannedStage, stage_s: float, run_s: float) -> None:
        """Prints the time of a finished stage and the page of all stages so far."""
        planned = self._minutes.get(stage.folder.name)
        budget_text = f" of {clock_of(60 * planned)}" if planned else ""
        print(f"time                {clock_of(stage_s)}{budget_text}, {clock_of(run_s)} in all")
        done = [s.folder for s in self._stages if (s.folder / "config.json").exists()]
        print(f"all stages          {lifecycle_report.write_page(self._workdir, done)}")


def run_programs(program_flags: Sequence[str], workdir: pathlib.Path) -> int:
    """Runs a stage of several programs on this machine and returns the exit code.

    The programs get only CPUs, because this process holds all accelerators until it ends.
    """
    program_flags = (*program_flags, f"--workdir={workdir}")
    if jax.process_count() > 1 or jax.default_backend() != "cpu":
        launch_command = f"python -m launch.local {shlex.join(program_flags)} (or launch.slurm, launch.gke, launch.on_ray)"
        message = (
            "this stage is several programs, and this program holds the accelerators; train it with"
        )
        print_error(f"{workdir.name}: {message} {launch_command}, then this command goes on")
        return 1
    from launch import local  # imported late, because few runs need its HTTP clients

    return local.main(["launch.local", *program_flags])


def clock_of(seconds: float) -> str:
    """Writes seconds as MINUTES:SECONDS."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def shares_of(minutes: Mapping[str, float]) -> str:
    """Writes the minutes of each name as a list of clocks."""
    return ", ".join(f"{name} {clock_of(60 * value)}" for name, value in minutes.items())
