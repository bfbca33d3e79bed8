"""Tests the results of tools: exact values, and an answer to any call of a policy."""

import asyncio
import json
import operator
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.agents.tools import (
    MAX_CHARACTERS,
    MAX_DIGITS,
    MAX_NESTING,
    Toolbox,
    calculate,
    format_number,
)
from glm5_jax.data import chat_tasks
from glm5_jax.envs.reasoning import task_sources
from glm5_jax.rl.types import Task
from glm5_jax.text.tool_calls import ToolCall

SHOP = tuple(chat_tasks.shop_tools())


def answer(expression):
    return asyncio.run(calculate(task(), {"expression": expression}))


def task(tools=SHOP):
    return Task(id="t", kind="tir", messages=({"role": "user", "content": "?"},), tools=tools)


async def order(task, arguments):
    return f"order {arguments['order_id']}"


BOX = Toolbox({"calculate": calculate, "get_order_details": order})


def call_tool(name, arguments, tools=SHOP, problem=None):
    return asyncio.run(BOX(task(tools), ToolCall(name, arguments, problem, "")))


VALUES = {
    "48*77": "3696",
    " 2 + 2 ": "4",
    "0.1+0.2": "0.3",
    "(1+2)*-3": "-9",
    "7//2-7%4": "0",
    "-7//2": "-4",
    "2**-2": "0.25",
    "-2**2": "-4",
    "2/3": "0.666666666667",
    "-1/3": "-0.333333333333",
    "1/10**13": "0",
    "5.": "5",
    ".5*2": "1",
    "12345678901234567890.12345": "12345678901234567890.12345",
    "0**0": "1",
    "(-1)**(10**9)": "1",
    "(-1)**(-(10**9)-1)": "-1",
    "0**10**9": "0",
    "1/3*3": "1",
}
ERRORS = {
    "division by zero": ["1/0", "1%0", "1//(2-2)", "0**-1"],
    "whole number": ["2**.5"],
    "digits": ["2**10**9", "(1/2)**10**9", "9**1500*9**1500", "1/9**1500/9**1500"],
    "no arithmetic": ["", "1+", "...", "(1)(2)", "()", "007"],
    "'e' is no number": ["1e5"],
    "'_' is no number": ["__import__('os')"],
    "is no number": ["1\n+1"],
    "no text": [1],
    "longer": ["1" * (MAX_CHARACTERS + 1)],
    "within each other": ["-" * 1500 + "1", "+".join("1" * (MAX_NESTING + 1))],
    "": ["(" * 900 + "1" + ")" * 900],
}


def test_calculates_values():
    assert {expression: answer(expression) for expression in VALUES} == VALUES


def test_explains_why_expression_has_no_value():
    for why, expressions in ERRORS.items():
        for expression in expressions:
            result = answer(expression)
            assert result.startswith("Error: ") and why in result, (expression, result)


def test_accepts_numbers_up_to_limits():
    assert answer("1" * MAX_DIGITS) == "1" * MAX_DIGITS
    assert answer("9" * MAX_DIGITS + "+0") == "9" * MAX_DIGITS
    assert "digits" in answer("9" * MAX_DIGITS + "+1")
    assert answer(f"10**{MAX_DIGITS - 1}") == "1" + "0" * (MAX_DIGITS - 1)
    assert answer("+".join("1" * (MAX_NESTING - 1))) == str(MAX_NESTING - 1)


@st.composite
def expressions(draw, depth=3):
    """Draws (text, Fraction) of an arithmetic expression with every operation in parentheses."""
    if not depth or draw(st.booleans()):
        text = draw(st.from_regex(r"[1-9][0-9]{0,5}(\.[0-9]{1,4})?", fullmatch=True))
        return text, Fraction(text)
    (a, left), (b, right) = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    if right:
        signs |= {"/": operator.truediv, "//": operator.floordiv, "%": operator.mod}
    sign = draw(st.sampled_from(sorted(signs)))
    return f"({a}{sign}{b})", Fraction(signs[sign](left, right))


@settings(max_examples=50)
@given(expressions())
def test_calculates_exact_value_of_any_arithmetic(drawn):
    text, value = drawn
    assert answer(text) == format_number(value)
    if value.denominator == 1:
        assert answer(text) == str(value.numerator)
    assert abs(Fraction(answer(text)) - value) <= Fraction(1, 2 * 10**12)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["calculate", "get_order_details", "lookup", ""]) | st.text()
KEYS = st.sampled_from(["expression", "order_id"]) | st.text()


@given(st.text() | st.text("0123456789.+-*/%() ", max_size=60))
def test_answers_any_expression(expression):
    assert isinstance(answer(expression), str)


@given(NAMES, st.dictionaries(KEYS, JSON, max_size=3), st.none() | st.text())
def test_answers_any_call(name, arguments, problem):
    assert isinstance(call_tool(name, arguments, problem=problem), str)


@pytest.mark.parametrize(
    "expression",
    [
        "+".join(f"1/{7 + i}**500" for i in range(150)),
        "*".join(["9**2000/7**2000"] * 100),
        "/".join(["9" * 1000] * 2),
        "%".join(["9**2000", "7**2000"] * 90),
        "**".join("9" * 190),
    ],
)
def test_answers_large_expression_quickly(expression):
    began = time.process_time()
    answer(expression)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("digits", [2, 1000])
def test_calculates_products_of_tasks(digits):
    config = task_sources.TaskConfig(kind="products", size=20, digits=digits)
    for product_task in task_sources.tasks(config):
        expression = product_task.messages[0]["content"].removesuffix("?")
        call = ToolCall("calculate", {"expression": expression}, None, "")
        assert asyncio.run(BOX(product_task, call)) == product_task.data["answer"]


def test_answers_as_in_synthetic_conversations():
    """Covers right calls and mistakes, but no arguments that are not an object, because parsing a call gives objects."""
    config = chat_tasks.ChatTaskConfig(kind="tools", size=200, mistakes=0.5)
    num_checked = 0
    for line in chat_tasks.make_lines(config, "interleaved"):
        chat = json.loads(line)
        for message, result in zip(chat["messages"], chat["messages"][1:]):
            for call in message.get("tool_calls", ()):
                name, arguments = call["name"], call["arguments"]
                wrong = result["content"].startswith("Error")
                if isinstance(arguments, dict) and (wrong or name == "calculate"):
                    assert call_tool(name, arguments, tuple(chat["tools"])) == result["content"]
                    num_checked += 1 + 1000 * wrong
    assert num_checked > 20_000 and num_checked % 1000 > 50


def test_rejects_invalid_arguments_and_unknown_tools():
    assert call_tool("get_order_details", {"order_id": "#W1"}) == "order #W1"
    assert call_tool("calculate", {}) == "Error: calculate needs expression"
    assert call_tool("calculate", {"expression": "1", "x": 2}) == "Error: calculate has no x"
    assert call_tool("calculate", {"expression": "1"}, ()) == "Error: no tool calculate"
    assert call_tool("calculate", {"expression": "1"}, problem="it has no end").endswith("no end")


def test_rejects_tools_without_implementation():
    tools = [tool for tool in SHOP if tool["function"]["name"] == "calculate"]
    Toolbox({"calculate": calculate}, [task(tools)])
    with pytest.raises(
        ValueError, match="'t' offers 'get_order_details', which is not implemented"
    ):
        Toolbox({"calculate": calculate}, [task(())] + [task()])
