"""Tests that replies with broken calls get the same reward over a gateway as in the trainer's process."""

import asyncio
import contextlib
import json

import pytest

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import ContextConfig, TokenCounter
from glm5_jax.agents.loop import ChatAgent, LoopConfig
from glm5_jax.agents.tools import Toolbox
from glm5_jax.inference.request import Completion
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.rollouts.rollout import RolloutConfig, Rollouts
from glm5_jax.rl.types import Reward, Task, reward_without_verifier
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import Engine

TOKENIZER = Tokenizer.load("bytes")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
TASK = Task(id="t", kind="tir", messages=({"role": "user", "content": "2+3?"},), tools=(ADD,))
COMPLETE = "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"
CUT = COMPLETE.removesuffix("</tool_call>")
TWICE = COMPLETE.replace("</tool_call>", "<arg_key>a</arg_key><arg_value>3</arg_value></tool_call>")
ANSWER = "</think>5<|user|>"


async def add(task, arguments):
    return json.dumps(arguments["a"] + 3)


def verdict(attempt):
    return reward_without_verifier(attempt) or Reward(float(attempt.reply.endswith("5")))


class InProcess:
    """Engine that returns scripted texts."""

    max_length = 2000

    def __init__(self, texts):
        self._texts = list(texts)

    def generate(self, prompts, samplings, should_stop):
        ids = TOKENIZER.encode(self._texts.pop(0), parse_special=True)
        reason = "stop" if ids[-1] in TOKENIZER.eos_ids else "length"
        return [Completion(ids, [-0.5] * len(ids), [0] * len(ids), [], reason, None, 0)]


class Served(Engine):
    """Server of an engine that returns scripted texts."""

    def __init__(self, texts):
        super().__init__(delay=0)
        self._texts = list(texts)

    async def _generate(self, request):
        ids = TOKENIZER.encode(self._texts.pop(0), parse_special=True)
        answer = await super()._generate(request)
        body = json.loads(answer.body)
        reason = "stop" if ids[-1] in TOKENIZER.eos_ids else "length"
        meta = body["meta_info"] | {"finish_reason": {"type": reason}}
        meta |= {"output_token_logprobs": [[-0.5, i, None] for i in ids]}
        meta |= {"weight_versions": [0] * len(ids)}
        answer.body = json.dumps({"output_ids": ids, "meta_info": meta}).encode()
        return answer


def in_process(texts):
    config = RolloutConfig(group=1, max_turns=4)
    rollouts = Rollouts(InProcess(texts), TOKENIZER, config, 1.0, Toolbox({"add": add}))
    [group] = rollouts.sample([TASK], 0)
    return group.attempts[0]


def over_a_gateway(texts):
    config = LoopConfig(
        max_turns=4, context=ContextConfig(keep_rounds=None, max_prompt_tokens=None)
    )
    counter = TokenCounter(TOKENIZER)

    async def run(url):
        async with JsonClient() as client:
            await client.request("POST", f"{url}/sessions", {"id": "s"}, timeout_s=30)
        async with ChatClient(f"{url}/sessions/s") as client:
            return await ChatAgent(
                client=client, tools=Toolbox({"add": add}), counter=counter, config=config
            )(TASK)

    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Served(texts).running())
        gateway = Gateway(TOKENIZER, [engine], GatewayConfig(port=0))
        return asyncio.run(run(stack.enter_context(gateway.running()))).attempt


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        ([f"</think>{COMPLETE}<|observation|>", ANSWER], 1),
        ([f"</think>{COMPLETE}<|user|>", ANSWER], 1),
        ([f"</think>{COMPLETE}<|endoftext|>", ANSWER], 1),
        ([f"</think>{CUT}<|user|>", ANSWER], 0),
        ([f"</think>{CUT}", ANSWER], 0),
        ([f"</think>{CUT}<|observation|>", ANSWER], 0),
        ([f"</think>5{TWICE}<|observation|>", ANSWER], 0),
        ([f"</think>{COMPLETE}{TWICE}<|observation|>", ANSWER], 0),
        ([f"</think>{COMPLETE.replace('add', 'rm')}<|observation|>", ANSWER], 0),
        (["</think>5<tool_call></tool_call><|observation|>", ANSWER], 0),
        (["</think><tool_call></tool_call>5<|observation|>", ANSWER], 1),
        ([ANSWER], 1),
    ],
)  # fmt: skip
def test_rewards_broken_call_equally_in_both_paths(texts, value):
    ours, theirs = in_process(texts), over_a_gateway(texts)
    assert verdict(ours).value == verdict(theirs).value == value
    assert ours.finish_reason == theirs.finish_reason and bool(ours.error) == bool(theirs.error)
