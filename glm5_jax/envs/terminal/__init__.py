"""Provides terminal tasks in Harbor's format: solved in a sandbox, graded in another.

async with TrialRunner() as trials:
    result = await trials.run(load_task("path/to/task"), Oracle())
"""

from glm5_jax.envs.terminal.bash import BashConfig
from glm5_jax.envs.terminal.image import BuildConfig
from glm5_jax.envs.terminal.policy import AttemptConfig, Policy
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.envs.terminal.task import TaskError, TaskLimits, TerminalTask, find_tasks, load_task
from glm5_jax.envs.terminal.trial import Agent, Nop, Oracle, Script, TrialResult, TrialRunner

__all__ = [
    "Agent",
    "AttemptConfig",
    "BashConfig",
    "BuildConfig",
    "Nop",
    "Oracle",
    "Policy",
    "TrialResult",
    "Script",
    "Shell",
    "TaskError",
    "TaskLimits",
    "TerminalTask",
    "TrialRunner",
    "find_tasks",
    "load_task",
]
