"""Checks of a task that run it in sandboxes: V02 to V06, and V09 to V12."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from glm5_jax.envs.sandbox.orphans import name_prefix
from glm5_jax.envs.terminal.image import Image, ImageError
from glm5_jax.envs.terminal.synthesis.attacks import ATTACKS, output_paths, script_of
from glm5_jax.envs.terminal.synthesis.reports import FAIL, NOT_APPLICABLE, Check, verdict_of
from glm5_jax.envs.terminal.synthesis.sandbox_runs import (
    OTHER_IDENTITY,
    GradedRun,
    ScriptedAttempt,
    TaskRuns,
    per_test_script,
)
from glm5_jax.envs.terminal.synthesis.verifier_texts import (
    TaskTexts,
    expected_literals,
    list_tests,
)
from glm5_jax.envs.terminal.task import TaskError, TerminalTask, load_task

NOP = ScriptedAttempt(script="true\n")
CLOCK_DAYS = 400
_FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"
# Files that differ between two builds of any image, because they hold times or numbers of files.
VOLATILE = (
    r"(?:^|/)__pycache__/|(?:^|/)\.git/index$|^var/(?:log|cache)/|^tmp/|^var/lib/(?:apt|dpkg)/"
    r"|^etc/(?:passwd|group|shadow|gshadow)-?$"
)
_MAX_CUTS = 10
# Commands at the end of a solution that tests need not see.
_TRIVIAL = re.compile(
    r"\s*(?:#.*|true|:|exit(?:\s+0)?|echo\s[^>|]*|printf\s[^>|]*|ls\b[^>|]*|cat\s[^>|<]*|set\s.*|cd\s[^;&|]*|)\s*"
)
_MAX_FILE_BYTES = 1 << 28  # of a file of an image that is searched


async def check_builds(runs: TaskRuns, task: TerminalTask) -> tuple[Check, list[Image]]:
    """Returns V02: both images build twice, offline and with the same files; and the images of the first build."""
    problems, images, count = [], [], 0
    for part in filter(None, (task, task.verifier)):
        try:
            pair = [await runs.images.rebuild(part) for _ in range(2)]
        except (ImageError, TaskError) as error:
            return Check(id="V02", status=FAIL, detail=str(error)), []
        images.append(pair[0])
        first, second = [await asyncio.to_thread(layer_files, image) for image in pair]
        count += len(first)
        differing = sorted(
            path for path in first.keys() | second.keys() if first.get(path) != second.get(path)
        )
        if differing:
            shown = ", ".join(differing[:5])
            problems.append(
                f"two builds of {part.context}/Dockerfile differ in {len(differing)} files: {shown}"
            )
    return verdict_of("V02", problems, f"{count} files in two equal builds"), images


def layer_files(image: Image) -> dict[str, str]:
    """Returns the mode and digest of each file in the layers of an image, without the volatile ones."""
    files: dict[str, str] = {}
    for folder in reversed(image.layer.folders):
        if not (folder / "bin/sh").exists() and not (folder / "grader").exists():
            files |= {name: _identity(path) for name, path in _walk(folder)}
    return {name: value for name, value in files.items() if not re.search(VOLATILE, name)}


def _walk(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = pathlib.Path(parent, name)
            yield path.relative_to(folder).as_posix(), path


def _identity(path: pathlib.Path) -> str:
    status = path.lstat()
    text = f"{status.st_mode:o} {status.st_uid} {status.st_gid}"
    if stat.S_ISLNK(status.st_mode):
        return f"{text} {os.readlink(path)}"
    if stat.S_ISREG(status.st_mode):
        with path.open("rb") as file:
            return f"{text} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    return text


async def check_oracle(runs: TaskRuns, task: TerminalTask) -> tuple[Check, list[GradedRun]]:
    """Returns V03: the solution scores 1 in each of its surroundings; and its plain runs."""
    problems, notes = [], []
    surroundings = {f"run {number}": (task, ScriptedAttempt()) for number in (1, 2, 3)}
    surroundings["half a processor"] = (dataclasses.replace(task, cpus=0.5), ScriptedAttempt())
    library = await runs.has_path(task, _FAKETIME)
    if library is None:
        notes.append("clock not moved, since the image has no libfaketime")
    else:
        env = {"LD_PRELOAD": library, "FAKETIME": f"+{CLOCK_DAYS}d"}
        moved = ScriptedAttempt(
            env=env, prepare="chmod 1777 /dev/shm"
        )  # the library keeps a semaphore there
        surroundings[f"clock {CLOCK_DAYS} days later"] = (task, moved)
    if task.user in (None, "root", "0"):
        surroundings["another host name"] = (
            task,
            ScriptedAttempt(hostname=OTHER_IDENTITY.hostname),
        )
        notes.append("user not changed, since the agent is root")
    else:
        surroundings["another host name and user"] = (task, OTHER_IDENTITY)
    graded = []
    for name, (changed, attempt) in surroundings.items():
        run = await runs.run(changed, attempt)
        graded.append(run)
        if run.verdict.reward != 1:
            problems.append(f"{name}: {run.description}")
            if len(graded) == 1:  # the others would fail for the same reason
                break
    notes.append(f"{len(graded)} runs, {max(run.seconds for run in graded):.1f} s at most")
    return verdict_of("V03", problems, "; ".join(notes)), graded[:3]


async def check_nop(runs: TaskRuns, task: TerminalTask, gradings: int = 3) -> Check:
    """Returns V04: what an agent leaves that does nothing scores 0 each time."""
    async with runs.submission(task, NOP) as (submission, _):
        verdicts = [await runs.grade(task, submission) for _ in range(gradings)]
    problems = [
        f"reward {verdict.reward} ({verdict.error or 'nothing was done'})"
        for verdict in verdicts
        if verdict.reward != 0
    ]
    return verdict_of("V04", problems)


@contextlib.contextmanager
def with_test_script(task: TerminalTask, script: str) -> Iterator[TerminalTask]:
    """Provides a copy of a task with another tests/test.sh."""
    with tempfile.TemporaryDirectory(prefix=f"{name_prefix()}task-") as folder:
        copy = pathlib.Path(folder, task.name)
        shutil.copytree(task.folder, copy, symlinks=True)
        (copy / "tests/test.sh").write_text(script)
        yield load_task(copy)


async def check_single_tests(runs: TaskRuns, task: TerminalTask, texts: TaskTexts) -> Check:
    """Returns V05: each test passes with the solution by itself, and fails before it unless it is a guard."""
    names, problems = list_tests(texts.tree), []
    with with_test_script(task, per_test_script(names)) as copy:
        solved = (await runs.run(copy)).verdict
        empty = (await runs.run(copy, NOP)).verdict
    for name in names:
        if solved.parts.get(name) != 1:
            problems.append(f"{name} fails with the solution when it runs alone")
        is_guard = name in texts.guard_tests
        if empty.parts.get(name) == 1 and not is_guard:
            problems.append(f"{name} passes before anything is done (metadata.guard_tests)")
    if empty.parts and all(empty.parts.get(name) == 1 for name in names):
        problems.append("no test fails before anything is done")
    if not solved.parts:
        problems.append(f"the tests give no results: {solved.error or solved.log[-300:]}")
    return verdict_of("V05", problems, f"{len(names)} tests, {len(texts.guard_tests)} guards")


async def check_partial_solutions(runs: TaskRuns, task: TerminalTask, texts: TaskTexts) -> Check:
    """Returns V06: the solution without its last commands does not score 1."""
    lines = texts.solution.splitlines()
    cuts = needed_cuts(lines, await runs.cut_points(task, texts.solution))
    if not cuts:
        return Check(
            id="V06", status=NOT_APPLICABLE, detail="the solution is a single command, so no cut"
        )
    chosen = cuts if len(cuts) <= _MAX_CUTS else cuts[:: -(-len(cuts) // _MAX_CUTS)]
    chosen = sorted({*chosen, cuts[-1]})
    problems = []
    for cut in chosen:
        run = await runs.run(task, ScriptedAttempt(script="\n".join(lines[:cut]) + "\n"))
        if run.verdict.reward is None or run.verdict.reward >= 1:
            left = next(line for line in lines[cut:] if not _TRIVIAL.fullmatch(line))
            problems.append(
                f"reward {run.verdict.reward} without the rest from line {cut + 1} on ({left.strip()[:80]!r}): the tests "
                "check too little, or the rest is not needed"
            )
    return verdict_of("V06", problems, f"{len(chosen)} cuts")


def needed_cuts(lines: Sequence[str], points: Sequence[int]) -> list[int]:
    """Returns the cuts before and after which a script has commands that do something."""

    def does_something(part: Sequence[str]) -> bool:
        return any(not _TRIVIAL.fullmatch(line) for line in part)

    points = [0, *(n for n in points if not lines[n - 1].endswith("\\"))]
    cuts = [
        point
        for before, point in zip(points, points[1:])
        if does_something(lines[before:point])  # else it is the same as the cut before
    ]
    return [cut for cut in cuts if does_something(lines[cut:])]


async def check_answers(
    runs: TaskRuns, task: TerminalTask, texts: TaskTexts, images: Sequence[Image]
) -> Check:
    """Returns V09: what the tests expect is not in the agent's image or its environment variables."""
    literals = sorted(text for text in expected_literals(texts) if text not in texts.instruction)
    variables = await runs.environment_text(task)
    problems = [f"{text[:60]!r} is in an environment variable" for text in literals if text in variables]  # fmt: skip
    if literals and images:
        matches = await asyncio.to_thread(search_image, images[0], literals)
        problems += [f"{text[:60]!r} is in /{path} of the image" for text, path in matches.items()]
    return verdict_of("V09", problems, f"{len(literals)} literals")


def search_image(image: Image, literals: Sequence[str]) -> dict[str, str]:
    """Returns the first file of the image's own layers that holds each literal, for those that some file holds.

    The name of a file, and the target of a link, count as its content.
    """
    matches: dict[str, str] = {}
    for folder in image.layer.folders:
        if (folder / "bin/sh").exists() or (folder / "grader").exists():
            continue  # a base system, or the tools of grading
        for name, path in _walk(folder):
            status, data = path.lstat(), os.fsencode(name)
            if stat.S_ISLNK(status.st_mode):
                data += b"\0" + os.fsencode(os.readlink(path))
            if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_FILE_BYTES:
                data += b"\0" + path.read_bytes()
            for text in literals:
                if text.encode() in data:
                    matches.setdefault(text, name)
    return matches


async def check_attacks(
    runs: TaskRuns, task: TerminalTask, more: Mapping[str, str] | None = None
) -> Check:
    """Returns V10: no attack scores. `more` holds the scripts of other attackers by name."""
    image = await runs.images.of(task)
    outputs = output_paths(task, task.workdir or image.workdir or "/app")
    problems = []
    attacks = {**ATTACKS, **(more or {})}
    for name, script in attacks.items():
        run = await runs.run(task, ScriptedAttempt(script=script_of(script, outputs)))
        if run.verdict.reward is None or run.verdict.reward > 0:
            problems.append(f"{name}: {run.description}")
    return verdict_of("V10", problems, f"{len(attacks)} attacks")


async def check_stability(runs: TaskRuns, task: TerminalTask, gradings: int = 5) -> Check:
    """Returns V11: the same work always gets the same verdict."""
    async with runs.submission(task, ScriptedAttempt()) as (submission, _):
        rewards = [(await runs.grade(task, submission)).reward for _ in range(gradings)]
    problems = [] if len(set(rewards)) == 1 else [f"the same work got the rewards {rewards}"]
    return verdict_of("V11", problems, f"{gradings} gradings")


async def check_limits(runs: TaskRuns, task: TerminalTask, oracle: Sequence[GradedRun]) -> Check:
    """Returns V12: the solution needs at most a quarter of the time, and three quarters of memory and files."""
    problems = []
    seconds = max((run.seconds for run in oracle), default=0.0)
    if seconds > 0.25 * task.agent_timeout_s:
        problems.append(
            f"the solution takes {seconds:.1f} s, more than a quarter of agent.timeout_sec = {task.agent_timeout_s:g}"
        )
    smaller = dataclasses.replace(
        task, memory_bytes=task.memory_bytes * 3 // 4, disk_bytes=task.disk_bytes * 3 // 4
    )
    run = await runs.run(smaller)
    if run.verdict.reward != 1:
        problems.append(
            f"with three quarters of memory and storage the solution fails: {run.description}"
        )
    return verdict_of("V12", problems, f"{seconds:.1f} s of {task.agent_timeout_s:g} s")
