"""Runs the calls of a policy's tools (`rl.rollouts.rollout.Tools`).

A mistake in a call gives an error message as the result, with the wording of the shipped conversations
(data/chat_tasks.py). No text that a policy writes raises an exception.
"""

import ast
import operator
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from glm5_jax.rl.types import Task
from glm5_jax.text.messages import tool_function
from glm5_jax.text.tool_calls import ToolCall

# Function of a task and a call's arguments; raises ToolError if the environment fails.
Tool = Callable[[Task, Mapping[str, Any]], Awaitable[str]]

MAX_CHARACTERS = 2048  # of an expression
MAX_DIGITS = 2000  # of a numerator or denominator; Python formats at most 4300
MAX_NESTING = 200  # nested operations; a sum of 200 numbers nests as deeply
DECIMALS = 12  # of numbers that are not integers
_TOO_MUCH = 10**MAX_DIGITS
_KNOWN = re.compile(r"[0-9.+\-*/%() ]*")


class Toolbox:
    """Runs each call with the tool of its name."""

    def __init__(self, tools: Mapping[str, Tool], tasks: Iterable[Task] = ()):
        """Checks the tools of the tasks that will be attempted. Raises ValueError if one is missing here."""
        self._tools = dict(tools)
        for task in tasks:
            if missing := sorted(_offered(task).keys() - self._tools.keys()):
                raise ValueError(
                    f"task {task.id!r} offers {missing[0]!r}, which is not implemented; the tools are "
                    f"{', '.join(self._tools) or 'none'}"
                )

    async def __call__(self, task: Task, call: ToolCall) -> str:
        offered = _offered(task)
        if call.name not in offered or call.name not in self._tools:
            return f"Error: no tool {call.name}"
        if call.problem:
            return f"Error: {call.problem}"
        schema = offered[call.name].get("parameters") or {}
        for name in call.arguments:
            if name not in schema.get("properties", {}):
                return f"Error: {call.name} has no {name}"
        for name in schema.get("required", ()):
            if name not in call.arguments:
                return f"Error: {call.name} needs {name}"
        return await self._tools[call.name](task, call.arguments)


def _offered(task: Task) -> dict[str, Mapping]:
    """Returns the functions that a task's policy may call, by name."""
    functions = [tool_function(tool, i) for i, tool in enumerate(task.tools)]
    return {function["name"]: function for function in functions}


async def calculate(task: Task, arguments: Mapping[str, Any]) -> str:
    """Runs the tool `calculate` of the shop: returns the value of its expression as text."""
    del task
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        return "Error: expression is no text"
    try:
        return format_number(evaluate(expression))
    except ValueError as error:
        return f"Error: {error}"


def evaluate(expression: str) -> Fraction:
    """Returns the exact value of numbers under + - * / // % ** and parentheses.

    Raises ValueError if the expression is invalid or its value is too large.
    """
    expression = expression.strip()
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    if odd := _KNOWN.sub("", expression, count=1):  # it matches at the beginning, if only nothing
        raise ValueError(f"{odd[0]!r} is no number, no parenthesis and none of + - * / // % **")
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        raise ValueError("the expression is no arithmetic") from None
    except (MemoryError, RecursionError):
        raise ValueError(_TOO_NESTED) from None
    return _value(tree.body, expression, MAX_NESTING)


def format_number(value: Fraction) -> str:
    """Formats an integer exactly, and other numbers rounded to `DECIMALS`."""
    units = round(value * 10**DECIMALS)
    integer, rest = divmod(abs(units), 10**DECIMALS)
    decimals = f".{rest:0{DECIMALS}}".rstrip("0").rstrip(".")
    return f"{'-' if units < 0 else ''}{integer}{decimals}"


_TOO_NESTED = f"more than {MAX_NESTING} operations stand within each other"
_SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr, expression: str, left: int) -> Fraction:
    """Evaluates a node; left: number of operations that may be nested in it."""
    if left == 0:
        raise ValueError(_TOO_NESTED)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        # From the text, because a float would be rounded.
        return _check_size(Fraction(expression[node.col_offset : node.end_col_offset].rstrip(".")))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand, expression, left - 1))
    if not isinstance(node, ast.BinOp):
        raise ValueError("the expression is no arithmetic")
    a, b = (_value(side, expression, left - 1) for side in (node.left, node.right))
    if isinstance(node.op, ast.Pow):
        return _power(a, b)
    if b == 0 and not isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        raise ValueError("division by zero")
    return _check_size(Fraction(_OPERATIONS[type(node.op)](a, b)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent is no whole number")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    if abs(base) in (0, 1):
        # The result is small for any exponent, of which only the parity matters.
        return base ** (exponent.numerator % 2 or 2 * (exponent != 0))
    # Lower bound of the bits of the result, checked before any multiplication.
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > _TOO_MUCH.bit_length():
        raise ValueError(_TOO_LARGE)
    return _check_size(base**exponent.numerator)


_TOO_LARGE = f"a number has more than {MAX_DIGITS} digits"


def _check_size(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= _TOO_MUCH:
        raise ValueError(_TOO_LARGE)
    return value
