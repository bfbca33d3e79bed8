"""Calls that are cut off or cannot be parsed: nobody can take one for a whole call, and its text is kept."""

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
    """Parses a reply whole, and piece by piece, which must be the same."""
    whole = TOKENIZER.encode(text, parse_special=True) if as_ids else text
    options = {"tokenizer": TOKENIZER if as_ids else None, "thinking": False}
    reply = parse_reply(whole, tools, **options)
    parser = ReplyParser(tools, **options)
    for at in range(len(whole)):
        parser.feed(whole[at : at + 1])
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
def test_passes_on_a_broken_call_as_it_was_written(text, problem, as_ids):
    reply = parse(text, as_ids=as_ids)
    [call] = reply.tool_calls
    assert problem in call.problem and problem in reply.problem
    written = text.removesuffix("<|observation|>")
    assert call.raw_text == call.function["arguments"] == written and reply.content == ""
    assert call.function["name"] == ("rm" if "rm'" in problem else "sh")
    with pytest.raises(ValueError):
        json.loads(call.function["arguments"])
    # What comes back is laid out again as it was written.
    chat = [{"role": "user", "content": "?"}, reply.message]
    assert written in render_chat(chat, add_generation_prompt=False).text


@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call>s", "<tool_call>sh", "<tool_call></tool_call>"])  # fmt: skip
def test_takes_a_call_without_a_whole_name_for_content(text):
    reply = parse(f"I look. {text}")
    assert reply.tool_calls == () and reply.content == f"I look. {text}" and not reply.problem


def test_does_not_run_a_marker_in_a_wrong_place_into_the_name():
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
def test_reads_a_marker_within_a_value_as_text(value, as_ids):
    for behind in ("", argument("cwd", ".")):
        text = f"<tool_call>sh{argument('cmd', value)}{behind}</tool_call><|observation|>"
        reply = parse(text, as_ids=as_ids)
        [call] = reply.tool_calls
        assert call.problem is None and call.arguments["cmd"] == value
        assert len(call.arguments) == 1 + bool(behind) and reply.stopped_by == "<|observation|>"


def test_ends_a_turn_at_a_marker_that_is_the_last_within_a_value():
    reply = parse("<tool_call>edit<arg_key>text</arg_key><arg_value>ask <|user|>")
    assert reply.stopped_by == "<|user|>" and reply.problem == "the call has no </tool_call>"


@pytest.mark.parametrize("tools", [None, []])
def test_reads_no_call_without_tools(tools):
    call = f"<tool_call>sh{argument('cmd', 'ls')}</tool_call>"
    reply = parse(f"Well.{call}<|observation|>", tools=tools)
    assert reply.tool_calls == () and reply.content == f"Well.{call}"


def test_leaves_python_literals_as_text():
    """They are no JSON; to guess at them would make other values of what some schema means as text."""
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "boolean"}}}}]
    [call] = parse(f"<tool_call>f{argument('a', 'True')}</tool_call>", tools=tools).tool_calls
    assert call.arguments == {"a": "True"}
