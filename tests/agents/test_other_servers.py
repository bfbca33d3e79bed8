"""Tests replies of other servers: fields under other names are read, and messages sent back fit any server."""

import asyncio
import dataclasses

import pytest

from glm5_jax.agents.context import ContextConfig, TokenCounter
from glm5_jax.agents.loop import BROKEN_CALL, ChatAgent, LoopConfig
from glm5_jax.agents.tools import Toolbox, calculate
from glm5_jax.data import chat_tasks
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.types import Task, reward_without_verifier
from glm5_jax.text.tokenizer import Tokenizer
from tests.agents.scripted import Scripted, calling

TASK = Task(
    id="t",
    kind="tir",
    messages=({"role": "user", "content": "6*7?"},),
    tools=tuple(chat_tasks.shop_tools()),
)
BOX = Toolbox({"calculate": calculate})
CONFIG = LoopConfig(max_turns=4, context=ContextConfig(keep_rounds=None, max_prompt_tokens=None))
COUNTER = TokenCounter(Tokenizer.default())
PRODUCT = ("calculate", {"expression": "6*7"})
OURS = "<tool_call>calculate<arg_key>expression</arg_key><arg_value>6*7"


def attempt(*replies, **options):
    client = Scripted(replies)
    config = dataclasses.replace(CONFIG, **options)
    return client, asyncio.run(
        ChatAgent(client=client, tools=BOX, counter=COUNTER, config=config)(TASK)
    )


@pytest.mark.parametrize("other", [None, "", "I look."])
def test_reads_reasoning_under_other_name(other):
    choice = calling(PRODUCT)
    choice["message"] |= {"reasoning": "I look.", "reasoning_content": other}
    client, trace = attempt(choice, "42")
    assert trace.messages[0]["reasoning_content"] == "I look." and trace.attempt.reply == "42"
    assert "reasoning" not in client.requests[1][0][1]


@pytest.mark.parametrize("written", ["{6*7", "[6]", OURS])
def test_ends_attempt_at_unparsable_call(written):
    client, trace = attempt(calling(PRODUCT, ("calculate", written)), "42")
    assert trace.ended == BROKEN_CALL and len(client.requests) == 1 and trace.error
    assert (
        trace.attempt.finish_reason == "stop" and reward_without_verifier(trace.attempt).value == 0
    )


@pytest.mark.parametrize(("written", "sent"), [("{6*7", "{}"), ("[6]", "{}"), (OURS, OURS)])
def test_continues_after_broken_call_if_configured(written, sent):
    client, trace = attempt(calling(("calculate", written)), "42", ends_on_broken_call=False)
    [call] = client.requests[1][0][1]["tool_calls"]
    assert call["function"]["arguments"] == sent and trace.attempt.reply == "42"
    assert (
        trace.messages[1]["content"].startswith("Error: ")
        and written in trace.messages[1]["content"]
    )


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_blames_server_for_reply_that_is_no_text(field):
    choice = calling(PRODUCT)
    choice["message"] |= {"reasoning_content": None, field: 5}
    with pytest.raises(ServerError, match="which is no text"):
        attempt(choice, "42")


def test_leaves_out_fields_of_calls_that_only_some_servers_send():
    """No server accepts them in the next request, and no counter of tokens."""
    choice = calling(PRODUCT)
    [call] = choice["message"]["tool_calls"]
    call |= {"index": 3, "extra_content": {"google": {"thought_signature": "x"}}}
    call["function"] |= {"parsed_arguments": {"expression": "6*7"}}
    client, trace = attempt(choice, "42")
    assert trace.attempt.reply == "42"
    [sent] = client.requests[1][0][1]["tool_calls"]
    assert sent.keys() == {"id", "type", "function"}
    assert sent["function"].keys() == {"name", "arguments"}


@pytest.mark.parametrize("fields", [{"id": 7}, {"id": {"a": 1}}, {"type": "custom"}, {"type": []}])
def test_blames_server_for_call_that_no_chat_shows(fields):
    choice = calling(PRODUCT)
    choice["message"]["tool_calls"][0] |= fields
    with pytest.raises(ServerError, match="the reply has invalid calls"):
        attempt(choice, "42")
