"""The orchestrator with real services and the real gateway over HTTP, and an engine that answers at random."""

import asyncio
import collections
import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.orchestrator.client import (
    OrchestratorClient,
    batch_group_from_json,
    batch_group_to_json,
)
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.server import Orchestrator, OrchestratorConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig
from glm5_jax.rl.trajectory import summarize_records
from glm5_jax.runtime.http_server import (
    ApiError,
    HttpServer,
    ListenConfig,
    json_response,
    read_json,
)
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import (
    ENGINE,
    Fleet,
    Sums,
    num_sessions,
    orchestrator_config,
    post_json,
    process,
    service_config,
    until,
)

TOKENIZER = Tokenizer.load("bytes")


# -- groups of rollouts ------------------------------------------------------------------------------------


def test_records_match_chats(stack, gate):
    fleet = Fleet(stack, gate).begin()
    groups = fleet.train(3)
    # There is no other task, and nothing was dropped.
    assert [group.order for group in groups] == [group.number for group in groups]
    assert len({group.order for group in groups}) == 12
    for group in groups:
        assert len(group.members) == 4 and 0 <= group.staleness <= 2
        assert len({member.rollout_id for member in group.members}) == 4
        for member in group.members:
            assert (member.task, member.number) == ("sums", group.number)
            assert member.metrics == {"turns": 2} and member.duration_s > 0
            [record] = member.records
            assert record.rollout_id == member.rollout_id and record.group_id == group.group_id
            text = TOKENIZER.decode(record.token_ids.tolist(), errors="replace")
            replies = re.findall(r"</think>(\d+)<\|user\|>", text)
            assert len(replies) == 2 and "+1?" in text
            assert record.loss_mask.sum() == 20  # of two replies
            summary = summarize_records(member.records, member.summary.digest)
            assert member.summary == summary
            is_even = float(int(replies[-1]) % 2 == 0)
            assert member.reward.value == member.reward.parts["right"] == is_even
    # Every epoch has each task once.
    assert len(set(fleet.services["sums"].indices)) == len(
        {request.number for request in fleet.services["sums"].requests}
    )


@pytest.mark.slow
def test_seed_determines_samples(gate):
    def ids(seed):
        with contextlib.ExitStack() as stack:
            groups = Fleet(stack, gate, seed=seed).begin().train(2)
        return {
            (group.order, index): member.records[0].token_ids.tolist()
            for group in groups
            for index, member in enumerate(group.members)
        }

    samples, same_seed, other_seed = ids(1), ids(1), ids(2)
    both = samples.keys() & same_seed.keys()  # which are first depends on the clock
    assert len(both) >= 16 and all(samples[name] == same_seed[name] for name in both)
    assert not any(samples[name] == other_seed[name] for name in samples.keys() & other_seed.keys())
    assert len(set(map(tuple, samples.values()))) == len(samples)


@pytest.mark.slow
def test_shares_equal_weights_and_no_session_is_left(stack, gate):
    weights = {"a": 1, "b": 2, "c": 3}
    fleet = Fleet(
        stack, gate, {name: {"weight": weight} for name, weight in weights.items()}
    ).begin()
    count = collections.Counter(group.task for group in fleet.train(15))
    assert sum(count.values()) == 60
    for name, weight in weights.items():
        assert abs(count[name] - 10 * weight) <= 2
    fleet.client.pause()
    until(lambda: fleet.client.status()["running"] == 0)
    assert num_sessions(gate) == 0
    status = fleet.task_status("c")
    assert status["accepted"] == 4 * status["accepted_groups"] and status["failed"] == 0
    assert status["in_flight"] == 0 and 0 < status["reward"] < 1


@pytest.mark.slow
def test_starts_groups_at_most_at_rate_of_service(stack, gate):
    rate, start = 3.0, time.monotonic()
    fleet = Fleet(stack, gate, {"limited": {"rate": rate}, "fast": {}}).begin()
    while fleet.task_status("limited")["num_drawn"] < 4:
        fleet.train()
    assert fleet.task_status("limited")["num_drawn"] <= rate * (time.monotonic() - start) + 1
    assert fleet.task_status("fast")["num_drawn"] > 4


# -- requests of people, and signals --------------------------------------------------------------------------------


@pytest.mark.parametrize("should_resample", [pytest.param(False, marks=pytest.mark.slow), True])
def test_cancels_group(stack, gate, should_resample):
    fleet = Fleet(stack, gate)
    service = fleet.services["sums"]
    service.mode = "hangs"
    fleet.begin()
    until(lambda: len(service.requests) == 48)
    third, *others = sorted(fleet.client.status()["groups"], key=lambda name: "-3-0" not in name)
    fleet.client.cancel(third, should_resample)
    service.mode = "ok"
    names = {f"{third}-{index}" for index in range(4)}
    until(lambda: set(service.cancelled) >= names)
    for name in others:
        fleet.client.cancel(name, should_resample=True)
    groups = fleet.train(4)
    assert {group.number for group in groups} >= set(range(12)) - {3}
    assert (3 in {group.number for group in groups}) == should_resample
    assert fleet.task_status()["cancelled_groups"] == 12
    with pytest.raises(ServerError, match=f"no group '{third}' is running"):
        fleet.client.cancel(third)
    fleet.client.pause()
    until(lambda: fleet.client.status()["running"] == 0 and num_sessions(gate) == 0)


class SlowGateway(HttpServer):
    """Gateway that opens a session with a delay, also if the client has disconnected.

    Attributes:
      sessions: names of open sessions.
      num_requests: number of requests for a session.
      tasks: pending openings.
    """

    def __init__(self):
        super().__init__(ListenConfig(port=0))
        self.sessions, self.num_requests, self.tasks = set(), 0, set()

    def routes(self):
        post = {"/sessions": self._begin, "/weights": self._ignore}
        return {"POST": post, "DELETE": {"/sessions/{id}": self._end}}

    async def _begin(self, request):
        name = read_json(await request.read())["id"]
        self.num_requests += 1

        async def open_later():
            await asyncio.sleep(0.3)
            self.sessions.add(name)

        self.tasks.add(task := asyncio.create_task(open_later()))
        await asyncio.shield(task)
        return json_response({"id": name})

    async def _end(self, request):
        if (name := request.match_info["id"]) not in self.sessions:
            raise ApiError(f"there is no session {name!r}", 404)
        self.sessions.remove(name)
        return json_response({"id": name})

    async def _ignore(self, request):
        return json_response({})


def test_opens_no_session_after_group_is_cancelled(stack):
    slow_gateway = SlowGateway()
    fleet = Fleet(stack, stack.enter_context(slow_gateway.running())).begin()
    until(lambda: slow_gateway.num_requests == 48)
    fleet.client.pause()
    for name in fleet.client.status()["groups"]:
        fleet.client.cancel(name)
    until(lambda: fleet.client.status()["running"] == 0)
    assert all(task.done() for task in slow_gateway.tasks) and slow_gateway.sessions == set()


def test_paused_orchestrator_starts_no_groups(stack, gate):
    fleet = Fleet(stack, gate)
    fleet.client.pause()
    fleet.begin()
    assert (
        fleet.client.take(0, 0.3) is None and "the orchestrator is paused" in fleet.client.blockers
    )
    assert fleet.services["sums"].requests == []
    fleet.client.pause(False)
    assert len(fleet.train()) == 4


def test_stopped_service_finishes_its_rollouts_and_leaves(stack, gate):
    fleet = Fleet(stack, gate, ["staying"])
    _, child = stack.enter_context(
        process("service", orchestrator=fleet.url, name="leaving", pause=0.3)
    )
    until(lambda: "leaving" in fleet.client.status()["tasks"])
    fleet.begin()
    until(lambda: fleet.task_status("leaving")["in_flight"] >= 4)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    until(lambda: "leaving" not in fleet.client.status()["tasks"])
    metrics = fleet.client.status()["metrics"]
    assert metrics["groups/failed"] == metrics["groups/cancelled"] == 0
    groups = fleet.train(5)
    assert {group.task for group in groups[-4:]} == {"staying"}
    assert "leaving" in {group.task for group in groups}


def test_stopped_orchestrator_finishes_running_groups(stack, gate, tmp_path):
    options = {"gateway": gate, "journal": str(tmp_path)}
    url, child = stack.enter_context(process("orchestrator", **options))
    service = Sums(service_config(url), pause=0.3)
    stack.enter_context(service.running())
    client, ENGINE.version = OrchestratorClient(url, patience_s=10.0), 0
    client.begin(0, 0)
    until(lambda: client.status()["running"] == 12 and service.requests)
    child.send_signal(signal.SIGTERM)
    assert client.take(0, 10)  # it answers until it exits
    assert child.wait(20) == 0
    assert len(service.requests) == 48 and service.cancelled == []
    port = int(url.rpartition(":")[2])
    orchestrator = Orchestrator(orchestrator_config(gate, journal=str(tmp_path), port=port))
    # The next orchestrator continues with the next task numbers.
    with orchestrator.running():
        assert (client.status()["waiting"], client.status()["running"]) == (12, 0)
        for step in range(5):
            groups = client.take(step, 20)
            assert groups and all(group.order == group.number for group in groups)
            client.mark_trained(step)
            ENGINE.version = step + 1
            client.push(step + 1)


def test_stopped_orchestrator_answers_waiting_requests(gate):
    with ThreadPoolExecutor() as threads:
        with Orchestrator(orchestrator_config(gate)).running() as url:
            client = OrchestratorClient(url, patience_s=0.0)
            client.begin(0, 0)
            pending = threads.submit(client.take, 0, 60)
            time.sleep(0.3)
            start = time.monotonic()
        assert time.monotonic() - start < 20
        with pytest.raises(ServerError, match="no server answers"):
            assert pending.result(30)


def test_evaluates_held_out_tasks_without_training_on_them(stack, gate):
    fleet = Fleet(stack, gate, ["a", "b"]).begin()
    fleet.train()
    fleet.services["b"].is_broken = lambda request: request.held_out and request.number == 1
    results = fleet.client.evaluate(3, 20)
    assert results["a"]["count"] == 3 and results["a"]["failed"] == 0
    assert results["a"]["reward"] in (0, 1 / 3, 2 / 3, 1)
    assert (results["b"]["count"], results["b"]["failed"]) == (2, 1)
    for service in fleet.services.values():
        numbers = {request.number for request in service.requests if request.held_out}
        assert numbers == {0, 1, 2}
    # A repeated evaluation has the same seeds.
    assert fleet.client.evaluate(3, 20)["a"] == results["a"]
    fleet.services["a"].mode = "hangs"
    start = time.monotonic()
    timed_out = fleet.client.evaluate(100, 0.5)["a"]
    assert (timed_out["reward"], timed_out["count"], timed_out["failed"]) == (None, 0, 4)
    assert time.monotonic() - start < 10
    # A call that waits less than the evaluation takes is repeated, and the evaluation is not.
    assert fleet.client.evaluate(2, 0.5, wait_s=0.0) is None
    assert fleet.client.evaluate(3, 20)["a"]["failed"] == 2
    held_out = {f"held-out-{name}" for name in "ab"}
    for group in fleet.train(2):
        assert not any(member.rollout_id.startswith(tuple(held_out)) for member in group.members)


def test_evaluation_has_priority_over_groups(stack, gate):
    """The service has no capacity for both."""
    fleet = Fleet(stack, gate, {"sums": {"max_inflight": 4, "pause": 0.05}}).begin()
    fleet.train()
    service = fleet.services["sums"]
    result = fleet.client.evaluate(4, 20)["sums"]
    assert (result["count"], result["failed"]) == (4, 0) and fleet.task_status()["failures"] == 0
    is_held_out = [request.held_out for request in service.requests]
    # Running rollouts end first; then no group starts before the last held-out rollout.
    first, last = is_held_out.index(True), len(is_held_out) - is_held_out[::-1].index(True)
    assert is_held_out[first:last].count(False) <= 4
    fleet.train(2)


# -- the environment of the process ---------------------------------------------------------------------------------------


def test_batch_group_keeps_its_fields_in_json(stack, gate):
    fleet = Fleet(stack, gate, dispatcher=DispatcherConfig(max_tries=1))
    fleet.services["sums"].is_broken = lambda request: request.rollout_id.endswith("-3")
    for group in fleet.begin().train():
        body = json.loads(json.dumps(batch_group_to_json(group)))
        assert len(body["members"]) == 3 and len(body["member_ids"]) == 4
        decoded = batch_group_from_json(body)
        assert decoded.members[3] is decoded.members[0] and decoded.baseline == group.baseline
        assert batch_group_to_json(decoded) == batch_group_to_json(group)


def test_client_ignores_proxy(stack, gate, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fleet = Fleet(stack, gate).begin()
    assert len(fleet.train()) == 4


def test_server_raises_limit_of_open_files():
    program = [sys.executable, "-m", "tests.rl.fleet", "engine", "{}"]
    command = ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline().strip().isdigit()
            soft, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        finally:
            child.kill()
    assert soft == hard > 64


# -- invalid requests and options --------------------------------------------------------------------------------------------------

LEASE = {"lease": "its"}
SPEC = {
    "schema": 2,
    "name": "new",
    "url": "http://127.0.0.1:9",
    "weight": 1.0,
    "size": 10,
    "held_out": 0,
    "max_inflight": 8,
    "rate": None,
    "rollout_timeout_s": 60.0,
}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tasks", {**SPEC, "schema": 1}, 400, "schema is 1 and this orchestrator speaks 2"),
        ("/tasks", {**SPEC, "weight": 0}, 400, "weight is 0; it must be positive"),
        ("/tasks", {**SPEC, "weight": -1.5}, 400, "weight is -1.5"),
        ("/tasks", {**SPEC, "rate": 0}, 400, "rate is 0"),
        ("/tasks", {**SPEC, "rollout_timeout_s": -1}, 400, "rollout_timeout_s is -1"),
        ("/tasks", {**SPEC, "url": "127.0.0.1:9"}, 400, "'127.0.0.1:9', which is no URL"),
        ("/tasks", {**SPEC, "url": "http://"}, 400, "which is no URL"),
        ("/tasks", {**SPEC, "name": "a/b"}, 400, "name is 'a/b'; use up to 64 letters"),
        ("/tasks", {**SPEC, "name": "sums"}, 409, "already served at http://127.0.0.1:"),
        ("/tasks", {**SPEC, "size": 0}, 400, "size: 0 is less than the minimum of 1"),
        ("/tasks", {**SPEC, "max_inflight": 3}, 400, "a group has 4 rollouts; raise it"),
        ("/tasks", {**SPEC, "speed": 1}, 400, "speed: no such field"),
        ("/tasks", {"schema": 2}, 400, "is a required property"),
        ("/tasks", [], 400, "is not of type 'object'"),
        ("/tasks/none/heartbeat", {}, 404, "no service 'none'"),
        ("/tasks/sums/heartbeat", {"instance": "x"}, 404, "register it"),
        ("/trainer/begin", {"step": 1, "version": 2}, 409, "version is 2 at step 1"),
        ("/groups/take", {"step": 7, "timeout_s": 0, **LEASE}, 409, "no batch of step 7"),
        (
            "/groups/take",
            {"step": -1, "timeout_s": 0, **LEASE},
            400,
            "step: -1 is less than the minimum of 0",
        ),
        ("/groups/take", {"step": 0, "timeout_s": 0}, 400, "'lease' is a required property"),
        ("/groups/trained", {"step": 0, **LEASE}, 409, "cannot be trained on"),
        ("/groups/lost", {"rollout_ids": [], "lease": 0}, 409, "lease 0 has been replaced"),
        ("/groups/lost", {"rollout_ids": [1], **LEASE}, 400, "is not of type 'string'"),
        ("/version", {"version": 9, **LEASE}, 409, "version is 9"),
        ("/version", {"version": 0, "lease": 0}, 409, "the trainer of lease 0 has been replaced"),
        (
            "/evaluate",
            {"count": 0, "timeout_s": 1},
            400,
            "count: 0 is less than the minimum of 1",
        ),
        ("/nowhere", {}, 404, "POST /tasks, /tasks/{name}/heartbeat, /trainer/begin"),
    ],
)
def test_rejects_invalid_requests(idle_orchestrator, path, body, status, message):
    url, lease = idle_orchestrator
    if body and body.get("lease") == "its":
        body = body | {"lease": lease}
    with pytest.raises(ServerError) as raised:
        Client(url).open(path, json.dumps(body).encode())
    assert raised.value.status == status and message in str(raised.value)


@pytest.fixture(scope="module")
def idle_orchestrator(gate):
    """Returns (URL, lease) of an orchestrator that is paused."""
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate)
        fleet.client.pause()
        yield fleet.url, post_json(fleet.url, "/trainer/begin", {"step": 0, "version": 0})["lease"]


def test_rejects_removal_of_unknown_service(idle_orchestrator):
    request = urllib.request.Request(f"{idle_orchestrator[0]}/tasks/none", method="DELETE")
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=10)
    assert raised.value.status == 404
    assert "there are sums" in json.load(raised.value)["error"]["message"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OrchestratorConfig(gateway="10.0.0.1:9000"),
            "gateway is '10.0.0.1:9000', which is no URL",
        ),
        (lambda: OrchestratorConfig(poll_interval_s=0), "poll_interval_s is 0"),
        (lambda: OrchestratorConfig(poll_timeout_s=-1), "poll_timeout_s is -1"),
        (lambda: DispatcherConfig(max_tries=0), "max_tries is 0"),
        (lambda: DispatcherConfig(response_grace_s=-1), "response_grace_s is -1"),
        (lambda: RegistryConfig(heartbeat_timeout_s=0), "heartbeat_timeout_s is 0"),
        (lambda: OrchestratorClient("http://x", patience_s=-1), "patience_s is -1"),
    ],
)
def test_rejects_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_reports_missing_orchestrator_after_patience():
    start = time.monotonic()
    with pytest.raises(ServerError, match="no server answers at http://127.0.0.1:9"):
        OrchestratorClient("http://127.0.0.1:9", patience_s=0.2).status()
    assert time.monotonic() - start < 10


def test_requires_key_of_services_and_clients(stack, gate):
    orchestrator = Orchestrator(orchestrator_config(gate, api_key="secret"))
    url = stack.enter_context(orchestrator.running())
    service_without_key = Sums(service_config(url, "other"))
    url_without_key = stack.enter_context(service_without_key.running())
    service = Sums(service_config(url, api_key="secret"))
    stack.enter_context(service.running())
    until(lambda: service.is_registered)
    assert OrchestratorClient(url, "secret").status()["tasks"].keys() == {"sums"}

    def problem():
        with urllib.request.urlopen(f"{url_without_key}/health", timeout=10) as response:
            return json.load(response)["problem"]

    until(lambda: "API key is missing" in problem())
    with pytest.raises(ServerError, match="API key is missing"):
        OrchestratorClient(url).status()
