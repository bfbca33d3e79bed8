"""The loop over a real server, with a policy that writes some of everything: whatever it writes is read again, and what
the loop counts is what the server reads."""

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
OWN = COUNTER.prompt(TASK)
CONTEXTS = (ContextConfig(None, None), ContextConfig(1, None), ContextConfig(1, OWN + 30))


class Watching(ChatClient):
    """asked: messages and choice of each request, by its seed."""

    asked: dict

    async def chat(self, messages, **fields):
        choice = await super().chat(messages, return_token_ids=True, **fields)
        self.asked.setdefault(fields["seed"], []).append((messages, choice))
        return choice


async def look(task, arguments):
    return f"seen {arguments.get('k')!r}"


async def attempts(url, config):
    async with Watching(url) as client:
        client.asked = {}
        agent = ChatAgent(
            client=client, tools=Toolbox({"f": look}, [TASK]), counter=COUNTER, config=config
        )
        fields = [{"seed": seed, "temperature": 0.9, "top_p": 1.0} for seed in range(12)]
        own = (dataclasses.replace(agent, fields=one)(TASK) for one in fields)
        return await asyncio.gather(*own), [client.asked[one["seed"]] for one in fields]


@pytest.mark.slow
def test_whatever_is_written_is_read_again_and_counted():
    options = dict(max_num_seqs=12, max_length=LENGTH, page_size=32, prefill_chunk=64)
    server = Server(
        Engine(policy(), TOKENIZER, EngineConfig(**options)), TOKENIZER, ServerConfig(port=0)
    )
    ended, several, omitted, restarts = set(), 0, 0, 0
    with server.running() as url:
        for context in CONTEXTS:
            limits = LoopConfig(
                max_turns=4, max_tokens=LENGTH - 24, reply_tokens=24, context=context
            )
            traces, asked = asyncio.run(attempts(url, limits))
            for trace, own in zip(traces, asked):
                ended.add(trace.ended)
                restarts += len(trace.restarts)
                several += len(own) > 2
                counted, before = Context(context, TASK, COUNTER), []
                rounds = rounds_of(trace.messages)
                for number, (messages, choice) in enumerate(own):
                    if number:
                        counted.add(rounds[number - 1])
                    ids = choice["prompt_token_ids"]
                    assert counted.messages() == messages and counted.num_tokens == len(ids)
                    omitted += OMITTED in [message["content"] for message in messages]
                    if context == CONTEXTS[0]:
                        # What the last reply was prompted with, but for its last token, whether it thinks.
                        assert ids[: len(before)] == before
                    before = ids[:-1]
    assert ended >= {"answer", "length"} and several > 5 and omitted > 5 and restarts > 0


def rounds_of(messages):
    """Calls with their results, in order."""
    found = []
    for message in messages:
        if message["role"] == "assistant":
            found.append([])
        found[-1].append(message)
    return [own for own in found if len(own) > 1]
