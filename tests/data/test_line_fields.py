"""Tests that fields of conversation lines are read as a server reads them, and that unread fields are reported."""

import json
import time

import pytest

from glm5_jax.data.conversation import parse_line, read_json, unread_fields
from glm5_jax.text.chat import render_chat
from glm5_jax.text.messages import ChatError

QUESTION, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
TOOL = {"name": "find", "parameters": {"properties": {"text": {"type": "string"}}}}


def test_trains_on_prompt_of_server():
    calls = [{"id": i, "function": {"name": "find", "arguments": {"text": i}}} for i in "ab"]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        QUESTION,
        {"role": "assistant", "reasoning": "two", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        ANSWER,
    ]
    read = parse_line({"messages": messages, "tools": [TOOL]})
    assert not read.mistakes
    for options in ({}, {"clear_thinking": False}):
        shown = render_chat(read.messages, tools=[TOOL], **options).text
        assert shown == render_chat(messages, tools=[TOOL], **options).text
    assert "<tool_response>A</tool_response><tool_response>B</tool_response>" in shown


def test_reports_unread_fields():
    line = {"messages": [QUESTION | {"colour": "red"}, ANSWER | {"scores": [1]}], "id": 7}
    assert parse_line(line) == parse_line({"messages": [QUESTION, ANSWER]})
    assert unread_fields(line) == ["id", "messages.colour", "messages.scores"]
    known = {"messages": [QUESTION | {"name": "ann"}, ANSWER | {"reasoning": "R", "weight": 1}]}
    assert unread_fields(known) == []


def test_masks_call_that_was_broken_when_written():
    written = "<tool_call>find<arg_key>text"
    call = {"function": {"name": "find", "arguments": written}}
    messages = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
    read = parse_line({"messages": messages, "tools": [TOOL]})
    assert list(read.mistakes) == [1] and "cannot be parsed" in read.mistakes[1]
    assert written in render_chat(read.messages).text


@pytest.mark.parametrize("count", [20_000, 40_000])
def test_rejects_repeated_field_in_linear_time(count):
    fields = [f'"f{i}": {i}' for i in range(count)]
    line = "{" + ", ".join([*fields, f'"f{count - 1}": 0']) + "}"
    began = time.process_time()
    with pytest.raises(ChatError, match=f"the field 'f{count - 1}' twice"):
        read_json(line)
    assert time.process_time() - began < 2


def test_reads_long_chat_in_linear_time():
    line = json.dumps({"messages": [QUESTION, ANSWER] * 10_000})
    began = time.process_time()
    assert len(parse_line(line).messages) == 20_000
    assert time.process_time() - began < 3
