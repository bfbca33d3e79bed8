"""Tests a served model with the SDKs of OpenAI and Anthropic: replies, streams, tools and structured output."""

from typing import Literal

import anthropic
import openai
import pydantic
import pytest

from tests.inference.conftest import serving
from tests.inference.test_server import post

USER = {"role": "user", "content": "hi"}
GREEDY = {"extra_body": {"temperature": 0}}  # Anthropic's SDK has no such argument
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}


class Weather(pydantic.BaseModel):
    """Structured output with short values only."""

    city: Literal["Oslo", "Rome"]
    is_wet: bool


@pytest.fixture
def client(long_server):
    with openai.OpenAI(base_url=f"{long_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(long_server):
    with anthropic.Anthropic(base_url=long_server.url, api_key="none", max_retries=0) as client:
        yield client


def chat_text(server, **fields):
    """Returns the content of a greedy chat without thinking."""
    body = {"messages": [USER], "thinking": {"type": "disabled"}, "temperature": 0, **fields}
    status, reply = post(server, "/v1/chat/completions", body)
    assert status == 200, reply
    return reply["choices"][0]["message"]["content"]


def is_forecast(arguments):
    return arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9


def test_anthropic_message_equals_chat_reply(claude, long_server):
    message = claude.messages.create(model="tiny", messages=[USER], max_tokens=8, **GREEDY)
    [block] = message.content
    assert block.type == "text" and block.text == chat_text(long_server, max_tokens=8)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    count = claude.messages.count_tokens(model="tiny", messages=[USER]).input_tokens
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count


def test_anthropic_stream_equals_message(claude):
    fields = dict(model="tiny", messages=[USER], max_tokens=16, **GREEDY)
    fields["thinking"] = {"type": "enabled", "budget_tokens": 6}
    message = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    thinking, text = final.content
    assert thinking == message.content[0] and text.text == message.content[1].text
    assert final.stop_reason == message.stop_reason == "max_tokens"
    assert final.usage.output_tokens == message.usage.output_tokens == 16
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_anthropic_calls_tools_in_loop(claude):
    tools = [{"name": "forecast", "input_schema": PARAMETERS}]
    fields = dict(model="tiny", tools=tools, max_tokens=60, **GREEDY)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = claude.messages.create(messages=[USER], tool_choice=choice, **fields)
    [call] = message.content
    assert call.type == "tool_use" and is_forecast(call.input) and message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [USER, *({"role": "assistant", "content": message.content},)]
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "and?"}]})
    forced = {"type": "tool", "name": "forecast"}
    with claude.messages.stream(messages=messages, tool_choice=forced, **fields) as stream:
        [call] = stream.get_final_message().content
    assert is_forecast(call.input)


def test_anthropic_continues_last_message(claude, long_server):
    plain = chat_text(long_server, max_tokens=8)
    partial = {"role": "assistant", "content": "To be"}
    message = claude.messages.create(
        model="tiny", messages=[USER, partial], max_tokens=8, stop_sequences=["zzz"], **GREEDY
    )
    chat = chat_text(
        long_server, messages=[USER, partial], continue_final_message=True, max_tokens=8
    )
    assert message.content[0].text == chat != plain


def test_anthropic_errors_have_types(claude):
    with pytest.raises(anthropic.BadRequestError, match="image") as caught:
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        claude.messages.create(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": [image]}]
        )
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="'other' is not served"):
        claude.messages.create(model="other", max_tokens=1, messages=[USER])


def test_anthropic_client_sends_key():
    with serving(api_key="secret") as server:
        for key, error in (
            ("secret", anthropic.BadRequestError),
            ("x", anthropic.AuthenticationError),
        ):
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
                with pytest.raises(error):
                    client.messages.create(model="tiny", max_tokens=1, messages=[])


def test_response_equals_chat_reply(client, long_server):
    fields = dict(model="tiny", input="hi", temperature=0, reasoning={"effort": "none"})
    response = client.responses.create(max_output_tokens=8, **fields)
    assert response.output_text == chat_text(long_server, max_tokens=8)
    assert response.status == "incomplete" and response.usage.output_tokens == 8
    assert response.incomplete_details.reason == "max_output_tokens"


def test_response_stream_equals_response(client):
    fields = dict(model="tiny", input=[USER], max_output_tokens=12, temperature=0)
    response = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    final = events[-1].response
    [item] = final.output
    assert item.type == "reasoning" and item.content == response.output[0].content
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text


def test_response_calls_tools_in_loop(client):
    tool = {"type": "function", "name": "forecast", "parameters": PARAMETERS, "strict": True}
    fields = dict(model="tiny", tools=[tool], max_output_tokens=60, temperature=0)
    fields |= dict(reasoning={"effort": "none"}, parallel_tool_calls=False)
    with client.responses.stream(input="hi", tool_choice="required", **fields) as stream:
        response = stream.get_final_response()
    [call] = response.output
    assert is_forecast(call.parsed_arguments) and response.status == "completed"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [USER, call.model_dump(exclude={"parsed_arguments"}), output]
    named = {"type": "function", "name": "forecast"}
    [call] = client.responses.create(input=items, tool_choice=named, **fields).output
    assert call.type == "function_call" and call.status == "completed"


def test_parses_structured_output(client):
    fields = dict(model="tiny", temperature=0)
    response = client.responses.parse(
        input="hi",
        text_format=Weather,
        reasoning={"effort": "none"},
        max_output_tokens=60,
        **fields,
    )
    assert isinstance(response.output_parsed, Weather)
    chat = client.chat.completions.parse(
        messages=[USER], response_format=Weather, reasoning_effort="none", max_tokens=60, **fields
    )
    assert chat.choices[0].message.parsed == response.output_parsed


def test_rejects_stored_responses(client):
    with pytest.raises(openai.BadRequestError, match="stores nothing; send all items in input"):
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
