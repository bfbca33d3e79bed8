"""Agents that call tools, over HTTP through the gateway and an engine's server.

The sampled tokens are the trained tokens, byte for byte, with the log-probs that the trainer computes, although
agents see them only as JSON.
"""

import asyncio
import collections
import json
import urllib.request

import jax
import numpy as np
import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.rollouts.record_codec import decode_records
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import STOP_TOKENS
from glm5_jax.training.gradients import score_function
from glm5_jax.training.step_config import StepConfig
from tests.rl.test_tool_chats import (
    CFG,
    LENGTH,
    LOOK,
    TOKENIZER,
    continues_turn,
    policy,
    tally,
    token,
)
from tests.text.random_chats import Chats

TURNS, TEMPERATURE = 4, 0.9
TIMEOUT_S = 120.0


def engine(requests):
    """Returns an engine that appends (prompt, handle) of each reply to `requests`."""
    options = dict(
        max_num_seqs=12, max_length=LENGTH, page_size=32, prefill_chunk=64, batch_invariant=True
    )
    inference_engine = Engine(policy(), TOKENIZER, EngineConfig(**options))
    submit = inference_engine.submit

    def record_request(request, *arguments):
        handle = submit(request, *arguments)
        requests.append((list(request.ids), handle))
        return handle

    inference_engine.submit = record_request
    return inference_engine


class Agent:
    """Asks a question and answers calls, in its session.

    Attributes:
      first: prompt of its first reply, as rendered.
      forgets: whether it omits the reasoning of its earlier replies.
      kinds: how each turn of the session continued.
      records: token records of the session.
    """

    def __init__(self, number, text):
        self.number, self.thinks, self.forgets = number, number % 3 > 0, number % 2 > 0
        self.messages = [{"role": "user", "content": f"{number}. {text}?"}]
        options = dict(tools=[LOOK], enable_thinking=self.thinks, clear_thinking=False)
        self.first = render_chat(self.messages, TOKENIZER, **options).ids
        self.answers = []

    async def __call__(self, client, url):
        name = f"s{self.number}"
        session = {"id": name, "seed": self.number}
        await client.request("POST", f"{url}/sessions", session, timeout_s=TIMEOUT_S)
        url = f"{url}/sessions/{name}"
        for _ in range(TURNS):
            if not await self._turn(client, url):
                break
        with urllib.request.urlopen(f"{url}/records", timeout=TIMEOUT_S) as response:
            self.records = decode_records(response.read(), rollout_id=name)
        self.kinds = (await client.request("GET", url, timeout_s=TIMEOUT_S))["kinds"]

    async def _turn(self, client, url):
        """Chats once, answers the calls of the reply, and returns whether there were any."""
        thinking = {"type": "enabled" if self.thinks else "disabled"}
        body = {"messages": self.messages, "tools": [LOOK], "max_tokens": 24, "thinking": thinking}
        try:
            response = await client.request(
                "POST", f"{url}/v1/chat/completions", body, timeout_s=TIMEOUT_S
            )
        except ServerError as error:
            assert error.status == 400 and "token" in str(error)  # the session is full
            return False
        [choice] = response["choices"]
        message = dict(choice["message"])
        if self.forgets:
            del message["reasoning_content"]
        self.messages.append(message)
        if choice["finish_reason"] != "tool_calls":
            return False
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            self.answers.append(f"<|user|>{arguments.get('k', 'é')}")
            answer = {"role": "tool", "tool_call_id": call["id"], "content": self.answers[-1]}
            self.messages.append(answer)
        return True


def chats(count):
    """Returns (agents, (prompt, reply) pairs of each)."""
    requests, texts = [], Chats(seed=0)
    agents = [Agent(i, texts.text(6)) for i in range(count)]

    async def run_agents(url):
        async with JsonClient() as client:
            await asyncio.gather(*(agent(client, url) for agent in agents))

    config = GatewayConfig(port=0, temperature=TEMPERATURE, reply_timeout_s=TIMEOUT_S)
    with (
        Server(engine(requests), TOKENIZER, ServerConfig(port=0)).running() as engine_url,
        Gateway(TOKENIZER, [engine_url], config).running() as url,
    ):
        asyncio.run(run_agents(url))
    replies = [(ids, handle.completion) for ids, handle in requests]
    replies_by_agent = [
        [reply for reply in replies if reply[0][: len(agent.first)] == agent.first]
        for agent in agents
    ]
    assert [len(agent.kinds) for agent in agents] == [len(turns) for turns in replies_by_agent]
    return agents, replies_by_agent


@pytest.mark.slow
def test_trains_on_sampled_tokens_over_gateway(count=200):
    agents, replies = chats(count)
    counts = collections.Counter()
    for agent, agent_replies in zip(agents, replies, strict=True):
        assert set(agent.kinds) == {"clean"}
        [record] = agent.records
        prompt, reply = agent_replies[-1]
        assert record.token_ids.tolist() == [*prompt, *reply.ids]
        logp = np.full(len(record), np.nan, np.float32)
        answers = iter(agent.answers)
        for turn, (after, _) in zip(
            agent_replies, [*agent_replies[1:], (record.token_ids.tolist(), None)]
        ):
            prompt, reply = turn
            num_trained = len(reply.ids)
            if not continues_turn(
                turn, after
            ):  # another message followed than its stop token expects
                num_trained -= 1
                assert after[: len(prompt) + num_trained] == [*prompt, *reply.ids[:num_trained]]
                assert reply.ids[-1] in map(token, STOP_TOKENS)
                assert after[len(prompt) + num_trained] == token("<|observation|>") != reply.ids[-1]
            logp[len(prompt) : len(prompt) + num_trained] = reply.logprobs[:num_trained]
            between = after[len(prompt) + num_trained :]
            for _ in range(between.count(token("<tool_response>"))):
                assert f"<tool_response>{next(answers)}</tool_response>" in TOKENIZER.decode(
                    between
                )
            assert token("<|user|>") not in between  # that of the tool result is plain text
            counts += tally(reply) + collections.Counter(
                {"dropped": num_trained < len(reply.ids), "calls": bool(between)}
            )
        np.testing.assert_array_equal(record.rollout_logp, logp)
        np.testing.assert_array_equal(record.loss_mask, ~np.isnan(logp))
        counts += {"several turns": len(agent_replies) > 1, "tokens": int(record.loss_mask.sum())}
    records = [record for agent in agents for record in agent.records]
    streams = ("token_ids", "loss_mask", "rollout_logp")
    batch, _ = pack_records(records, 2 * LENGTH, count // 5, streams)
    score = jax.jit(score_function(CFG, StepConfig(mtp_steps=0), temperature=TEMPERATURE))
    logp = np.asarray(score(glm5.params_of(policy()), batch))
    is_trained = batch["loss_mask"] == 1
    assert is_trained.sum() == counts["tokens"]
    assert np.abs(logp - batch["rollout_logp"])[is_trained].max() < 1e-4
    # The chats cover all cases.
    assert counts["several turns"] > count / 2 and counts["tokens"] > 15 * count
    for name in ("no text", "others", "in thought", "dropped", "calls"):
        assert counts[name] > count / 40, (name, counts)
