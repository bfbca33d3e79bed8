"""Messages of a gateway's agents: read as a server reads them, and broken calls go out and come back as they were written."""

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
BROKEN = "<tool_call>look<arg_key>n</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
WHOLE = "<tool_call>look<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"


class Says(Engine):
    """An engine that says one text after the other.

    Attributes:
      texts: texts to say.
      prompts: texts of the prompts so far.
    """

    def __init__(self):
        super().__init__(delay=0)
        self.texts, self.prompts = [], []

    def reply(self, prompt, draw):
        self.prompts.append(TOKENIZER.decode(prompt))
        return TOKENIZER.encode(self.texts.pop(0), parse_special=True)


@pytest.fixture(scope="module")
def served():
    with contextlib.ExitStack() as stack:
        engine = Says()
        ranks = [stack.enter_context(engine.running())]
        gateway = Gateway(TOKENIZER, ranks, GatewayConfig(port=0))
        yield engine, stack.enter_context(gateway.running())


def converse(served, texts, work):
    """Returns what work(chat, session) makes of a new session whose replies are the texts."""
    engine, url = served
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


def result(id_, text):
    return {"role": "tool", "tool_call_id": id_, "content": text}


def test_gives_a_broken_call_as_it_was_written_and_reads_it_again(served):
    async def work(chat, kinds):
        choice = await chat([USER])
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "stop" and call["function"]["arguments"] == BROKEN
        with pytest.raises(ValueError):
            json.loads(call["function"]["arguments"])
        again = [USER, choice["message"], result(call["id"], "Error: given twice")]
        last = await chat(again)
        assert last["message"]["content"] == "So." and await kinds() == ["clean", "clean"]

    texts = f"</think>{BROKEN}<|observation|>", "</think>So.<|user|>"
    converse(served, texts, work)
    assert BROKEN in served[0].prompts[1]


def test_says_tool_calls_of_whole_calls(served):
    async def work(chat, kinds):
        choice = await chat([USER])
        arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert choice["finish_reason"] == "tool_calls" and arguments == ['{"n": "1"}'] * 2

    converse(served, [f"</think>{WHOLE}{WHOLE}<|observation|>"], work)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}], ids=str)
def test_gives_no_call_where_none_may_be_made(served, fields):
    async def work(chat, kinds):
        choice = await chat([USER], parallel_tool_calls=False, **fields)
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == f"Well.{WHOLE}"

    converse(served, [f"</think>Well.{WHOLE}<|observation|>"], work)


def test_lays_out_results_in_the_order_of_their_calls(served):
    async def work(chat, kinds):
        choice = await chat([USER])
        first, second = (call["id"] for call in choice["message"]["tool_calls"])
        results = [result(second, "Rome"), result(first, "Oslo")]
        await chat([USER, choice["message"], *results])
        assert await kinds() == ["clean", "clean"]

    converse(served, [f"</think>{WHOLE}{WHOLE}<|observation|>", "</think>x<|user|>"], work)
    prompt = served[0].prompts[1]
    assert "<tool_response>Oslo</tool_response><tool_response>Rome</tool_response>" in prompt


def test_keeps_reasoning_and_roles_under_their_other_names(served):
    async def work(chat, kinds):
        said = {"role": "assistant", "content": "4", "reasoning": "two and two"}
        await chat([{"role": "developer", "content": "Be brief."}, USER, said, USER])

    converse(served, ["</think>x<|user|>"], work)
    assert "<|system|>Be brief.<|user|>" in served[0].prompts[0]
    assert "<think>two and two</think>4" in served[0].prompts[0]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url'"),
        ([{**USER, "colour": "red"}], "the field 'colour', which no chat shows"),
        ([USER, {"role": "assistant", "content": "4", "thinking": "r"}, USER], "has thinking"),
    ],
)  # fmt: skip
def test_refuses_what_the_prompt_would_not_show(served, messages, said):
    async def work(chat, kinds):
        with pytest.raises(ServerError, match=said) as caught:
            await chat(messages)
        assert caught.value.status == 400 and await kinds() == []

    converse(served, [], work)
