"""Invalid responses of task services: each counts against its service, and delays no other."""

import dataclasses
import json

import pytest
from aiohttp import web

from glm5_jax.rl.orchestrator.task_service import (
    MAX_DEPTH,
    MAX_NAME_LENGTH,
    MAX_NAMES,
    outcome_from_json,
)
from glm5_jax.rl.types import MAX_REWARD, Reward
from tests.rl.fleet import SOON, Fleet, Sums, gateway, service_config, until

GOOD = {"messages": [{"role": "user", "content": "?"}], "reward": {"value": 1.0}, "metrics": {}}


def nested(depth):
    """Returns lists nested to a depth."""
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_reads_outcome_within_limits():
    outcome = outcome_from_json(
        GOOD | {"reward": {"value": -MAX_REWARD}, "metrics": {"tokens": 10**9}}
    )
    assert outcome.reward.value == -MAX_REWARD and outcome.metrics == {"tokens": 10**9}
    deep = {"role": "user", "content": nested(MAX_DEPTH - 10)}
    assert outcome_from_json(GOOD | {"messages": [deep]}).messages == (deep,)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"value": 10**400}},
        {"reward": {"value": -(10**310)}},
        {"reward": {"value": 1e308}},
        {"reward": {"value": -1e39}},
        {"reward": {"value": float("nan")}},
        {"reward": {"value": "1"}},
        {"reward": {"value": [1]}},
        {"reward": {"value": 1.0, "parts": {"style": 10**400}}},
        {"reward": {"value": 1.0, "parts": 3}},
        {"metrics": {"calls": 10**400}},
        {"metrics": {"calls": float("inf")}},
        {"metrics": {"calls": 1e308}},
        {"messages": [{"role": "user", "content": nested(MAX_DEPTH + 1)}]},
        {"messages": [{"role": "user", "content": nested(980)}]},
        {"messages": None},
        {"reward": None},
        {"metrics": {f"m{i}": 1 for i in range(MAX_NAMES + 1)}},
        {"metrics": {"m" * (MAX_NAME_LENGTH + 1): 1}},
        {"reward": {"value": 1.0, "parts": {f"p{i}": 1 for i in range(MAX_NAMES + 1)}}},
    ],
)
def test_rejects_outcome_out_of_limits(change):
    with pytest.raises(ValueError, match="no outcome of a rollout") as raised:
        outcome_from_json(GOOD | change)
    assert len(str(raised.value)) < 2000


def test_rejects_reward_that_float32_cannot_square():
    with pytest.raises(ValueError, match="a reward's value is 1e.308; .* from -1e.06 to 1e.06"):
        Reward(1e308)
    assert Reward(None).value is None and Reward(MAX_REWARD).value == MAX_REWARD


@pytest.fixture(scope="module")
def gate(engine):
    """Runs a gateway that probes its engine rarely, because only responses of services fail in these tests."""
    with gateway(engine, probe_interval_s=5.0) as url:
        yield url


class Hostile(Sums):
    """Service that responds to rollouts with `body`; None: with an endless body."""

    body: bytes | None = b""

    async def _rollout_by_mode(self, request):
        if self.body is not None:
            return web.Response(body=self.body, content_type="application/json")
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" " * 2**16)


BODIES = {
    "digits": json.dumps(GOOD | {"reward": {"value": 10**400}}).encode(),
    "huge": json.dumps(GOOD | {"reward": {"value": 1e308}}).encode(),
    "deep": b'{"messages": [{"role": "user", "content": %s}], "reward": {"value": 1.0}}'
    % (b"[" * 980 + b"]" * 980),
    "empty": b"",
    "values": json.dumps(GOOD | {"x": [{}] * 21_000}).encode(),
    "names": json.dumps(GOOD | {"metrics": {f"m{i}": 1 for i in range(200)}}).encode(),
    "endless": None,
}


# Reading many values takes long where the lines that run are recorded.
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) if k == "values" else k for k in BODIES],
)
def test_blames_only_service_of_bad_answer(stack, gate, kind):
    dispatcher = dataclasses.replace(SOON["dispatcher"], max_tries=1, max_response_bytes=2**21)
    fleet = Fleet(stack, gate, ("good",), dispatcher=dispatcher)
    bad = Hostile(service_config(fleet.url, "bad"))
    bad.body = BODIES[kind]
    stack.enter_context(bad.running())
    until(lambda: bad.is_registered)
    fleet.begin()
    assert {group.task for group in fleet.train(2)} == {"good"}
    state = until(
        lambda: fleet.task_status("bad")["breaker"] != "closed" and fleet.task_status("bad")
    )
    # After 4 failures the breaker lets one group through at a time, each after a pause.
    assert state["failures"] >= 4 and state["accepted"] == 0 and state["cancelled_groups"] == 0
    assert fleet.task_status("good")["failures"] == 0
    assert any("service of bad is" in line for line in fleet.client.status()["blockers"])
