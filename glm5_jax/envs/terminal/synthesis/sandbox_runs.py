"""Runs scripts at a task and grades what they leave, for the checks of the validator.

async with TaskRuns() as runs:
    run = await runs.run(task, ScriptedAttempt(script="true\\n"))
"""

import asyncio
import contextlib
import dataclasses
import shlex
import time
from collections.abc import AsyncIterator, Mapping

from glm5_jax.envs.sandbox import Sandbox, SandboxError
from glm5_jax.envs.terminal.grading import (
    MAKE_LOGS,
    Grader,
    Submission,
    SubmissionError,
    Verdict,
    collect,
    sandbox_config,
    workdir_of,
)
from glm5_jax.envs.terminal.image import BuildConfig, Image, ImageError, Images
from glm5_jax.envs.terminal.shell import Shell, command_for_script
from glm5_jax.envs.terminal.synthesis.reports import ValidatorError
from glm5_jax.envs.terminal.task import TaskLimits, TerminalTask

OTHER_USER, OTHER_UID = "other", 4321


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedAttempt:
    """Script that works at a task, and the surroundings in which it runs.

    Attributes:
      script: text of the script; None: the task's solution.
      hostname: name of the machine.
      user: user of the script; None: the task's.
      env: environment variables, in addition to those of the solution.
      prepare: shell command that root runs first.
    """

    script: str | None = None
    hostname: str = "sandbox"
    user: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prepare: str = ""


OTHER_IDENTITY = ScriptedAttempt(
    hostname="elsewhere",
    user=OTHER_USER,
    prepare=f"useradd --create-home --uid {OTHER_UID} {OTHER_USER} && chown -R {OTHER_USER} .",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradedRun:
    """Verdict on an attempt, and what the attempt's script did.

    Attributes:
      verdict: verdict.
      seconds: duration of the script, in seconds.
      code: exit code of the script.
      output: end of its output.
    """

    verdict: Verdict
    seconds: float = 0.0
    code: int = 0
    output: str = ""

    @property
    def description(self) -> str:
        """Returns the reward with its reason, and the end of the outputs."""
        parts = [f"reward {self.verdict.reward}", self.verdict.error or ""]
        if self.code:
            parts.append(f"exit code {self.code}: {self.output[-300:]}")
        parts.append(self.verdict.log[-800:].strip())
        return ", ".join(part for part in parts if part)


class TaskRuns:
    """Images and a grader for runs of any number of tasks; an asynchronous context manager.

    Args:
      images: image name -> folder of a root file system, or "host".
      build: options of image builds; the network stays off.
      limits: maximum resources of tasks.
    """

    def __init__(
        self,
        images: Mapping[str, str] | None = None,
        build: BuildConfig = BuildConfig(),
        limits: TaskLimits = TaskLimits(),
    ):
        self.limits = limits
        self.images = Images(images, dataclasses.replace(build, network=False))
        self._grader = Grader(self.images, limits)

    async def __aenter__(self):
        try:
            await self.images.tools()
        except BaseException:
            await self.images.close()
            raise
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        await self._grader.close()
        await self.images.close()

    @contextlib.asynccontextmanager
    async def sandbox(
        self, task: TerminalTask, attempt: ScriptedAttempt = ScriptedAttempt()
    ) -> AsyncIterator[tuple[Sandbox, Image]]:
        """Provides a sandbox in the state in which an agent receives it, and its image.

        Raises ValidatorError if the sandbox cannot be had.
        """
        with _environment_errors():
            image = await self.images.of(task)
            workdir_of(task, image)
            config = sandbox_config(task, image, self.limits)
        async with Sandbox(dataclasses.replace(config, hostname=attempt.hostname)) as box:
            await box.exec(MAKE_LOGS, user="root", cwd="/")
            yield box, image

    @contextlib.asynccontextmanager
    async def submission(
        self, task: TerminalTask, attempt: ScriptedAttempt
    ) -> AsyncIterator[tuple[Submission, GradedRun]]:
        """Runs an attempt; provides what it leaves, and facts about its script with an empty verdict.

        Raises SubmissionError if what it leaves cannot be graded, SandboxError and ValidatorError.
        """
        async with self.sandbox(task, attempt) as (box, image):
            workdir = workdir_of(task, image)
            if attempt.prepare:
                done = await box.exec(attempt.prepare, user="root", cwd=workdir)
                if done.code:
                    raise ValidatorError(
                        f"{attempt.prepare!r} failed: {done.stderr.decode(errors='replace')[-300:]}"
                    )
            shell = Shell(
                box, attempt.user or task.user or image.user, workdir, task.agent_timeout_s
            )
            start = time.monotonic()
            done = await self._run_script(task, attempt, shell)
            seconds = time.monotonic() - start
            submission = await collect(box, task, workdir)
        output = (done.stdout + done.stderr).decode(errors="replace")
        facts = GradedRun(
            verdict=Verdict(reward=None), seconds=seconds, code=done.code, output=output[-1000:]
        )
        with submission:
            yield submission, facts

    async def _run_script(self, task: TerminalTask, attempt: ScriptedAttempt, shell: Shell):
        if attempt.script is None:
            script = await asyncio.to_thread((task.folder / "solution/solve.sh").read_bytes)
            await shell.put_folder("/solution", task.folder / "solution")
            path = "/solution/solve.sh"
        else:
            script, path = attempt.script.encode(), "/script/script"
            await shell.put(path, script, mode=0o755)
        command = command_for_script(script, path)
        if attempt.env:
            # By env, which the user starts: what root runs before it must not load libraries named there.
            command = ["env", *(f"{name}={value}" for name, value in attempt.env.items()), *command]
        return await shell.exec(command, env=task.solution_env, timeout_s=task.solution_timeout_s)

    async def grade(self, task: TerminalTask, submission: Submission) -> Verdict:
        """Returns the verdict on a submission, which can be graded again. Raises ValidatorError."""
        with _environment_errors():
            image = await self.images.of(task)
            for file in submission.files.values():
                file.seek(0)
            return await self._grader(task, image, submission)

    async def run(
        self, task: TerminalTask, attempt: ScriptedAttempt = ScriptedAttempt()
    ) -> GradedRun:
        """Runs an attempt and grades it. Raises ValidatorError if the environment fails."""
        try:
            async with self.submission(task, attempt) as (submission, facts):
                return dataclasses.replace(facts, verdict=await self.grade(task, submission))
        except SubmissionError as error:
            return GradedRun(verdict=Verdict(reward=0.0, error=str(error)))
        except SandboxError as error:
            with _environment_errors():
                image = await self.images.of(task)
                return GradedRun(
                    verdict=await self._grader.grade_failed_attempt(task, image, error)
                )

    async def cut_points(self, task: TerminalTask, script: str) -> list[int]:
        """Returns the numbers of the lines after which a Bash script can be cut between two commands."""
        command = (
            "n=$(wc -l < script); for i in $(seq 1 $n); do head -n $i script > part; "
            '[ -z "$(bash -n part 2>&1)" ] && echo $i; done; true'
        )
        async with self.sandbox(task) as (box, _):
            await box.put("/var/tmp/cut/script", script.encode(), user="root")
            done = await box.exec(command, user="root", cwd="/var/tmp/cut")
        return [int(word) for word in done.stdout.split()]

    async def has_path(self, task: TerminalTask, pattern: str) -> str | None:
        """Returns the first path in a task's sandbox that a shell pattern matches, or None."""
        async with self.sandbox(task) as (box, _):
            done = await box.exec(f"for p in {pattern}; do [ -e $p ] && echo $p; done; true")
        return next(iter(done.stdout.decode().split()), None)

    async def environment_text(self, task: TerminalTask) -> str:
        """Returns the environment variables of a command in a task's sandbox."""
        async with self.sandbox(task) as (box, image):
            shell = Shell(box, task.user or image.user, workdir_of(task, image), 60.0)
            return (await shell.exec("env")).stdout.decode(errors="replace")


@contextlib.contextmanager
def _environment_errors():
    """Turns errors of the environment into ValidatorError. Errors of images stay ImageError."""
    try:
        yield
    except ImageError:
        raise
    except (SandboxError, OSError) as error:
        raise ValidatorError(str(error)) from error


def per_test_script(names: list[str]) -> str:
    """Returns a tests/test.sh that runs each test in a process of its own, and writes its result as a part."""
    lines = [
        "#!/bin/bash",
        "cd /",
        "mkdir -p /logs/verifier; chmod 700 /logs/verifier",
        "parts='\"reward\": 0'",
    ]
    for name in names:
        lines += [
            "python3 -I -m pytest -q -c /dev/null --rootdir /tests -p no:cacheprovider "
            f"/tests/test_outputs.py::{shlex.quote(name)} && r=1 || r=0",
            f'parts="$parts, \\"{name}\\": $r"',
        ]
    lines.append('echo "{$parts}" > /logs/verifier/reward.json')
    return "\n".join(lines) + "\n"
