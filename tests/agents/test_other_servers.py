"""Replies of servers that are not ours: read by the names that they use, and sent back as any server reads them."""

import asyncio
import dataclasses

import pytest

from glm5_jax.agents.context import ContextConfig, TokenCounter
from glm5_jax.agents.loop import BROKEN_CALL, ChatAgent, LoopConfig
from glm5_jax.agents.tools import Toolbox, calculate
from glm5_jax.data import chat_tasks
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
CONFIG = LoopConfig(max_turns=4, context=ContextConfig(None, None))
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
def test_keeps_reasoning_that_a_server_calls_otherwise(other):
    choice = calling(PRODUCT)
    choice["message"] |= {"reasoning": "I look.", "reasoning_content": other}
    client, trace = attempt(choice, "42")
    assert trace.messages[0]["reasoning_content"] == "I look." and trace.attempt.reply == "42"
    assert "reasoning" not in client.asked[1][0][1]


@pytest.mark.parametrize("written", ["{6*7", "[6]", OURS])
def test_ends_an_attempt_at_a_call_that_cannot_be_parsed(written):
    client, trace = attempt(calling(PRODUCT, ("calculate", written)), "42")
    assert trace.ended == BROKEN_CALL and len(client.asked) == 1 and trace.error
    assert (
        trace.attempt.finish_reason == "stop" and reward_without_verifier(trace.attempt).value == 0
    )


@pytest.mark.parametrize(("written", "sent"), [("{6*7", "{}"), ("[6]", "{}"), (OURS, OURS)])
def test_goes_on_after_a_broken_call_where_it_may(written, sent):
    client, trace = attempt(calling(("calculate", written)), "42", ends_on_broken_call=False)
    [call] = client.asked[1][0][1]["tool_calls"]
    assert call["function"]["arguments"] == sent and trace.attempt.reply == "42"
    assert (
        trace.messages[1]["content"].startswith("Error: ")
        and written in trace.messages[1]["content"]
    )
