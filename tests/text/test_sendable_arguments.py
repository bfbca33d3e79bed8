"""Tests that arguments that JSON cannot hold are rejected from clients and stay text from a model."""

import pytest

from glm5_jax.text.chat import render_chat
from glm5_jax.text.messages import ChatError
from glm5_jax.text.tool_calls import parse_reply

LOOK = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_rejects_numbers_outside_json(number):
    function = {"name": "look", "arguments": f'{{"a": [{number}]}}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    with pytest.raises(ChatError, match="message 1 calls 'look' with 'a' that is not JSON"):
        render_chat(chat)


@pytest.mark.parametrize("text", ['"\\ud800"', '{"a": ["\\udfff"]}', '{"\\ud83d": 1}'])
def test_keeps_half_surrogate_pair_as_text(text):
    """A server would send another character instead, so its arguments would differ from those in process."""
    reply = f"<tool_call>look<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    [call] = parse_reply(reply, [LOOK], thinking=False).tool_calls
    assert call.arguments == {"a": text} and call.problem is None


def test_reads_complete_surrogate_pair():
    text = '["\\ud83e\\udd99"]'
    reply = f"<tool_call>look<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    [call] = parse_reply(reply, [LOOK], thinking=False).tool_calls
    assert call.arguments == {"a": ["🦙"]}
