"""Implements the tool `python`: programs that a policy wrote, each run in a new sandbox.

Tools with a sandbox that persists between calls are in `envs.terminal`.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from glm5_jax.envs.concurrency import ConcurrencyLimit
from glm5_jax.envs.sandbox import ExecResult, SandboxConfig, SandboxError, run_python
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task

# In OpenAI's format of function tools.
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and see what it prints. Nothing is kept between calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class Python:
    """Tool `python` (`agents.tools.Tool`), which runs each program in a new sandbox.

    It answers with the printed text (of a long text the beginning and the end) and the last line of an
    error. If the sandbox of a program fails twice while others work, the answer says so. Treating that as a
    failure of the environment would let a policy drop attempts that go badly.

    Args:
      config: limits of the sandbox.
      at_once: maximum number of programs that run at once.
      max_characters: maximum length of each part of the answer.
      run: function that runs a program.
    """

    def __init__(
        self,
        config: SandboxConfig = SandboxConfig(timeout_s=10.0),
        *,
        at_once: int = 16,
        max_characters: int = 4000,
        run: Callable[..., Awaitable[ExecResult]] = run_python,
    ):
        if at_once < 1 or max_characters < 1:
            raise ValueError(
                f"at_once is {at_once} and max_characters {max_characters}; both must be positive"
            )
        self._config, self._max_characters, self._run = config, max_characters, run
        self._concurrency = ConcurrencyLimit(at_once)

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        del task
        code = arguments.get("code")
        if wrong := text_problem("code", code):
            return f"Error: {wrong}"
        async with self._concurrency():
            for _ in range(2):
                try:
                    return self._format(await self._run(code, config=self._config))
                except (SandboxError, OSError):
                    await self.check()
        return "Error: the program broke its sandbox"

    async def check(self) -> None:
        """Raises ToolError unless an empty program runs."""
        try:
            await self._run("", config=self._config)
        except (SandboxError, OSError) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def _format(self, result: ExecResult) -> str:
        printed, wrong = (out.decode(errors="replace") for out in (result.stdout, result.stderr))
        lines = [truncate_middle(printed.rstrip(), self._max_characters)] if printed.strip() else []
        if result.timed_out:
            lines.append(f"Error: no end within {self._config.timeout_s:g} s")
        elif result.out_of_memory:
            lines.append("Error: out of memory")
        elif result.code:
            error_lines = wrong.strip().splitlines()
            last = (
                truncate_middle(error_lines[-1], self._max_characters)
                if error_lines
                else f"exit code {result.code}"
            )
            lines.append(f"Error: {last}")
        return "\n".join(lines)


def text_problem(name: str, text: Any) -> str | None:
    """Returns what is wrong with an argument that must be a program's text, or None."""
    if not isinstance(text, str):
        return f"{name} is no text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{name} holds half a character"
    # A program's argument cannot hold a null character.
    return f"{name} holds a null character" if "\0" in text else None


def truncate_middle(text: str, max_characters: int) -> str:
    """Returns a text, or the beginning and end of one with more than `max_characters` characters."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[: max_characters - half]}\n[...]\n{text[len(text) - half :]}"
