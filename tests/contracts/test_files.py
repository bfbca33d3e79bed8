"""Limits the names, contents and sizes of files."""

import ast
import re
import subprocess
import sys

import pytest

from tests.contracts import workspace_map
from tests.contracts.source_tree import PACKAGES, ROOT, files, python_files, read, syntax

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "v2", "experimental"}
MAX_LINES = 700
ASSETS = "glm5_jax/data/assets"

# One machine's folders (/home/kubernetes/bin is on each node of GKE) and one network's package hosts; and promises in place of code.
MACHINE_PATH = re.compile(r"(?<![\w.<~-])/(?:root|home(?!/kubernetes/)|work|mnt|opt|Users)/\w")
REGISTRY = re.compile(r"pypi[.]org|python[h]osted|index[-]url|find[-]links|trusted[-]host")
# A picture in a notebook, whose letters may spell anything.
PICTURE = re.compile(r'\s*"image/png": "[\w+/=\\]*",?')
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X|HA[C]K)\b|\bfor[ ]now\b")


def lines_with(pattern: re.Pattern, paths) -> list[str]:
    return [
        f"{path}:{number} {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(read(path).splitlines(), 1)
        if pattern.search(line) and not PICTURE.fullmatch(line)
    ]


def ours() -> list:
    """Returns the files written in this repository: all but shipped texts and reference data."""
    return [path for path in files() if not str(path).startswith((ASSETS, "tests/goldens/hf_"))]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine path", "registry"])
def test_files_name_no_machine(pattern):
    assert not lines_with(pattern, ours())


def test_files_have_no_marks_of_unfinished_work():
    assert not lines_with(UNFINISHED, ours())


def test_module_names_are_specific():
    paths = python_files(*PACKAGES, "tests")
    assert not [str(path) for path in paths if FORBIDDEN_NAMES & {*path.with_suffix("").parts}]


def test_files_are_short():
    lengths = {str(path): read(path).count("\n") for path in python_files(*PACKAGES)}
    assert not {path: n for path, n in lengths.items() if n > MAX_LINES}


def test_test_files_have_unique_names():
    names = [path.name for path in python_files("tests") if path.name.startswith("test_")]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.usefixtures("parsed")
def test_public_names_have_docstrings():
    wrong = []
    for path in python_files(*PACKAGES):
        tree = syntax(path)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(f"{path}:1 module")
        for node in tree.body:
            named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            public = named and not node.name.startswith("_") and node.name != "main"
            public = public and not any(
                ast.unparse(d) in ("overload", "typing.overload") for d in node.decorator_list
            )
            if public and not ast.get_docstring(node):
                wrong.append(f"{path}:{node.lineno} {node.name}")
    assert not wrong, "\n".join(wrong)


def test_shipped_assets_are_small_and_licensed():
    assets = [path for path in files() if str(path).startswith(ASSETS)]
    assert sum((ROOT / path).stat().st_size for path in assets) <= 8e6
    licensed = (ROOT / ASSETS / "LICENSES").read_text()
    names = [str(path.relative_to(ASSETS)) for path in assets]
    missing = [
        n for n in names if n != "LICENSES" and not re.search(f"(?m)^{re.escape(n)}$", licensed)
    ]
    assert not missing, f"{missing} have no paragraph in {ASSETS}/LICENSES"


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=lambda c: c[0])
def test_ruff_reports_nothing(command):
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--output-format=concise", "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("parsed")
def test_workspace_map_lists_every_module():
    _, current, _ = workspace_map.parts()
    assert current.lstrip("\n") == workspace_map.render().lstrip("\n"), (
        "run python -m tests.contracts.workspace_map --write"
    )
