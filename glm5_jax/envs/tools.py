"""Tools whose answers need an environment: programs that a policy wrote, run in a sandbox of their own. Those of a
sandbox that lasts are in `envs.terminal`."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from glm5_jax.envs.sandbox import ExecResult, SandboxConfig, SandboxError, run_python
from glm5_jax.envs.turns import Turns
from glm5_jax.rl.rollout import ToolError
from glm5_jax.rl.types import Task

# As OpenAI describes functions.
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
    """The tool `python` (`agents.tools.Tool`): each program in a sandbox of its own, so many at once. It answers with
    what is printed, of a long text the beginning and the end, and the last line of an error.

    A program whose sandbox fails twice, while others work, is told so: were it the environment's failure, a policy
    could have attempts left out that go badly."""

    def __init__(
        self,
        config: SandboxConfig = SandboxConfig(seconds=10.0),
        *,
        at_once: int = 16,
        most_characters: int = 4000,
        run: Callable[..., Awaitable[ExecResult]] = run_python,
    ):
        if at_once < 1 or most_characters < 1:
            raise ValueError(
                f"at_once is {at_once} and most_characters {most_characters}; both must be positive"
            )
        self._config, self._most, self._run = config, most_characters, run
        self._turns = Turns(at_once)

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        del task
        code = arguments.get("code")
        if wrong := problem_of("code", code):
            return f"Error: {wrong}"
        async with self._turns():
            for _ in range(2):
                try:
                    return self._told(await self._run(code, config=self._config))
                except (SandboxError, OSError):
                    await self._check_works()
        return "Error: the program broke its sandbox"

    async def _check_works(self) -> None:
        try:
            await self._run("", config=self._config)
        except (SandboxError, OSError) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def _told(self, result: ExecResult) -> str:
        printed, wrong = (out.decode(errors="replace") for out in (result.stdout, result.stderr))
        lines = [ends_of(printed.rstrip(), self._most)] if printed.strip() else []
        if result.timed_out:
            lines.append(f"Error: no end within {self._config.seconds:g} s")
        elif result.out_of_memory:
            lines.append("Error: out of memory")
        elif result.code:
            said = wrong.strip().splitlines()
            last = ends_of(said[-1], self._most) if said else f"exit code {result.code}"
            lines.append(f"Error: {last}")
        return "\n".join(lines)


def problem_of(name: str, text: Any) -> str | None:
    """What is wrong with an argument that is to be a program's text; None: nothing."""
    if not isinstance(text, str):
        return f"{name} is no text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{name} holds half a character"
    # Which no argument of a program can hold.
    return f"{name} holds a null character" if "\0" in text else None


def ends_of(text: str, most: int) -> str:
    """A text, or the beginning and the end of one that has more characters than most."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[: most - half]}\n[...]\n{text[len(text) - half :]}"
