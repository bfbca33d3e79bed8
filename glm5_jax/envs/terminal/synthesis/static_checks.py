"""Checks of a task that read its files only: V01, V07, V08, and the literals of V09."""

import os
import pathlib
import re
import tomllib

from glm5_jax.envs.terminal.forms import forgeable_forms
from glm5_jax.envs.terminal.synthesis.reports import Check, verdict_of
from glm5_jax.envs.terminal.synthesis.task_source import EXECUTABLE, SCHEMA_VERSION
from glm5_jax.envs.terminal.synthesis.verifier_texts import (
    TEST_FILE,
    TaskTexts,
    list_tests,
    names_read,
    strings,
)
from glm5_jax.envs.terminal.task import TaskError, TerminalTask, load_task

_MIN_SHARED = 5  # characters of a literal that tests and solution must not share
_INSTALL = re.compile(
    r"\b(?:(?:uv\s+)?pip3?\s+install|python3?\s+-m\s+pip\s+install|uv\s+tool\s+install|npm\s+(?:install|i)|uvx)\s+([^\n;&|]*)"
)
_DOWNLOAD = re.compile(
    r"\b(?:curl|wget)\s|\bgit\s+clone\b|\b(?:apt-get|apt)\s+(?:update|install)\b|\b(?:pip3?|npm)\s+install\b|\buvx\b"
)
_FROM = re.compile(r"(?im)^\s*FROM\s+(?:--\S+\s+)*(\S+)")


def check_static(folder: pathlib.Path) -> tuple[Check, TerminalTask | None]:
    """Returns V01 and the task; None if it cannot be loaded."""
    try:
        task = load_task(folder)
    except TaskError as error:
        return verdict_of("V01", [str(error)]), None
    problems = [
        *_file_problems(task),
        *_config_problems(task),
        *_pin_problems(task),
        *_leak_problems(task),
        *(f"forgeable: {form}" for form in forgeable_forms(task)),
    ]
    return verdict_of("V01", problems), task


def _file_problems(task: TerminalTask) -> list[str]:
    problems = []
    for name in ("solution/solve.sh", TEST_FILE):
        if not (task.folder / name).is_file():
            problems.append(f"there is no {name}")
    for name in EXECUTABLE:
        path = task.folder / name
        if path.is_file() and not os.access(path, os.X_OK):
            problems.append(f"{name} is not executable (chmod 755)")
        if path.is_file() and not path.read_bytes().startswith(b"#!"):
            problems.append(f"{name} has no first line such as #!/bin/bash")
    if not task.instruction.strip():
        problems.append("instruction.md is empty")
    return problems


def _config_problems(task: TerminalTask) -> list[str]:
    data = tomllib.loads((task.folder / "task.toml").read_text())
    problems = []
    if data.get("schema_version") != SCHEMA_VERSION:
        problems.append(f'schema_version is not "{SCHEMA_VERSION}"')
    if task.is_shared:
        problems.append('verifier.environment_mode is "shared"')
    for path in task.artifacts:
        if path == "/logs" or path.startswith("/logs/"):
            problems.append(f"artifact {path} overlaps the logs")
    is_root = task.user in (None, "root", "0")
    if is_root and not data.get("metadata", {}).get("root_reason"):
        problems.append("the agent is root (agent.user); metadata.root_reason does not say why")
    return problems


def _pin_problems(task: TerminalTask) -> list[str]:
    problems = []
    files = [task.folder / name for name in ("environment/Dockerfile", "tests/Dockerfile")]
    for path in filter(pathlib.Path.is_file, files):
        text, name = path.read_text(errors="replace"), f"{path.parent.name}/Dockerfile"
        for image in _FROM.findall(text):
            tag = image.rpartition("/")[2].partition(":")[2]
            if (not tag or tag == "latest") and "@" not in image:
                problems.append(f"{name}: image {image} is not pinned to a version")
        problems += [f"{name}: {package} is not pinned" for package in unpinned_packages(text)]
    for path in sorted((task.folder / "tests").rglob("*.sh")):
        text = re.sub(r"(?m)(^|\s)#.*$", "", path.read_text(errors="replace"))
        if match := _DOWNLOAD.search(text):
            problems.append(f"tests/{path.name}: downloads while tests run ({match[0].strip()})")
    return problems


def unpinned_packages(text: str) -> list[str]:
    """Returns the packages of PyPI and npm that commands install without a version."""
    result = []
    for match in _INSTALL.finditer(text.replace("\\\n", " ")):
        for word in match[1].split():
            is_file = word.startswith(("-", ".", "/", "$")) or word.endswith(".txt")
            if not is_file and not re.search(r"==|@\d|@file:", word):
                result.append(word)
    return result


def _leak_problems(task: TerminalTask) -> list[str]:
    """Returns files of the tests or of the solution that are also in the environment."""
    secret = {}
    for part in ("tests", "solution"):
        for path in (task.folder / part).rglob("*"):
            if path.is_file() and not path.is_symlink() and path.name != "Dockerfile":
                secret[path.read_bytes()] = f"{part}/{path.relative_to(task.folder / part)}"
    problems = []
    for path in sorted((task.folder / "environment").rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(task.folder).as_posix()
        if path.read_bytes() in secret and path.stat().st_size:
            problems.append(f"{name} is a copy of {secret[path.read_bytes()]}")
        elif path.name in ("test_outputs.py", "solve.sh"):
            problems.append(f"{name} has the name of a test or solution")
    return problems


def check_names(texts: TaskTexts) -> Check:
    """Returns V07: names that tests read occur in the instruction or in the environment."""
    known = texts.instruction + "\n" + texts.environment
    missing = sorted(name for name in names_read(texts.tree) if name not in known)
    return verdict_of(
        "V07",
        [
            f"tests read {name!r}, which neither instruction nor environment names"
            for name in missing
        ],
    )


def check_shared_literals(texts: TaskTexts) -> Check:
    """Returns V08: tests do not read the solution, and the solution has no constants of the tests."""
    problems = []
    if "/solution" in texts.tests:
        problems.append("the tests read /solution")
    if re.search(r"/tests\b", texts.solution):
        problems.append("the solution reads /tests")
    known = texts.instruction + "\n" + texts.environment
    shared = {
        text.strip()
        for text in strings(texts.tree)
        if len(text.strip()) >= _MIN_SHARED
        and text.strip() in texts.solution
        and text.strip() not in known
    }
    problems += [
        f"{text[:60]!r} is in the tests and in the solution, but not in the instruction or the environment"
        for text in sorted(shared)
    ]
    return verdict_of("V08", problems)


def check_tests_exist(texts: TaskTexts) -> list[str]:
    """Returns problems of the list of tests: none at all, or guards that are no tests."""
    names = list_tests(texts.tree)
    problems = [] if names else [f"{TEST_FILE} has no test"]
    problems += [f"metadata.guard_tests: there is no test {n}" for n in texts.guard_tests if n not in names]  # fmt: skip
    if names and set(names) <= set(texts.guard_tests):
        problems.append("all tests are guards")
    return problems
