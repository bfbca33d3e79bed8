"""Runs trials: an agent works at a task in its sandbox, then the result is graded in another."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Protocol

from glm5_jax.envs.sandbox import Sandbox, SandboxError
from glm5_jax.envs.terminal.grading import (
    MAKE_LOGS,
    Grader,
    SubmissionError,
    Verdict,
    collect,
    sandbox_config,
    workdir_of,
)
from glm5_jax.envs.terminal.health import wait_until_healthy
from glm5_jax.envs.terminal.image import BuildConfig, ImageError, Images
from glm5_jax.envs.terminal.shell import Shell, command_for_script
from glm5_jax.envs.terminal.task import TaskError, TaskLimits, TerminalTask
from glm5_jax.inference.client import ServerError

log = logging.getLogger(__name__)

_MAX_SUBMISSIONS = 16  # each with up to MAX_SUBMISSION_BYTES per folder and artifact, on disk


class Agent(Protocol):
    """Agent that works at a task. It is cancelled at the task's time limit, and its work until then is graded.

    An exception is the agent's failure, and ends the trial without a reward; a failed command is none.
    """

    async def run(self, task: TerminalTask, sandbox: Shell) -> str | None:
        """Works in the sandbox until it is done or reaches a limit of the agent; returns a description of that
        limit.
        """
        ...


class Nop:
    """Agent that does nothing."""

    async def run(self, task: TerminalTask, sandbox: Shell) -> None:
        """Returns immediately."""


class Oracle:
    """Agent that runs the task's solution/solve.sh."""

    async def run(self, task: TerminalTask, sandbox: Shell) -> None:
        """Runs the solution. Raises TaskError if the task has none."""
        folder = task.folder / "solution"
        if not (folder / "solve.sh").is_file():
            raise TaskError(f"task {task.name}: it has no solution/solve.sh")
        script = await asyncio.to_thread((folder / "solve.sh").read_bytes)
        await sandbox.put_folder("/solution", folder)
        await sandbox.exec(
            command_for_script(script, "/solution/solve.sh"),
            env=task.solution_env,
            timeout_s=task.solution_timeout_s,
        )


class Script:
    """Agent that runs the same file of the host at every task."""

    def __init__(self, file: pathlib.Path):
        self._script = file.read_bytes()

    async def run(self, task: TerminalTask, sandbox: Shell) -> None:
        """Runs the script and ignores its exit code."""
        await sandbox.put("/script/script", self._script, mode=0o755)
        await sandbox.exec(command_for_script(self._script, "/script/script"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Result of a trial.

    Attributes:
      reward: reward; None if nothing can be said about the attempt, for the reason in `error`.
      error: reason of a missing reward; with a reward: what the agent did that made it 0, or the limit that
          ended it.
      duration_s: duration of the trial, in seconds.
      log: output of the tests.
      parts: parts of the reward by name.
    """

    reward: float | None
    error: str | None
    duration_s: float
    log: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class TrialRunner:
    """Runner of trials; an asynchronous context manager that removes at its end what it built.

    Entering it raises SandboxError if no sandbox starts on this machine. Raises ValueError without root.

    Args:
      images: see `Images`.
      limits: maximum resources of tasks; a task that needs more gets no reward.
      build: options for building images.
    """

    def __init__(
        self,
        images: Mapping[str, str] | None = None,
        limits: TaskLimits = TaskLimits(),
        build: BuildConfig = BuildConfig(),
    ):
        if os.getuid() != 0:
            raise ValueError(
                "trials need root: any other user's sandboxes have one user, and an attempt could write its own reward"
            )
        self._images = Images(images, build)
        self._grader, self._limits = Grader(self._images, limits), limits
        self._submission_slots = asyncio.Semaphore(_MAX_SUBMISSIONS)

    async def __aenter__(self):
        try:
            await self._images.tools()
        except BaseException:
            await self._images.close()
            raise
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        await self._grader.close()
        await self._images.close()

    async def run(self, task: TerminalTask, agent: Agent) -> TrialResult:
        """Runs one trial. Raises only when cancelled."""
        start = time.monotonic()
        try:
            verdict = await self._run(task, agent)
        except (ImageError, TaskError, SandboxError, OSError) as failure:
            verdict = Verdict(reward=None, error=str(failure))
        except ServerError as failure:
            verdict = Verdict(reward=None, error=f"the policy's server failed: {failure}")
        except Exception as failure:
            log.exception("the agent failed at task %s", task.name)
            verdict = Verdict(
                reward=None, error=f"the agent failed: {type(failure).__name__}: {failure}"
            )
        duration_s = time.monotonic() - start
        return TrialResult(
            reward=verdict.reward,
            error=verdict.error,
            duration_s=duration_s,
            log=verdict.log,
            parts=verdict.parts,
        )

    async def _run(self, task: TerminalTask, agent: Agent) -> Verdict:
        self._limits.check(task)
        image = await self._images.of(task)
        workdir = workdir_of(task, image)
        limit, failure, submission, verdict = None, None, None, None
        # A submission is stored on disk until it is graded.
        async with contextlib.AsyncExitStack() as stack:
            async with Sandbox(sandbox_config(task, image, self._limits)) as box:
                await box.exec(MAKE_LOGS, user="root", cwd="/")
                if task.health_check is not None:
                    await wait_until_healthy(box, task.health_check)
                shell = Shell(box, task.user or image.user, workdir, task.agent_timeout_s)
                try:
                    limit = await _attempt(task, agent, shell)
                    if task.is_shared:
                        verdict = await self._grader.grade_in_place(task, image, box)
                    else:
                        await stack.enter_async_context(self._submission_slots)
                        submission = stack.enter_context(await collect(box, task, workdir))
                except (SandboxError, SubmissionError) as error:
                    failure = error
            if failure is not None:
                verdict = await self._grader.grade_failed_attempt(task, image, failure)
            elif submission is not None:
                verdict = await self._grader(task, image, submission)
        assert verdict is not None, (
            "without a submission there is a failure, or the sandbox was graded"
        )
        error = "; ".join(filter(None, (limit, verdict.error))) or None
        return dataclasses.replace(verdict, error=error)


async def _attempt(task: TerminalTask, agent: Agent, shell: Shell) -> str | None:
    """Lets the agent work at the task within its time limit; returns a description of the limit that ended it."""
    try:
        async with asyncio.timeout(task.agent_timeout_s) as time_limit:
            return await agent.run(task, shell)
    except TimeoutError:
        if not time_limit.expired():
            raise
        return f"the agent had no end within {task.agent_timeout_s:g} s"
