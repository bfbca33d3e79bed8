"""What an attempt's work is worth: the task's tests, in a fresh sandbox over the pristine image.

Only the work folder, /logs/artifacts and the declared artifacts go over, as files, folders and links. What else the
attempt changed, started or left running stays in its own sandbox, and the verdict says so. See `grader` for which rights
programs have there.

Tasks whose environment_mode is "shared" are graded in the attempt's own sandbox instead, where an attempt can write its
reward in many ways (`forms`).
"""

import asyncio
import dataclasses
import errno
import shlex
import tempfile
from collections.abc import Awaitable, Mapping
from typing import IO

from glm5_jax.envs.sandbox import (
    ExecResult,
    Layer,
    RightsPolicy,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
)
from glm5_jax.envs.terminal import grader, rewards
from glm5_jax.envs.terminal.image import Image, Images
from glm5_jax.envs.terminal.shell import started_by
from glm5_jax.envs.terminal.task import TaskLimits, TerminalTask, can_be_workdir, check_workdir

MOST_WORK = 1 << 29  # bytes of a work folder or an artifact
MOST_CHANGES = 1000  # paths outside of the work folder that are looked at
_NAMED = 5  # of them that a verdict names
ARTIFACTS = "/logs/artifacts"
# The folders that tasks expect.
MAKE_LOGS = f"mkdir -p /logs/agent /logs/verifier {ARTIFACTS} && chmod 777 /logs/agent {ARTIFACTS}"
_PLAIN_FOLDER = "/var/agent"  # where commands start if the task's own folder cannot be an agent's
# Changes there are the task's own doing, or of no use to tests.
_PASSED_OVER = ("/logs", "/solution", "/script", "/tests", "/grader", "/proc", "/dev", "/run")
# Bash then has them in files of root's; what comes through a pipe may have come from the attempt.
_HERE_DOCUMENTS = {"BASH_COMPAT": "5.0"}
_AGENT = 1000  # whose an attempt's files are in grading
_TEMPORARY = ("/tmp", "/var/tmp")
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
    """What an attempt leaves to be graded; a context manager that closes its files.

    Attributes:
      files: path in the sandbox -> file of the host that `Sandbox.save` wrote.
      ungraded: paths that the attempt changed and that are not graded.
    """

    files: Mapping[str, IO[bytes]]
    ungraded: tuple[str, ...] = ()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        for file in self.files.values():
            file.close()


class WorkError(RuntimeError):
    """What an attempt has left cannot be graded, which is its own doing."""


def workdir_of(task: TerminalTask, image: Image) -> str:
    """The folder that is worked in and graded; TaskError if it has to be taken elsewhere and cannot."""
    if task.workdir is not None:
        return task.workdir
    path = image.workdir or "/"
    return path if task.is_shared else check_workdir(path, "the image's WORKDIR")


def sandbox_config(
    task: TerminalTask, image: Image, limits: TaskLimits, *, layers: tuple = ()
) -> SandboxConfig:
    """A sandbox over a task's image."""
    # Each once: an overlay refuses a folder that is in it already.
    folders = tuple(dict.fromkeys((*layers, *image.layer.folders)))
    layer = Layer(folders, image.layer.host_programs)
    workdir = workdir_of(task, image)
    return SandboxConfig(
        seconds=task.agent_seconds,
        memory_bytes=task.memory_bytes,
        disk_bytes=task.disk_bytes,
        cpus=task.cpus,
        processes=limits.processes,
        env={**image.env, **task.env},
        workdir=workdir if can_be_workdir(workdir) else _PLAIN_FOLDER,
        base=layer,
    )


async def collect(box: Sandbox, task: TerminalTask, workdir: str) -> Work:
    """What is graded of a sandbox; WorkError if it cannot be."""
    files: dict[str, IO[bytes]] = {}
    try:
        for path in dict.fromkeys((workdir, *task.artifacts, ARTIFACTS)):
            file = tempfile.TemporaryFile()
            try:
                await box.save(path, file, MOST_WORK)
                files[path] = file
            except SandboxFileError as error:
                file.close()
                is_optional = error.errno == errno.ENOENT or path == ARTIFACTS
                if path == workdir or not is_optional or error.errno == errno.EFBIG:
                    raise
        return Work(files, await _ungraded(box, tuple(files)))
    except BaseException as error:
        for file in files.values():
            file.close()
        if isinstance(error, SandboxFileError):
            raise WorkError(f"what the agent left cannot be graded: {error.args[-1]}") from None
        raise


async def _ungraded(box: Sandbox, graded: tuple[str, ...]) -> tuple[str, ...]:
    """The paths that were changed outside of the graded ones, but for hidden ones and caches."""
    try:
        paths = await box.changes(MOST_CHANGES)
    except SandboxFileError:  # folders too deep: nothing can be said
        return ()
    return tuple(
        path
        for path in paths
        if not _is_below(path, (*graded, *_PASSED_OVER))
        and not any(name.startswith(".") or name == "__pycache__" for name in path.split("/"))
    )


def _with_ungraded(verdict: Verdict, work: Work) -> Verdict:
    """The verdict, which says what was not graded of an attempt that has not all of the reward."""
    if verdict.reward is None or verdict.reward >= 1 or not work.ungraded:
        return verdict
    names = ", ".join(work.ungraded[:_NAMED])
    more = len(work.ungraded) - _NAMED
    note = f"changed, not graded: {names}" + (f" and {more} more" if more > 0 else "")
    error = "; ".join(filter(None, (verdict.error, note)))
    return dataclasses.replace(verdict, error=error)


class Grader:
    """Grades attempts at tasks."""

    def __init__(self, images: Images, limits: TaskLimits):
        self._images, self._limits = images, limits
        self._untouched: dict[str, asyncio.Task[str | None]] = {}

    async def __call__(self, task: TerminalTask, image: Image, work: Work) -> Verdict:
        """The verdict on what an attempt left. Tests that give no reward to it say nothing of it if they give
        none to the untouched image either; if they do, it is the attempt's doing, and 0."""
        return _with_ungraded(
            await self._verdict(task, image, self._grade(task, image, work)), work
        )

    async def in_place(self, task: TerminalTask, image: Image, box: Sandbox) -> Verdict:
        """The verdict on an attempt, whose tests run in its own sandbox, next to what it left running."""
        return await self._verdict(task, image, self._grade_in_place(task, image, box))

    async def _verdict(self, task: TerminalTask, image: Image, graded: Awaitable) -> Verdict:
        try:
            return await graded
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
        config = sandbox_config(task, image, self._limits, layers=tools.folders[:1])
        workdir = workdir_of(task, image)
        async with Sandbox(config) as box:
            # Of what the image has of the work nothing may come back that the attempt removed.
            old = shlex.join(work.files if work else [])
            clear = f"rm -rf -- {old}" if old else "true"
            command = f"{MAKE_LOGS} && chmod 700 /logs/verifier && {clear}"
            await box.exec(command, user="root", cwd="/")
            await box.put("/tests", task.folder / "tests", user="root", mode=0o700)
            # Last, so that nobody follows a link that is made while the tests run.
            still = await _put_work(box, work) if work is not None else []
            await box.stop_links([*_TEMPORARY, *still])
            done = await self._run_tests(box, task, config, workdir, RightsPolicy(**grader.POLICY))
            await _check_links(box, [*_TEMPORARY, *(work.files if work else [])])
            return await _verdict_of(box, task, done)

    async def _grade_in_place(self, task: TerminalTask, image: Image, box: Sandbox) -> Verdict:
        await self._images.tools()
        command = f"rm -rf /tests /logs/verifier; {MAKE_LOGS}"
        await box.exec(command, user="root", cwd="/")
        try:
            await box.put("/tests", task.folder / "tests", user="root", mode=0o755)
            workdir = workdir_of(task, image)
            done = await self._run_tests(
                box, task, sandbox_config(task, image, self._limits), workdir, None
            )
        except SandboxFileError as error:
            raise WorkError(
                f"the tests cannot run in the agent's sandbox: {error.args[-1]}"
            ) from None
        return await _verdict_of(box, task, done)

    async def _run_tests(self, box, task, config, workdir, policy) -> ExecResult:
        script = await asyncio.to_thread((task.folder / "tests" / "test.sh").read_bytes)
        path = config.env["PATH"]
        # What is newer than this file has been made by the tests, or by the attempt.
        places = (workdir, *task.artifacts, ARTIFACTS)
        clean = [f for f in path.split(":") if f.startswith("/") and not _is_below(f, places)]
        inodes = await box.exec("find /tests -printf '%i '", user="root", cwd="/")
        marker = f"{':'.join(clean)}\n".encode() + inodes.stdout + b"\n"
        await box.put(f"{grader.FOLDER}/path", marker, user="root")
        return await box.exec(
            started_by(script, "/tests/test.sh"),
            user="root",
            cwd=workdir,
            env={**task.verifier_env, "PATH": f"{grader.FOLDER}/bin:{path}", **_HERE_DOCUMENTS},
            seconds=task.verifier_seconds,
            policy=policy,
        )


async def _verdict_of(box: Sandbox, task: TerminalTask, done: ExecResult) -> Verdict:
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


async def _put_work(box: Sandbox, work: Work) -> list[str]:
    """Writes the work into a grading sandbox; the folders of it that hold no links."""
    try:
        for path, file in work.files.items():
            # As an ordinary user's, whoever's it was: whose programs have no rights in grading.
            await box.put_saved(path, file)
    except SandboxFileError as error:
        raise WorkError(f"what the agent left cannot be graded: {error.args[-1]}") from None
    return [path for path in work.files if not await _check_links(box, [path])]


async def _check_links(box: Sandbox, places: list[str]) -> int:
    """The number of links in these places; WorkError if one leads to where tests or rewards are.

    Tests follow links as root: to their own answers, or to where the reward is written.
    """
    names = shlex.join(places)
    look = f"find {names} -type l -user {_AGENT} -exec realpath -mz -- {{}} + 2>/dev/null"
    found = await box.exec(["/bin/sh", "-c", look], user="root", cwd="/")
    if found.truncated:
        raise WorkError("what the agent left cannot be graded: too many links")
    targets = found.stdout.decode(errors="replace").split("\0")[:-1]
    for target in targets:
        if target.split("/")[1:2] in _NO_TARGETS:
            raise WorkError(f"what the agent left cannot be graded: a link to {target[:100]}")
    return len(targets)


def _is_below(path: str, folders) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


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
