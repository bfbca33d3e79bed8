"""Environments of the verifiers library as a task service: with a stand-in of the library, and with the library itself."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import sys
import types

import pytest
from aiohttp import web

from glm5_jax.agents.loop import LoopConfig
from glm5_jax.envs.verifiers.service import VerifiersService, VerifiersShare
from glm5_jax.rl.orchestrator.task_service import RolloutRequest, ServiceConfig

HAS_LIBRARY = importlib.util.find_spec("verifiers") is not None
SERVICE = ServiceConfig(name="sums", api_key="secret")


def request_to(url, held_out=False):
    return RolloutRequest(
        rollout_id="r", group_id="g", number=0, held_out=held_out, base_url=url, seed=0
    )


class Message:
    def __init__(self, role, content):
        self._fields = {"role": role, "content": content}

    def model_dump(self, **options):
        return self._fields


def trace(**changes):
    """Returns a trace of a reply with two rewards."""
    fields = {
        "messages": [Message("user", "1+1?"), Message("assistant", "2")],
        "num_turns": 1,
        "metrics": {"length": 1.0, "unknown": None},
        "rewards": {"right": types.SimpleNamespace(value=0.75), "skipped": None},
        "reward": 0.75,
        "is_truncated": False,
        "errors": [],
    }
    return types.SimpleNamespace(**fields | changes)


def episode(*traces, ok=True, error=None):
    return types.SimpleNamespace(traces=list(traces), ok=ok, last_error=error)


class Environment:
    """Stand-in of an environment, whose episodes end as prepared; None: never."""

    def __init__(self, result):
        self._result, self.contexts, self.is_serving = result, [], False

    @contextlib.asynccontextmanager
    async def serving(self):
        self.is_serving = True
        yield
        self.is_serving = False

    def slots(self, task, count):
        assert count == 1
        return [types.SimpleNamespace(task=task, traces=[trace()])]

    async def run_slot(self, slot, context):
        self.contexts.append((slot.task, context))
        if self._result is None:
            await asyncio.Event().wait()
        return self._result


@pytest.fixture
def library(monkeypatch):
    """Puts a stand-in of the library in its place."""
    record = types.SimpleNamespace
    module = types.ModuleType("verifiers.v1")
    module.EvalClientConfig = module.SamplingConfig = record
    clients = types.ModuleType("verifiers.v1.clients")
    clients.ModelContext = record
    for name, value in (
        ("verifiers", types.ModuleType("verifiers")),
        ("verifiers.v1", module),
        ("verifiers.v1.clients", clients),
    ):
        monkeypatch.setitem(sys.modules, name, value)
    return module


def attempt(environment, **limits):
    service = VerifiersService(
        SERVICE, environment, ["training"], ["held out"], LoopConfig(reply_tokens=7, **limits)
    )
    return asyncio.run(service.attempt(request_to("http://gateway/sessions/s", held_out=True), 0))


def test_runs_episode_against_session(library, monkeypatch):
    environment = Environment(episode(trace()))
    outcome = attempt(environment)
    assert (outcome.reward.value, outcome.reward.parts) == (0.75, {"right": 0.75})
    assert [one["role"] for one in outcome.messages] == ["user", "assistant"]
    assert outcome.metrics == {"replies": 1.0, "length": 1.0}
    [(task, context)] = environment.contexts
    assert task == "held out" and context.sampling.max_tokens == 7
    assert context.client.base_url == "http://gateway/sessions/s/v1"
    # Programs of the environment do not get the key: the library drops such variables.
    assert "API_KEY" in context.client.api_key_var


@pytest.mark.parametrize(
    ("result", "reward", "why"),
    [
        (episode(trace(), ok=False, error="no sandbox"), None, "no sandbox"),
        (episode(trace(is_truncated=True, reward=0.0), ok=False), 0.0, None),
        (episode(trace(), trace()), None, "2 agents have run"),
        (episode(ok=False, error="no agent"), None, "no agent"),
    ],
)
def test_failures_of_environment_have_no_reward(library, result, reward, why):
    outcome = attempt(Environment(result))
    assert outcome.reward.value == reward
    assert why is None or why in outcome.reward.error


def test_time_limit_is_reward_of_zero(library):
    outcome = attempt(Environment(None), timeout_s=0.01, tool_timeout_s=0.005)
    assert outcome.reward.value == 0.0 and outcome.metrics == {"ended_time": 1.0}


def test_names_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ValueError, match="'gsm' needs the package verifiers.*pip install"):
        VerifiersShare(verifiers="gsm").load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "verifiers is empty"),
        ({"verifiers": "a", "held_out_fraction": 1.0}, "held_out_fraction is 1.0"),
        ({"verifiers": "a", "max_tasks": 0}, "max_tasks is 0"),
    ],
)
def test_rejects_values_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        VerifiersShare(**fields)


ENVIRONMENT = """
import json, urllib.request
import verifiers.v1 as vf

class Sum(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[Sum]):
    @vf.reward(weight=0.5)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.answer)

class Sums(vf.Taskset[SumTask]):
    def load(self):
        for i in range(20):
            yield SumTask(Sum(prompt=f"{i}+{i}?", answer=str(2 * i)), self.config.task)

class OneReply(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *more, **options):
        import httpx
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient() as client:
            url = endpoint.rstrip("/") + "/chat/completions"
            reply = await client.post(url, json=body, headers={"Authorization": f"Bearer {secret}"})
        return vf.ProgramResult(exit_code=0 if reply.status_code == 200 else 1, stdout=reply.text, stderr="")

__all__ = ["Sums", "OneReply"]
"""


@contextlib.asynccontextmanager
async def policy():
    """Serves replies that double the first number of a question, and records the requests."""
    requests = []

    async def chat(request):
        body = await request.json()
        requests.append((request.path, request.headers["Authorization"], body))
        number = int(body["messages"][-1]["content"].split("+")[0])
        message = {"role": "assistant", "content": str(2 * number)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy"}
        return web.json_response(reply | {"choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/sessions/s/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}/sessions/s", requests
    await runner.cleanup()


@pytest.mark.skipif(not HAS_LIBRARY, reason="verifiers is not installed (pip install verifiers)")
def test_real_library_runs_and_scores_episode(tmp_path, monkeypatch):
    (tmp_path / "sums_environment.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"agent": {"runtime": {"type": "subprocess"}}}
    share = VerifiersShare(
        verifiers="sums_environment", config=config, held_out_fraction=0.3, max_tasks=15
    )
    training, held_out = share.load()
    assert len(training) + len(held_out) == 15 and training and held_out
    with pytest.raises(ValueError, match="'nothing_such' cannot be loaded"):
        dataclasses.replace(share, verifiers="nothing_such").load()

    async def run():
        environment, loop = share.load_environment(), LoopConfig(reply_tokens=7)
        service = VerifiersService(SERVICE, environment, training, held_out, loop)
        async with policy() as (url, requests), environment.serving():
            return await service.attempt(request_to(url), 3), requests

    outcome, [(path, key, body)] = asyncio.run(run())
    assert (outcome.reward.value, outcome.reward.parts) == (0.5, {"is_right": 0.5})
    assert [one["role"] for one in outcome.messages] == ["user", "assistant"]
    assert path == "/sessions/s/v1/chat/completions" and key == "Bearer secret"
    assert body["max_tokens"] == 7 and "temperature" not in body
