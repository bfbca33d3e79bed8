"""What answers the calls of a policy's tools (`rl.rollout.Tools`).

What is wrong with a call is said in the answer, in the words of the shipped conversations (data/chat_tasks.py), and
nothing that a policy writes raises.
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

# Of a task and a call's arguments; ToolError if it cannot.
Tool = Callable[[Task, Mapping[str, Any]], Awaitable[str]]

MOST_CHARACTERS = 2048  # of an expression
MOST_DIGITS = 2000  # of a number, above and below its line; Python spells no more than 4300
MOST_NESTED = 200  # operations within each other, of which a sum of so many numbers consists too
DECIMALS = 12  # of what is no whole number
_TOO_MUCH = 10**MOST_DIGITS
_KNOWN = re.compile(r"[0-9.+\-*/%() ]*")


class Toolbox:
    """Answers a call with the tool of its name."""

    def __init__(self, tools: Mapping[str, Tool], tasks: Iterable[Task] = ()):
        """tasks: that are going to be attempted; ValueError if one offers a tool that is not among these."""
        self._tools = dict(tools)
        for task in tasks:
            if missing := sorted(_offered(task).keys() - self._tools.keys()):
                raise ValueError(
                    f"task {task.id!r} offers {missing[0]!r}, which nobody answers; the tools are "
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
    """The functions that a task's policy may call, by name."""
    functions = [tool_function(tool, i) for i, tool in enumerate(task.tools)]
    return {function["name"]: function for function in functions}


async def calculate(task: Task, arguments: Mapping[str, Any]) -> str:
    """The tool `calculate` of the shop: the value of its expression."""
    del task
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        return "Error: expression is no text"
    try:
        return spelt(value_of(expression))
    except ValueError as error:
        return f"Error: {error}"


def value_of(expression: str) -> Fraction:
    """The exact value of numbers under + - * / // % ** and parentheses; ValueError if it has none, or one that is too
    large."""
    expression = expression.strip()
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression is longer than {MOST_CHARACTERS} characters")
    if odd := expression[_KNOWN.match(expression).end() :]:
        raise ValueError(f"{odd[0]!r} is no number, no parenthesis and none of + - * / // % **")
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        raise ValueError("the expression is no arithmetic") from None
    except (MemoryError, RecursionError):
        raise ValueError(_TOO_NESTED) from None
    return _value(tree.body, expression, MOST_NESTED)


def spelt(value: Fraction) -> str:
    """A whole number exactly, others rounded to `DECIMALS`."""
    units = round(value * 10**DECIMALS)
    whole, rest = divmod(abs(units), 10**DECIMALS)
    decimals = f".{rest:0{DECIMALS}}".rstrip("0").rstrip(".")
    return f"{'-' if units < 0 else ''}{whole}{decimals}"


_TOO_NESTED = f"more than {MOST_NESTED} operations stand within each other"
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
    """left: how many operations may stand within this one."""
    if left == 0:
        raise ValueError(_TOO_NESTED)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        # Of the text: as a float it would be rounded.
        return _limited(Fraction(expression[node.col_offset : node.end_col_offset].rstrip(".")))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand, expression, left - 1))
    if not isinstance(node, ast.BinOp):
        raise ValueError("the expression is no arithmetic")
    a, b = (_value(side, expression, left - 1) for side in (node.left, node.right))
    if isinstance(node.op, ast.Pow):
        return _power(a, b)
    if b == 0 and not isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        raise ValueError("division by zero")
    return _limited(Fraction(_OPERATIONS[type(node.op)](a, b)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent is no whole number")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    if abs(base) in (0, 1):
        # Small for any exponent, which counts for its parity alone.
        return base ** (exponent.numerator % 2 or 2 * (exponent != 0))
    # Before anything is multiplied: what the result has at least.
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > _TOO_MUCH.bit_length():
        raise ValueError(_TOO_LARGE)
    return _limited(base**exponent.numerator)


_TOO_LARGE = f"a number has more than {MOST_DIGITS} digits"


def _limited(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= _TOO_MUCH:
        raise ValueError(_TOO_LARGE)
    return value
