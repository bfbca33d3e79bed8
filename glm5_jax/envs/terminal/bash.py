"""Implements the tool `bash`: commands in the sandbox of a task, in which files and processes persist between
calls.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from glm5_jax.envs.reasoning.python_tool import text_problem, truncate_middle
from glm5_jax.envs.sandbox import ExecResult, SandboxConfig, SandboxError
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task

MAX_COMMAND_BYTES = 100_000  # Linux starts no program with an argument of 128 KiB
# Characters. The sandbox certainly retains the last half.
MAX_SHOWN = 2 * (SandboxConfig.end_bytes // 4)
# Keeps the order of the output; works also after the folder was removed.
_RUN = 'cd -- "$1" 2>/dev/null || cd /; exec /bin/bash -c "$0" 2>&1'


@dataclasses.dataclass(kw_only=True, frozen=True)
class BashConfig:
    """Limits of commands. Raises ValueError for values out of range.

    Attributes:
      timeout_s: time limit of a command that sets none, in seconds.
      max_timeout_s: largest time limit that a command may set, in seconds.
      max_characters: maximum output that is shown, half from its beginning and half from its end.
    """

    timeout_s: float = 60.0  # as mini-swe-agent for SWE-bench
    max_timeout_s: float = 600.0
    max_characters: int = 10_000  # as Terminus 2 and mini-swe-agent

    def __post_init__(self):
        if not 0 < self.timeout_s <= self.max_timeout_s:
            raise ValueError(
                f"timeout_s is {self.timeout_s} and max_timeout_s {self.max_timeout_s}; make the first positive and no more "
                "than the second"
            )
        if not 2 <= self.max_characters <= MAX_SHOWN:
            raise ValueError(f"max_characters is {self.max_characters}; use 2 to {MAX_SHOWN}")

    def tool(self) -> Mapping[str, Any]:
        """Returns the description of the tool for the policy, in OpenAI's format of functions."""
        description = (
            "Run a command in bash and see what it prints, of a long text the beginning and the end, and its exit code. "
            "Each command begins in a new shell in the folder of the task: files stay, and processes in the background, but "
            "no variables and no change of folder. Nothing can be typed into it."
        )
        limit = (
            f"Seconds after which the command is ended; {self.timeout_s:g} where not given, at most "
            f"{self.max_timeout_s:g}."
        )
        properties = {
            "command": {
                "type": "string",
                "description": "The command, which may have several lines.",
            },
            "timeout_sec": {"type": "number", "description": limit},
        }
        schema = {"type": "object", "properties": properties, "required": ["command"]}
        function = {"name": "bash", "description": description, "parameters": schema}
        return {"type": "function", "function": function}


class Bash:
    """Tool `bash` (`agents.tools.Tool`) of one sandbox. The calls of one reply run one after the other, in order."""

    def __init__(self, shell: Shell, config: BashConfig):
        self._shell, self._config, self._turn = shell, config, asyncio.Lock()

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        """Runs a command and returns its output.

        Raises ToolError from the sandbox's error if the sandbox fails: only the caller can find out who
        caused that.
        """
        del task
        command = arguments.get("command")
        if wrong := text_problem("command", command):
            return f"Error: {wrong}"
        assert isinstance(command, str), "the command was checked"
        if len(command.encode()) > MAX_COMMAND_BYTES:
            return f"Error: command is longer than {MAX_COMMAND_BYTES} bytes; write what is long into a file, in parts"
        timeout_s, max_timeout_s = (
            arguments.get("timeout_sec", self._config.timeout_s),
            self._config.max_timeout_s,
        )
        if (
            isinstance(timeout_s, bool)
            or not isinstance(timeout_s, int | float)
            or not 0 < timeout_s <= max_timeout_s
        ):
            return f"Error: timeout_sec is no number above 0 and up to {max_timeout_s:g}"
        async with self._turn:
            try:
                done = await self._shell.exec(
                    ["/bin/sh", "-c", _RUN, command, self._shell.workdir],
                    cwd="/",
                    timeout_s=timeout_s,
                )
            except (SandboxError, OSError) as error:
                raise ToolError(f"{type(error).__name__}: {error}") from error
        return self._format(done, timeout_s)

    def _format(self, done: ExecResult, timeout_s: float) -> str:
        parts = done.stdout, done.stdout_end, done.stderr
        printed = b"".join(parts).decode(errors="replace").rstrip()
        if done.timed_out:
            end = f"no end within {timeout_s:g} s, so it was ended"
        elif done.out_of_memory:
            end = f"out of memory, exit code {done.code}"
        else:
            end = f"exit code {done.code}"
        shown = [truncate_middle(printed, self._config.max_characters)] if printed else []
        return "\n".join([*shown, f"[{end}]"])
