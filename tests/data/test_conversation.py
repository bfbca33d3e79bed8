"""Lines of conversations: what is learnt of them, what stays in the context unlearnt, what is refused."""

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
    """A user, some assistant's steps with their results, and an answer."""
    steps = [m for step in middle for m in (step, {"role": "tool", "content": "result"})]
    messages = [{"role": "user", "content": "Q"}, *steps, {"role": "assistant", "content": "A"}]
    return json.dumps({"messages": messages, "tools": list(tools), **more})


def learnt(record) -> str:
    return TOKENIZER.decode(record.token_ids[record.loss_mask == 1].tolist())


def text(record) -> str:
    return TOKENIZER.decode(record.token_ids.tolist())


def test_the_assistants_tokens_are_learnt_and_no_others():
    [record] = make_records(parse_line(line(calls())), TOKENIZER)
    assert learnt(record) == (
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
def test_a_mistake_stays_in_the_context_and_is_not_learnt(wrong, mistake):
    conversation = parse_line(line(wrong, calls(arguments='{"text": "right"}')))
    assert list(conversation.mistakes) == [1] and mistake in conversation.mistakes[1]
    [record] = make_records(conversation, TOKENIZER)
    assert learnt(record) == (
        "think</think><tool_call>find<arg_key>text</arg_key><arg_value>right</arg_value></tool_call>"
        "<|observation|>A<|user|>"
    )
    [(first, last, kind), *_] = record.spans
    assert kind == "error" and not record.loss_mask[first:last].any()
    # The mistake is there, between the question and what came of it.
    [all_of_it] = make_records(conversation, TOKENIZER, mask_errors=False)
    assert text(all_of_it) == text(record)
    shown = learnt(all_of_it)
    assert shown.count("<tool_call>") == 2 and shown.count("<|observation|>") == 2


def test_arguments_that_cannot_be_read_stand_as_text():
    [record] = make_records(parse_line(line(calls(arguments='{"text": '))), TOKENIZER)
    assert '<arg_key>arguments</arg_key><arg_value>{"text": </arg_value>' in text(record)


def test_a_call_is_a_mistake_where_the_line_has_no_tools():
    wrong = json.loads(line(calls(name="any", arguments="{}"), tools=()))
    for conversation in (parse_line(wrong), parse_line({"messages": wrong["messages"]})):
        assert conversation.mistakes == {1: "no tool is named 'any'; there are none"}
        [record] = make_records(conversation, TOKENIZER)
        assert learnt(record) == "A<|user|>"


def test_the_mode_of_a_line_comes_first():
    two = {
        "messages": [
            {"role": "user", "content": "Q1"},
            {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
            {"role": "user", "content": "Q2"},
            {"role": "assistant", "content": "A2", "reasoning_content": "R2"},
        ]
    }
    first, second = make_records(parse_line(two), TOKENIZER)
    assert learnt(first) == "R1</think>A1<|user|>" and learnt(second) == "R2</think>A2<|user|>"
    for own in (parse_line(two | {"mode": "preserved"}), parse_line(two)):
        [record] = make_records(own, TOKENIZER, mode="preserved")
        assert learnt(record) == "R1</think>A1<|user|>R2</think>A2<|user|>"
    quiet = parse_line(two | {"mode": "turn_level"})
    assert len(make_records(quiet, TOKENIZER, mode="preserved")) == 2


def test_a_sample_with_nothing_to_learn_is_no_record():
    wrong = {"role": "assistant", "content": "A", "weight": 0}
    conversation = parse_line({"messages": [{"role": "user", "content": "Q"}, wrong]})
    assert make_records(conversation, TOKENIZER) == []
    assert len(make_records(conversation, TOKENIZER, mask_errors=False)) == 1


ASKED, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "the line is not JSON in UTF-8"),
        (b'{"messages": "\xff"}', "the line is not JSON in UTF-8"),
        ("[]", "the line has no messages; it has list"),
        ({"text": "x"}, "the line has no messages; it has text"),
        ({"messages": "x"}, "messages is empty or not a list"),
        ({"messages": [ASKED], "mode": "deep"}, "mode is 'deep'; use one of interleaved"),
        ({"messages": [{"role": "robot"}]}, "message 0 has role 'robot'"),
        ({"messages": [ASKED, {"role": "tool", "content": "x"}]}, "message 1 is a tool's result"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]}, "message 1 calls a function"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": ["f"]}]}, "must name a function"),
        ({"messages": [ASKED, ANSWER | {"weight": 0.5}]}, "message 1 has weight 0.5"),
        ({"messages": [ASKED, ANSWER | {"error": 1}]}, "message 1 has error 1"),
        ({"messages": [ASKED], "tools": [{"function": {}}]}, "tool 0 has no name"),
        ({"messages": [ASKED], "tools": "find"}, "tools is of type str; give a list"),
        ({"messages": [ASKED], "tools": TOOL}, "tools is of type dict; give a list"),
        ({"messages": [ASKED], "tools": [TOOL, TOOL]}, "two tools are named 'find'"),
        ({"messages": [ASKED], "functions": [TOOL["function"]]}, "an older form; give them as tools"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 1, an assistant's, is empty"),
        ({"messages": [ASKED, ANSWER | {"content": " "}]}, "message 1, an assistant's, is empty"),
        (
            {"messages": [ASKED, ANSWER | {"function_call": {"name": "f"}}]},
            "message 1 has function_call, which would be lost; give it as tool_calls",
        ),
        (
            {"messages": [ASKED, ANSWER | {"thinking": "R"}]},
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
        ({"messages": [ASKED, ANSWER | {"content": "<think>a</think>b</think>c"}]}, "message 1 would lose"),
        ('{"messages": [], "messages": []}', "has the field 'messages' twice"),
        ('{"messages": [NaN]}', "NaN is not a JSON number"),
        (r'{"messages": [{"role": "user", "content": "x\ud800y"}]}', "half of a surrogate pair"),
        (b'{"messages": "\xed\xa0\x80"}', "the line is not JSON in UTF-8"),
        (
            {"messages": [ASKED], "tools": [{"name": "f", "parameters": {"$ref": "#/$defs/No"}}]},
            "the parameters of tool 'f' have a dangling or endless reference",
        ),
        (
            {"messages": [ASKED], "tools": [{"name": "f", "parameters": {"$ref": "#"}}]},
            "the parameters of tool 'f' have a dangling or endless reference",
        ),
        (
            {"messages": [ASKED], "tools": [{"name": "f", "parameters": {"type": "thing"}}]},
            "tool 0, 'f', has parameters that are not a JSON schema",
        ),
    ],
)  # fmt: skip
def test_a_useless_line_is_refused_in_words(bad, said):
    with pytest.raises(ChatError) as error:
        parse_line(bad)
    assert said in str(error.value)


def test_a_conversation_without_a_reply_trains_nothing():
    with pytest.raises(ChatError, match="no message is an assistant's; add a reply"):
        make_records(parse_line({"messages": [ASKED]}), TOKENIZER)


def test_nothing_is_fetched_for_a_schema():
    """A reference is an error of the line, whether or not somebody answers there."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        server.timeout = 0.2
        asked = []
        server.process_request = lambda *request: asked.append(request)
        url = f"http://127.0.0.1:{server.server_address[1]}/schema.json"
        tools = [{"name": "f", "parameters": {"$ref": url}}]
        with pytest.raises(ChatError, match="have a dangling or endless reference"):
            parse_line({"messages": [ASKED, ANSWER], "tools": tools})
        server.handle_request()
    assert not asked


def test_older_schemas_are_read_by_their_own_rules():
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"limit": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}},
    }
    tools = [{"name": "f", "parameters": schema}]
    for limit, wrong in ((1, []), (0, [1])):
        call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"limit": limit}}]}
        assert list(parse_line({"messages": [ASKED, call], "tools": tools}).mistakes) == wrong


def test_deep_arguments_are_a_mistake():
    call = {"name": "f", "arguments": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"}
    found = parse_line({"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]})
    assert list(found.mistakes) == [1]


def two_calls(*results, then=True):
    calls = [{"id": i, "function": {"name": "find", "arguments": {"text": i}}} for i in ("a", "b")]
    messages = [ASKED, {"role": "assistant", "tool_calls": calls}]
    messages += [
        {"role": "tool", "content": text} | ({"tool_call_id": i} if i else {})
        for i, text in results
    ]
    return {"messages": [*messages, ANSWER] if then else messages, "tools": [TOOL]}


def test_results_follow_the_order_of_their_calls():
    found = parse_line(two_calls(("b", "TWO"), ("a", "ONE")))
    assert [m["content"] for m in found.messages[2:4]] == ["ONE", "TWO"]
    # A result without an id answers the call that is left.
    found = parse_line(two_calls((None, "TWO"), ("a", "ONE")))
    assert [m["content"] for m in found.messages[2:4]] == ["ONE", "TWO"]


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([("a", "1")], "message 1 makes 2 calls, 1 of which have a result before the next turn"),
        ([], "message 1 makes 2 calls, 0 of which"),
        ([("a", "1"), ("z", "2")], "message 3 is the result of no call 'z'"),
        ([("a", "1"), ("a", "2")], "message 3 is a second result of call 'a'"),
    ],
)
def test_results_that_fit_no_call_are_refused(results, said):
    with pytest.raises(ChatError) as error:
        parse_line(two_calls(*results))
    assert said in str(error.value)


def test_a_conversation_may_end_with_its_calls():
    [record] = make_records(parse_line(two_calls(("a", "1"), then=False)), TOKENIZER)
    assert learnt(record).endswith("</tool_call><|observation|>")


def test_what_teaches_the_same_has_the_same_key():
    same = [
        {"messages": [ASKED, ANSWER]},
        {"messages": [ASKED, ANSWER | {"tool_calls": None, "name": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q "}]}, ANSWER]},
        {"messages": [ASKED, ANSWER | {"content": ["A"]}], "id": 7},
    ]
    other = [
        {"messages": [ASKED, ANSWER], "mode": "preserved"},
        {"messages": [ASKED, ANSWER | {"weight": 0}]},
        {"messages": [ASKED, ANSWER | {"reasoning_content": "R"}]},
        {"messages": [ASKED, ANSWER], "tools": [TOOL]},
    ]
    assert len({parse_line(line).key for line in same}) == 1
    assert len({parse_line(line).key for line in same + other}) == 1 + len(other)
