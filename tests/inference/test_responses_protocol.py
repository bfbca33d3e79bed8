"""Tests OpenAI's Responses API: bodies become chats, and replies become items, complete and streamed."""

import dataclasses
import random

import pytest

from glm5_jax.inference.protocol import Reader
from glm5_jax.inference.responses_protocol import Responses, to_chat
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_replies import CALL, TOOLS, complete_reply, parsed_request, stream_chunks

USER = {"role": "user", "content": "hi"}
INCLUDE = ["reasoning.encrypted_content"]
RESPONSE_TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


def messages(*items, **fields):
    return to_chat({"input": list(items), **fields})[0]["messages"]


def call(id_):
    return {"type": "function_call", "call_id": id_, "name": "look", "arguments": "{}"}


def output(id_, text):
    return {"type": "function_call_output", "call_id": id_, "output": text}


def text_item(text, role="assistant"):
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def reasoning(text):
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def test_joins_items_of_assistant_to_messages():
    items = [
        text_item("hi", "user"),
        reasoning("Where?"),
        text_item("Let me look."),
        call("a"),
        call("b"),
        output("a", "Oslo"),
        output("b", [{"type": "input_text", "text": "Rome"}]),
        text_item("Done."),
        text_item("Anything else?"),
    ]
    calls = [
        {"type": "function", "id": i, "function": {"name": "look", "arguments": "{}"}} for i in "ab"
    ]
    reply = {"role": "assistant", "reasoning_content": "Where?", "content": "Let me look."}
    assert messages(*items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        USER,
        reply | {"tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "Oslo"},
        {"role": "tool", "tool_call_id": "b", "content": "Rome"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Anything else?"},
    ]


def test_translates_options():
    body = dict(
        input="hi",
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "auto"},
        tools=[{"type": "function", "name": "look", "parameters": {}, "strict": None}],
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
        store=False,
    )
    chat, repeated = to_chat(body)
    schema = {"name": "n", "schema": {}, "strict": True}
    assert chat == {
        "messages": [USER],
        "max_tokens": 5,
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    assert repeated["text"] == body["text"] and repeated["parallel_tool_calls"] is True


@pytest.mark.parametrize(
    ("body", "expected_error", "param"),
    [
        (dict(input=[{"type": "item_reference", "id": "x"}]), "'item_reference'", "input"),
        (dict(input=["x"]), "an item of type 'x'", "input"),
        (dict(input=[text_item("a") | {"content": [{"type": "input_image"}]}]), "no text", "input"),
        (dict(input=[{"type": "reasoning", "encrypted_content": "?"}]), "not of this", "input"),
        (dict(previous_response_id="resp_1"), "stores nothing", "previous_response_id"),
        (dict(tools=[{"type": "web_search"}]), "cannot run", "tools"),
        (dict(text={"verbosity": "low"}), "'medium' was expected", "text.verbosity"),
        (dict(background=True), "False was expected", "background"),
    ],
)
def test_rejects_unsupported_body(body, expected_error, param):
    with pytest.raises(ApiError, match=expected_error) as caught:
        to_chat({"input": "hi"} | body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("text", "kinds", "status"),
    [
        ("I think.</think>It is 42.<|user|>", ["reasoning", "message"], "completed"),
        (
            f"why</think>Look.{CALL}{CALL}<|observation|>",
            ["reasoning", "message", "function_call", "function_call"],
            "completed",
        ),
        (f"x</think>{CALL[:-5]}", ["reasoning", "function_call"], "incomplete"),
        ("never ends", ["reasoning"], "incomplete"),
    ],
)
def test_stream_adds_up_to_response(text, kinds, status):
    parsed = parsed_request(tools=TOOLS)
    response = complete_reply(Responses, parsed, text)
    assert [item["type"] for item in response["output"]] == kinds
    assert (response["status"], response["output"][-1]["status"]) == (status, status)
    events = stream_chunks(Responses, parsed, text, random.Random(0))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]

    def without_ids(items):
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    assert without_ids(done) == without_ids(response["output"])
    last = events[-1]
    assert last["type"] == f"response.{status}" and last["response"]["usage"] == response["usage"]
    deltas = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in response["output"]]
    assert list(deltas.values()) == texts


def test_reads_encoded_reasoning():
    parsed = dataclasses.replace(parsed_request(), repeated={"include": INCLUDE})
    [item, _] = complete_reply(Responses, parsed, "Où?</think>Oslo.<|user|>")["output"]
    del item["content"]
    [_, message] = messages(USER, item, text_item("Oslo."))[:2]
    assert message["reasoning_content"] == "Où?" and message["content"] == "Oslo."
    assert to_chat({"input": "hi", "include": INCLUDE})[1]["include"] == INCLUDE


@pytest.mark.parametrize("content", [5, True, 1.5, "text", {"type": "reasoning_text"}])
def test_rejects_reasoning_that_is_no_list_of_parts(content):
    with pytest.raises(ApiError, match="input.1: content is .*; give a list of parts"):
        messages(USER, {"type": "reasoning", "content": content})


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "x" * 513}},
        {"metadata": {str(i): "" for i in range(17)}},
        {"metadata": {"a": {"b": "c"}}},
        {"user": "x" * 513},
        {"reasoning": {"summary": "x" * 513}},
    ],
)
def test_limits_fields_that_responses_repeat(fields):
    [name] = fields
    with pytest.raises(ApiError, match=f"^{name}"):
        to_chat({"input": "hi", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "text", "x": "y"}}},
        {"tool_choice": {"type": "function", "name": "look", "x": "y"}, "tools": RESPONSE_TOOLS},
    ],
    ids=["format", "choice"],
)
def test_rejects_unknown_fields_of_options(fields):
    reader = Reader(Tokenizer.default(), model="m")
    with pytest.raises(ApiError):
        reader.chat(to_chat({"input": "hi", **fields})[0], 0)
