"""Tests that lines in ShareGPT's form, of prompts with completions and in Alpaca's form are read as messages."""

import json

import pytest

from glm5_jax.data.conversation import parse_line, unread_fields
from glm5_jax.text.messages import ChatError

USER, REPLY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
EXPECTED = parse_line({"messages": [SYSTEM, USER, REPLY]})
TOOL = {"name": "find", "parameters": {"properties": {"text": {"type": "string"}}}}


@pytest.mark.parametrize(
    "line",
    [
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"system": "S", "conversations": [{"from": "user", "value": "Q"}, {"from": "assistant", "value": "A"}]},
        {"conversations": [SYSTEM, USER, REPLY]},
        {"prompt": [SYSTEM, USER], "completion": [REPLY]},
        {"prompt": [SYSTEM, USER], "completion": "A"},
        {"system": "S", "instruction": "Q", "output": "A"},
        {"system": "S", "instruction": "Q", "input": "", "output": "A", "history": []},
    ],
)  # fmt: skip
def test_reads_other_forms(line):
    assert parse_line(line) == parse_line(json.dumps(line)) == EXPECTED
    assert unread_fields(line) == []


def test_reads_calls_of_sharegpt():
    call = {"name": "find", "arguments": {"text": "x"}}
    line = {
        "tools": json.dumps([TOOL]),
        "mode": "preserved",
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "found"},
            {"from": "gpt", "value": "A", "weight": 0},
        ],
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "found"},
        REPLY | {"weight": 0},
    ]
    expected = parse_line({"messages": messages, "tools": [TOOL], "mode": "preserved"})
    assert parse_line(line) == expected
    assert list(expected.mistakes) == [3]


def test_masks_replies_of_prompt():
    turns = [USER, REPLY, USER]
    assert list(parse_line({"prompt": turns, "completion": "B"}).mistakes) == [1]


def test_joins_instruction_and_input():
    line = {"instruction": "I", "input": "x", "output": "A", "history": [["Q", "B"]], "id": 1}
    contents = [message["content"] for message in parse_line(line).messages]
    assert contents == ["Q", "B", "I\nx", "A"]
    assert unread_fields(line) == ["id"]


@pytest.mark.parametrize(
    ("line", "expected_error"),
    [
        ({"text": "x"}, "it has text; give messages, or conversations; prompt and completion"),
        ({"conversations": "x"}, "conversations is of type str; give a list"),
        ({"conversations": [{"from": "bard", "value": "x"}]}, "turn 0 is from 'bard'; use one of system, human"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "turn 0 is from ['gpt']"),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt"}]}, "message 1, an assistant's, is empty"),
        ({"conversations": [{"from": "function_call", "value": "find("}]}, "turn 0, a function_call, is not JSON"),
        ({"conversations": [{"from": "human", "value": "Q"}], "tools": "find"}, "tools is not JSON"),
        ({"prompt": 1, "completion": "A"}, "prompt is of type int; give a text or messages"),
        ({"instruction": "Q", "output": 3}, "instruction, input and output must be texts"),
        ({"instruction": "Q", "output": "A", "history": ["Q"]}, "history is no list of pairs"),
    ],
)  # fmt: skip
def test_rejects_wrong_form(line, expected_error):
    with pytest.raises(ChatError) as error:
        parse_line(line)
    assert expected_error in str(error.value)
