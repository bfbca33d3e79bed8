"""Calls in answers: whole ones alone are told as such, and stop texts end content, not thoughts."""

import json

import pytest

from glm5_jax.inference.protocol import Reader
from glm5_jax.inference.replies import Chats, Origin
from glm5_jax.inference.request import Handle, Token
from glm5_jax.inference.stop_checker import StopChecker
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
READER = Reader(TOKENIZER, model="m")
TOOL = {
    "type": "function",
    "function": {"name": "sh", "parameters": {"properties": {"cmd": {"type": "string"}}}},
}
USER = {"role": "user", "content": "hi"}
WHOLE = "<tool_call>sh<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>"
CUT = "<tool_call>sh<arg_key>cmd</arg_key><arg_value>rm -r /tmp/scr"
TWICE = WHOLE.replace("</tool_call>", "<arg_key>cmd</arg_key><arg_value>rm</arg_value></tool_call>")


def choice(text, **fields):
    """Returns the choice that a reply becomes, which is the same in a stream of single tokens."""
    body = {"messages": [USER], "tools": [TOOL], **fields}
    asked = READER.chat(body, 0)
    ids = TOKENIZER.encode(text, parse_special=True)
    sampling = asked.requests[0].sampling
    stops, count, end = StopChecker(sampling, len(ids), TOKENIZER.eos_ids, TOKENIZER), 0, None
    while end is None:
        end = stops.feed(ids[count])
        count += 1
    tokens = [Token(i, -0.5, 0, ()) for i in ids[:count]]
    whole, streamed = Handle(asked.requests[0]), Handle(asked.requests[0])
    whole.append_output(tokens, *end)
    [told] = Chats(asked, [whole], Origin("m", 0), TOKENIZER).complete()["choices"]
    form, chunks = Chats(asked, [streamed], Origin("m", 0), TOKENIZER), []
    for i, token in enumerate(tokens):
        streamed.append_output([token], *(end if i == count - 1 else [None]))
        chunks += [chunk["choices"][0] for chunk in form.piece(0)]
    assert chunks[-1]["finish_reason"] == told["finish_reason"]
    for name in ("content", "reasoning_content"):
        pieces = "".join(chunk["delta"].get(name) or "" for chunk in chunks)
        assert pieces == (told["message"].get(name) or "")
    calls = [call["function"] for c in chunks for call in c["delta"].get("tool_calls", ())]
    assert calls == [call["function"] for call in told["message"].get("tool_calls", ())]
    return told


def arguments(told):
    return [call["function"]["arguments"] for call in told["message"]["tool_calls"]]


@pytest.mark.parametrize(
    ("text", "written", "reason", "fields"),
    [
        (CUT, CUT, "length", {}),
        (f"{CUT}<|observation|>", CUT, "stop", {}),
        (f"{CUT} END more", f"{CUT} END", "stop", {"stop": "END"}),
        (f"{TWICE}<|observation|>", TWICE, "stop", {}),
        (f"{WHOLE.replace('sh', 'rm')}<|observation|>", WHOLE.replace("sh", "rm"), "stop", {}),
    ],
)
def test_gives_a_broken_call_as_it_was_written(text, written, reason, fields):
    told = choice(f"I look.</think>{text}", **fields)
    assert told["finish_reason"] == reason and arguments(told) == [written]
    with pytest.raises(ValueError):
        json.loads(written)


def test_says_tool_calls_only_if_all_are_whole():
    whole = choice(f"</think>{WHOLE}{WHOLE}<|observation|>")
    assert whole["finish_reason"] == "tool_calls"
    assert arguments(whole) == ['{"cmd": "ls"}'] * 2
    mixed = choice(f"</think>{WHOLE}{TWICE}<|observation|>")
    assert mixed["finish_reason"] == "stop" and arguments(mixed) == ['{"cmd": "ls"}', TWICE]


def test_gives_a_call_without_a_whole_name_as_content():
    told = choice("</think><tool_call>s")
    assert told["message"] == {"role": "assistant", "content": "<tool_call>s"}
    assert told["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_gives_no_call_where_none_may_be_made(fields):
    told = choice(f"</think>Well.{WHOLE}<|observation|>", **fields)
    assert told["finish_reason"] == "stop" and "tool_calls" not in told["message"]
    assert told["message"]["content"] == f"Well.{WHOLE}"


def test_does_not_stop_at_a_text_that_is_thought_of():
    thought = "I am to say END at last."
    told = choice(f"{thought}</think>The answer is 4. END, so", stop=["END"])
    assert told["message"]["reasoning_content"] == thought
    assert told["message"]["content"] == "The answer is 4. " and told["finish_reason"] == "stop"


def test_does_not_stop_at_the_blanks_before_the_content():
    told = choice("a\n\nb</think>\n\nFour.\n\nFive.<|user|>", stop=["\n\n"])
    assert told["message"]["reasoning_content"] == "a\n\nb"
    assert told["message"]["content"] == "Four."


def test_stops_anywhere_in_a_reply_without_thinking():
    told = choice("so END</think>4<|user|>", stop=["END"], thinking={"type": "disabled"})
    assert told["message"]["content"] == "so " and told["finish_reason"] == "stop"


def test_stops_anywhere_in_a_completion():
    [request] = READER.completion({"prompt": "x", "stop": ["END"]}, 0).requests
    assert request.sampling.stop_after is None
