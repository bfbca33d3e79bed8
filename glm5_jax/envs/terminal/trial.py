"""A trial: an agent at a task in its sandbox, then grading in another."""

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
    Verdict,
    WorkError,
    collect,
    sandbox_config,
    workdir_of,
)
from glm5_jax.envs.terminal.image import ImageError, Images
from glm5_jax.envs.terminal.shell import Shell, started_by
from glm5_jax.envs.terminal.task import TaskError, TaskLimits, TerminalTask
from glm5_jax.inference.client import ServerError

log = logging.getLogger(__name__)

_WORKS_AT_ONCE = 16  # of up to MOST_WORK bytes each and per artifact, on disk


class Agent(Protocol):
    """Works at a task. It is cancelled at the end of the task's time, and what it has done by then is graded.

    What it raises is a failure of its own, and ends the trial without a reward; a command that fails is none.
    """

    async def run(self, task: TerminalTask, sandbox: Shell) -> str | None:
        """Works in the sandbox until it is done, or a limit of its own is reached: which, in words."""
        ...


class Nop:
    """Does nothing."""

    async def run(self, task: TerminalTask, sandbox: Shell) -> None:
        """Returns."""


class Oracle:
    """Runs the task's own solution/solve.sh."""

    async def run(self, task: TerminalTask, sandbox: Shell) -> None:
        """TaskError if the task has none."""
        folder = task.folder / "solution"
        if not (folder / "solve.sh").is_file():
            raise TaskError(f"task {task.name}: it has no solution/solve.sh")
        script = await asyncio.to_thread((folder / "solve.sh").read_bytes)
        await sandbox.put_folder("/solution", folder)
        await sandbox.exec(started_by(script, "/solution/solve.sh"), env=task.solution_env)


class Script:
    """Runs a file of the host in the sandbox, as what the agent does at every task."""

    def __init__(self, file: pathlib.Path):
        self._script = file.read_bytes()

    async def run(self, task: TerminalTask, sandbox: Shell) -> None:
        """Whatever its exit code."""
        await sandbox.put("/script/script", self._script, mode=0o755)
        await sandbox.exec(started_by(self._script, "/script/script"))


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a trial.

    reward: None if nothing can be said of the attempt, for `error`. error may stand beside a reward: what the agent
    did that made it 0, or by what limit it was ended. seconds: of the whole trial. log: what the tests printed. parts:
    of the reward, by name.
    """

    reward: float | None
    error: str | None
    seconds: float
    log: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Trials:
    """Runs trials; an asynchronous context manager that removes at its end what it built.

    images: see `Images`. limits: what tasks may ask for; one that asks for more gets no reward.
    SandboxError, as it is entered, if no sandbox starts here.
    """

    def __init__(self, images: Mapping[str, str] | None = None, limits: TaskLimits = TaskLimits()):
        if os.getuid() != 0:
            raise ValueError(
                "trials need root: any other user's sandboxes have one user, and an attempt could write its own reward"
            )
        self._images = Images(images)
        self._grader, self._limits = Grader(self._images, limits), limits
        self._places = asyncio.Semaphore(_WORKS_AT_ONCE)

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

    async def run(self, task: TerminalTask, agent: Agent) -> Result:
        """One trial. It raises nothing but what cancels it."""
        start = time.monotonic()
        try:
            verdict = await self._run(task, agent)
        except (ImageError, TaskError, SandboxError, OSError) as failure:
            verdict = Verdict(None, str(failure))
        except ServerError as failure:
            verdict = Verdict(None, f"the policy's server failed: {failure}")
        except Exception as failure:
            log.exception("the agent failed at task %s", task.name)
            verdict = Verdict(None, f"the agent failed: {type(failure).__name__}: {failure}")
        seconds = time.monotonic() - start
        return Result(verdict.reward, verdict.error, seconds, verdict.log, verdict.parts)

    async def _run(self, task: TerminalTask, agent: Agent) -> Verdict:
        self._limits.check(task)
        image = await self._images.of(task)
        workdir = workdir_of(task, image)
        limit, broken, work, verdict = None, None, None, None
        # Until it is graded, work lies on disk.
        async with contextlib.AsyncExitStack() as stack:
            async with Sandbox(sandbox_config(task, image, self._limits)) as box:
                await box.exec(MAKE_LOGS, user="root", cwd="/")
                shell = Shell(box, task.user or image.user, workdir, task.agent_seconds)
                try:
                    limit = await _attempt(task, agent, shell)
                    if task.is_shared:
                        verdict = await self._grader.in_place(task, image, box)
                    else:
                        await stack.enter_async_context(self._places)
                        work = stack.enter_context(await collect(box, task, workdir))
                except (SandboxError, WorkError) as error:
                    broken = error
            if broken is not None:
                verdict = await self._grader.blame(task, image, broken)
            elif work is not None:
                verdict = await self._grader(task, image, work)
        error = "; ".join(filter(None, (limit, verdict.error))) or None
        return dataclasses.replace(verdict, error=error)


async def _attempt(task: TerminalTask, agent: Agent, shell: Shell) -> str | None:
    """Has the agent work at the task within its time; the limit that ended it, in words."""
    try:
        async with asyncio.timeout(task.agent_seconds) as time_limit:
            return await agent.run(task, shell)
    except TimeoutError:
        if not time_limit.expired():
            raise
        return f"the agent had no end within {task.agent_seconds:g} s"
