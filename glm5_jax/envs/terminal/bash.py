"""The tool `bash`: a policy's commands in the sandbox of its task, in which files and processes stay between calls."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from glm5_jax.envs.sandbox import ExecResult, SandboxConfig, SandboxError
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.envs.tools import ends_of, problem_of
from glm5_jax.rl.rollout import ToolError
from glm5_jax.rl.types import Task

LONGEST = 100_000  # bytes of a command: Linux starts no program with an argument of 128 KiB
MOST_SHOWN = 2 * (
    SandboxConfig.end_bytes // 4
)  # characters, of which the last half is kept for sure
# With what it prints in its order, also once the folder is gone.
_RUN = 'cd -- "$1" 2>/dev/null || cd /; exec /bin/bash -c "$0" 2>&1'


@dataclasses.dataclass(frozen=True)
class BashConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      seconds: of a command that names no limit of its own.
      most_seconds: that a command may name.
      characters: shown of what a command prints, half of them from its beginning and half from its end.
    """

    seconds: float = 60.0  # mini-swe-agent, for SWE-bench
    most_seconds: float = 600.0  # ours
    characters: int = 10_000  # as Terminus 2 and mini-swe-agent

    def __post_init__(self):
        if not 0 < self.seconds <= self.most_seconds:
            raise ValueError(
                f"seconds is {self.seconds} and most_seconds {self.most_seconds}; make the first positive and no more "
                "than the second"
            )
        if not 2 <= self.characters <= MOST_SHOWN:
            raise ValueError(f"characters is {self.characters}; use 2 to {MOST_SHOWN}")

    def tool(self) -> Mapping[str, Any]:
        """What a policy is told of it, as OpenAI describes functions."""
        description = (
            "Run a command in bash and see what it prints, of a long text the beginning and the end, and its exit code. "
            "Each command begins in a new shell in the folder of the task: files stay, and processes in the background, but "
            "no variables and no change of folder. Nothing can be typed into it."
        )
        limit = (
            f"Seconds after which the command is ended; {self.seconds:g} where not given, at most "
            f"{self.most_seconds:g}."
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
    """The tool (`agents.tools.Tool`) in one sandbox. The calls of one reply run one after the other, in their order."""

    def __init__(self, shell: Shell, config: BashConfig):
        self._shell, self._config, self._turn = shell, config, asyncio.Lock()

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        """ToolError, whose cause it is, if the sandbox fails: whose doing that is can only be told outside of it."""
        del task
        command = arguments.get("command")
        if wrong := problem_of("command", command):
            return f"Error: {wrong}"
        if len(command.encode()) > LONGEST:
            return f"Error: command is longer than {LONGEST} bytes; write what is long into a file, in parts"
        seconds, most = (
            arguments.get("timeout_sec", self._config.seconds),
            self._config.most_seconds,
        )
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds <= most
        ):
            return f"Error: timeout_sec is no number above 0 and up to {most:g}"
        async with self._turn:
            try:
                done = await self._shell.exec(
                    ["/bin/sh", "-c", _RUN, command, self._shell.workdir], cwd="/", seconds=seconds
                )
            except (SandboxError, OSError) as error:
                raise ToolError(f"{type(error).__name__}: {error}") from error
        return self._told(done, seconds)

    def _told(self, done: ExecResult, seconds: float) -> str:
        parts = done.stdout, done.stdout_end, done.stderr
        printed = b"".join(parts).decode(errors="replace").rstrip()
        if done.timed_out:
            end = f"no end within {seconds:g} s, so it was ended"
        elif done.out_of_memory:
            end = f"out of memory, exit code {done.code}"
        else:
            end = f"exit code {done.code}"
        shown = [ends_of(printed, self._config.characters)] if printed else []
        return "\n".join([*shown, f"[{end}]"])
