"""Orchestrators and trainers that restart: nothing is lost or trained on twice, and only the newest trainer is
accepted."""

import contextlib
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.group_buffer import GroupBuffer
from glm5_jax.rl.orchestrator.server import Orchestrator
from tests.rl.fleet import ENGINE, Fleet, Sums, gateway, orchestrator_config, service_config, until


def test_orchestrator_resumes_from_journal(gate, tmp_path):
    """No finished, taken or running group is lost or trained on twice, and each task number comes once."""
    trained, last_ids, port, num_running = [], [], 0, 0
    client = None
    ENGINE.version = step = 0
    with contextlib.ExitStack() as services:
        for run in range(4):
            orchestrator = Orchestrator(orchestrator_config(gate, journal=str(tmp_path), port=port))
            with orchestrator.running() as url:
                port, client = orchestrator.port, client or OrchestratorClient(url, patience_s=10.0)
                if run == 0:
                    service = Sums(service_config(url), pause=0.1)
                    services.enter_context(service.running())
                    client.begin(0, 0)
                for batch in range(3):
                    groups = until(lambda: client.take(step, 5))  # noqa: B023
                    if batch == 0 and run:
                        assert ids(groups) == last_ids
                    if batch < 2:
                        client.mark_trained(step)
                        trained += groups
                        step += 1
                        ENGINE.version = step
                        client.push(step)
                last_ids, status = ids(groups), client.status()
                num_running += status["running"]
            after = GroupBuffer(orchestrator_config(gate).buffer, tmp_path)
            assert after.step == step and after.running == 0 and after.waiting >= status["waiting"]
    assert num_running > 0
    numbers = [group.number for group in trained]
    assert len(set(numbers)) == len(numbers) == 32 == len(set(ids(trained)))
    assert {group.order for group in trained} == set(numbers)
    # None was skipped: those before the last that are missing wait or were under way.
    assert set(range(max(numbers) - 12)) <= set(numbers)


def ids(groups):
    """Returns the ids of groups."""
    return [group.group_id for group in groups]


@pytest.mark.slow
def test_trainer_continues_after_restart_without_journal(gate):
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate)
        fleet.begin().train(3)
        port = fleet.orchestrator.port
        groups = fleet.client.take(3, 10)
        assert groups
        services = stack.pop_all()
    with services:
        pass
    with contextlib.ExitStack() as stack:
        orchestrator = Orchestrator(orchestrator_config(gate, port=port))
        stack.enter_context(orchestrator.running())
        stack.enter_context(Sums(service_config(fleet.url)).running())
        # The trainer trains on the batch of the old orchestrator, and takes the next one from the new orchestrator.
        fleet.client.mark_trained(3)
        fleet.step, ENGINE.version = 4, 4
        fleet.client.push(4)
        assert len(fleet.train(2)) == 8
        assert fleet.client.status()["step"] == 6


def test_session_names_differ_after_restart_without_journal(gate):
    """Agents of the old orchestrator may still use their sessions."""
    names = []
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            fleet = Fleet(stack, gate).begin()
            names.append({m.rollout_id for group in fleet.train() for m in group.members})
    assert len(names[0]) == 16 and not names[0] & names[1]


def test_restarted_orchestrator_deletes_sessions_of_its_run(gate, tmp_path):
    """The gateway may have been down when the earlier process was killed. Sessions of other runs stay."""
    options = {"journal": str(tmp_path), "dispatcher": DispatcherConfig(cleanup_interval_s=0.1)}
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate, **options).begin()
        run_id = fleet.train()[0].group_id.partition("-")[0]
    orphan, other = f"{run_id}-99-0-1", "another-99-0-1"
    for name in (orphan, other):
        send_request("POST", f"{gate}/sessions", {"id": name})
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate, **options)
        until(lambda: orphan not in send_request("GET", f"{gate}/sessions")["sessions"])
        fleet.begin()
        assert all(group.group_id.startswith(f"{run_id}-") for group in fleet.train(4))
    assert send_request("GET", f"{gate}/sessions")["sessions"] == [other]
    send_request("DELETE", f"{gate}/sessions/{other}")


@pytest.mark.parametrize("has_journal", [False, True])
def test_rejects_reports_of_replaced_trainer(stack, gate, tmp_path, has_journal):
    """A trainer that seemed dead has trained on a batch on which another trainer now trains."""
    options = {"max_staleness": 0} | ({"journal": str(tmp_path)} if has_journal else {})
    with contextlib.ExitStack() as first_run, ThreadPoolExecutor() as threads:
        fleet = Fleet(first_run, gate, **options).begin()
        oldest, port = OrchestratorClient(fleet.url), fleet.orchestrator.port
        oldest.begin(0, 0)
        fleet.begin()
        batch_ids = ids(fleet.client.take(0, 20))
        waiting = threads.submit(fleet.client.take, 1, 60)
        replaced = fleet.client
        fleet.client = OrchestratorClient(fleet.url)
        fleet.begin()
        with pytest.raises(ServerError, match="has been replaced: one has begun since with lease"):
            waiting.result(20)

        def check_rejected():
            for report in (
                lambda: replaced.mark_trained(0),
                lambda: replaced.push(0),
                lambda: replaced.take(0, 0.1),
                lambda: oldest.mark_trained(0),
            ):
                with pytest.raises(ServerError, match="has been replaced") as raised:
                    report()
                assert raised.value.status == 409

        check_rejected()
        assert ids(fleet.train()) == batch_ids  # the rejected report did not count
        if not has_journal:
            return
    with Orchestrator(orchestrator_config(gate, port=port, **options)).running():
        check_rejected()
        fleet.client.push(1)


def send_request(method, url, body=None):
    """Sends a request, and returns the JSON of the response."""
    request = urllib.request.Request(url, body and json.dumps(body).encode(), method=method)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def required_weights(gate):
    """Returns (version, checksum) of the weights that the gateway requires, or None."""
    required = send_request("GET", f"{gate}/server_info")["weights"]
    return required and (required["version"], required["checksum"])


def test_gateway_requires_weights_of_each_push(stack, engine):
    with gateway(engine) as gate:
        fleet = Fleet(stack, gate, [])
        assert required_weights(gate) is None
        fleet.begin()
        assert required_weights(gate) == (0, None)
        fleet.add("sums")
        assert fleet.client.take(0, 20)
        fleet.client.mark_trained(0)
        ENGINE.version, ENGINE.checksum = 1, "c"
        try:
            fleet.client.push(1, "c")
            assert required_weights(gate) == (1, "c")
        finally:
            ENGINE.checksum = None


@pytest.mark.slow
def test_restarted_gateway_gets_required_weights_with_next_session(stack, engine):
    """It has no journal, and missed the last push."""
    with gateway(engine) as gate:
        fleet = Fleet(stack, gate).begin()
        fleet.train()
        assert fleet.client.take(1, 20)
    ENGINE.version = 0  # it restarted too
    fleet.client.mark_trained(1)
    fleet.client.push(2)
    with gateway(engine, port=int(gate.rpartition(":")[2])):
        until(lambda: required_weights(gate) == (2, None))
        until(
            lambda: (
                "no engine that has the weights of version 2"
                in fleet.client.status()["gateway"]["error"]
            )
        )
        ENGINE.version = fleet.step = 2
        assert len(fleet.train(2)) == 8
