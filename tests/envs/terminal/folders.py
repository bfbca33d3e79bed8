"""Task folders for tests: those of tasks/*.txt, small ones of one's own, and the scripts of cheats/*.txt."""

import os
import pathlib
import re

import pytest

from glm5_jax.envs.terminal import Script, TrialResult, TrialRunner, load_task

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="needs users that only root's sandboxes have"
)
HERE = pathlib.Path(__file__).parent
SHIPPED = sorted(path.stem for path in (HERE / "tasks").glob("*.txt"))
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
# As most tasks of Terminal-Bench have it.
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
    """Parameters of which all but `quick` are slow."""
    assert {*quick} <= {*names}
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def selected(request, parameter: str) -> list[str]:
    """Values of a parameter of this file's tests that are going to run, for a fixture that makes the results of all at
    once."""
    specs = [item.callspec.params for item in request.session.items if item.path == request.path
             and hasattr(item, "callspec")]  # fmt: skip
    return list(dict.fromkeys(spec[parameter] for spec in specs if parameter in spec))


def write(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    """A folder of these files."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def sections(file: pathlib.Path) -> dict[str, str]:
    """The files of a folder that is written down as one."""
    _, *parts = re.split(r"(?m)^=== (.*)\n", file.read_text())
    texts = [text.removesuffix("\n") for text in parts[1:-1:2]] + parts[-1:]
    return dict(zip(parts[::2], texts))


def shipped(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The folder of a task of tasks/NAME.txt."""
    return write(folder / name, sections(HERE / "tasks" / f"{name}.txt"))


def shipped_cheats() -> dict[str, tuple[str, str]]:
    """Name -> (task that it attacks, script), of cheats/NAME.txt."""
    found = {path.stem: sections(path) for path in sorted((HERE / "cheats").glob("*.txt"))}
    return {name: (files["task.txt"].strip(), files["solve.sh"]) for name, files in found.items()}


def own(folder: pathlib.Path, name: str = "own", **files: str) -> pathlib.Path:
    """A task of one's own: `test` is tests/test.sh, `tests` tests/test_outputs.py, others by their names."""
    given = {
        "task.toml": files.pop("toml", TOML),
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": files.pop(
            "dockerfile", "FROM debian:bookworm-slim\nWORKDIR /app\n"
        ),
        "tests/test.sh": files.pop("test", PYTEST),
        "solution/solve.sh": files.pop("solve", "true\n"),
    }
    if "tests" in files:
        given["tests/test_outputs.py"] = files.pop("tests")
    return write(folder / name, {**given, **files})


class Text(Script):
    """An agent that runs this text of bash."""

    def __init__(self, text: str):
        self._script = text.encode()


async def tried(folder: pathlib.Path, agent, images=None) -> TrialResult:
    """The result of one trial."""
    async with TrialRunner(images) as trials:
        return await trials.run(load_task(folder), agent)
