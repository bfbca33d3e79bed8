"""Finds the values that tests in Python expect, so that variants of them can expect others (`planting`).

Code under test can make tests pass that check it: an object that equals everything, or a change of pytest's own functions that
leaves planted tests with odd names as they are. It makes the variant pass too, which is a test like all others of its file
but for one expected value.
"""

import ast
import re
from collections.abc import Iterator, Sequence

from glm5_jax.envs.swe.recipes.planting import TestSite, ValueChange, can_vary

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_HEAD = re.compile(rb"(?:async[ \t]+)?def[ \t]+(\w+)")
_EQUALITIES = {"assertEqual", "assertEquals"}
_OPPOSITES = {
    "assertEqual": b"assertNotEqual",
    "assertTrue": b"assertFalse",
    "assertFalse": b"assertTrue",
    "assertIn": b"assertNotIn",
    "assertIsNone": b"assertIsNotNone",
}


def find_python_sites(source: bytes) -> list[TestSite]:
    """Returns the suitable tests of a module; none if the text is no Python.

    Suitable is a test without decorators that compares two values for equality in a statement of its own, so that a test
    which passes has made the comparison.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    sites = []
    for test in _tests(module):
        start = lines[test.lineno - 1] + test.col_offset
        head = _HEAD.match(source, start)
        changes = [change for check in _checks(test) for change in _changes(check, source, lines)]
        begin = lines[test.lineno - 1]
        if head and changes and not test.decorator_list and not source[begin:start].strip():
            end = _span(test, lines)[1]
            sites.append(TestSite(begin, end, *head.span(1), "_", tuple(changes)))
    return sites


def _tests(module: ast.Module) -> Iterator[_Function]:
    """Yields the tests of a module and of its classes."""
    owners: Sequence[ast.Module | ast.ClassDef] = [module, *_classes(module)]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, _Function) and node.name.startswith("test"):
                yield node


def _classes(module: ast.Module) -> list[ast.ClassDef]:
    return [node for node in module.body if isinstance(node, ast.ClassDef)]


def _checks(test: _Function) -> list[ast.expr]:
    """Returns what the statements of a test check that are in no block."""
    checks = []
    for node in test.body:
        if isinstance(node, ast.Assert):
            checks.append(node.test)
        elif isinstance(node, ast.Expr):
            checks.append(node.value)
    return checks


def _changes(check: ast.expr, source: bytes, lines: Sequence[int]) -> list[ValueChange]:
    """Returns what can be replaced in a comparison for equality, and the opposites of some others."""
    if isinstance(check, ast.Compare) and [type(op) for op in check.ops] == [ast.Eq]:
        left, right = check.left, check.comparators[0]
        between = _span(left, lines)[1], _span(right, lines)[0]
        place = source.find(b"==", *between)
        return _value_changes([left, right], source, lines) or [
            ValueChange(place, place + 2, b"!=")
        ]
    if not isinstance(check, ast.Call) or not isinstance(check.func, ast.Attribute):
        return []
    name = check.func.attr
    values = _value_changes(check.args[:2], source, lines) if name in _EQUALITIES else []
    if values or name not in _OPPOSITES:
        return values
    end = _span(check.func, lines)[1]
    return [ValueChange(end - len(name), end, _OPPOSITES[name])]


def _value_changes(
    sides: Sequence[ast.expr], source: bytes, lines: Sequence[int]
) -> list[ValueChange]:
    """Returns the numbers and texts of the one side that consists of nothing else."""
    literal = [side for side in sides if _is_literal(side)]
    if len(sides) != 2 or len(literal) != 1:
        return []
    constants = [node for node in ast.walk(literal[0]) if isinstance(node, ast.Constant)]
    spans = [_span(node, lines) for node in constants if not isinstance(node.value, bool)]
    return [ValueChange(*span) for span in spans if can_vary(source[span[0] : span[1]])]


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _span(node: ast.expr | _Function, lines: Sequence[int]) -> tuple[int, int]:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    return lines[node.lineno - 1] + node.col_offset, lines[end_line - 1] + end_column
