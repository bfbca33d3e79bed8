"""Dataclasses are filled by name, so that a new field cannot move the others."""

import ast
import functools

import pytest

from tests.contracts.source_tree import PACKAGES, python_files, syntax


@pytest.mark.usefixtures("parsed")
def test_configs_take_keywords_only():
    positional = [
        f"{path}:{node.lineno} {node.name}"
        for path, node, decorator in dataclasses_of_packages()
        if node.name.endswith("Config") and "kw_only=True" not in decorator
    ]
    assert not positional, "add kw_only=True"


@pytest.mark.usefixtures("parsed")
def test_no_dataclass_is_filled_from_unpacked_tuple():
    names = {node.name for _, node, _ in dataclasses_of_packages()}
    unpacked = [
        f"{path}:{call.lineno} {name}"
        for path in python_files(*PACKAGES)
        for call in ast.walk(syntax(path))
        if isinstance(call, ast.Call)
        and any(isinstance(argument, ast.Starred) for argument in call.args)
        and (name := called_name(call, names_of(path))) in names
    ]
    assert not unpacked, "give each field by its name"


def dataclasses_of_packages():
    """Yields (path, class, source of its dataclass decorator)."""
    for path in python_files(*PACKAGES):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                for decorator in map(ast.unparse, node.decorator_list):
                    if decorator.startswith("dataclasses.dataclass"):
                        yield path, node, decorator


@functools.cache
def names_of(path) -> dict[str, str]:
    """Returns {name in a file: name that it was imported as} of what comes from other packages."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in PACKAGES
        for alias in node.names
    }


def called_name(call: ast.Call, imported: dict[str, str]) -> str:
    """Returns the name of the called function or class; that of another package is qualified."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return imported.get(name, name)
