"""Runs attempts at software engineering instances: an agent works in one sandbox, and its changes are graded in others.

    runner = AttemptRunner(SweDataset("DATASET"), RuleBuilder(LayerStore("layers")))
    report = await runner.run("xmltodict__mutation-b3ff9942d7", policy)

The environment of an instance is built when it is attempted first. Agents have no network, and the tests of the instance are
not in their sandbox.
"""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from glm5_jax.agents.client import ChatBackend
from glm5_jax.agents.context import Counter
from glm5_jax.agents.loop import ChatAgent, Trace
from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.sandbox import Sandbox, SandboxError
from glm5_jax.envs.swe.arms import time_limit
from glm5_jax.envs.swe.awareness import AwarenessJudge
from glm5_jax.envs.swe.builder import BuildError, RuleBuilder
from glm5_jax.envs.swe.dataset import SweDataset
from glm5_jax.envs.swe.grading import VARIANTS, SweGrader
from glm5_jax.envs.swe.instance import AttemptReport, InstanceError, SweInstance
from glm5_jax.envs.swe.patches import PatchError
from glm5_jax.envs.swe.recipes import WORKDIR, RecipeError
from glm5_jax.envs.swe.runs import ENVIRONMENT, RunCommands
from glm5_jax.envs.swe.sources import apply_patch
from glm5_jax.envs.swe.tools import EditTool, RunTestsTool
from glm5_jax.envs.terminal.bash import Bash
from glm5_jax.envs.terminal.policy import AttemptConfig, describe_limit, run_episode
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.types import Task

KIND = "swe"
SYSTEM = (
    f"You work at a project of software in {WORKDIR} on a Linux machine without a network. Solve the issue by changes of the "
    "project's sources. Hidden tests decide; changes of tests do not count. The tool bash runs commands, edit changes files, "
    "run_tests runs the tests that you can see. When the issue is solved, reply without a call, which ends your work."
)
_MAX_BUILDS = 2  # at a time
_MAX_NAMED = 5  # instances in a warning
_log = logging.getLogger(__name__)


class SweAgent(Protocol):
    """Agent that works at instances."""

    async def run(self, instance: SweInstance, box: Sandbox) -> str | None:
        """Works in a sandbox; returns a description of the limit that ended it, or None.

        Raises ServerError if its model fails, and SandboxError.
        """
        ...


class PatchAgent:
    """Agent that applies a patch to each instance: the gold patch, or one of a file of predictions.

    patches: patch by name of the instance; None: the gold patch.
    """

    def __init__(self, patches: Mapping[str, str] | None = None):
        self._patches = patches

    async def run(self, instance: SweInstance, box: Sandbox) -> str | None:
        """Applies the patch; one that does not apply leaves the tree as it is."""
        text = instance.patch if self._patches is None else self._patches[instance.instance_id]
        if text.strip() and not await apply_patch(box, text, WORKDIR):
            return "the patch does not apply"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweAttemptConfig(AttemptConfig):
    """Limits and prompt of an attempt at an instance, as of terminal tasks."""

    system: str = SYSTEM

    def instance_task(self, instance: SweInstance) -> Task:
        """Returns an instance as a chat task."""
        text = instance.problem_statement
        if instance.requirements:
            facts = "\n".join(f"- {line}" for line in instance.requirements)
            text += f"\n\nRequirements:\n\n{facts}"
        return Task(
            id=instance.instance_id,
            kind=KIND,
            messages=(
                {"role": "system", "content": self.system},
                {"role": "user", "content": text},
            ),
            data={"instance": instance},
            tools=(self.bash.tool(), EditTool.tool(), RunTestsTool.tool()),
            thinking=None if self.thinking else False,
        )


class SwePolicy:
    """Agent that runs a model at instances with the tools bash, edit and run_tests, any number at once.

    Args:
      connect: function that opens a client of the model's server for each attempt.
      counter: token counter of that server.
      config: limits.
      fields: fields of every request, such as the temperature.
      on_trace: function that receives the trace of each attempt, before it is graded.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[ChatBackend]],
        counter: Counter,
        config: SweAttemptConfig,
        fields: Mapping[str, Any] | None = None,
        on_trace: Callable[[SweInstance, Trace], None] = lambda instance, trace: None,
    ):
        self._connect, self._counter, self._config = connect, counter, config
        self._fields, self._on_trace = dict(fields or {}), on_trace

    async def run(self, instance: SweInstance, box: Sandbox) -> str | None:
        """Works at an instance; returns a description of the limit that ended it, or None."""
        variables = {**ENVIRONMENT, **instance.environment.variables}
        shell = Shell(box, "agent", WORKDIR, self._config.timeout_s, variables)
        commands = RunCommands(
            rebuild_cmds=instance.rebuild_cmds,
            test_cmds=instance.test_cmds,
            log_parser=instance.log_parser,
            log_parser_source=instance.log_parser_source,
            variables=instance.environment.variables,
        )
        tools = {
            "bash": Bash(shell, self._config.bash),
            "edit": EditTool(box),
            "run_tests": RunTestsTool(box, commands, time_limit(instance.seconds)),
        }
        async with self._connect() as client:
            agent = ChatAgent(
                client=client,
                tools=Toolbox(tools),
                counter=self._counter,
                config=self._config.loop(),
                fields=self._fields,
            )
            trace = await run_episode(
                agent,
                self._config.instance_task(instance),
                lambda trace: self._on_trace(instance, trace),
            )
        return describe_limit(trace, self._config)


class AttemptRunner:
    """Runner of attempts at the instances of a dataset. Raises ValueError without root.

    Args:
      dataset: instances with their sources.
      builder: builder of environments.
      judge: decides on lines that name a runner or a test; None: they do not count.
    """

    def __init__(
        self, dataset: SweDataset, builder: RuleBuilder, judge: AwarenessJudge | None = None
    ):
        check_root()
        self.dataset, self._builder, self._judge = dataset, builder, judge
        warn_of_forgeable(dataset.instances)
        self._graders: dict[str, asyncio.Task[SweGrader]] = {}
        self._slots = asyncio.Semaphore(_MAX_BUILDS)

    async def run(self, name: str, agent: SweAgent) -> AttemptReport:
        """Runs one attempt and grades it. Raises only when cancelled."""
        try:
            grader = await self._grader(name)
        except (InstanceError, RecipeError, BuildError, PatchError, SandboxError, OSError) as error:
            return _ungraded(name, f"the environment cannot be built: {error}")
        limit = None
        try:
            async with Sandbox(self._builder.store.limits.sandbox(grader.layer.layer)) as box:
                await box.exec("mkdir -p -m 1777 /tmp/home", user="root", cwd="/")
                limit = await agent.run(grader.instance, box)
                report = await grader.grade_sandbox(box)
        except ServerError as error:
            return _ungraded(name, f"the policy's server failed: {error}")
        except (SandboxError, OSError) as error:
            report = await grader.grade_failure(str(error))
        error = "; ".join(filter(None, (limit, report.error))) or None
        return msgspec.structs.replace(report, error=error)

    async def _grader(self, name: str) -> SweGrader:
        """Returns the grader of an instance, whose environment is built once."""
        if name not in self._graders:
            self._graders[name] = asyncio.create_task(self._make_grader(name))
        task = self._graders[name]
        try:
            # Other attempts wait for the same build, so that the end of this one must not cancel it.
            return await asyncio.shield(task)
        except Exception:
            self._graders.pop(name, None)  # the next attempt tries again
            raise

    async def _make_grader(self, name: str) -> SweGrader:
        async with self._slots:
            layer = await self.dataset.layer(name, self._builder)
        instance = self.dataset.instances[name]
        limits = self._builder.store.limits
        return SweGrader(instance, layer, limits, judge=self._judge, caches_reports=True)


def warn_of_forgeable(instances: Mapping[str, SweInstance]) -> None:
    """Logs the instances whose results an attempt's code can forge, since no variants of their tests can be planted."""
    names = [name for name, one in instances.items() if not one.labels.get(VARIANTS, True)]
    if names:
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        _log.warning(
            "the rewards of %d instances can be forged, because nothing varies their tests: %s%s",
            len(names),
            ", ".join(names[:_MAX_NAMED]),
            more,
        )


def check_root() -> None:
    """Raises ValueError unless this process is root's, since tests are protected from attempts only then."""
    if os.getuid() != 0:
        raise ValueError(
            "software engineering tasks need root: any other user's sandboxes have one user, and an attempt could change "
            "its tests"
        )


def _ungraded(name: str, reason: str) -> AttemptReport:
    return AttemptReport(
        instance_id=name,
        patch_exists=False,
        patch_applied=False,
        resolved=False,
        reward=None,
        infra_reason=reason,
    )
