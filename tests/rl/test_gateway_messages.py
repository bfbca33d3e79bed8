"""Messages of a gateway's agents are read as a server reads them. Malformed calls keep their text in both directions."""

import asyncio
import contextlib
import json

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import Engine

TOKENIZER = Tokenizer.load("bytes")
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"n": {"type": "string"}}}},
}
USER = {"role": "user", "content": "Where?"}
MALFORMED = "<tool_call>look<arg_key>n</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
COMPLETE = "<tool_call>look<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"


class ScriptedEngine(Engine):
    """Engine that replies with one text after another.

    Attributes:
      texts: remaining replies.
      prompts: texts of the prompts so far.
    """

    def __init__(self):
        super().__init__(delay=0)
        self.texts, self.prompts = [], []

    def reply(self, prompt, rng):
        self.prompts.append(TOKENIZER.decode(prompt))
        return TOKENIZER.encode(self.texts.pop(0), parse_special=True)


@pytest.fixture(scope="module")
def engine_and_url():
    """Returns the engine, and the URL of the gateway in front of it."""
    with contextlib.ExitStack() as stack:
        engine = ScriptedEngine()
        ranks = [stack.enter_context(engine.running())]
        gateway = Gateway(TOKENIZER, ranks, GatewayConfig(port=0))
        yield engine, stack.enter_context(gateway.running())


def converse(engine_and_url, texts, work):
    """Returns the result of work(chat, kinds) in a new session that is sampled from the texts."""
    engine, url = engine_and_url
    engine.texts, engine.prompts = list(texts), []

    async def run():
        async with JsonClient() as client:
            name = (await client.request("POST", f"{url}/sessions", {}, timeout_s=30))["id"]
            session = f"{url}/sessions/{name}"

            async def chat(messages, **fields):
                body = {"messages": messages, "tools": [TOOL], **fields}
                path = f"{session}/v1/chat/completions"
                return (await client.request("POST", path, body, timeout_s=30))["choices"][0]

            async def kinds():
                return (await client.request("GET", session, timeout_s=30))["kinds"]

            return await work(chat, kinds)

    return asyncio.run(run())


def result(call_id, text):
    """Returns the message of a tool result."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_malformed_call_keeps_its_text(engine_and_url):
    async def work(chat, kinds):
        choice = await chat([USER])
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "stop" and call["function"]["arguments"] == MALFORMED
        with pytest.raises(ValueError):
            json.loads(call["function"]["arguments"])
        messages = [USER, choice["message"], result(call["id"], "Error: given twice")]
        answer = await chat(messages)
        assert answer["message"]["content"] == "So." and await kinds() == ["clean", "clean"]

    texts = f"</think>{MALFORMED}<|observation|>", "</think>So.<|user|>"
    converse(engine_and_url, texts, work)
    assert MALFORMED in engine_and_url[0].prompts[1]


def test_finish_reason_is_tool_calls_after_complete_calls(engine_and_url):
    async def work(chat, kinds):
        choice = await chat([USER])
        arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert choice["finish_reason"] == "tool_calls" and arguments == ['{"n": "1"}'] * 2

    converse(engine_and_url, [f"</think>{COMPLETE}{COMPLETE}<|observation|>"], work)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}], ids=str)
def test_returns_no_calls_without_tools(engine_and_url, fields):
    async def work(chat, kinds):
        choice = await chat([USER], parallel_tool_calls=False, **fields)
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == f"Well.{COMPLETE}"

    converse(engine_and_url, [f"</think>Well.{COMPLETE}<|observation|>"], work)


def test_orders_tool_results_by_their_calls(engine_and_url):
    async def work(chat, kinds):
        choice = await chat([USER])
        first, second = (call["id"] for call in choice["message"]["tool_calls"])
        results = [result(second, "Rome"), result(first, "Oslo")]
        await chat([USER, choice["message"], *results])
        assert await kinds() == ["clean", "clean"]

    converse(
        engine_and_url, [f"</think>{COMPLETE}{COMPLETE}<|observation|>", "</think>x<|user|>"], work
    )
    prompt = engine_and_url[0].prompts[1]
    assert "<tool_response>Oslo</tool_response><tool_response>Rome</tool_response>" in prompt


def test_reads_aliases_of_reasoning_and_roles(engine_and_url):
    async def work(chat, kinds):
        answer = {"role": "assistant", "content": "4", "reasoning": "two and two"}
        await chat([{"role": "developer", "content": "Be brief."}, USER, answer, USER])

    converse(engine_and_url, ["</think>x<|user|>"], work)
    assert "<|system|>Be brief.<|user|>" in engine_and_url[0].prompts[0]
    assert "<think>two and two</think>4" in engine_and_url[0].prompts[0]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url'"),
        ([{**USER, "colour": "red"}], "the field 'colour', which no chat shows"),
        ([USER, {"role": "assistant", "content": "4", "thinking": "r"}, USER], "has thinking"),
    ],
)  # fmt: skip
def test_rejects_content_that_prompt_cannot_show(engine_and_url, messages, error):
    async def work(chat, kinds):
        with pytest.raises(ServerError, match=error) as raised:
            await chat(messages)
        assert raised.value.status == 400 and await kinds() == []

    converse(engine_and_url, [], work)
