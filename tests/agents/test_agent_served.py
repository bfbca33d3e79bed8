"""Tests the loop on a real server with a random policy: every reply can be read again, and token counts equal the
server's.
"""

import asyncio
import dataclasses

import pytest

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import OMITTED, Context, ContextConfig, TokenCounter
from glm5_jax.agents.loop import ChatAgent, LoopConfig
from glm5_jax.agents.tools import Toolbox
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.rl.types import Task
from tests.rl.test_tool_chats import LENGTH, LOOK, TOKENIZER, policy

TASK = Task(id="t", kind="any", messages=({"role": "user", "content": "?"},), tools=(LOOK,))
COUNTER = TokenCounter(TOKENIZER)
PROMPT_TOKENS = COUNTER.prompt(TASK)
CONTEXTS = (
    ContextConfig(keep_rounds=None, max_prompt_tokens=None),
    ContextConfig(keep_rounds=1, max_prompt_tokens=None),
    ContextConfig(keep_rounds=1, max_prompt_tokens=PROMPT_TOKENS + 30),
)


class Watching(ChatClient):
    """Client that records the messages and choice of each request by seed."""

    recorded: dict

    async def chat(self, messages, **fields):
        choice = await super().chat(messages, return_token_ids=True, **fields)
        self.recorded.setdefault(fields["seed"], []).append((messages, choice))
        return choice


async def look(task, arguments):
    return f"seen {arguments.get('k')!r}"


async def attempts(url, config):
    async with Watching(url) as client:
        client.recorded = {}
        agent = ChatAgent(
            client=client, tools=Toolbox({"f": look}, [TASK]), counter=COUNTER, config=config
        )
        fields = [{"seed": seed, "temperature": 0.9, "top_p": 1.0} for seed in range(12)]
        runs = (dataclasses.replace(agent, fields=options)(TASK) for options in fields)
        return await asyncio.gather(*runs), [client.recorded[options["seed"]] for options in fields]


@pytest.mark.slow
def test_counts_tokens_as_server_does():
    options = dict(max_num_seqs=12, max_length=LENGTH, page_size=32, prefill_chunk=64)
    server = Server(
        Engine(policy(), TOKENIZER, EngineConfig(**options)), TOKENIZER, ServerConfig(port=0)
    )
    ended, num_long, omitted, restarts = set(), 0, 0, 0
    with server.running() as url:
        for context in CONTEXTS:
            limits = LoopConfig(
                max_turns=4, max_tokens=LENGTH - 24, reply_tokens=24, context=context
            )
            traces, requests = asyncio.run(attempts(url, limits))
            for trace, attempt in zip(traces, requests):
                ended.add(trace.ended)
                restarts += len(trace.restarts)
                num_long += len(attempt) > 2
                counted, before = Context(context, TASK, COUNTER), []
                rounds = rounds_of(trace.messages)
                for number, (messages, choice) in enumerate(attempt):
                    if number:
                        counted.add(rounds[number - 1])
                    ids = choice["prompt_token_ids"]
                    assert counted.messages() == messages and counted.num_tokens == len(ids)
                    omitted += OMITTED in [message["content"] for message in messages]
                    if context == CONTEXTS[0]:
                        # The prompt extends the last one, except its last token, which sets the thinking mode.
                        assert ids[: len(before)] == before
                    before = ids[:-1]
    assert ended >= {"answer", "length"} and num_long > 5 and omitted > 5 and restarts > 0


def rounds_of(messages):
    """Returns the calls with their results, in order."""
    rounds = []
    for message in messages:
        if message["role"] == "assistant":
            rounds.append([])
        rounds[-1].append(message)
    return [messages_of_round for messages_of_round in rounds if len(messages_of_round) > 1]
