"""Tests that a policy cannot leave an attempt without a reward by writing more than the orchestrator reads."""

import pytest

from glm5_jax.agents.client import MAX_BYTES
from glm5_jax.agents.loop import LoopConfig
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.task_service import (
    MAX_MESSAGES_BYTES,
    Outcome,
    outcome_from_json,
)
from glm5_jax.rl.types import Reward, has_used_tools
from glm5_jax.runtime.http_server import read_json
from glm5_jax.runtime.json_encoding import json_bytes
from glm5_jax.text.tokenizer import Tokenizer

TURN = (
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]},
    {"role": "tool", "content": "\0" * 20_000},
)


@pytest.mark.parametrize(
    "reply", [" " * 3 * MAX_MESSAGES_BYTES, "\n" * MAX_MESSAGES_BYTES, "short"]
)
def test_shortens_messages_to_what_orchestrator_reads(reply):
    answer = {"role": "assistant", "content": reply}
    outcome = Outcome((*TURN * 100, answer), Reward(-1.0, {"tests": 0.5}), {"replies": 101})
    body = json_bytes(outcome.to_json())
    assert len(body) < DispatcherConfig().max_response_bytes
    read = outcome_from_json(read_json(body))
    assert (read.reward, read.metrics) == (outcome.reward, outcome.metrics)
    assert [m["role"] for m in read.messages] == [m["role"] for m in outcome.messages]
    assert has_used_tools(read.messages)


def test_sends_ordinary_messages_unchanged():
    outcome = Outcome((*TURN, {"role": "assistant", "content": "x" * 500_000}), Reward(0.0))
    assert outcome_from_json(read_json(json_bytes(outcome.to_json()))) == outcome


def test_client_reads_longest_reply_of_blanks():
    tokenizer, max_tokens = Tokenizer.default(), LoopConfig().max_tokens
    texts = (tokenizer.decode([token], errors="replace") for token in range(tokenizer.vocab_size))
    longest = max(len(json_bytes(text)) for text in texts)
    assert longest * max_tokens < MAX_BYTES
