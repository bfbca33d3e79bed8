"""Implements the tools by which a model tries and submits the commands of a project, and runs what it submits.

A submission is accepted by its runs alone: see `agent_builder`.
"""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.envs.sandbox import Sandbox, SandboxError
from glm5_jax.envs.swe.builder import MAX_FAILING_SHARE, commands_of
from glm5_jax.envs.swe.file_tree import FileTree, put_tree
from glm5_jax.envs.swe.grading import has_true_canaries
from glm5_jax.envs.swe.layers import StoredLayer, SweLimits
from glm5_jax.envs.swe.parsers import PARSERS, RunTotals
from glm5_jax.envs.swe.parsers.generated import ParserLog, ParserRejected, check_parser
from glm5_jax.envs.swe.recipes import RESULTS, WORKDIR, Canaries, ProjectPlan, ProjectRecipe
from glm5_jax.envs.swe.recipes.planting import make_draw
from glm5_jax.envs.swe.runs import (
    RebuildError,
    RunCommands,
    RunResult,
    rebuild,
    run_parser,
    run_tests,
)
from glm5_jax.envs.swe.tools import make_tool, summarise_run
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task

_COMMANDS = {"type": "array", "items": {"type": "string"}}
_PARSER = {"type": "string", "description": f"One of {', '.join(sorted(PARSERS))}, or generated."}


class TryTests:
    """Tool `try_tests`: runs test commands in the sandbox of the verification.

    Attributes:
      has_results: whether a run had a result for at least one test that passes.
    """

    def __init__(self, box: Sandbox, limits: SweLimits):
        self._box, self._limits = box, limits
        self.has_results = False

    @staticmethod
    def tool() -> Mapping[str, Any]:
        """Returns the description of the tool, in OpenAI's format of functions."""
        description = (
            f"Run commands that run the tests; reports are read from {RESULTS}. Returns the counts, the names of failing tests, "
            "and the end of the output."
        )
        properties = {"test_cmds": _COMMANDS, "log_parser": _PARSER}
        return make_tool("try_tests", description, properties, ("test_cmds", "log_parser"))

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        """Runs the commands and returns a summary. Raises ToolError if the sandbox fails."""
        del task
        problem = _argument_problem(arguments, ("test_cmds",))
        if problem is None and arguments["log_parser"] not in PARSERS:
            problem = f"log_parser is {arguments['log_parser']!r}; try a built-in one"
        if problem:
            return f"Error: {problem}"
        commands = RunCommands(
            rebuild_cmds=(),
            test_cmds=tuple(arguments["test_cmds"]),
            log_parser=arguments["log_parser"],
        )
        try:
            run = await run_tests(self._box, commands, self._limits.test_timeout_s)
        except (SandboxError, OSError) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error
        if run.report is not None and run.report.names("pass"):
            self.has_results = True
        return summarise_run(run)


class Submit:
    """Tool `submit`: accepts commands and a parser if their runs in fresh sandboxes are right.

    Attributes:
      accepted: plan and its runs; None: nothing was accepted.
      refusal: why the last submission was refused.
    """

    def __init__(
        self,
        limits: SweLimits,
        layer: StoredLayer,
        plan: ProjectPlan,
        recipe: ProjectRecipe,
        tree: FileTree,
        focus: Sequence[str],
    ):
        self._limits, self._layer, self._plan, self._recipe = limits, layer, plan, recipe
        self._tree, self._focus = tree, focus
        self.accepted: tuple[ProjectPlan, list[RunResult]] | None = None
        self.refusal = "nothing was submitted"

    @staticmethod
    def tool() -> Mapping[str, Any]:
        """Returns the description of the tool, in OpenAI's format of functions."""
        properties = {
            "rebuild_cmds": _COMMANDS,
            "test_cmds": _COMMANDS,
            "log_parser": _PARSER,
            "log_parser_source": {"type": "string"},
        }
        description = "Submit the commands of the project. They are run; the answer says whether they are accepted."
        return make_tool("submit", description, properties, ("test_cmds", "log_parser"))

    async def __call__(self, task: Task, arguments: Mapping[str, Any]) -> str:
        """Runs a submission and returns the decision. Raises ToolError if a sandbox fails."""
        del task
        try:
            refusal = await self._check(arguments)
        except (SandboxError, OSError) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error
        if refusal is None:
            return "accepted; reply without a call"
        self.refusal = refusal
        return f"refused: {refusal}"

    async def _check(self, arguments: Mapping[str, Any]) -> str | None:
        """Returns why a submission is refused; None: it is accepted."""
        arguments = {"rebuild_cmds": [], "log_parser_source": "", **arguments}
        if problem := _argument_problem(arguments, ("rebuild_cmds", "test_cmds")):
            return problem
        parser, source = arguments["log_parser"], arguments["log_parser_source"] or None
        if parser != "generated" and parser not in PARSERS:
            return (
                f"log_parser is {parser!r}; use one of {', '.join(sorted(PARSERS))}, or generated"
            )
        if (parser == "generated") != bool(source):
            return "a log_parser_source and log_parser = generated go together"
        plan = dataclasses.replace(
            self._plan,
            rebuild_cmds=tuple(arguments["rebuild_cmds"]),
            test_cmds=tuple(arguments["test_cmds"]),
            shuffled_cmds=tuple(arguments["test_cmds"]),
            log_parser=parser,
            log_parser_source=source,
        )
        runs, refusal = await self._runs(plan)
        refusal = refusal or _runs_problem(runs) or await self._canary_problem(plan)
        if refusal is None:
            self.accepted = plan, runs
        return refusal

    async def _runs(self, plan: ProjectPlan) -> tuple[list[RunResult], str | None]:
        """Returns two runs in one fresh sandbox, and why there are none."""
        commands = commands_of(plan)
        async with Sandbox(self._limits.sandbox(self._layer.layer)) as box:
            try:
                await rebuild(box, commands, self._limits.build_timeout_s)
            except RebuildError as error:
                return [], f"the rebuild failed: {error}"
            return [await run_tests(box, commands, self._limits.test_timeout_s) for _ in "12"], None

    async def _canary_problem(self, plan: ProjectPlan) -> str | None:
        """Returns why planted tests do not have their results; None: they have."""
        draw = make_draw(self._tree, (), secrets.randbits(64))
        canaries = self._recipe.canaries(self._tree, self._focus, draw)
        commands = commands_of(plan)
        async with Sandbox(self._limits.sandbox(self._layer.layer)) as box:
            await put_tree(box, WORKDIR, canaries.files)
            try:
                await rebuild(box, commands, self._limits.build_timeout_s)
            except RebuildError as error:
                return f"the rebuild failed with another test file: {error}"
            run = await run_tests(box, commands, self._limits.test_timeout_s)
        if run.report is None:
            return f"with a failing test the report cannot be read: {run.problem}"
        if not has_true_canaries(run.report, canaries):
            return (
                f"test files that were added ({', '.join(sorted(canaries.files))}) are not in the results, one passing and "
                "the others failing; the commands must run every test file"
            )
        return await _parser_problem(plan, run, canaries)


def _runs_problem(runs: Sequence[RunResult]) -> str | None:
    """Returns why the runs of a submission are refused; None: they are not."""
    for run in runs:
        if run.report is None:
            return f"the report cannot be read: {run.problem}"
        if not run.report.names("pass"):
            return f"no test passes; the output ends with {run.log[-1000:]}"
        failing = run.report.names("fail")
        if len(failing) >= MAX_FAILING_SHARE * len(run.report.statuses):
            return f"{len(failing)} of {len(run.report.statuses)} tests fail, such as {failing[0]}"
    names = [set(run.report.statuses) for run in runs if run.report]
    if len(names[0] ^ names[1]) > MAX_FAILING_SHARE * len(names[0]):
        return "two runs list different tests"
    return None


async def _parser_problem(plan: ProjectPlan, run: RunResult, canaries: Canaries) -> str | None:
    """Returns why a generated parser is refused; None: it is not, or is built in."""
    if plan.log_parser_source is None:
        return None
    log = ParserLog(log=run.log, totals=RunTotals(), failing_test=canaries.failing)
    try:
        await check_parser(plan.log_parser_source, [log], run_parser)
    except ParserRejected as error:
        return f"log_parser_source: {error}"
    return None


def _argument_problem(arguments: Mapping[str, Any], lists: Sequence[str]) -> str | None:
    for name in lists:
        value = arguments.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return f"{name} is {value!r:.60}; give a list of commands"
    if not arguments.get("test_cmds"):
        return "test_cmds is empty; give at least one command"
    if not isinstance(arguments.get("log_parser"), str):
        return "log_parser is no text"
    return None
