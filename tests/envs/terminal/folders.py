"""Task folders for tests: those of tasks/*.txt, small ones, and the scripts of cheats/*.txt."""

import os
import pathlib
import re

import pytest

from glm5_jax.envs.terminal import Script, TrialResult, TrialRunner, load_task

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="needs users that only root's sandboxes have"
)
FOLDER = pathlib.Path(__file__).parent
SHIPPED = sorted(path.stem for path in (FOLDER / "tasks").glob("*.txt"))
TOML = """
schema_version = "1.1"
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 30.0
[environment]
memory_mb = 512
storage_mb = 256
"""
PYTEST = """
if pytest /tests/test_outputs.py -rA; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
# The form of most tasks of Terminal-Bench.
ORDINARY = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then
    echo "Error: No working directory set."
    exit 1
fi
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def slow_but(quick, names):
    """Returns parameters that are all slow, except `quick`."""
    assert {*quick} <= {*names}
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def selected_values(request, parameter: str) -> list[str]:
    """Returns the values of a parameter in the tests of this file that will run.

    A fixture can then compute all results together.
    """
    specs = [item.callspec.params for item in request.session.items if item.path == request.path
             and hasattr(item, "callspec")]  # fmt: skip
    return list(dict.fromkeys(spec[parameter] for spec in specs if parameter in spec))


def write(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    """Writes a folder of these files."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def sections(file: pathlib.Path) -> dict[str, str]:
    """Returns the files of a folder that is written as one file."""
    _, *parts = re.split(r"(?m)^=== (.*)\n", file.read_text())
    texts = [text.removesuffix("\n") for text in parts[1:-1:2]] + parts[-1:]
    return dict(zip(parts[::2], texts))


def write_shipped(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the folder of a task of tasks/NAME.txt."""
    return write(folder / name, sections(FOLDER / "tasks" / f"{name}.txt"))


def shipped_cheats() -> dict[str, tuple[str, str]]:
    """Returns {name: (task that it attacks, script)} of cheats/NAME.txt."""
    files_by_name = {
        path.stem: sections(path) for path in sorted((FOLDER / "cheats").glob("*.txt"))
    }
    return {
        name: (files["task.txt"].strip(), files["solve.sh"])
        for name, files in files_by_name.items()
    }


def make_task(folder: pathlib.Path, name: str = "own", **files: str) -> pathlib.Path:
    """Writes a small task: `test` is tests/test.sh, `tests` is tests/test_outputs.py, other files have their names."""
    task_files = {
        "task.toml": files.pop("toml", TOML),
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": files.pop(
            "dockerfile", "FROM debian:bookworm-slim\nWORKDIR /app\n"
        ),
        "tests/test.sh": files.pop("test", PYTEST),
        "solution/solve.sh": files.pop("solve", "true\n"),
    }
    if "tests" in files:
        task_files["tests/test_outputs.py"] = files.pop("tests")
    return write(folder / name, {**task_files, **files})


class Text(Script):
    """Agent that runs this text of bash."""

    def __init__(self, text: str):
        self._script = text.encode()


async def run_trial(folder: pathlib.Path, agent, images=None) -> TrialResult:
    """Returns the result of one trial."""
    async with TrialRunner(images) as trials:
        return await trials.run(load_task(folder), agent)
