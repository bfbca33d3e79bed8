"""Tests messages and tools in chat bodies: equivalent bodies give the same prompt, and lost content gives a 400."""

import pytest

from glm5_jax.inference.protocol import Reader
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
READER = Reader(TOKENIZER, model="m")
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look"}}
CALLS = [
    {"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in "ab"
]


def prompt(*messages, **fields):
    [request] = READER.chat({"messages": list(messages), **fields}, 0).requests
    return TOKENIZER.decode(request.ids)


def result(id_, text):
    return {"role": "tool", "tool_call_id": id_, "content": text}


def test_renders_results_in_order_of_calls():
    before = USER, {"role": "assistant", "tool_calls": CALLS}
    text = prompt(*before, result("b", "Rome"), result("a", "Oslo"))
    assert text == prompt(*before, result("a", "Oslo"), result("b", "Rome"))
    assert text.index("Oslo") < text.index("Rome")


def test_reads_developer_as_system():
    brief = {"content": "Be brief."}
    assert prompt(brief | {"role": "developer"}, USER) == prompt(brief | {"role": "system"}, USER)


def test_keeps_reasoning_under_other_name():
    reply = {"role": "assistant", "content": "4", "reasoning": "two and two"}
    text = prompt(USER, reply, USER, thinking={"clear_thinking": False})
    assert "<think>two and two</think>4" in text


def test_reads_broken_call_of_earlier_reply():
    written = "<tool_call>look<arg_key>n</arg_key><arg_value>1"
    call = {**CALLS[0], "function": {"name": "look", "arguments": written}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = prompt(USER, reply, result("a", "Error: no JSON"), tools=[TOOL])
    assert f"{written}<|observation|><tool_response>Error" in text
    # Markers in a client's text are encoded as text.
    [request] = READER.chat({"messages": [USER, reply, result("a", "x")]}, 0).requests
    assert TOKENIZER.special_ids["<arg_key>"] not in request.ids


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}], ids=str
)
def test_accepts_single_calls_without_tools(fields):
    assert prompt(USER, parallel_tool_calls=False, **fields) == prompt(USER)


def test_ends_reply_after_single_call():
    assert "look" in prompt(USER, tools=[TOOL], parallel_tool_calls=False)
    for thinking, after in (("enabled", TOKENIZER.special_ids["</think>"]), ("disabled", None)):
        fields = {"tools": [TOOL], "thinking": {"type": thinking}, "parallel_tool_calls": False}
        [request] = READER.chat({"messages": [USER], **fields}, 0).requests
        sampling = request.sampling
        assert sampling.late_stop_ids == (TOKENIZER.special_ids["</tool_call>"],)
        assert (sampling.stop_after, sampling.stop) == (after, ())


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_shows_or_forces_allowed_tools(mode):
    other = {"type": "function", "function": {"name": "find"}}
    entry = {"type": "function", "function": {"name": "look"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [entry]}}
    body = {"messages": [USER], "tools": [TOOL, other], "tool_choice": choice}
    parsed = READER.chat(body, 0)
    names = [tool["function"]["name"] for tool in parsed.tools]
    rules = parsed.requests[0].rules
    if mode == "auto":
        assert names == ["look"] and rules is None
    else:
        assert names == ["look", "find"] and "find" not in rules.grammar.source


def test_continues_final_message():
    partial = {"role": "assistant", "content": "To be, "}
    fields = {"messages": [USER, partial], "continue_final_message": True}
    parsed = READER.chat(fields, 0)
    assert not parsed.thinking
    text = TOKENIZER.decode(parsed.requests[0].ids)
    assert text.endswith("<|assistant|></think>To be, ")
    partial_reasoning = {"role": "assistant", "content": "", "reasoning_content": "I am"}
    parsed = READER.chat(fields | {"messages": [USER, partial_reasoning]}, 0)
    assert parsed.thinking and TOKENIZER.decode(parsed.requests[0].ids).endswith("<think>I am")


def test_ignores_neutral_unknown_fields_and_logs_them_once(caplog):
    fields = {"guided_json": None, "use_wings": False, "wings": [], "stream_options": {"x": ""}}
    for _ in range(2):
        assert prompt(USER, **fields) == prompt(USER)
    names = [record.args[0] for record in caplog.records]
    assert sorted(names) == ["guided_json", "stream_options.x", "use_wings", "wings"]
    with pytest.raises(ApiError, match="use_wings: no such field"):
        prompt(USER, use_wings=True)


@pytest.mark.parametrize(
    ("messages", "expected_error"),
    [
        ([{**USER, "colour": "red"}], "the field 'colour', which no chat shows; leave it out"),
        ([USER, {"role": "assistant", "content": "4", "thinking": "r"}], "has thinking, which would"),
        ([USER, {"role": "assistant", "tool_calls": CALLS}, result("z", "?")], "of no call 'z'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "type 'input_audio'"),
    ],
)  # fmt: skip
def test_rejects_fields_that_prompt_would_not_show(messages, expected_error):
    with pytest.raises(ApiError, match=expected_error) as caught:
        prompt(*messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")
