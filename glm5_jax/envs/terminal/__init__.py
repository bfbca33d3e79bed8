"""Tasks in a terminal, in Harbor's format: solved in a sandbox, graded in another.

async with Trials() as trials:
    result = await trials.run(load_task("path/to/task"), Oracle())
"""

from glm5_jax.envs.terminal.bash import BashConfig
from glm5_jax.envs.terminal.policy import AttemptConfig, Policy
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.envs.terminal.task import TaskError, TaskLimits, TerminalTask, find_tasks, load_task
from glm5_jax.envs.terminal.trial import Agent, Nop, Oracle, Result, Script, Trials

__all__ = [
    "Agent",
    "AttemptConfig",
    "BashConfig",
    "Nop",
    "Oracle",
    "Policy",
    "Result",
    "Script",
    "Shell",
    "TaskError",
    "TaskLimits",
    "TerminalTask",
    "Trials",
    "find_tasks",
    "load_task",
]
