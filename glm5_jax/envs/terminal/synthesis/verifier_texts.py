"""Reads what the tests of a task name and expect: test functions, paths, keys and literals."""

import ast
import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Iterator
from typing import TypeGuard

from glm5_jax.envs.terminal.task import TerminalTask

TEST_FILE = "tests/test_outputs.py"
SCRATCH = "scratch"  # part of the names of files that tests make for themselves
_MAX_TEXT_BYTES = 1 << 20  # of a file of the environment that is read as text
_MIN_NUMBER = 10_000  # smaller numbers are in many files by chance
_OWN_PATHS = ("/tests", "/logs", "/tmp", "/dev", "/proc", "/usr", "/bin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskTexts:
    """Texts of a task that checks read.

    Attributes:
      instruction: prompt.
      solution: text of solution/solve.sh.
      tests: text of tests/test_outputs.py.
      tree: syntax tree of the tests.
      environment: all paths and texts below environment/.
      guard_tests: names of tests that pass before anything is done.
    """

    instruction: str
    solution: str
    tests: str
    tree: ast.Module
    environment: str
    guard_tests: tuple[str, ...]


def read_texts(task: TerminalTask) -> TaskTexts:
    """Reads the texts of a task. Raises ValueError for tests that are no Python, OSError for missing files."""
    tests = (task.folder / TEST_FILE).read_text()
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        raise ValueError(f"{TEST_FILE}: {error}") from None
    return TaskTexts(
        instruction=task.instruction,
        solution=(task.folder / "solution/solve.sh").read_text(errors="replace"),
        tests=tests,
        tree=tree,
        environment="\n".join(_environment(task.folder / "environment")),
        guard_tests=guard_tests(task),
    )


def guard_tests(task: TerminalTask) -> tuple[str, ...]:
    """Returns the tests that task.toml marks as guards (metadata.guard_tests)."""
    data = tomllib.loads((task.folder / "task.toml").read_text())
    names = data.get("metadata", {}).get("guard_tests", [])
    return tuple(name for name in names if isinstance(name, str))


def _environment(folder: pathlib.Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        yield path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_TEXT_BYTES:
            yield path.read_bytes().decode("utf-8", errors="replace")


def list_tests(tree: ast.Module) -> list[str]:
    """Returns the names of the tests as pytest selects them after `::`."""
    names = []
    for node in tree.body:
        if _is_test(node):
            names.append(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names += [f"{node.name}::{part.name}" for part in node.body if _is_test(part)]
    return names


def _is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def count_assertions(text: str) -> int:
    """Returns the number of assert statements and of `pytest.raises` in Python; 0 for what is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return 0
    nodes = list(ast.walk(tree))
    raises = sum(isinstance(node, ast.Attribute) and node.attr == "raises" for node in nodes)
    return raises + sum(isinstance(node, ast.Assert) for node in nodes)


def strings(tree: ast.AST) -> set[str]:
    """Returns all texts in the tests, except for docstrings."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    }


def names_read(tree: ast.AST) -> set[str]:
    """Returns the parts of paths, names of files and keys that tests read."""
    names = set()
    for text in strings(tree):
        is_path = re.fullmatch(r"[\w./+@-]+", text) and (
            "/" in text or re.search(r"\w\.\w+$", text)
        )
        if is_path and SCRATCH not in text and not text.startswith(_OWN_PATHS):
            names |= {part for part in text.split("/") if len(re.findall(r"[A-Za-z]", part)) >= 2}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            names |= _text_of(node.right)
        if isinstance(node, ast.Subscript):
            names |= _text_of(node.slice)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and node.args:
                names |= _text_of(node.args[0])
    return {part for name in names for part in name.split("/") if part and SCRATCH not in part}


def _text_of(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return set()


def expected_literals(texts: TaskTexts, min_length: int = 6) -> set[str]:
    """Returns the texts and large numbers that tests compare with, apart from those of guards."""
    active = [node for name, node in _functions(texts.tree) if name not in texts.guard_tests]
    used = {node.id for part in active for node in ast.walk(part) if isinstance(node, ast.Name)}
    values: list[ast.expr] = []
    for node in texts.tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in used for target in node.targets
        ):
            values.append(node.value)
    for part in active:
        values += _compared(part)
    literals = {text for value in values for text in _literals(value)}
    return {
        text
        for text in literals
        if len(text.strip()) >= min_length or (text.isdigit() and int(text) >= _MIN_NUMBER)
    }


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of a module and the methods of its classes, with the names of `list_tests`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
            yield from ((f"{node.name}::{part.name}", part) for part in methods)


def _compared(function: ast.FunctionDef) -> list[ast.expr]:
    """Returns what a function compares, also by `assertEqual` and the like, the values of its variables that it compares, and
    those that its parameters take.
    """
    nodes = list(ast.walk(function))
    compared = [part for node in nodes if isinstance(node, ast.Compare) for part in (node.left, *node.comparators)]  # fmt: skip
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("assert"):
            compared += call.args
    names = {node.id for part in compared for node in ast.walk(part) if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in names for target in node.targets
        ):
            compared.append(node.value)
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
            compared += decorator.args[1:]
    return compared


def _literals(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and not isinstance(node.value, bool):
        if isinstance(node.value, str | int):
            yield str(node.value)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from _literals(value)
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        for value in node.elts:
            yield from _literals(value)
