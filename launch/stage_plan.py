"""Lists the stages of an experiment's config in order, and selects one of them.

The config of an experiment is a stage, or has stages as its fields (experiments/lifecycle.py). With --stage=NAME a program
trains or plans only that stage, so that each stage of a run can have hosts and programs of its own:

    python -m launch.slurm --experiment=experiments/lifecycle.py:glm5 --stage=rl_reasoning ...

Flags set the fields of all stages, as without --stage. The folder of the stage is in the workdir of the run.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from glm5_jax.checkpoint import store
from glm5_jax.runtime.config_fields import unknown_variant
from glm5_jax.training.experiment import StageConfig
from launch.command_line import Command


class PlannedStage(NamedTuple):
    """Stage of a run: its config, its folder, and whether it starts from the weights of the stage before it."""

    config: StageConfig
    folder: pathlib.Path
    follows: bool

    @property
    def is_finished(self) -> bool:
        """Returns whether the folder has the checkpoint of the last step."""
        return (store.latest_step(self.folder) or 0) >= self.config.steps


def plan_stages(config: Any, workdir: pathlib.Path) -> Iterator[PlannedStage]:
    """Yields the stages of a config in order, each with the checkpoints of the previous ones filled in."""
    if isinstance(config, StageConfig):
        yield PlannedStage(config, workdir, False)
        return
    folders: dict[str, str] = {}
    for field in dataclasses.fields(config):
        stage = getattr(config, field.name)
        if stage is None:
            continue
        follows = bool(folders) and stage.checkpoint is None
        stage, folder = stage.continue_from(folders), workdir / field.name
        folders[field.name] = str(folder)
        yield PlannedStage(stage, folder, follows)


def has_stages(config: Any) -> bool:
    """Returns whether a config has several stages."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    is_stage = isinstance(config, StageConfig)
    return not is_stage and any(
        isinstance(getattr(config, field.name), StageConfig) for field in fields
    )


def needs_plan_per_stage(config: Any) -> bool:
    """Returns whether a config has several stages of which one consists of several programs."""
    return has_stages(config) and any(
        getattr(stage.config, "has_engine_processes", False)
        for stage in plan_stages(config, pathlib.Path())
    )


def select_stage(command: Command) -> Command:
    """Returns the command of its stage, with the stage's module, config and folder; unchanged without --stage.

    Raises ValueError for an unknown stage.
    """
    if command.stage is None:
        return command
    if not has_stages(command.config):
        raise ValueError(f"--stage={command.stage}: the experiment is one stage; leave it out")
    stages = {stage.folder.name: stage for stage in plan_stages(command.config, command.workdir)}
    if command.stage not in stages:
        raise ValueError(f"--stage: {unknown_variant(command.stage, stages)}")
    stage = stages[command.stage]
    module = command.module.STAGE_MODULES[command.stage]
    return command._replace(module=module, config=stage.config, workdir=stage.folder)


def check_stages_before(command: Command) -> None:
    """Raises ValueError if a stage before --stage is not finished."""
    if command.stage is None:
        return
    for stage in plan_stages(command.config, command.workdir):
        if stage.folder.name == command.stage:
            return
        done = store.latest_step(stage.folder) or 0
        if not stage.is_finished:
            raise ValueError(
                f"--stage={command.stage}: {stage.folder} has {done} of {stage.config.steps} steps; train "
                f"--stage={stage.folder.name} first"
            )
