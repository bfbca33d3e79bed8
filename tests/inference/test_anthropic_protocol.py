"""Tests Anthropic's Messages API: bodies become chats, and replies become messages, complete and streamed."""

import random

import pytest

from glm5_jax.inference.anthropic_protocol import AnthropicMessages, to_chat
from glm5_jax.runtime.http_server import ApiError
from tests.inference.test_replies import CALL, TOOLS, complete_reply, parsed_request, stream_chunks

TEXT = {"type": "text", "text": "It rains."}
CONVERSATION = [
    {"role": "user", "content": [TEXT, {**TEXT, "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Where?", "signature": ""},
            {"type": "tool_use", "id": "a", "name": "look", "input": {"n": 1}},
            {"type": "tool_use", "id": "b", "name": "look", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "b", "content": [TEXT]},
            {"type": "tool_result", "tool_use_id": "a", "is_error": True},
            {"type": "text", "text": "So?"},
        ],
    },
]


def chat(**body):
    return to_chat({"messages": [{"role": "user", "content": "hi"}], **body})


def test_translates_conversation_with_tools():
    calls = [
        {"type": "function", "id": i, "function": {"name": "look", "arguments": arguments}}
        for i, arguments in (("a", {"n": 1}), ("b", {}))
    ]
    assert to_chat({"messages": CONVERSATION, "system": [TEXT]})["messages"] == [
        {"role": "system", "content": "It rains."},
        {"role": "user", "content": "It rains.It rains."},
        {"role": "assistant", "content": "", "reasoning_content": "Where?", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "It rains."},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": "So?"},
    ]


def test_translates_options():
    translated = chat(
        max_tokens=5,
        stop_sequences=["x"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[{"name": "look", "input_schema": {"type": "object"}, "type": "custom"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
        metadata={"user_id": "u"},
    )
    function = {"name": "look", "parameters": {"type": "object"}}
    assert translated == {
        "messages": [{"role": "user", "content": "hi"}],
        "continue_final_message": False,
        "max_tokens": 5,
        "stop": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}},
    }
    assert chat()["thinking"] == {"type": "disabled"}
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    preserved = chat(thinking={"type": "adaptive"}, context_management={"edits": edits})
    assert preserved["thinking"] == {"type": "enabled", "clear_thinking": False}
    assert to_chat({"messages": CONVERSATION[:2]})["continue_final_message"]


@pytest.mark.parametrize(
    ("body", "expected_error", "param"),
    [
        (dict(messages=[{"role": "tool", "content": "x"}]), "is no message", "messages"),
        (dict(messages=[{"role": "user", "content": [{"type": "image"}]}]), "'image'", "messages"),
        (dict(messages=[{"role": "user", "content": 3}]), "content is 3", "messages"),
        (
            dict(messages=[{"role": "user", "content": [TEXT, {"type": "tool_result"}]}]),
            "put all results first",
            "messages",
        ),
        (dict(tools=[{"type": "web_search_20250305", "name": "w"}]), "cannot run", "tools"),
        (dict(thinking={"type": "maybe"}), "'maybe' is not one of", "thinking.type"),
        (dict(top_p=0), "0 is ", "top_p"),
        (dict(mcp_servers=[{"url": "x"}]), "no such field is known", "mcp_servers"),
        (dict(stop_sequences=[""]), "stop_sequences.0: ''", "stop_sequences.0"),
    ],
)
def test_rejects_unsupported_body(body, expected_error, param):
    with pytest.raises(ApiError, match=expected_error) as caught:
        chat(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        ("I think.</think>It is 42.<|user|>", ["thinking", "text"], "end_turn"),
        (
            f"why</think>Look.{CALL}{CALL}<|observation|>",
            ["thinking", "text", "tool_use", "tool_use"],
            "tool_use",
        ),
        (f"x</think>{CALL[:-5]}", ["thinking", "text"], "max_tokens"),
        ("never ends", ["thinking"], "max_tokens"),
    ],
)
def test_stream_adds_up_to_message(text, kinds, reason):
    parsed = parsed_request(tools=TOOLS)
    message = complete_reply(AnthropicMessages, parsed, text)
    assert [block["type"] for block in message["content"]] == kinds
    assert message["stop_reason"] == reason
    events = stream_chunks(AnthropicMessages, parsed, text, random.Random(0))
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == kinds
    for index, block in enumerate(message["content"]):
        deltas = [e["delta"] for e in events if e.get("index") == index and "delta" in e]
        field = "partial_json" if block["type"] == "tool_use" else block["type"]
        joined = "".join(delta.get(field, "") for delta in deltas)
        if field == "partial_json":
            assert joined == '{"n": 2}' and block["input"] == {"n": 2}
        else:
            assert joined == block[field]
    assert events[-2]["usage"] == message["usage"] and events[-1] == {"type": "message_stop"}
    assert message["usage"]["input_tokens"] == 1  # two of three come from the cache
