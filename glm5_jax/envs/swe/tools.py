"""Implements the tools `edit` and `run_tests` of software engineering tasks; `terminal.bash` has the shell."""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.envs.sandbox import Sandbox, SandboxError, SandboxFileError
from glm5_jax.envs.swe.recipes import RESULTS, WORKDIR
from glm5_jax.envs.swe.runs import RebuildError, RunCommands, RunResult, rebuild, run_tests
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task

_MAX_FILE_BYTES = 1 << 20
_MAX_NAMES = 30
_LOG_END = 4000  # characters


class EditTool:
    """Tool `edit` (`agents.tools.Tool`) of one sandbox: replaces a passage of a file, or writes a new file."""

    def __init__(self, box: Sandbox):
        self._box = box

    @staticmethod
    def tool() -> Mapping[str, Any]:
        """Returns the description of the tool, in OpenAI's format of functions."""
        description = "Replace a passage of a text file that occurs in it exactly once. With an empty old_text, write a new file."
        properties = {
            "path": {"type": "string", "description": "Path of the file, in the project's folder."},
            "old_text": {"type": "string", "description": "The passage, with its exact spaces."},
            "new_text": {"type": "string", "description": "What replaces it."},
        }
        return make_tool("edit", description, properties, required=("path", "old_text", "new_text"))

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        """Edits a file and returns what was done. Raises ToolError if the sandbox fails."""
        del task
        values = [arguments.get(name) for name in ("path", "old_text", "new_text")]
        if not all(isinstance(value, str) for value in values):
            return "Error: path, old_text and new_text are texts"
        path, old, new = map(str, values)
        place = posixpath.normpath(posixpath.join(WORKDIR, path))
        if not place.startswith(f"{WORKDIR}/"):
            return f"Error: {path} is not in {WORKDIR}"
        try:
            return await self._edit(place, old, new)
        except SandboxFileError as error:
            return f"Error: {path}: {error}"
        except (SandboxError, OSError) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    async def _edit(self, place: str, old: str, new: str) -> str:
        exists = (await self._box.exec(["test", "-e", place])).code == 0
        if not old:
            if exists:
                return f"Error: {place} exists; give the passage to replace as old_text"
            await self._box.exec(["mkdir", "-p", "--", posixpath.dirname(place)])
            await self._box.put(place, new.encode("utf-8", "surrogateescape"))
            return f"{place} is written"
        if not exists:
            return f"Error: there is no {place}; write a new file with an empty old_text"
        content = await self._box.get(place, _MAX_FILE_BYTES)
        text = content.decode("utf-8", "surrogateescape")
        count = text.count(old)
        if count != 1:
            return f"Error: old_text occurs {count} times in {place}; it must occur once"
        is_program = (await self._box.exec(["test", "-x", place])).code == 0
        data = text.replace(old, new).encode("utf-8", "surrogateescape")
        await self._box.put(place, data, mode=0o755 if is_program else 0o644)
        line = text[: text.index(old)].count("\n") + 1
        return f"{place} is changed at line {line}"


class RunTestsTool:
    """Tool `run_tests` (`agents.tools.Tool`) of one sandbox: rebuilds the project and runs the tests that it has.

    Background processes of the agent are ended.
    """

    def __init__(self, box: Sandbox, commands: RunCommands, timeout_s: float):
        self._box, self._commands, self._timeout_s = box, commands, timeout_s

    @staticmethod
    def tool() -> Mapping[str, Any]:
        """Returns the description of the tool, in OpenAI's format of functions."""
        description = (
            "Build the project and run its tests, without the hidden ones of the task. Returns the counts, the names of "
            "failing tests and the end of the output. Ends background processes."
        )
        return make_tool("run_tests", description, {})

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        """Runs the tests and returns a summary. Raises ToolError if the sandbox fails."""
        del task, arguments
        try:
            await rebuild(self._box, self._commands, self._timeout_s)
            run = await run_tests(self._box, self._commands, self._timeout_s)
            await self._box.exec(["rm", "-rf", RESULTS], user="root", cwd="/")
        except RebuildError as error:
            return f"The build failed: {error}"
        except (SandboxError, OSError) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error
        return summarise_run(run)


def summarise_run(run: RunResult) -> str:
    """Returns the counts of a run, its failing tests, and the end of its log."""
    if run.exit_code is None:
        head = "The tests had no end within their time limit."
    elif run.report is None:
        head = f"The report cannot be read: {run.problem}"
    else:
        failing = run.report.names("fail")
        counts = {status: len(run.report.names(status)) for status in ("pass", "fail", "skip")}
        head = f"{counts['pass']} tests pass, {counts['fail']} fail, {counts['skip']} are skipped."
        names = "".join(f"\n- {name}" for name in failing[:_MAX_NAMES])
        more = f"\n- and {len(failing) - _MAX_NAMES} more" if len(failing) > _MAX_NAMES else ""
        head += names + more
    return f"{head}\n\n{run.log[-_LOG_END:].strip()}".strip()


def make_tool(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Returns the description of a tool, in OpenAI's format of functions."""
    schema = {"type": "object", "properties": dict(properties), "required": list(required)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}
