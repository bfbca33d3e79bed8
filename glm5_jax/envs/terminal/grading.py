"""What an attempt's work is worth: the task's tests, in a fresh sandbox over the pristine image.

Only the work folder and the declared artifacts go over, as files, folders and links that nobody follows; what else the
attempt changed, started or left running stays behind. See `grader` for who runs with which rights there.
"""

import asyncio
import dataclasses
import errno
import shlex
from collections.abc import Mapping

from glm5_jax.envs.sandbox import (
    ExecResult,
    Layer,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
)
from glm5_jax.envs.terminal import grader, rewards
from glm5_jax.envs.terminal.image import Image, Images
from glm5_jax.envs.terminal.shell import started_by
from glm5_jax.envs.terminal.task import TerminalTask, check_workdir

MOST_WORK = 1 << 29  # bytes of a work folder, as it is held in memory on its way
# The folders that tasks expect.
MAKE_LOGS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"
_NO_TARGETS = [[name] for name in ("logs", "tests", "grader", "proc")]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of grading.

    reward: None if nothing can be said of the attempt. error: why it is None, or 0 for what the attempt did to its
    tests. log: what the tests printed.
    """

    reward: float | None
    error: str | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    log: str = ""


@dataclasses.dataclass(frozen=True)
class Work:
    """What an attempt leaves to be graded: the archive of its folder, and of each artifact there is.

    artifacts: path -> content of a file, or archive of a folder.
    """

    folder: bytes
    artifacts: Mapping[str, tuple[str, bytes]]


class WorkError(RuntimeError):
    """What an attempt has left cannot be graded, which is its own doing."""


def workdir_of(task: TerminalTask, image: Image) -> str:
    """The folder that is worked in and graded; TaskError if there is none of its own."""
    if task.workdir is not None:
        return task.workdir
    return check_workdir(image.workdir or "/", "the image's WORKDIR")


def sandbox_config(task: TerminalTask, image: Image, *, layers: tuple = ()) -> SandboxConfig:
    """A sandbox over a task's image."""
    # Each once: an overlay refuses a folder that is in it already.
    folders = tuple(dict.fromkeys((*layers, *image.layer.folders)))
    layer = Layer(folders, image.layer.host_programs)
    return SandboxConfig(
        seconds=task.agent_seconds,
        memory_bytes=task.memory_bytes,
        disk_bytes=task.disk_bytes,
        cpus=task.cpus,
        env={**image.env, **task.env},
        workdir=workdir_of(task, image),
        base=layer,
    )


async def collect(box: Sandbox, task: TerminalTask, workdir: str) -> Work:
    """What is graded of a sandbox; WorkError if it cannot be."""
    try:
        folder = await box.get_folder(workdir, MOST_WORK)
        artifacts = {}
        for path in task.artifacts:
            try:
                artifacts[path] = "file", await box.get(path, MOST_WORK)
            except SandboxFileError as error:
                if error.errno == errno.EFBIG:
                    raise
                try:
                    artifacts[path] = "folder", await box.get_folder(path, MOST_WORK)
                except SandboxFileError as other:
                    if other.errno != errno.ENOENT:
                        raise
    except SandboxFileError as error:
        raise WorkError(f"what the agent left cannot be graded: {error.args[-1]}") from None
    return Work(folder, artifacts)


class Grader:
    """Grades attempts at tasks."""

    def __init__(self, images: Images):
        self._images = images
        self._untouched: dict[str, asyncio.Task[str | None]] = {}

    async def __call__(self, task: TerminalTask, image: Image, work: Work) -> Verdict:
        """The verdict on what an attempt left. Tests that give no reward to it say nothing of it if they give
        none to the untouched image either; if they do, it is the attempt's doing, and 0."""
        try:
            return await self._grade(task, image, work)
        except WorkError as error:
            return Verdict(0.0, str(error))
        except rewards.RewardError as error:
            told = str(error)
        except SandboxError as error:
            told = f"the tests' sandbox failed: {error}"
        problem = await self._problem_without_work(task, image)
        if problem is None:
            return Verdict(0.0, told)
        return Verdict(None, f"the tests fail on the untouched image too: {problem}")

    async def blame(self, task: TerminalTask, image: Image, error: Exception) -> Verdict:
        """The verdict on an attempt whose sandbox broke, or that left nothing that could be graded."""
        if isinstance(error, WorkError):
            return Verdict(0.0, str(error))
        try:
            # Looked at anew: it may be that no sandbox works just now, for want of processes say.
            problem = await self._look(task, image)
        except SandboxError as failure:
            problem = str(failure)
        return Verdict(0.0, str(error)) if problem is None else Verdict(None, problem)

    async def close(self) -> None:
        """Ends what is still being graded."""
        for look in self._untouched.values():
            look.cancel()
        await asyncio.gather(*self._untouched.values(), return_exceptions=True)

    async def _problem_without_work(self, task: TerminalTask, image: Image) -> str | None:
        """Why tests say nothing of the untouched image, or None; found out once."""
        key = str(task.folder)
        if key not in self._untouched:
            self._untouched[key] = asyncio.create_task(self._look(task, image))
        try:
            return await asyncio.shield(self._untouched[key])
        except SandboxError as error:  # which may be otherwise the next time
            self._untouched.pop(key, None)
            return str(error)

    async def _look(self, task: TerminalTask, image: Image) -> str | None:
        try:
            return (await self._grade(task, image, None)).error
        except rewards.RewardError as error:
            return str(error)

    async def _grade(self, task: TerminalTask, image: Image, work: Work | None) -> Verdict:
        tools = await self._images.tools()
        config = sandbox_config(task, image, layers=tools.folders[:1])
        async with Sandbox(config) as box:
            # Of what the image has of the work nothing may come back that the attempt removed.
            old = shlex.join([config.workdir, *work.artifacts] if work else [])
            clear = f"rm -rf -- {old}" if old else "true"
            command = f"{MAKE_LOGS} && chmod 700 /logs/verifier && {clear}"
            await box.exec(command, user="root", cwd="/")
            await box.put("/tests", task.folder / "tests", user="root", mode=0o700)
            if work is not None:
                await _put_work(box, config.workdir, work)
            done = await self._run_tests(box, task, config)
            log = (done.stdout + done.stderr).decode(errors="replace")
            try:
                value, parts = await _read_reward(box, done, task)
            except rewards.RewardError:
                if lacking := await _lacking(box):
                    return Verdict(None, lacking, log=log)
                raise
            if value <= 0 and (lacking := await _lacking(box)):
                return Verdict(None, lacking, log=log)
            return Verdict(value, None, parts, log)

    async def _run_tests(self, box: Sandbox, task, config: SandboxConfig) -> ExecResult:
        script = await asyncio.to_thread((task.folder / "tests" / "test.sh").read_bytes)
        path = f"{grader.FOLDER}/bin:{config.env['PATH']}"
        return await box.exec(
            started_by(script, "/tests/test.sh"),
            user="root",
            cwd=config.workdir,
            env={**task.verifier_env, "PATH": path},
            seconds=task.verifier_seconds,
        )


async def _put_work(box: Sandbox, workdir: str, work: Work) -> None:
    try:
        # As an ordinary user's, whoever's it was: whose programs have no rights in grading.
        await box.put_tar(workdir, work.folder)
        for path, (kind, content) in work.artifacts.items():
            await (box.put if kind == "file" else box.put_tar)(path, content)
    except SandboxFileError as error:
        raise WorkError(f"what the agent left cannot be graded: {error.args[-1]}") from None
    # Tests follow links as root: to their own answers, or to where the reward is written.
    places = [workdir, *work.artifacts]
    look = ["find", *places, "-type", "l", "-exec", "realpath", "-mz", "--", "{}", "+"]
    found = await box.exec(look, user="root", cwd="/")
    if found.truncated:
        raise WorkError("what the agent left cannot be graded: too many links")
    for target in found.stdout.decode(errors="replace").split("\0"):
        if target.split("/")[1:2] in _NO_TARGETS:
            raise WorkError(f"what the agent left cannot be graded: a link to {target[:100]}")


async def _lacking(box: Sandbox) -> str | None:
    """What the tests asked for in vain, if anything."""
    told = await box.exec(["ls", "-A", grader.MISSING], user="root", cwd="/")
    names = sorted(told.stdout.decode(errors="replace").splitlines())
    return f"the tests need what is not here: {', '.join(names[:5])}" if names else None


async def _read_reward(box: Sandbox, done: ExecResult, task: TerminalTask):
    """The reward and its parts; RewardError."""
    for name, read in (("json", rewards.read_json), ("txt", rewards.read_text)):
        try:
            data = await box.get(f"/logs/verifier/reward.{name}", rewards.MOST_BYTES)
        except SandboxFileError as error:
            if error.errno == errno.ENOENT:
                continue
            said = str(error.args[-1]).removeprefix("/logs/verifier/")
            raise rewards.RewardError(said) from None
        found = read(data)
        return found if isinstance(found, tuple) else (found, {})
    late = f"no end within {task.verifier_seconds:g} s" if done.timed_out else ""
    late = late or f"test.sh ended with exit code {done.code}"
    raise rewards.RewardError(f"there is no reward.json and no reward.txt ({late})")
