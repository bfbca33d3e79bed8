"""Tests calls in replies: only complete calls are reported as calls, and stop texts end content, not reasoning."""

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
COMPLETE = "<tool_call>sh<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>"
CUT = "<tool_call>sh<arg_key>cmd</arg_key><arg_value>rm -r /tmp/scr"
TWICE = COMPLETE.replace(
    "</tool_call>", "<arg_key>cmd</arg_key><arg_value>rm</arg_value></tool_call>"
)


def choice(text, **fields):
    """Returns the choice that a reply becomes, which is the same in a stream of single tokens."""
    body = {"messages": [USER], "tools": [TOOL], **fields}
    parsed = READER.chat(body, 0)
    ids = TOKENIZER.encode(text, parse_special=True)
    sampling = parsed.requests[0].sampling
    stops, count, end = StopChecker(sampling, len(ids), TOKENIZER.eos_ids, TOKENIZER), 0, None
    while end is None:
        end = stops.feed(ids[count])
        count += 1
    tokens = [Token(i, -0.5, 0, ()) for i in ids[:count]]
    complete, streamed = Handle(parsed.requests[0]), Handle(parsed.requests[0])
    complete.append_output(tokens, *end)
    [result] = Chats(parsed, [complete], Origin("m", 0), TOKENIZER).complete()["choices"]
    form, chunks = Chats(parsed, [streamed], Origin("m", 0), TOKENIZER), []
    for i, token in enumerate(tokens):
        streamed.append_output([token], *(end if i == count - 1 else [None]))
        chunks += [chunk["choices"][0] for chunk in form.piece(0)]
    assert chunks[-1]["finish_reason"] == result["finish_reason"]
    for name in ("content", "reasoning_content"):
        pieces = "".join(chunk["delta"].get(name) or "" for chunk in chunks)
        assert pieces == (result["message"].get(name) or "")
    calls = [call["function"] for c in chunks for call in c["delta"].get("tool_calls", ())]
    assert calls == [call["function"] for call in result["message"].get("tool_calls", ())]
    return result


def arguments(result):
    return [call["function"]["arguments"] for call in result["message"]["tool_calls"]]


@pytest.mark.parametrize(
    ("text", "written", "reason", "fields"),
    [
        (CUT, CUT, "length", {}),
        (f"{CUT}<|observation|>", CUT, "stop", {}),
        (f"{CUT} END more", f"{CUT} END", "stop", {"stop": "END"}),
        (f"{TWICE}<|observation|>", TWICE, "stop", {}),
        (
            f"{COMPLETE.replace('sh', 'rm')}<|observation|>",
            COMPLETE.replace("sh", "rm"),
            "stop",
            {},
        ),
    ],
)
def test_returns_raw_text_of_broken_call(text, written, reason, fields):
    result = choice(f"I look.</think>{text}", **fields)
    assert result["finish_reason"] == reason and arguments(result) == [written]
    with pytest.raises(ValueError):
        json.loads(written)


def test_finishes_with_tool_calls_only_if_all_are_complete():
    complete = choice(f"</think>{COMPLETE}{COMPLETE}<|observation|>")
    assert complete["finish_reason"] == "tool_calls"
    assert arguments(complete) == ['{"cmd": "ls"}'] * 2
    mixed = choice(f"</think>{COMPLETE}{TWICE}<|observation|>")
    assert mixed["finish_reason"] == "stop" and arguments(mixed) == ['{"cmd": "ls"}', TWICE]


def test_returns_call_without_complete_name_as_content():
    result = choice("</think><tool_call>s")
    assert result["message"] == {"role": "assistant", "content": "<tool_call>s"}
    assert result["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_returns_no_call_if_calls_are_disabled(fields):
    result = choice(f"</think>Well.{COMPLETE}<|observation|>", **fields)
    assert result["finish_reason"] == "stop" and "tool_calls" not in result["message"]
    assert result["message"]["content"] == f"Well.{COMPLETE}"


def test_does_not_stop_in_reasoning():
    reasoning = "I am to say END at last."
    result = choice(f"{reasoning}</think>The answer is 4. END, so", stop=["END"])
    assert result["message"]["reasoning_content"] == reasoning
    assert result["message"]["content"] == "The answer is 4. " and result["finish_reason"] == "stop"


def test_does_not_stop_at_blanks_before_content():
    result = choice("a\n\nb</think>\n\nFour.\n\nFive.<|user|>", stop=["\n\n"])
    assert result["message"]["reasoning_content"] == "a\n\nb"
    assert result["message"]["content"] == "Four."


def test_stops_anywhere_without_thinking():
    result = choice("so END</think>4<|user|>", stop=["END"], thinking={"type": "disabled"})
    assert result["message"]["content"] == "so " and result["finish_reason"] == "stop"


def test_stops_anywhere_in_completion():
    [request] = READER.completion({"prompt": "x", "stop": ["END"]}, 0).requests
    assert request.sampling.stop_after is None
