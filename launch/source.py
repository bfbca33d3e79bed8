"""Reads Python modules of this repository as syntax trees, and follows their names, without importing them.

Importing an experiment imports jax, which takes seconds. Reading its source takes milliseconds, so that names on a
command line can be checked at once.
"""

import ast
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]  # the folder of glm5_jax, experiments and launch


class SourceModule(NamedTuple):
    """Module that was read, not imported.

    Attributes:
      path: its file.
      tree: its syntax tree.
    """

    path: pathlib.Path
    tree: ast.Module


class Definition(NamedTuple):
    """Statement that defines a name, and the module that it stands in."""

    module: SourceModule
    node: ast.AST


@functools.cache
def read_module(path: pathlib.Path) -> SourceModule:
    """Returns the module of a file. Raises ValueError if it cannot be read or parsed."""
    try:
        return SourceModule(path, ast.parse(path.read_bytes(), str(path)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{path} is not valid Python{where}: {error}") from None


def find_module(name: str) -> SourceModule | None:
    """Returns the module with a dotted name; None if it is not in this repository."""
    path = ROOT.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return read_module(file)
    return None


def resolve(module: SourceModule, expression: ast.AST) -> Definition | None:
    """Returns the definition of an expression such as `Name` or `module.Name`; None if it cannot be followed."""
    if isinstance(expression, ast.Attribute):
        target = resolve(module, expression.value)
        if target and isinstance(target.node, ast.Module):
            return _find_name(target.module, expression.attr)
        return None
    return _find_name(module, expression.id) if isinstance(expression, ast.Name) else None


def _find_name(module: SourceModule, name: str) -> Definition | None:
    """Returns the last definition of a name at the top level of a module, followed through imports and aliases."""
    definition = None
    for statement in module.tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and statement.name == name:
            definition = Definition(module, statement)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    definition = _imported(statement.module or "", alias.name)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname == name and (target := find_module(alias.name)):
                    definition = Definition(target, target.tree)
        elif isinstance(statement, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in statement.targets):
                alias = isinstance(statement.value, (ast.Name, ast.Attribute))
                definition = resolve(module, statement.value) if alias else None
                definition = definition or Definition(module, statement.value)
    return definition


def _imported(module: str, name: str) -> Definition | None:
    """Returns what `from MODULE import NAME` imports: a submodule, or a definition of the module."""
    if submodule := find_module(f"{module}.{name}"):
        return Definition(submodule, submodule.tree)
    source = find_module(module)
    return _find_name(source, name) if source else None


def literal_strings(module: SourceModule, node: ast.AST | None) -> tuple[str, ...] | None:
    """Returns the strings of a literal tuple or list, or the keys of a literal dict; None for anything else."""
    if isinstance(node, ast.Name) and (target := resolve(module, node)):
        module, node = target.module, target.node
    if not isinstance(node, (ast.Dict, ast.Tuple, ast.List)):
        return None
    values: list[str] = []
    for item in node.keys if isinstance(node, ast.Dict) else node.elts:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            values.append(item.value)
        elif isinstance(item, ast.Starred) and (more := literal_strings(module, item.value)):
            values += more
        else:
            return None
    return tuple(values)


def calls_of(function: ast.FunctionDef, name: str) -> Iterator[ast.Call]:
    """Yields the calls of a function of that name within a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node
