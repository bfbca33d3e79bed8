"""Makes a variant of a test in Python that must fail: it expects another value.

Code under test can make tests pass that check it: an object that equals everything, or a change of pytest's own functions that
leaves planted tests with odd names as they are. It makes the variant pass too, which is a test like all others of its file
but for one expected value.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Variant(NamedTuple):
    """Variant of a test.

    Attributes:
      text: source of a module with this test as its only one.
      name: `Class::name` of the test.
    """

    text: str
    name: str


def make_variant(text: str) -> Variant | None:
    """Returns a variant of the first suitable test of a module; None if there is none, or the text is no Python.

    Suitable is a test without decorators that compares two values for equality in a statement of its own, so that a test
    which passes has made the comparison.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for owner, test in _tests(module):
        if not test.decorator_list and any(map(_expect_another, _checks(test))):
            _keep_only(module, test)
            name = f"{owner.name}::{test.name}" if isinstance(owner, ast.ClassDef) else test.name
            return Variant(f"{ast.unparse(module)}\n", name)
    return None


def _tests(module: ast.Module) -> Iterator[tuple[ast.Module | ast.ClassDef, _Function]]:
    """Yields the tests of a module, each with its class or the module."""
    owners: Sequence[ast.Module | ast.ClassDef] = [module, *_classes(module)]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, _Function) and node.name.startswith("test"):
                yield owner, node


def _classes(module: ast.Module) -> list[ast.ClassDef]:
    return [
        node for node in module.body if isinstance(node, ast.ClassDef) and not node.decorator_list
    ]


def _checks(test: _Function) -> list[ast.expr]:
    """Returns what the statements of a test check that are in no block, last first."""
    checks = []
    for node in reversed(test.body):
        if isinstance(node, ast.Assert):
            checks.append(node.test)
        elif isinstance(node, ast.Expr):
            checks.append(node.value)
    return checks


def _expect_another(check: ast.expr) -> bool:
    """Changes a comparison for equality, so that equal values differ; returns whether it is one."""
    if isinstance(check, ast.Compare) and [type(op) for op in check.ops] == [ast.Eq]:
        check.comparators[0] = _another(check.comparators[0])
        return True
    name = (
        check.func.attr
        if isinstance(check, ast.Call) and isinstance(check.func, ast.Attribute)
        else ""
    )
    if (
        name in ("assertEqual", "assertEquals")
        and isinstance(check, ast.Call)
        and len(check.args) >= 2
    ):
        check.args[1] = _another(check.args[1])
        return True
    return False


def _another(value: ast.expr) -> ast.expr:
    """Returns an expression whose value is not equal to that of another."""
    number = value.value if isinstance(value, ast.Constant) else None
    if isinstance(number, int | float) and not isinstance(number, bool):
        return ast.Constant(number + 1)
    if isinstance(value, ast.Constant) and type(value.value) is str:
        return ast.Constant(value.value + "s")
    if isinstance(value, ast.List | ast.Tuple) and isinstance(value.ctx, ast.Load):
        return type(value)([*value.elts, ast.Constant(0)], value.ctx)
    return ast.Tuple([value, ast.Constant(0)], ast.Load())


def _keep_only(module: ast.Module, test: _Function) -> None:
    """Removes all other tests of a module."""
    for owner in [module, *_classes(module)]:
        others = [
            node
            for node in owner.body
            if isinstance(node, _Function) and node.name.startswith("test") and node is not test
        ]
        owner.body = [node for node in owner.body if node not in others] or [ast.Pass()]
