"""Tests lines of conversations: the trained tokens, mistakes kept in the context without loss, and rejected lines."""

import json
import socketserver

import numpy as np
import pytest

from glm5_jax.data.conversation import make_records, parse_line
from glm5_jax.text.messages import ChatError
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["text"],
        },
    },
}


def calls(name="find", arguments='{"text": "x"}', **more):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "reasoning_content": "think", "tool_calls": [call], **more}


def line(*middle, tools=(TOOL,), **more):
    """Returns a line with a user's message, the assistant's steps with results, and an answer."""
    steps = [m for step in middle for m in (step, {"role": "tool", "content": "result"})]
    messages = [{"role": "user", "content": "Q"}, *steps, {"role": "assistant", "content": "A"}]
    return json.dumps({"messages": messages, "tools": list(tools), **more})


def trained_text(record) -> str:
    return TOKENIZER.decode(record.token_ids[record.loss_mask == 1].tolist())


def text(record) -> str:
    return TOKENIZER.decode(record.token_ids.tolist())


def test_masks_loss_to_assistant_tokens():
    [record] = make_records(parse_line(line(calls())), TOKENIZER)
    assert trained_text(record) == (
        "think</think><tool_call>find<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"
        "<|observation|>A<|user|>"
    )
    np.testing.assert_array_equal(record.ce_weight, record.loss_mask)
    assert record.spans == []


@pytest.mark.parametrize(
    ("wrong", "mistake"),
    [
        (calls(arguments='{"text": '), "arguments that are not JSON"),
        (calls(arguments="[1]"), "it must be an object"),
        (calls(name="lose"), "no tool is named 'lose'; there are find"),
        (calls(arguments="{}"), "'text' is a required property"),
        (calls(arguments='{"text": "x", "limit": "many"}'), "'many' is not of type 'integer'"),
        (calls(weight=0), "weight 0"),
        (calls(error="taken back in step 4"), "taken back in step 4"),
    ],
)
def test_keeps_mistake_in_context_without_loss(wrong, mistake):
    conversation = parse_line(line(wrong, calls(arguments='{"text": "right"}')))
    assert list(conversation.mistakes) == [1] and mistake in conversation.mistakes[1]
    [record] = make_records(conversation, TOKENIZER)
    assert trained_text(record) == (
        "think</think><tool_call>find<arg_key>text</arg_key><arg_value>right</arg_value></tool_call>"
        "<|observation|>A<|user|>"
    )
    [(first, last, kind), *_] = record.spans
    assert kind == "error" and not record.loss_mask[first:last].any()
    # Without masking, the tokens of the mistake are trained too.
    [unmasked] = make_records(conversation, TOKENIZER, mask_errors=False)
    assert text(unmasked) == text(record)
    trained = trained_text(unmasked)
    assert trained.count("<tool_call>") == 2 and trained.count("<|observation|>") == 2


def test_renders_unreadable_arguments_as_text():
    [record] = make_records(parse_line(line(calls(arguments='{"text": '))), TOKENIZER)
    assert '<arg_key>arguments</arg_key><arg_value>{"text": </arg_value>' in text(record)


def test_counts_call_without_tools_as_mistake():
    wrong = json.loads(line(calls(name="any", arguments="{}"), tools=()))
    for conversation in (parse_line(wrong), parse_line({"messages": wrong["messages"]})):
        assert conversation.mistakes == {1: "no tool is named 'any'; there are none"}
        [record] = make_records(conversation, TOKENIZER)
        assert trained_text(record) == "A<|user|>"


def test_prefers_mode_of_line():
    two = {
        "messages": [
            {"role": "user", "content": "Q1"},
            {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
            {"role": "user", "content": "Q2"},
            {"role": "assistant", "content": "A2", "reasoning_content": "R2"},
        ]
    }
    first, second = make_records(parse_line(two), TOKENIZER)
    assert (
        trained_text(first) == "R1</think>A1<|user|>"
        and trained_text(second) == "R2</think>A2<|user|>"
    )
    for conversation in (parse_line(two | {"mode": "preserved"}), parse_line(two)):
        [record] = make_records(conversation, TOKENIZER, mode="preserved")
        assert trained_text(record) == "R1</think>A1<|user|>R2</think>A2<|user|>"
    quiet = parse_line(two | {"mode": "turn_level"})
    assert len(make_records(quiet, TOKENIZER, mode="preserved")) == 2


def test_drops_sample_without_trained_tokens():
    wrong = {"role": "assistant", "content": "A", "weight": 0}
    conversation = parse_line({"messages": [{"role": "user", "content": "Q"}, wrong]})
    assert make_records(conversation, TOKENIZER) == []
    assert len(make_records(conversation, TOKENIZER, mask_errors=False)) == 1


QUESTION, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("bad", "expected_error"),
    [
        ("{", "the line is not JSON in UTF-8"),
        (b'{"messages": "\xff"}', "the line is not JSON in UTF-8"),
        ("[]", "the line has no messages; it is of type list"),
        ({"text": "x"}, "the line has no messages; it has text"),
        ({"messages": "x"}, "messages is empty or not a list"),
        ({"messages": [QUESTION], "mode": "deep"}, "mode is 'deep'; use one of interleaved"),
        ({"messages": [{"role": "robot"}]}, "message 0 has role 'robot'"),
        ({"messages": [QUESTION, {"role": "tool", "content": "x"}]}, "message 1 is a tool's result"),
        ({"messages": [QUESTION, {"role": "assistant", "tool_calls": [{}]}]}, "message 1 calls a function"),
        ({"messages": [QUESTION, {"role": "assistant", "tool_calls": ["f"]}]}, "must name a function"),
        ({"messages": [QUESTION, ANSWER | {"weight": 0.5}]}, "message 1 has weight 0.5"),
        ({"messages": [QUESTION, ANSWER | {"error": 1}]}, "message 1 has error 1"),
        ({"messages": [QUESTION], "tools": [{"function": {}}]}, "tool 0 has no name"),
        ({"messages": [QUESTION], "tools": "find"}, "tools is of type str; give a list"),
        ({"messages": [QUESTION], "tools": TOOL}, "tools is of type dict; give a list"),
        ({"messages": [QUESTION], "tools": [TOOL, TOOL]}, "two tools are named 'find'"),
        ({"messages": [QUESTION], "functions": [TOOL["function"]]}, "an older form; give them as tools"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "message 1, an assistant's, is empty"),
        ({"messages": [QUESTION, ANSWER | {"content": " "}]}, "message 1, an assistant's, is empty"),
        (
            {"messages": [QUESTION, ANSWER | {"function_call": {"name": "f"}}]},
            "message 1 has function_call, which would be lost; give it as tool_calls",
        ),
        (
            {"messages": [QUESTION, ANSWER | {"thinking": "R"}]},
            "message 1 has thinking, which would be lost; call it reasoning_content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
            "message 0 has a part of type 'image_url'; this model reads text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "Q"}]}, ANSWER]},
            "message 0 has a part of type 'input_text'; this model reads text only",
        ),
        ({"messages": [QUESTION, ANSWER | {"content": "<think>a</think>b</think>c"}]}, "message 1 would lose"),
        ('{"messages": [], "messages": []}', "has the field 'messages' twice"),
        ('{"messages": [NaN]}', "NaN is not a JSON number"),
        (r'{"messages": [{"role": "user", "content": "x\ud800y"}]}', "half of a surrogate pair"),
        (b'{"messages": "\xed\xa0\x80"}', "the line is not JSON in UTF-8"),
        (
            {"messages": [QUESTION], "tools": [{"name": "f", "parameters": {"$ref": "#/$defs/No"}}]},
            "the parameters of tool 'f' have a dangling or endless reference",
        ),
        (
            {"messages": [QUESTION], "tools": [{"name": "f", "parameters": {"$ref": "#"}}]},
            "the parameters of tool 'f' have a dangling or endless reference",
        ),
        (
            {"messages": [QUESTION], "tools": [{"name": "f", "parameters": {"type": "thing"}}]},
            "tool 0, 'f', has parameters that are not a JSON schema",
        ),
    ],
)  # fmt: skip
def test_rejects_invalid_line(bad, expected_error):
    with pytest.raises(ChatError) as error:
        parse_line(bad)
    assert expected_error in str(error.value)


def test_rejects_conversation_without_reply():
    with pytest.raises(ChatError, match="no message is an assistant's; add a reply"):
        make_records(parse_line({"messages": [QUESTION]}), TOKENIZER)


def test_does_not_fetch_schema_reference():
    """A reference is an error of the line, whether or not a server responds at its address."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        server.timeout = 0.2
        requests = []
        server.process_request = lambda *request: requests.append(request)
        url = f"http://127.0.0.1:{server.server_address[1]}/schema.json"
        tools = [{"name": "f", "parameters": {"$ref": url}}]
        with pytest.raises(ChatError, match="have a dangling or endless reference"):
            parse_line({"messages": [QUESTION, ANSWER], "tools": tools})
        server.handle_request()
    assert not requests


def test_applies_rules_of_older_schema_draft():
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"limit": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}},
    }
    tools = [{"name": "f", "parameters": schema}]
    for limit, wrong in ((1, []), (0, [1])):
        call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"limit": limit}}]}
        assert list(parse_line({"messages": [QUESTION, call], "tools": tools}).mistakes) == wrong


def test_counts_deep_arguments_as_mistake():
    call = {"name": "f", "arguments": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"}
    conversation = parse_line({"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]})
    assert list(conversation.mistakes) == [1]


def two_calls(*results, then=True):
    calls = [{"id": i, "function": {"name": "find", "arguments": {"text": i}}} for i in ("a", "b")]
    messages = [QUESTION, {"role": "assistant", "tool_calls": calls}]
    messages += [
        {"role": "tool", "content": text} | ({"tool_call_id": i} if i else {})
        for i, text in results
    ]
    return {"messages": [*messages, ANSWER] if then else messages, "tools": [TOOL]}


def test_sorts_results_by_calls_in_line():
    conversation = parse_line(two_calls(("b", "TWO"), ("a", "ONE")))
    assert [m["content"] for m in conversation.messages[2:4]] == ["ONE", "TWO"]
    # A result without an id belongs to the remaining call.
    conversation = parse_line(two_calls((None, "TWO"), ("a", "ONE")))
    assert [m["content"] for m in conversation.messages[2:4]] == ["ONE", "TWO"]


@pytest.mark.parametrize(
    ("results", "expected_error"),
    [
        ([("a", "1")], "message 1 makes 2 calls, 1 of which have a result before the next turn"),
        ([], "message 1 makes 2 calls, 0 of which"),
        ([("a", "1"), ("z", "2")], "message 3 is the result of no call 'z'"),
        ([("a", "1"), ("a", "2")], "message 3 is a second result of call 'a'"),
    ],
)
def test_rejects_mismatched_results(results, expected_error):
    with pytest.raises(ChatError) as error:
        parse_line(two_calls(*results))
    assert expected_error in str(error.value)


def test_trains_conversation_that_ends_with_calls():
    [record] = make_records(parse_line(two_calls(("a", "1"), then=False)), TOKENIZER)
    assert trained_text(record).endswith("</tool_call><|observation|>")


def test_equivalent_lines_have_equal_key():
    same = [
        {"messages": [QUESTION, ANSWER]},
        {"messages": [QUESTION, ANSWER | {"tool_calls": None, "name": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q "}]}, ANSWER]},
        {"messages": [QUESTION, ANSWER | {"content": ["A"]}], "id": 7},
    ]
    other = [
        {"messages": [QUESTION, ANSWER], "mode": "preserved"},
        {"messages": [QUESTION, ANSWER | {"weight": 0}]},
        {"messages": [QUESTION, ANSWER | {"reasoning_content": "R"}]},
        {"messages": [QUESTION, ANSWER], "tools": [TOOL]},
    ]
    assert len({parse_line(line).key for line in same}) == 1
    assert len({parse_line(line).key for line in same + other}) == 1 + len(other)
