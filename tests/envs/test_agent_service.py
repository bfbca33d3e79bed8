"""A service of agents, called over HTTP as by the orchestrator: failures of policy, environment and caller."""

import asyncio
import contextlib
import http.client
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5_jax.agents.context import ContextConfig
from glm5_jax.agents.loop import LoopConfig
from glm5_jax.agents.tools import Toolbox, calculate
from glm5_jax.data import chat_tasks
from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.service import AgentService
from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.server import Orchestrator
from glm5_jax.rl.orchestrator.task_service import Outcome, ServiceConfig, outcome_from_json
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Reward, Task, reward_without_verifier
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer
from tests.agents.scripted import ScriptedServer
from tests.rl.fleet import (
    Engine,
    gateway,
    orchestrator_config,
    post_json,
    rollout,
    service_config,
    until,
)

TOKENIZER = Tokenizer.load("bytes")
PRODUCT = ("calculate", {"expression": "6*7"})
LOOP = LoopConfig(
    max_turns=4, timeout_s=5.0, context=ContextConfig(keep_rounds=None, max_prompt_tokens=None)
)
NOWHERE = "http://127.0.0.1:9"


def tasks(count, kind="product"):
    questions = [{"role": "user", "content": f"{i}: 6*7?"} for i in range(count)]
    tools = chat_tasks.shop_tools()
    return [
        Task(id=f"{kind}-{i}", kind=kind, messages=(message,), tools=tools)
        for i, message in enumerate(questions)
    ]


async def verify(task, attempt):
    return reward_without_verifier(attempt) or Reward(float(attempt.reply == "42"), {"right": 1.0})


@contextlib.contextmanager
def serving(replies=(), *, tools=None, verifier=verify, loop=LOOP, count=5, held_out=2, **options):
    """Yields (ask, service, model); ask(number, **fields) requests a rollout."""
    model = ScriptedServer(replies)
    toolbox = Toolbox(tools or {"calculate": calculate, "lookup": calculate})
    config = service_config(NOWHERE, **{"rollout_timeout_s": 10.0} | options)
    more = tasks(count), tasks(held_out, "held-out")
    service = AgentService(config, *more, toolbox, verifier, TOKENIZER, loop)
    with model.running() as url, service.running() as service_url:

        def ask(number=0, path="/rollout", **fields):
            if path != "/rollout":
                return post_json(service_url, path, fields)
            base_url = f"{url}/sessions/r{number}"
            return rollout(service_url, number, **{"base_url": base_url} | fields)

        yield ask, service, model


def health(service) -> dict:
    with Client(f"http://127.0.0.1:{service.port}").open("/health") as answer:
        return json.load(answer)


def test_rollout_returns_messages_and_reward():
    with serving([[PRODUCT], "42"]) as (ask, _, model):
        result = ask(3)
    roles = [message["role"] for message in result["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert result["messages"][2]["content"] == "42"
    assert result["reward"] == {"value": 1.0, "parts": {"right": 1.0}, "error": ""}
    assert result["metrics"] == {
        "replies": 2,
        "tool_failures": 0,
        "restarts": 0,
        "ended_answer": 1.0,
    }
    assert model.paths == ["/sessions/r3/v1/chat/completions"] * 2
    assert outcome_from_json(result) == outcome_from_json(
        json.loads(json.dumps(outcome_from_json(result).to_json()))
    )


@pytest.mark.parametrize(
    ("replies", "loop", "words"),
    [
        ([[PRODUCT]] * 4, {}, "cut off"),
        ([[PRODUCT], {"sleep": 3, "message": {}, "finish_reason": "stop"}], {"timeout_s": 0.3}, "cut"),
        ([{"message": {"role": "assistant", "content": "4"}, "finish_reason": "length"}], {}, "cut"),
    ],
    ids=["turns", "seconds", "length"],
)  # fmt: skip
def test_limit_of_agent_gives_zero_reward(replies, loop, words):
    limits = LoopConfig(**{"max_turns": 4, "timeout_s": 5.0, "context": LOOP.context} | loop)
    with serving(replies, loop=limits) as (ask, *_):
        reward = ask()["reward"]
    assert reward["value"] == 0.0 and words in reward["error"]


async def broken_tool(task, arguments):
    raise ToolError("the shop is closed")


async def broken_verifier(task, attempt):
    raise SandboxError("no cgroup is left")


async def unsure_verifier(task, attempt):
    return Reward(None, error="nobody can judge that")


@pytest.mark.parametrize(
    ("replies", "options", "words"),
    [
        ([ApiError("no engine answers", 502)], {}, "ServerError: no engine answers"),
        ([[PRODUCT]], {"tools": {"calculate": broken_tool}}, "ToolError: the shop is closed"),
        (["42"], {"verifier": broken_verifier}, "SandboxError: no cgroup is left"),
        (["42"], {"verifier": unsure_verifier}, "nobody can judge that"),
        (["42"], {"verifier": None}, "TypeError"),
        (
            [{"message": "none", "finish_reason": "stop"}],
            {},
            "ServerError: the reply is not a chat",
        ),
    ],
    ids=["gateway", "tool", "sandbox", "verifier", "bug", "garbage"],
)
def test_environment_failure_gives_no_reward(replies, options, words):
    if tools := options.get("tools"):
        options = {"tools": {**tools, "lookup": calculate}}
    with serving(replies, **options) as (ask, *_):
        reward = ask()["reward"]
        assert reward["value"] is None and words in reward["error"]


def test_missing_gateway_gives_no_reward():
    with serving() as (ask, *_):
        reward = ask(base_url=f"{NOWHERE}/sessions/r0")["reward"]
    assert reward["value"] is None and "no server answers at" in reward["error"]


def test_endless_rollout_gives_no_reward():
    """Its handling of the cancellation does not matter."""
    held = []

    async def stubborn(task, attempt):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            held.append(task.id)
            await asyncio.sleep(0.2)
            raise

    loop = LoopConfig(timeout_s=0.2, context=LOOP.context)
    with serving(["42"], verifier=stubborn, loop=loop, rollout_timeout_s=0.3) as (ask, *_):
        began = time.monotonic()
        reward = ask()["reward"]
        assert reward["value"] is None and "has not ended within 0.3 s" in reward["error"]
        assert 0.3 <= time.monotonic() - began < 5
    assert held


def test_cancels_rollouts():
    slow = {"sleep": 30, "message": {}, "finish_reason": "stop"}
    with serving([slow] * 9, max_inflight=2) as (ask, service, _), ThreadPoolExecutor() as threads:
        futures = [threads.submit(ask, number) for number in range(2)]
        until(lambda: health(service)["running"] == 2)
        with pytest.raises(ServerError, match="2 rollouts are running, which is the maximum"):
            ask(2)
        with pytest.raises(ServerError, match="rollout 'r1' is running"):
            ask(1)
        assert ask(path="/cancel", rollout_id="r7")["cancelled"] is False
        for number in range(2):
            result = ask(path="/cancel", rollout_id=f"r{number}")
            assert result == {"rollout_id": f"r{number}", "cancelled": True}
        for number, one in enumerate(futures):
            with pytest.raises(ServerError, match=f"rollout 'r{number}' was cancelled"):
                one.result(10)
        until(lambda: not health(service)["running"])


def test_ends_rollout_of_closed_connection():
    slow = {"sleep": 30, "message": {}, "finish_reason": "stop"}
    with serving([slow]) as (_, service, model):
        with rollout_request(service, model) as connection:
            until(lambda: health(service)["running"])
            connection.close()
        until(lambda: not health(service)["running"])


@contextlib.contextmanager
def rollout_request(service, model):
    """Yields a connection that has requested a rollout."""
    body = json.dumps(
        {
            "rollout_id": "r",
            "group_id": "g",
            "number": 0,
            "held_out": False,
            "base_url": f"http://127.0.0.1:{model.port}/sessions/r",
            "seed": 1,
        }
    )
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.request("POST", "/rollout", body)
    try:
        yield connection
    finally:
        connection.close()


def test_every_epoch_has_all_tasks_in_new_order():
    def order(seed, name="sums"):
        with serving(lambda _: "42", count=6, seed=seed, name=name) as (ask, *_):
            questions = [ask(number)["messages"][0]["content"] for number in range(18)]
            held_out = [ask(n, held_out=True)["messages"][0]["content"] for n in range(2)]
        assert held_out == ["0: 6*7?", "1: 6*7?"]
        return [tuple(questions[i : i + 6]) for i in (0, 6, 12)]

    epochs = order(0)
    assert all(len(set(epoch)) == 6 for epoch in epochs) and len(set(epochs)) == 3
    assert order(0) == epochs
    assert order(1)[0] != epochs[0] != order(0, "other")[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"number": -1}, "number: -1 is less than the minimum"),
        ({"number": 2, "held_out": True}, "number is 2 and 2 tasks are held out"),
        ({"speed": 1}, "speed: no such field"),
        ({"rollout_id": ""}, "rollout_id"),
        ({"base_url": None}, "'base_url' is a required property"),
    ],
)
def test_refuses_invalid_request(body, words):
    with serving() as (ask, *_), pytest.raises(ServerError) as caught:
        ask(**body)
    assert caught.value.status == 400 and words in str(caught.value)


def test_reports_missing_orchestrator():
    with serving() as (_, service, _):
        until(lambda: "no server answers" in health(service)["problem"])
        status = health(service)
    assert status["status"] == "ok" and not status["registered"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: make_service(loop=LoopConfig(timeout_s=10.0)),
            "an agent has 10 s and a rollout with",
        ),
        (
            lambda: make_service(loop=LoopConfig(max_turns=20, max_tokens=9, timeout_s=1.0)),
            "task 'product-0' has .* max_tokens is 9",
        ),
        (lambda: make_service(count=0), "sums has 0 tasks"),
        (lambda: ServiceConfig(name="a/b"), "name is 'a/b'"),
        (
            lambda: ServiceConfig(orchestrator="orchestrator:8100"),
            "orchestrator is 'orchestrator:8100', which is no URL",
        ),
        (lambda: ServiceConfig(url="nowhere"), "url is 'nowhere', which is no URL"),
        (
            lambda: ServiceConfig(host="0.0.0.0", trusted_network=True),
            "host is 0.0.0.0, which is no address; give url",
        ),
        (lambda: ServiceConfig(weight=0), "weight is 0"),
        (lambda: ServiceConfig(rate=-1.0), "rate is -1.0"),
        (lambda: ServiceConfig(rollout_timeout_s=float("inf")), "rollout_timeout_s is inf"),
        (lambda: Outcome((), Reward(1.0), {"x": float("nan")}), "metric x is nan"),
        (lambda: outcome_from_json({"messages": "none"}), "no outcome of a rollout"),
        (
            lambda: outcome_from_json({"messages": [1], "reward": {"value": 1}}),
            "no outcome of a rollout",
        ),
        (
            lambda: outcome_from_json({"messages": [], "reward": {"value": "1"}}),
            "no outcome of a rollout",
        ),
        (lambda: outcome_from_json([]), "no outcome of a rollout"),
    ],
)
def test_rejects_values_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def make_service(loop=LOOP, count=3):
    config = service_config(NOWHERE, rollout_timeout_s=10.0)
    return AgentService(config, tasks(count), [], Toolbox({}), verify, TOKENIZER, loop)


def test_records_equal_those_of_gateway():
    """With an orchestrator, the real gateway, and an engine that writes digits."""

    async def even(task, attempt):
        return reward_without_verifier(attempt) or Reward(float(int(attempt.reply) % 2 == 0))

    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(gateway(stack.enter_context(Engine().running())))
        url = stack.enter_context(Orchestrator(orchestrator_config(gate)).running())
        toolbox = Toolbox({"calculate": calculate, "lookup": calculate})
        more = service_config(url), tasks(9), tasks(2, "held-out"), toolbox, even, TOKENIZER, LOOP
        stack.enter_context(AgentService(*more).running())
        client = OrchestratorClient(url, patience_s=10.0)
        client.begin(0, 0)
        groups = client.take(0, 20)
        assert client.evaluate(5, 20)["sums"]["count"] == 2
    rewards = set()
    for member in (member for group in groups for member in group.members):
        [record] = member.records
        text = TOKENIZER.decode(record.token_ids.tolist(), errors="replace")
        reply = re.findall(r"</think>(\d+)<\|user\|>", text)[-1]
        assert "calculate" in text
        assert member.reward.value == float(int(reply) % 2 == 0)
        rewards.add(member.reward.value)
    assert rewards == {0.0, 1.0}
