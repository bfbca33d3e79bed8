"""Lines of conversations: what is learnt of them, what stays in the context unlearnt, what is refused."""

import json

import numpy as np
import pytest

from glm5_jax.data.conversation import parse, records
from glm5_jax.text.chat import ChatError
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
    [record] = records(parse(line(calls())), TOKENIZER)
    assert learnt(record) == (
        "think</think><tool_call>find<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"
        "<|observation|>A<|user|>"
    )
    np.testing.assert_array_equal(record.ce_weight, record.loss_mask)
    assert record.spans == []


@pytest.mark.parametrize(
    ("wrong", "mistake"),
    [
        (calls(arguments='{"text": '), "arguments that are no JSON"),
        (calls(arguments="[1]"), "it must be an object"),
        (calls(name="lose"), "no tool is named 'lose'; there are find"),
        (calls(arguments="{}"), "'text' is a required property"),
        (calls(arguments='{"text": "x", "limit": "many"}'), "'many' is not of type 'integer'"),
        (calls(weight=0), "weight 0"),
        (calls(error="taken back in step 4"), "taken back in step 4"),
    ],
)
def test_a_mistake_stays_in_the_context_and_is_not_learnt(wrong, mistake):
    conversation = parse(line(wrong, calls(arguments='{"text": "right"}')))
    assert list(conversation.mistakes) == [1] and mistake in conversation.mistakes[1]
    [record] = records(conversation, TOKENIZER)
    assert learnt(record) == (
        "think</think><tool_call>find<arg_key>text</arg_key><arg_value>right</arg_value></tool_call>"
        "<|observation|>A<|user|>"
    )
    [(first, last, kind), *_] = record.spans
    assert kind == "error" and not record.loss_mask[first:last].any()
    # The mistake is there, between the question and what came of it.
    [all_of_it] = records(conversation, TOKENIZER, mask_errors=False)
    assert text(all_of_it) == text(record)
    shown = learnt(all_of_it)
    assert shown.count("<tool_call>") == 2 and shown.count("<|observation|>") == 2


def test_arguments_that_cannot_be_read_stand_as_text():
    [record] = records(parse(line(calls(arguments='{"text": '))), TOKENIZER)
    assert '<arg_key>arguments</arg_key><arg_value>{"text": </arg_value>' in text(record)


def test_without_tools_no_call_breaks_a_rule():
    assert not parse(line(calls(name="any", arguments="{}"), tools=())).mistakes


def test_the_mode_of_a_line_comes_first():
    two = {
        "messages": [
            {"role": "user", "content": "Q1"},
            {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
            {"role": "user", "content": "Q2"},
            {"role": "assistant", "content": "A2", "reasoning_content": "R2"},
        ]
    }
    first, second = records(parse(two), TOKENIZER)
    assert learnt(first) == "R1</think>A1<|user|>" and learnt(second) == "R2</think>A2<|user|>"
    for own in (parse(two | {"mode": "preserved"}), parse(two)):
        [record] = records(own, TOKENIZER, mode="preserved")
        assert learnt(record) == "R1</think>A1<|user|>R2</think>A2<|user|>"
    quiet = parse(two | {"mode": "turn_level"})
    assert len(records(quiet, TOKENIZER, mode="preserved")) == 2


def test_a_sample_with_nothing_to_learn_is_no_record():
    wrong = {"role": "assistant", "content": "A", "weight": 0}
    conversation = parse({"messages": [{"role": "user", "content": "Q"}, wrong]})
    assert records(conversation, TOKENIZER) == []
    assert len(records(conversation, TOKENIZER, mask_errors=False)) == 1


ASKED = {"role": "user", "content": "Q"}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "the line is not JSON in UTF-8"),
        (b'{"messages": "\xff"}', "the line is not JSON in UTF-8"),
        ("[]", "the line has no messages; it has list"),
        ({"text": "x"}, "the line has no messages; it has text"),
        ({"messages": "x"}, "messages is empty or no list"),
        ({"messages": [ASKED], "mode": "deep"}, "mode is 'deep'; use one of interleaved"),
        ({"messages": [{"role": "robot"}]}, "message 0 has role 'robot'"),
        ({"messages": [ASKED, {"role": "tool", "content": "x"}]}, "message 1 is a tool's result"),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [{}]}]},
            "message 1 calls a function",
        ),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": ["f"]}]}, "must name a function"),
        ({"messages": [ASKED, {"role": "assistant", "weight": 0.5}]}, "message 1 has weight 0.5"),
        ({"messages": [ASKED, {"role": "assistant", "error": 1}]}, "message 1 has error 1"),
        ({"messages": [ASKED], "tools": [{"function": {}}]}, "tool 0 has no name"),
        ({"messages": [ASKED], "tools": "find"}, "tool 0 has no name"),
        (
            {"messages": [ASKED], "tools": [{"name": "f", "parameters": {"type": "thing"}}]},
            "tool 0, 'f', has parameters that are no JSON schema",
        ),
    ],
)
def test_a_useless_line_is_refused_in_words(bad, said):
    with pytest.raises(ChatError) as error:
        parse(bad)
    assert said in str(error.value)


def test_a_conversation_without_a_reply_trains_nothing():
    with pytest.raises(ChatError, match="without a reply trains nothing"):
        records(parse({"messages": [ASKED]}), TOKENIZER)
