"""Grades attempts: runs the task's tests in a fresh sandbox over the unchanged image.

Only the work folder, /logs/artifacts and the declared artifacts are copied, as files, folders and links. If the tests
have an environment of their own, the work folder is copied only if it is such an artifact.
Everything else that the attempt changed, started or left running stays in its sandbox, and the verdict says
so. `grader` describes which rights programs have there.

Tasks whose environment_mode is "shared" are graded in the attempt's sandbox instead, where an attempt can
write its reward in many ways (`forms`).
"""

import asyncio
import contextlib
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
from glm5_jax.envs.sandbox.launch_spec import HOMES
from glm5_jax.envs.terminal import grader, rewards
from glm5_jax.envs.terminal.image import Image, Images
from glm5_jax.envs.terminal.shell import command_for_script
from glm5_jax.envs.terminal.task import TaskLimits, TerminalTask, can_be_workdir, check_workdir
from glm5_jax.runtime.files import read_start

MAX_SUBMISSION_BYTES = 1 << 29  # of a work folder or an artifact
MAX_CHANGES = 1000  # examined paths outside of the work folder
_MAX_NAMED = 5  # number of changed paths, or of programs, that a verdict names
ARTIFACTS = "/logs/artifacts"
# Makes the folders that tasks expect.
MAKE_LOGS = f"mkdir -p /logs/agent /logs/verifier {ARTIFACTS} && chmod 777 /logs/agent {ARTIFACTS}"
_PLAIN_FOLDER = "/var/agent"  # start of commands if the task's folder cannot be a work folder
# Changes in these folders come from the task, or do not matter to tests.
_IGNORED = ("/logs", "/solution", "/script", "/tests", "/grader", "/proc", "/dev", "/run")
# Bash then stores here-documents in files of root; a pipe's content may come from the attempt.
_HERE_DOCUMENTS = {"BASH_COMPAT": "5.0"}
_AGENT = 1000  # owner of an attempt's files in grading
_MAX_TEST_BYTES = 1 << 20  # of a file of tests that is searched for names of rewards
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
# Prints the identity of each file, in the format of `isolation._identity`, and its path.
_LIST_TESTS = ["find", "/tests", "-exec", "stat", "--printf", "%i:%.9Y:%s %n\\0", "--", "{}", "+"]
# Prints its own number, then the name, state and number of each process.
_LIST_PROCESSES = "echo $$; exec grep -shE '^(Name|State|Pid):' /proc/[0-9]*/status"
_NO_TARGETS = ("", "logs", "tests", "grader", "proc")  # first names of paths; "" is the root folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of grading.

    Attributes:
      reward: reward; None if nothing can be said about the attempt.
      error: reason of a missing reward, or of a reward of 0 for what the attempt did to its tests.
      parts: parts of the reward by name.
      log: output of the tests.
    """

    reward: float | None
    error: str | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    log: str = ""


@dataclasses.dataclass(frozen=True)
class Submission:
    """Files that an attempt submits for grading; a context manager that closes them.

    Attributes:
      files: path in the sandbox -> file of the host that `Sandbox.save` wrote.
      ungraded: paths that the attempt changed and that are not graded.
      running: names of programs that the attempt left running, and that do not run in grading.
    """

    files: Mapping[str, IO[bytes]]
    ungraded: tuple[str, ...] = ()
    running: tuple[str, ...] = ()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        for file in self.files.values():
            file.close()


class SubmissionError(RuntimeError):
    """Raised if an attempt left something that cannot be graded, which is its own fault."""


def workdir_of(task: TerminalTask, image: Image) -> str:
    """Returns the work folder, which is graded. Raises TaskError if it has to be copied and cannot be."""
    path = _start_folder(task, image)
    if task.workdir is not None or task.is_shared:
        return path
    return check_workdir(path, "the image's WORKDIR")


def _start_folder(task: TerminalTask, image: Image) -> str:
    return task.workdir or image.workdir or "/"


def _graded_paths(task: TerminalTask, workdir: str) -> tuple[str, ...]:
    """Returns the paths of an attempt that are graded."""
    folders = () if task.verifier is not None else (workdir,)
    return tuple(dict.fromkeys((*folders, *task.artifacts, ARTIFACTS)))


def sandbox_config(
    task: TerminalTask, image: Image, limits: TaskLimits, *, layers: tuple = ()
) -> SandboxConfig:
    """Returns the options of a sandbox over a task's image."""
    # Without duplicates, because an overlay rejects a folder that it already has.
    folders = tuple(dict.fromkeys((*layers, *image.layer.folders)))
    layer = Layer(folders, image.layer.host_programs)
    workdir = _start_folder(task, image)
    return SandboxConfig(
        timeout_s=task.agent_timeout_s,
        memory_bytes=task.memory_bytes,
        disk_bytes=task.disk_bytes,
        cpus=task.cpus,
        max_processes=limits.max_processes,
        env={**image.env, **task.env},
        workdir=workdir if can_be_workdir(workdir) else _PLAIN_FOLDER,
        base=layer,
    )


async def collect(box: Sandbox, task: TerminalTask, workdir: str) -> Submission:
    """Returns the files of a sandbox that are graded. Raises SubmissionError if they cannot be."""
    files: dict[str, IO[bytes]] = {}
    with contextlib.ExitStack() as opened:
        try:
            for path in _graded_paths(task, workdir):
                file = opened.enter_context(tempfile.TemporaryFile())
                try:
                    await box.save(path, file, MAX_SUBMISSION_BYTES)
                    files[path] = file
                except SandboxFileError as error:
                    file.close()
                    is_optional = error.errno == errno.ENOENT or path == ARTIFACTS
                    if path == workdir or not is_optional or error.errno == errno.EFBIG:
                        raise
            submission = Submission(files, await _ungraded(box, tuple(files)), await _running(box))
        except SandboxFileError as error:
            raise SubmissionError(
                f"what the agent left cannot be graded: {error.args[-1]}"
            ) from None
        opened.pop_all()  # the submission closes its files
        return submission


async def _ungraded(box: Sandbox, graded: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the changed paths outside of the graded ones, except for hidden files and caches."""
    try:
        paths = await box.changes(MAX_CHANGES)
    except SandboxFileError:  # folders too deep to list
        return ()
    return tuple(
        path
        for path in paths
        if not _is_below(path, (*graded, *_IGNORED))
        and not any(name.startswith(".") or name == "__pycache__" for name in path.split("/"))
    )


async def _running(box: Sandbox) -> tuple[str, ...]:
    """Returns the names of programs that run in a sandbox between two commands."""
    done = await box.exec(_LIST_PROCESSES, user="root", cwd="/")
    lister_pid, _, rest = done.stdout.decode(errors="replace").partition("\n")
    values = [line.partition(":")[2].strip() for line in rest.splitlines()]
    processes = zip(values[::3], values[1::3], values[2::3])
    names = (
        name for name, state, pid in processes if pid not in ("1", lister_pid) and state[:1] != "Z"
    )
    return tuple(sorted({name if name.isprintable() else ascii(name) for name in names}))


def _with_ungraded(verdict: Verdict, submission: Submission) -> Verdict:
    """Returns the verdict; if the attempt does not have the full reward, it lists what was not graded."""
    if verdict.reward is None or verdict.reward >= 1:
        return verdict
    notes = [
        f"{what}, not graded: {_enumerated(names)}"
        for what, names in (
            ("changed", submission.ungraded),
            ("left running", submission.running),
        )
        if names
    ]
    error = "; ".join(filter(None, (verdict.error, *notes))) or None
    return dataclasses.replace(verdict, error=error)


def _enumerated(names: tuple[str, ...]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


class Grader:
    """Grader of attempts at tasks.

    Args:
      images: images of tasks.
      limits: maximum resources of tasks.
    """

    def __init__(self, images: Images, limits: TaskLimits):
        self._images, self._limits = images, limits
        self._untouched: dict[str, asyncio.Task[str | None]] = {}

    async def __call__(self, task: TerminalTask, image: Image, submission: Submission) -> Verdict:
        """Returns the verdict on a submission.

        If the tests write no reward, they run again on the unchanged image. If they write one there, the
        attempt broke them: reward 0. If not, the task is broken and there is no verdict.
        """
        return _with_ungraded(
            await self._verdict(task, image, self._grade(task, image, submission)), submission
        )

    async def grade_in_place(self, task: TerminalTask, image: Image, box: Sandbox) -> Verdict:
        """Returns the verdict on an attempt, whose tests run in its sandbox, together with processes that it
        left running.
        """
        return await self._verdict(task, image, self._grade_in_place(task, image, box))

    async def _verdict(self, task: TerminalTask, image: Image, graded: Awaitable) -> Verdict:
        try:
            return await graded
        except SubmissionError as error:
            return Verdict(reward=0.0, error=str(error))
        except rewards.RewardError as error:
            message = str(error)
        except SandboxError as error:
            message = f"the tests' sandbox failed: {error}"
        problem = await self._problem_of_untouched(task, image)
        if problem is None:
            return Verdict(reward=0.0, error=message)
        return Verdict(reward=None, error=f"the tests fail on the untouched image too: {problem}")

    async def grade_failed_attempt(
        self, task: TerminalTask, image: Image, error: Exception
    ) -> Verdict:
        """Returns the verdict on an attempt whose sandbox broke, or that left nothing that can be graded."""
        if isinstance(error, SubmissionError):
            return Verdict(reward=0.0, error=str(error))
        try:
            # Not from the cache, because at this moment sandboxes may fail in general, for example for lack of processes.
            problem = await self._grade_untouched(task, image)
        except SandboxError as failure:
            problem = str(failure)
        return (
            Verdict(reward=0.0, error=str(error))
            if problem is None
            else Verdict(reward=None, error=problem)
        )

    async def close(self) -> None:
        """Cancels grading that is still running."""
        for check in self._untouched.values():
            check.cancel()
        await asyncio.gather(*self._untouched.values(), return_exceptions=True)

    async def _problem_of_untouched(self, task: TerminalTask, image: Image) -> str | None:
        """Returns why the tests give no reward to the unchanged image, or None. Each task is checked once."""
        key = str(task.folder)
        if key not in self._untouched:
            self._untouched[key] = asyncio.create_task(self._grade_untouched(task, image))
        try:
            return await asyncio.shield(self._untouched[key])
        except SandboxError as error:  # may succeed the next time
            self._untouched.pop(key, None)
            return str(error)

    async def _grade_untouched(self, task: TerminalTask, image: Image) -> str | None:
        try:
            return (await self._grade(task, image, None)).error
        except rewards.RewardError as error:
            return str(error)

    async def _grade(
        self, task: TerminalTask, image: Image, submission: Submission | None
    ) -> Verdict:
        tools = await self._images.tools()
        place, workdir = task, workdir_of(task, image)
        if task.verifier is not None:
            place, image = task.verifier, await self._images.of(task.verifier)
            workdir = _start_folder(place, image)
        config = sandbox_config(place, image, self._limits, layers=tools.folders[:1])
        async with Sandbox(config) as box:
            # Delete the image's copies first: files that the attempt deleted must stay deleted.
            old = shlex.join(submission.files if submission else [])
            clear = f"rm -rf -- {old}" if old else "true"
            command = f"{MAKE_LOGS} && chmod 700 /logs/verifier && {clear}"
            await box.exec(command, user="root", cwd="/")
            await box.put("/tests", task.folder / "tests", user="root", mode=0o700)
            # Last, so that no link that is made while the tests run is followed.
            still = await _put_submission(box, submission) if submission is not None else []
            await box.stop_links([*_TEMPORARY, *still])
            await box.hide_processes()
            done = await self._run_tests(box, task, config, workdir, RightsPolicy(**grader.POLICY))
            if done.alert:
                raise SubmissionError(f"while the tests ran, {done.alert}")
            await _check_links(box, [*_TEMPORARY, *(submission.files if submission else [])])
            await _check_names(box, [*_TEMPORARY, *(submission.files if submission else [])])
            verdict = await _verdict_of(box, task, done)
            # A program that was killed or not started leaves no output, so that two different outputs look equal.
            if (done.out_of_memory or done.out_of_processes) and (verdict.reward or 0) > 0:
                what = "memory ran out" if done.out_of_memory else "no more processes could start"
                raise SubmissionError(f"while the tests ran, {what}")
            return verdict

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
            raise SubmissionError(
                f"the tests cannot run in the agent's sandbox: {error.args[-1]}"
            ) from None
        return await _verdict_of(box, task, done)

    async def _run_tests(self, box, task, config, workdir, policy) -> ExecResult:
        script = await asyncio.to_thread((task.folder / "tests" / "test.sh").read_bytes)
        path = config.env["PATH"]
        attempt_folders = _graded_paths(task, workdir)
        trusted = [
            f for f in path.split(":") if f.startswith("/") and not _is_below(f, attempt_folders)
        ]
        untrusted = [f for f in path.split(":") if f not in trusted]
        tests = await box.exec(_LIST_TESTS, user="root", cwd="/")
        # Files that are newer than this one were made by the tests, or by the attempt.
        marker = f"{':'.join(trusted)}\n".encode() + tests.stdout
        await box.put(f"{grader.FOLDER}/path", marker, user="root")
        env = {**config.env, **task.verifier_env, **_HERE_DOCUMENTS}
        # Last on PATH, so that no program of the attempt replaces one of the image by its name.
        env["PATH"] = ":".join((f"{grader.FOLDER}/bin", *trusted, *untrusted))
        if policy is not None and _is_below(env.get("HOME", HOMES["root"]), attempt_folders):
            env["HOME"] = grader.HOME
        return await box.exec(
            command_for_script(script, "/tests/test.sh"),
            user="root",
            cwd=workdir,
            env=env,
            timeout_s=task.verifier_timeout_s,
            policy=policy,
        )


async def _verdict_of(box: Sandbox, task: TerminalTask, done: ExecResult) -> Verdict:
    log = (done.stdout + done.stderr).decode(errors="replace")
    try:
        value, parts = await _read_reward(box, done, task)
    except rewards.RewardError:
        if missing := await _missing_of_tests(box):
            return Verdict(reward=None, error=missing, log=log)
        raise
    missing = await _missing_of_tests(box)
    if done.timed_out and value > 0:  # written before all checks were done
        raise rewards.RewardError(_end_of(done, task))
    # A package that is missing may have been replaced by a module of the attempt.
    if missing and (value <= 0 or "Python package" in missing):
        return Verdict(reward=None, error=missing, log=log)
    note = f"while the tests ran, {done.note}" if done.note and value <= 0 else None
    return Verdict(reward=value, error=note, parts=parts, log=log)


async def _put_submission(box: Sandbox, submission: Submission) -> list[str]:
    """Writes a submission into a grading sandbox; returns those of its folders that hold no links."""
    try:
        for path, file in submission.files.items():
            # Owned by an unprivileged user, so that submitted programs have no rights in grading.
            await box.put_saved(path, file)
    except SandboxFileError as error:
        raise SubmissionError(f"what the agent left cannot be graded: {error.args[-1]}") from None
    await _check_names(box, list(submission.files))
    return [path for path in submission.files if not await _check_links(box, [path])]


async def _check_names(box: Sandbox, folders: list[str]) -> None:
    """Raises SubmissionError if a path of the attempt has a word that is a path of the tests.

    Of "/app/x /tests/key", `cat $(find /app)` reads the second word, which is a file of the tests.
    """
    targets = "|".join(filter(None, _NO_TARGETS))
    pattern = rf".*[[:space:]]['\"\\]*/({targets})(/.*)?"
    command = ["find", *folders, "-regextype", "posix-extended", "-user", str(_AGENT)]
    result = await box.exec([*command, "-regex", pattern, "-print0"], user="root", cwd="/")
    if names := result.stdout.decode(errors="replace").split("\0")[0]:
        raise SubmissionError(
            f"what the agent left cannot be graded: a word of the name {ascii(names[:100])} is a path of the tests"
        )


async def _check_links(box: Sandbox, folders: list[str]) -> int:
    """Returns the number of links in these folders. Raises SubmissionError if one leads to the tests or rewards.

    Tests follow links as root, which could lead to their answers or to the reward file.
    """
    names = shlex.join(folders)
    command = f"find {names} -type l -user {_AGENT} -exec realpath -mz -- {{}} + 2>/dev/null"
    result = await box.exec(["/bin/sh", "-c", command], user="root", cwd="/")
    if result.truncated:
        raise SubmissionError("what the agent left cannot be graded: too many links")
    targets = result.stdout.decode(errors="replace").split("\0")[:-1]
    forbidden = [target for target in targets if target.split("/")[1] in _NO_TARGETS]
    if forbidden:
        target = max(forbidden, key=len)[:100]
        raise SubmissionError(f"what the agent left cannot be graded: a link to {target}")
    return len(targets)


def _is_below(path: str, folders) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


async def _missing_of_tests(box: Sandbox) -> str | None:
    """Returns a description of what the tests needed and this machine lacks, or None."""
    result = await box.exec(["ls", "-A", grader.MISSING], user="root", cwd="/")
    names = sorted(result.stdout.decode(errors="replace").splitlines())
    return f"the tests need what this machine lacks: {', '.join(names[:5])}" if names else None


_REWARDS = {"reward.json": rewards.read_json, "reward.txt": rewards.read_text}


def _named_rewards(task: TerminalTask) -> list[str]:
    """Returns the reward files whose name occurs in a file of the tests."""
    paths = (task.folder / "tests").rglob("*")
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    texts = [read_start(path, _MAX_TEST_BYTES) for path in files]
    return [name for name in _REWARDS if any(name.encode() in text for text in texts)]


async def _read_reward(box: Sandbox, done: ExecResult, task: TerminalTask):
    """Returns the reward and its parts. Raises RewardError.

    A reward file that the tests name takes precedence, because another may be a copy of the attempt's.
    """
    named = await asyncio.to_thread(_named_rewards, task)
    for name in sorted(_REWARDS, key=lambda name: name not in named):
        read = _REWARDS[name]
        try:
            data = await box.get(f"/logs/verifier/{name}", rewards.MAX_BYTES)
        except SandboxFileError as error:
            if error.errno == errno.ENOENT:
                continue
            message = str(error.args[-1]).removeprefix("/logs/verifier/")
            raise rewards.RewardError(message) from None
        reward = read(data)
        return reward if isinstance(reward, tuple) else (reward, {})
    message = f"there is no reward.json and no reward.txt ({_end_of(done, task)})"
    raise rewards.RewardError(message)


def _end_of(done: ExecResult, task: TerminalTask) -> str:
    """Returns how test.sh ended."""
    if done.timed_out:
        return f"test.sh had no end within {task.verifier_timeout_s:g} s"
    return f"test.sh ended with exit code {done.code}"
