"""The orchestrator with real services and the real gateway, over HTTP, in front of an engine that answers at random: what comes of
rollouts, and what people and the world outside do to it."""

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
    orchestrator_config,
    process,
    service_config,
    sessions,
    told,
    until,
)

TOKENIZER = Tokenizer.load("bytes")


# -- what comes of rollouts ------------------------------------------------------------------------------------


def test_what_is_trained_is_what_was_sampled_in_the_chat(stack, gate):
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
            right = float(int(replies[-1]) % 2 == 0)
            assert member.reward.value == member.reward.parts["right"] == right
    # Every epoch has each task once.
    assert len(set(fleet.services["sums"].places)) == len(
        {asked.number for asked in fleet.services["sums"].seen}
    )


@pytest.mark.slow
def test_the_same_seed_samples_the_same(gate):
    def ids(seed):
        with contextlib.ExitStack() as stack:
            groups = Fleet(stack, gate, seed=seed).begin().train(2)
        return {
            (group.order, place): member.records[0].token_ids.tolist()
            for group in groups
            for place, member in enumerate(group.members)
        }

    one, again, other = ids(1), ids(1), ids(2)
    both = one.keys() & again.keys()  # which are first depends on the clock
    assert len(both) >= 16 and all(one[name] == again[name] for name in both)
    assert not any(one[name] == other[name] for name in one.keys() & other.keys())
    assert len(set(map(tuple, one.values()))) == len(one)


@pytest.mark.slow
def test_shares_are_the_weights_and_nothing_is_left_behind(stack, gate):
    weights = {"a": 1, "b": 2, "c": 3}
    fleet = Fleet(stack, gate, {name: {"weight": own} for name, own in weights.items()}).begin()
    count = collections.Counter(group.task for group in fleet.train(15))
    assert sum(count.values()) == 60
    for name, weight in weights.items():
        assert abs(count[name] - 10 * weight) <= 2
    fleet.client.pause()
    until(lambda: fleet.client.status()["running"] == 0)
    assert sessions(gate) == 0
    told = fleet.told("c")
    assert told["accepted"] == 4 * told["accepted_groups"] and told["failed"] == 0
    assert told["in_flight"] == 0 and 0 < told["reward"] < 1


@pytest.mark.slow
def test_no_more_groups_than_the_rate(stack, gate):
    rate, began = 3.0, time.monotonic()
    fleet = Fleet(stack, gate, {"limited": {"rate": rate}, "fast": {}}).begin()
    while fleet.told("limited")["num_drawn"] < 4:
        fleet.train()
    assert fleet.told("limited")["num_drawn"] <= rate * (time.monotonic() - began) + 1
    assert fleet.told("fast")["num_drawn"] > 4


# -- what people and signals do --------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_group_can_be_called_off(stack, gate, again):
    fleet = Fleet(stack, gate)
    own = fleet.services["sums"]
    own.mode = "hangs"
    fleet.begin()
    until(lambda: len(own.seen) == 48)
    third, *others = sorted(fleet.client.status()["groups"], key=lambda name: "-3-0" not in name)
    fleet.client.cancel(third, again)
    own.mode = "ok"
    names = {f"{third}-{place}" for place in range(4)}
    until(lambda: set(own.cancelled) >= names)
    for name in others:
        fleet.client.cancel(name, should_resample=True)
    groups = fleet.train(4)
    assert {group.number for group in groups} >= set(range(12)) - {3}
    assert (3 in {group.number for group in groups}) == again
    assert fleet.told()["cancelled_groups"] == 12
    with pytest.raises(ServerError, match=f"no group '{third}' is running"):
        fleet.client.cancel(third)
    fleet.client.pause()
    until(lambda: fleet.client.status()["running"] == 0 and sessions(gate) == 0)


class Slow(HttpServer):
    """A gateway that begins a session later than it was asked to, whether or not who asked still waits."""

    def __init__(self):
        super().__init__(ListenConfig(port=0))
        self.sessions, self.asked, self._late = set(), 0, set()

    def routes(self):
        post = {"/sessions": self._begin, "/weights": self._ignored}
        return {"POST": post, "DELETE": {"/sessions/{id}": self._end}}

    async def _begin(self, request):
        name = read_json(await request.read())["id"]
        self.asked += 1

        async def later():
            await asyncio.sleep(0.3)
            self.sessions.add(name)

        self._late.add(task := asyncio.create_task(later()))
        await asyncio.shield(task)
        return json_response({"id": name})

    async def _end(self, request):
        if (name := request.match_info["id"]) not in self.sessions:
            raise ApiError(f"there is no session {name!r}", 404)
        self.sessions.remove(name)
        return json_response({"id": name})

    async def _ignored(self, request):
        return json_response({})


def test_no_session_begins_after_its_group_was_called_off(stack):
    slow = Slow()
    fleet = Fleet(stack, stack.enter_context(slow.running())).begin()
    until(lambda: slow.asked == 48)
    fleet.client.pause()
    for name in fleet.client.status()["groups"]:
        fleet.client.cancel(name)
    until(lambda: fleet.client.status()["running"] == 0)
    assert all(task.done() for task in slow._late) and slow.sessions == set()


def test_a_paused_orchestrator_begins_nothing(stack, gate):
    fleet = Fleet(stack, gate)
    fleet.client.pause()
    fleet.begin()
    assert (
        fleet.client.take(0, 0.3) is None and "the orchestrator is paused" in fleet.client.blockers
    )
    assert fleet.services["sums"].seen == []
    fleet.client.pause(False)
    assert len(fleet.train()) == 4


def test_a_service_that_is_told_to_end_ends_what_it_has_and_is_forgotten(stack, gate):
    fleet = Fleet(stack, gate, ["staying"])
    _, child = stack.enter_context(
        process("service", orchestrator=fleet.url, name="leaving", pause=0.3)
    )
    until(lambda: "leaving" in fleet.client.status()["tasks"])
    fleet.begin()
    until(lambda: fleet.told("leaving")["in_flight"] >= 4)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    until(lambda: "leaving" not in fleet.client.status()["tasks"])
    metrics = fleet.client.status()["metrics"]
    assert metrics["groups/failed"] == metrics["groups/cancelled"] == 0
    groups = fleet.train(5)
    assert {group.task for group in groups[-4:]} == {"staying"}
    assert "leaving" in {group.task for group in groups}


def test_an_orchestrator_that_is_told_to_end_lets_its_groups_come(stack, gate, tmp_path):
    options = {"gateway": gate, "journal": str(tmp_path)}
    url, child = stack.enter_context(process("orchestrator", **options))
    service = Sums(service_config(url), pause=0.3)
    stack.enter_context(service.running())
    client, ENGINE.version = OrchestratorClient(url, patience_s=10.0), 0
    client.begin(0, 0)
    until(lambda: client.status()["running"] == 12 and service.seen)
    child.send_signal(signal.SIGTERM)
    assert client.take(0, 10)  # it answers to the end
    assert child.wait(20) == 0
    assert len(service.seen) == 48 and service.cancelled == []
    port = int(url.rpartition(":")[2])
    orchestrator = Orchestrator(orchestrator_config(gate, journal=str(tmp_path), port=port))
    # The next one knows which numbers there were.
    with orchestrator.running():
        assert (client.status()["waiting"], client.status()["running"]) == (12, 0)
        for step in range(5):
            taken = client.take(step, 20)
            assert taken and all(group.order == group.number for group in taken)
            client.mark_trained(step)
            ENGINE.version = step + 1
            client.push(step + 1)


def test_an_orchestrator_that_ends_tells_who_waits(gate):
    with ThreadPoolExecutor() as threads:
        with Orchestrator(orchestrator_config(gate)).running() as url:
            client = OrchestratorClient(url, patience_s=0.0)
            client.begin(0, 0)
            taken = threads.submit(client.take, 0, 60)
            time.sleep(0.3)
            began = time.monotonic()
        assert time.monotonic() - began < 20
        with pytest.raises(ServerError, match="no server answers"):
            assert taken.result(30)


def test_held_out_tasks_are_attempted_and_never_trained_on(stack, gate):
    fleet = Fleet(stack, gate, ["a", "b"]).begin()
    fleet.train()
    fleet.services["b"].broken = lambda asked: asked.held_out and asked.number == 1
    found = fleet.client.evaluate(3, 20)
    assert found["a"]["count"] == 3 and found["a"]["failed"] == 0
    assert found["a"]["reward"] in (0, 1 / 3, 2 / 3, 1)
    assert (found["b"]["count"], found["b"]["failed"]) == (2, 1)
    for own in fleet.services.values():
        asked = {one.number for one in own.seen if one.held_out}
        assert asked == {0, 1, 2}
    # The same once more, with the same seeds.
    assert fleet.client.evaluate(3, 20)["a"] == found["a"]
    fleet.services["a"].mode = "hangs"
    began = time.monotonic()
    late = fleet.client.evaluate(100, 0.5)["a"]
    assert (late["reward"], late["count"], late["failed"]) == (None, 0, 4)
    assert time.monotonic() - began < 10
    held_out = {f"held-out-{name}" for name in "ab"}
    for group in fleet.train(2):
        assert not any(m.rollout_id.startswith(tuple(held_out)) for m in group.members)


def test_an_evaluation_goes_before_groups(stack, gate):
    """Where there is no room for both."""
    fleet = Fleet(stack, gate, {"sums": {"max_inflight": 4, "pause": 0.05}}).begin()
    fleet.train()
    own = fleet.services["sums"]
    found = fleet.client.evaluate(4, 20)["sums"]
    assert (found["count"], found["failed"]) == (4, 0) and fleet.told()["failures"] == 0
    asked = [one.held_out for one in own.seen]
    # Those that had begun, and then no group before the last of what is held out.
    first, last = asked.index(True), len(asked) - asked[::-1].index(True)
    assert asked[first:last].count(False) <= 4
    fleet.train(2)


# -- the world outside ---------------------------------------------------------------------------------------


def test_a_batch_is_heard_as_it_was_told(stack, gate):
    fleet = Fleet(stack, gate, dispatcher=DispatcherConfig(max_tries=1))
    fleet.services["sums"].broken = lambda asked: asked.rollout_id.endswith("-3")
    for group in fleet.begin().train():
        told = json.loads(json.dumps(batch_group_to_json(group)))
        assert len(told["members"]) == 3 and len(told["member_ids"]) == 4
        again = batch_group_from_json(told)
        assert again.members[3] is again.members[0] and again.baseline == group.baseline
        assert batch_group_to_json(again) == batch_group_to_json(group)


def test_no_proxy_leads_to_an_orchestrator(stack, gate, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fleet = Fleet(stack, gate).begin()
    assert len(fleet.train()) == 4


def test_a_server_may_have_as_many_connections_as_it_is_allowed_to():
    program = [sys.executable, "-m", "tests.rl.fleet", "engine", "{}"]
    limited = ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *program]
    with subprocess.Popen(limited, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline().strip().isdigit()
            soft, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        finally:
            child.kill()
    assert soft == hard > 64


# -- mistakes --------------------------------------------------------------------------------------------------

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
    ("path", "body", "status", "words"),
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
def test_what_the_orchestrator_cannot_take_it_says(idle, path, body, status, words):
    url, lease = idle
    if body and body.get("lease") == "its":
        body = body | {"lease": lease}
    with pytest.raises(ServerError) as caught:
        Client(url).open(path, json.dumps(body).encode())
    assert caught.value.status == status and words in str(caught.value)


@pytest.fixture(scope="module")
def idle(gate):
    """An orchestrator whose service never has anything to do, and its trainer's lease."""
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate)
        fleet.client.pause()
        yield fleet.url, told(fleet.url, "/trainer/begin", {"step": 0, "version": 0})["lease"]


def test_nobody_leaves_who_is_not_there(idle):
    request = urllib.request.Request(f"{idle[0]}/tasks/none", method="DELETE")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.status == 404
    assert "there are sums" in json.load(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    ("make", "words"),
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
def test_orchestrators_and_clients_refuse_values_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_an_orchestrator_that_is_not_there_is_waited_for_and_then_said_so():
    began = time.monotonic()
    with pytest.raises(ServerError, match="no server answers at http://127.0.0.1:9"):
        OrchestratorClient("http://127.0.0.1:9", patience_s=0.2).status()
    assert time.monotonic() - began < 10


def test_who_has_the_key_is_let_in(stack, gate):
    orchestrator = Orchestrator(orchestrator_config(gate, api_key="secret"))
    url = stack.enter_context(orchestrator.running())
    without = Sums(service_config(url, "other"))
    other = stack.enter_context(without.running())
    own = Sums(service_config(url, api_key="secret"))
    stack.enter_context(own.running())
    until(lambda: own.is_registered)
    assert OrchestratorClient(url, "secret").status()["tasks"].keys() == {"sums"}

    def problem():
        with urllib.request.urlopen(f"{other}/health", timeout=10) as answer:
            return json.load(answer)["problem"]

    until(lambda: "API key is missing" in problem())
    with pytest.raises(ServerError, match="API key is missing"):
        OrchestratorClient(url).status()
