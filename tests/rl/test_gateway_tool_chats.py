"""Agents that call tools, over HTTP through the gateway and an engine's server: what was sampled is what is learnt, byte for
byte, with the log-probs that the learner has for it, whatever JSON makes of what the policy writes."""

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
    policy,
    requires_checkpoint,
    tally,
    token,
)
from tests.text.random_chats import Chats

TURNS, TEMPERATURE = 4, 0.9
SECONDS = 120.0


def engine(seen):
    """seen: (what it was asked, handle) of each reply, in their order."""
    options = dict(
        max_num_seqs=12, max_length=LENGTH, page_size=32, prefill_chunk=64, batch_invariant=True
    )
    made = Engine(policy(), TOKENIZER, EngineConfig(**options))
    submit = made.submit

    def watched(request, listener=None):
        handle = submit(request, listener)
        seen.append((list(request.ids), handle))
        return handle

    made.submit = watched
    return made


class Agent:
    """Asks a question and answers calls, in a session of its own.

    first: the prompt of its first reply, as the layout has it; forgets: whether it tells no reasoning again; kinds: how the
    session's turns went on; records: of it.
    """

    def __init__(self, number, text):
        self.number, self.thinks, self.forgets = number, number % 3 > 0, number % 2 > 0
        self.messages = [{"role": "user", "content": f"{number}. {text}?"}]
        options = dict(tools=[LOOK], enable_thinking=self.thinks, clear_thinking=False)
        self.first = render_chat(self.messages, TOKENIZER, **options).ids
        self.answers = []

    async def __call__(self, client, url):
        name = f"s{self.number}"
        begin = {"id": name, "seed": self.number}
        await client.request("POST", f"{url}/sessions", begin, timeout_s=SECONDS)
        url = f"{url}/sessions/{name}"
        for _ in range(TURNS):
            if not await self._turn(client, url):
                break
        with urllib.request.urlopen(f"{url}/records", timeout=SECONDS) as response:
            self.records = decode_records(response.read(), rollout_id=name)
        self.kinds = (await client.request("GET", url, timeout_s=SECONDS))["kinds"]

    async def _turn(self, client, url):
        """Whether there were calls, which are then answered."""
        thinking = {"type": "enabled" if self.thinks else "disabled"}
        body = {"messages": self.messages, "tools": [LOOK], "max_tokens": 24, "thinking": thinking}
        try:
            told = await client.request(
                "POST", f"{url}/v1/chat/completions", body, timeout_s=SECONDS
            )
        except ServerError as error:
            assert error.status == 400 and "token" in str(error)  # there is no room
            return False
        [choice] = told["choices"]
        said = dict(choice["message"])
        if self.forgets:
            del said["reasoning_content"]
        self.messages.append(said)
        if choice["finish_reason"] != "tool_calls":
            return False
        for call in said["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            self.answers.append(f"<|user|>{arguments.get('k', 'é')}")
            answer = {"role": "tool", "tool_call_id": call["id"], "content": self.answers[-1]}
            self.messages.append(answer)
        return True


def chats(count):
    """(agents, for each what the engine was asked and what it replied)."""
    seen, texts = [], Chats(seed=0)
    agents = [Agent(i, texts.text(6)) for i in range(count)]

    async def all_of(url):
        async with JsonClient() as client:
            await asyncio.gather(*(agent(client, url) for agent in agents))

    config = GatewayConfig(port=0, temperature=TEMPERATURE, reply_timeout_s=SECONDS)
    with (
        Server(engine(seen), TOKENIZER, ServerConfig(port=0)).running() as served,
        Gateway(TOKENIZER, [served], config).running() as url,
    ):
        asyncio.run(all_of(url))
    replies = [(ids, handle.completion) for ids, handle in seen]
    own = [[one for one in replies if one[0][: len(a.first)] == a.first] for a in agents]
    assert [len(agent.kinds) for agent in agents] == [len(turns) for turns in own]
    return agents, own


@pytest.mark.slow
def test_what_was_sampled_is_learnt_byte_for_byte(count=200):
    agents, replies = chats(count)
    found = collections.Counter()
    for agent, own in zip(agents, replies, strict=True):
        assert set(agent.kinds) == {"clean"}
        [record] = agent.records
        asked, reply = own[-1]
        assert record.token_ids.tolist() == [*asked, *reply.ids]
        logp = np.full(len(record), np.nan, np.float32)
        answers = iter(agent.answers)
        for turn, (after, _) in zip(own, [*own[1:], (record.token_ids.tolist(), None)]):
            asked, reply = turn
            kept = len(reply.ids)
            if not requires_checkpoint(turn, after):  # its stop expected another message than came
                kept -= 1
                assert after[: len(asked) + kept] == [*asked, *reply.ids[:kept]]
                assert reply.ids[-1] in map(token, STOP_TOKENS)
                assert after[len(asked) + kept] == token("<|observation|>") != reply.ids[-1]
            logp[len(asked) : len(asked) + kept] = reply.logprobs[:kept]
            between = after[len(asked) + kept :]
            for _ in range(between.count(token("<tool_response>"))):
                assert f"<tool_response>{next(answers)}</tool_response>" in TOKENIZER.decode(
                    between
                )
            assert token("<|user|>") not in between  # the tools' is text
            found += tally(reply) + collections.Counter(
                {"dropped": kept < len(reply.ids), "calls": bool(between)}
            )
        np.testing.assert_array_equal(record.rollout_logp, logp)
        np.testing.assert_array_equal(record.loss_mask, ~np.isnan(logp))
        found += {"several turns": len(own) > 1, "tokens": int(record.loss_mask.sum())}
    records = [record for agent in agents for record in agent.records]
    streams = ("token_ids", "loss_mask", "rollout_logp")
    batch, _ = pack_records(records, 2 * LENGTH, count // 5, streams)
    score = jax.jit(score_function(CFG, StepConfig(mtp_steps=0), temperature=TEMPERATURE))
    logp = np.asarray(score(glm5.params_of(policy()), batch))
    on = batch["loss_mask"] == 1
    assert on.sum() == found["tokens"]
    assert np.abs(logp - batch["rollout_logp"])[on].max() < 1e-4
    # Or nothing was shown.
    assert found["several turns"] > count / 2 and found["tokens"] > 15 * count
    for name in ("no text", "others", "in thought", "dropped", "calls"):
        assert found[name] > count / 40, (name, found)
