"""Tests that messages are read into one form, with results sorted by their calls and no field dropped silently."""

import time

import pytest

from glm5_jax.text.chat import render_chat
from glm5_jax.text.messages import ChatError, read_message, read_messages, read_tools

QUESTION = {"role": "user", "content": "Weather?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": id_, "type": "function", "function": {"name": "look", "arguments": f'{{"n": {n}}}'}}
        for n, id_ in enumerate(("a", "b", "c"))
    ],
}


def result(text, id_=None):
    return {"role": "tool", "content": text} | ({"tool_call_id": id_} if id_ else {})


def results_of(*results):
    """Returns the results in the order in which a chat shows them."""
    return [m["content"] for m in read_messages([QUESTION, CALLS, *results]) if m["role"] == "tool"]


@pytest.mark.parametrize(
    "results",
    [
        [result("0", "a"), result("1", "b"), result("2", "c")],
        [result("2", "c"), result("0", "a"), result("1", "b")],
        [result("1", "b"), result("0"), result("2")],
        [result("0"), result("2", "c"), result("1")],
        [result("0"), result("1"), result("2")],
    ],
)
def test_sorts_results_by_calls(results):
    assert results_of(*results) == ["0", "1", "2"]
    shown = render_chat([QUESTION, CALLS, *results]).text
    assert shown == render_chat([QUESTION, CALLS, result("0"), result("1"), result("2")]).text


def test_accepts_results_of_first_calls_only():
    assert results_of(result("1", "b"), result("0", "a")) == ["0", "1"]


def test_pairs_equal_ids_in_order():
    call = {"id": "x", "name": "look", "arguments": {}}
    results = [result("0", "x"), result("1", "x")]
    read = read_messages([QUESTION, {"role": "assistant", "tool_calls": [call, call]}, *results])
    assert [m["content"] for m in read[2:]] == ["0", "1"]


@pytest.mark.parametrize(
    ("results", "expected_error"),
    [
        ([result("9", "z")], "message 2 is the result of no call 'z'"),
        ([result("0", "a"), result("9", "a")], "message 3 is a second result of call 'a'"),
        ([result("2", "c")], "no result of call 'a', but one of a later call"),
        ([result("0", "a"), result("2", "c")], "no result of call 'b', but one of a later call"),
        ([result("0")] * 4, "message 5 is a tool's result with more results than calls"),
        ([{**result("0"), "tool_call_id": 7}], "message 2 has tool_call_id 7; it must be text"),
    ],
)
def test_rejects_results_without_matching_call(results, expected_error):
    with pytest.raises(ChatError, match=expected_error):
        read_messages([QUESTION, CALLS, *results])


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (
            {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "assistant", "content": "4", "reasoning": "2+2"},
            {"role": "assistant", "content": "4", "reasoning_content": "2+2"},
        ),
        (
            {"role": "assistant", "content": "4", "reasoning": "r", "reasoning_content": "r"},
            {"role": "assistant", "content": "4", "reasoning_content": "r"},
        ),
        # SDKs fill in fields that they do not use and that no layout shows.
        (
            {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}
            | {"function_call": None, "tool_calls": [], "provider": {"refusal": None}},
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "user", "name": "ann", "content": "x", "cache_control": {"type": "ephemeral"}},
            {"role": "user", "content": "x"},
        ),
    ],
)
def test_normalizes_equivalent_messages(message, same):
    assert read_message(message) == read_message(same) == same
    assert read_messages([message, QUESTION])[0] == same


def test_keeps_reasoning_under_either_name():
    for name in ("reasoning", "reasoning_content"):
        reply = {"role": "assistant", "content": "4", name: "two and two"}
        shown = render_chat([QUESTION, reply, QUESTION], clear_thinking=False).text
        assert "<think>two and two</think>4" in shown


def test_reading_is_idempotent():
    broken = {"name": "look", "arguments": "<tool_call>look<arg_key>n"}
    reply = {"role": "assistant", "content": "<think>r</think>x", "tool_calls": [broken]}
    read = read_messages([QUESTION, CALLS, result("1", "b"), result("0", "a"), reply, result("e")])
    assert read_messages(read) == read
    assert read[4] == {"role": "assistant", "content": "x", "reasoning_content": "r"} | {
        "tool_calls": [broken]
    }


@pytest.mark.parametrize(
    ("message", "expected_error"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "reads text only"),
        ({"role": "tool", "content": [{"type": "tool_reference"}]}, "part of type 'tool_reference'"),
        ({"role": "user", "content": [{"type": "text"}]}, "text part whose text is None"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]},
            "a part with the field 'colour', which no chat shows; leave it out",
        ),
        ({"role": "user", "content": "x", "colour": "red"}, "has the field 'colour', which no chat"),
        ({"role": "user", "content": "x", "reasoning": "r"}, "of role 'user' has the field 'reasoning'"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "has the field 'tool_call_id'"),
        ({"role": "assistant", "thinking": "r"}, "has thinking, which would be lost; call it"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "give it as tool_calls"),
        ({"role": "assistant", "reasoning": 5}, "has reasoning 5; it must be text"),
        (
            {"role": "assistant", "reasoning": "r", "reasoning_content": "s"},
            "reasoning_content and reasoning that differ; give one of them",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "name": "f"}]},
            "calls 'f' with type 'custom'; use 'function'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "input": "x"}]},
            "calls 'f' with the field 'input', which no chat shows",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "id": 7}]},
            "a call of message 0 has id 7; it must be text",
        ),
    ],
)  # fmt: skip
def test_rejects_fields_that_layouts_omit(message, expected_error):
    with pytest.raises(ChatError, match=expected_error):
        read_message(message)


def test_rejects_tools_with_equal_names():
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(ChatError, match="two tools are named 'f'; rename or remove one"):
        read_tools([tool, tool["function"]])


def test_sorts_many_results_in_linear_time():
    count = 20_000
    calls = [{"id": f"c{i}", "name": "f", "arguments": {}} for i in range(count)]
    results = [result(str(i), f"c{i}") for i in reversed(range(count))]
    began = time.process_time()
    read = read_messages([QUESTION, {"role": "assistant", "tool_calls": calls}, *results])
    assert [m["content"] for m in read[2:]] == list(map(str, range(count)))
    assert time.process_time() - began < 5
