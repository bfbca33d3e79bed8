"""Tests that calls that are cut off or cannot be parsed keep their text and are never taken for complete calls."""

import json

import pytest

from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import ReplyParser, parse_reply

TOKENIZER = Tokenizer.default()
TOOLS = [
    {
        "name": "sh",
        "parameters": {"properties": {"cmd": {"type": "string"}, "cwd": {"type": "string"}}},
    },
    {"name": "edit", "parameters": {"properties": {"text": {"type": "string"}}}},
]


def argument(key, value):
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def parse(text, tools=TOOLS, as_ids=False):
    """Parses a reply in one piece and token by token, and checks that the results are equal."""
    source = TOKENIZER.encode(text, parse_special=True) if as_ids else text
    options = {"tokenizer": TOKENIZER if as_ids else None, "thinking": False}
    reply = parse_reply(source, tools, **options)
    parser = ReplyParser(tools, **options)
    for at in range(len(source)):
        parser.feed(source[at : at + 1])
    assert parser.close() == reply
    return reply


CUT = f"<tool_call>sh{argument('cmd', 'rm -r build')}<arg_key>cwd</arg_key><arg_value>/tmp/scr"
BROKEN = [
    (CUT, "the call has no </tool_call>"),
    (CUT + "<|observation|>", "the call has no </tool_call>"),
    (f"<tool_call>sh{argument('cmd', 'ls')}", "the call has no </tool_call>"),
    (f"<tool_call>sh{argument('cmd', 'ls')}{argument('cmd', 'rm -r /')}</tool_call>", "given twice"),
    ("<tool_call>sh<arg_key>cmd</arg_key></tool_call>", "ends after a key"),
    (f"<tool_call>sh<arg_key>cmd</arg_key>x{argument('cwd', '.')}</tool_call>", "text stands after a key"),
    ("<tool_call>sh<tool_call>cmd</arg_key><arg_value>ls</arg_value></tool_call>", "inside the name"),
    (f"<tool_call>rm{argument('cmd', 'ls')}</tool_call>", "no tool is named 'rm'; there are sh, edit"),
]  # fmt: skip


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(("text", "problem"), BROKEN)
def test_keeps_raw_text_of_broken_call(text, problem, as_ids):
    reply = parse(text, as_ids=as_ids)
    [call] = reply.tool_calls
    assert problem in call.problem and problem in reply.problem
    written = text.removesuffix("<|observation|>")
    assert call.raw_text == call.function["arguments"] == written and reply.content == ""
    assert call.function["name"] == ("rm" if "rm'" in problem else "sh")
    with pytest.raises(ValueError):
        json.loads(call.function["arguments"])
    # Rendering the message again gives the text that the model wrote.
    chat = [{"role": "user", "content": "?"}, reply.message]
    assert written in render_chat(chat, add_generation_prompt=False).text


@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call>s", "<tool_call>sh", "<tool_call></tool_call>"])  # fmt: skip
def test_reads_call_without_complete_name_as_content(text):
    reply = parse(f"I look. {text}")
    assert reply.tool_calls == () and reply.content == f"I look. {text}" and not reply.problem


def test_excludes_misplaced_marker_from_name():
    text = "<tool_call>sh<tool_call>cmd</arg_key><arg_value>ls</arg_value></tool_call>"
    [call] = parse(text).tool_calls
    assert call.name == "sh" and call.arguments == {}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        "if s.endswith('</tool_call>'): pass",
        "a = '</arg_value>'",
        "a</arg_value></arg_value> b",
        "ask(<|user|>)",
        "<|observation|>x</arg_value> <|user|> y",
        "<tool_call>sh<arg_key>cmd</arg_key>",
        "<think></think>",
    ],
)
def test_reads_marker_within_value_as_text(value, as_ids):
    for suffix in ("", argument("cwd", ".")):
        text = f"<tool_call>sh{argument('cmd', value)}{suffix}</tool_call><|observation|>"
        reply = parse(text, as_ids=as_ids)
        [call] = reply.tool_calls
        assert call.problem is None and call.arguments["cmd"] == value
        assert len(call.arguments) == 1 + bool(suffix) and reply.stopped_by == "<|observation|>"


def test_ends_turn_at_last_marker_of_open_value():
    reply = parse("<tool_call>edit<arg_key>text</arg_key><arg_value>ask <|user|>")
    assert reply.stopped_by == "<|user|>" and reply.problem == "the call has no </tool_call>"


@pytest.mark.parametrize("tools", [None, []])
def test_reads_call_without_tools_as_content(tools):
    call = f"<tool_call>sh{argument('cmd', 'ls')}</tool_call>"
    reply = parse(f"Well.{call}<|observation|>", tools=tools)
    assert reply.tool_calls == () and reply.content == f"Well.{call}"


def test_keeps_python_literals_as_text():
    """They are not JSON, and guessing would change values that a schema means as text."""
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "boolean"}}}}]
    [call] = parse(f"<tool_call>f{argument('a', 'True')}</tool_call>", tools=tools).tool_calls
    assert call.arguments == {"a": "True"}
