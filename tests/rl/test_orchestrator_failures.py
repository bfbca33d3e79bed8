"""The orchestrator when environments, services and the gateway fail: retries, circuit breakers and blame."""

import collections
import contextlib
import time

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig
from tests.rl.fleet import (
    ENGINE,
    Fleet,
    Sums,
    gateway,
    num_sessions,
    post_json,
    service_config,
    until,
)


def register(fleet, port):
    """Registers another process as the service `sums`."""
    spec = dict(schema=2, name="sums", url=f"http://127.0.0.1:{port}", instance="another")
    spec |= dict(
        weight=1.0, size=100, held_out=4, max_inflight=64, rate=None, rollout_timeout_s=60.0
    )
    post_json(fleet.url, "/tasks", spec)


def test_retries_rollout_after_environment_failure(stack, gate):
    fleet = Fleet(stack, gate)
    service = fleet.services["sums"]
    service.is_broken = lambda request: request.rollout_id.endswith("-1")
    groups = fleet.begin().train(2)
    names = {member.rollout_id for group in groups for member in group.members}
    assert {f"{group.group_id}-1.1" for group in groups} <= names and len(names) == 32
    status = fleet.task_status()
    assert status["failures"] >= 8 and status["failed"] == 0 and status["dropped_groups"] == 0
    assert status["error"] == "OSError: the sandbox is gone"
    # Retries have the same seed.
    seeds = collections.defaultdict(set)
    for request in service.requests:
        seeds[request.rollout_id.removesuffix(".1")].add(request.seed)
    assert all(len(seeds_of_rollout) == 1 for seeds_of_rollout in seeds.values())


def test_repairs_or_resamples_groups_with_failures(stack, gate):
    """One of four fails: padded. Two of four in the first try: dropped, and its number is sampled again in its place."""
    fleet = Fleet(stack, gate, dispatcher=DispatcherConfig(max_tries=1))
    fleet.services["sums"].is_broken = lambda request: (
        request.rollout_id.endswith("-1")
        or request.rollout_id.endswith("-2")
        and request.number == 1
        and request.group_id.endswith("-0")
    )
    groups = fleet.begin().train(4)
    assert 1 in [group.number for group in groups]
    for group in groups:
        assert group.order == group.number
        ids = [member.rollout_id.rpartition("-")[2] for member in group.members]
        assert ids == ["0", "2", "3", "0"] and len(group.baseline) == 3
        assert group.members[3] is group.members[0]
        assert group.group_id.split("-")[1:] == [str(group.order), str(int(group.number == 1))]
    assert fleet.task_status()["dropped_groups"] == 1


def test_batch_has_counts_since_previous_batch(stack, gate):
    fleet = Fleet(stack, gate, dispatcher=DispatcherConfig(max_tries=1), max_staleness=0)
    service = fleet.services["sums"]
    service.is_broken = lambda request: (
        request.rollout_id.endswith("-1") or request.rollout_id.endswith(("1-0-2", "1-0-3"))
    )
    fleet.begin().client.take(0, 20)
    counts = dict(fleet.client.counts)
    # Four groups with one failure each, and the first try of one of them with three failures.
    assert (counts["groups/failed"], counts["groups/taken"]) == (1, 4)
    assert (counts["attempts/failed"], counts["attempts/ended"]) == (4 + 3, 5 * 4)
    assert (counts["members/taken"], counts["members/padded"]) == (12, 4)
    service.is_broken = lambda request: False  # before the next groups start
    fleet.train()  # takes the same batch again
    assert fleet.client.counts == counts
    fleet.train()
    assert fleet.client.counts == {"groups/taken": 4, "members/taken": 16, "attempts/ended": 16}
    assert fleet.client.status()["metrics"]["attempts/ended"] == 36


def slow(mode):
    """Returns a parameter that is slow."""
    return pytest.param(mode, marks=pytest.mark.slow)


@pytest.mark.parametrize("mode", [slow("500"), slow("garbage"), "fails"])
def test_pauses_failing_service_until_it_recovers(stack, gate, mode):
    fleet = Fleet(stack, gate, ("bad", "good"))
    bad = fleet.services["bad"]
    bad.mode = mode
    fleet.begin()
    assert {group.task for group in fleet.train(5)} == {"good"}
    status = until(lambda: fleet.task_status("bad")["state"] == "open" and fleet.task_status("bad"))
    assert status["accepted"] == 0 and status["failures"] >= 4
    message = {"500": "the disk is full", "garbage": "no outcome", "fails": "sandbox is gone"}[mode]
    assert message in status["error"]
    assert any("service of bad is" in line for line in fleet.client.status()["blockers"])
    if mode == "fails":
        # The breaker lets one group through at a time: only a few within the second or two of this test.
        assert len(bad.requests) < 60
    bad.mode = "ok"
    until(lambda: fleet.train() and fleet.task_status("bad")["accepted"])
    assert fleet.task_status("bad")["state"] in ("ok", "full")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hangs", "deaf"])
def test_hanging_service_costs_only_its_deadline(stack, gate, mode):
    services = {"bad": {"rollout_timeout_s": 0.3}, "good": {}}
    fleet = Fleet(
        stack, gate, services, dispatcher=DispatcherConfig(max_tries=1, response_grace_s=0.2)
    ).begin()
    bad = fleet.services["bad"]
    bad.mode = mode
    groups = fleet.train(5)
    assert "good" in {group.task for group in groups}
    status = until(
        lambda: fleet.task_status("bad")["breaker"] != "closed" and fleet.task_status("bad")
    )
    assert "within 0." in status["error"]
    if mode == "hangs":
        until(lambda: set(bad.cancelled) == {request.rollout_id for request in bad.requests})
    if mode == "deaf":
        # A service that does not notice a closed connection is sent a cancellation.
        until(lambda: len(bad.called_off) >= status["failures"])
    bad.mode = "ok"
    until(lambda: "bad" in {group.task for group in fleet.train()})


def test_stops_waiting_for_service_without_heartbeat(stack, gate):
    """Its connections are open and its deadline is far, but it sends neither responses nor heartbeats."""
    fleet = Fleet(stack, gate, [], registry=RegistryConfig(heartbeat_timeout_s=0.5))
    silent = Sums(service_config("http://127.0.0.1:9", rollout_timeout_s=60.0))
    silent.mode = "deaf"
    stack.enter_context(silent.running())
    fleet.begin()  # before the registration, because the service is lost soon after it
    register(fleet, silent.port)
    until(
        lambda: fleet.task_status()["state"] == "lost" and not fleet.task_status()["in_flight"], 10
    )
    assert fleet.task_status()["to_resample"] == fleet.task_status()["num_drawn"] > 0


@pytest.mark.slow
def test_service_that_restarts_is_lost_and_returns(stack, gate):
    registry = RegistryConfig(heartbeat_timeout_s=1.5)
    fleet = Fleet(stack, gate, ["good"], registry=registry).begin()
    with contextlib.ExitStack() as service_stack:
        bad = fleet.add("bad", service_stack, pause=0.2)
        fleet.train(2)
        until(lambda: fleet.task_status("bad")["in_flight"])
    # Its running rollouts have failed, and nothing waits for them.
    until(lambda: fleet.task_status("bad")["state"] == "lost")
    until(lambda: not fleet.task_status("bad")["in_flight"])
    numbers = [group.number for group in fleet.train(4) if group.task == "bad"]
    num_to_resample = fleet.task_status("bad")["to_resample"]
    assert (
        num_to_resample + fleet.task_status("bad")["accepted_groups"]
        == fleet.task_status("bad")["num_drawn"]
    )
    assert any("bad is lost: no heartbeat" in line for line in fleet.client.status()["blockers"])
    fleet.add("bad", port=bad.port)
    groups = until(lambda: [group for group in fleet.train() if group.task == "bad"])
    assert num_to_resample == 0 or groups[0].number not in numbers
    assert fleet.task_status("bad")["to_resample"] == 0


def test_new_process_of_service_fails_old_rollouts(stack, gate):
    """After a machine is lost, only the registration shows it: the connections stay open."""
    fleet = Fleet(stack, gate, registry=RegistryConfig(heartbeat_timeout_s=60.0))
    fleet.services["sums"].mode = "hangs"
    fleet.begin()
    until(lambda: len(fleet.services["sums"].requests) == 48)
    fleet.services["sums"].mode = "ok"
    register(fleet, fleet.services["sums"].port)
    until(lambda: fleet.task_status()["failures"] >= 48)
    assert len(fleet.train()) == 4


def test_reports_unreachable_gateway_and_blames_no_service(stack, engine, tmp_path):
    options = {"journal": str(tmp_path)}
    with contextlib.ExitStack() as gateway_stack:
        gate = gateway_stack.enter_context(gateway(engine, **options))
        fleet = Fleet(stack, gate, {"sums": {"pause": 0.1}}).begin()
        fleet.train(2)
    until(lambda: fleet.client.status()["gateway"]["state"] == "open")
    until(lambda: fleet.task_status()["in_flight"] == 0)
    assert fleet.task_status()["breaker"] == "closed"
    start = time.monotonic()
    assert fleet.client.take(fleet.step, 0.2) is None and time.monotonic() - start < 10
    assert any(f"the gateway at {gate} fails: no server" in line for line in fleet.client.blockers)
    port = int(gate.rpartition(":")[2])
    with gateway(engine, port=port, **options):
        fleet.client.push(fleet.step)
        ENGINE.version = fleet.step
        fleet.train(2)
        # Sessions that could not be deleted before are deleted now.
        fleet.client.pause()
        until(lambda: fleet.client.status()["running"] == 0 and num_sessions(gate) == 0)


def test_take_returns_in_time_without_services(stack, gate):
    fleet = Fleet(stack, gate, [])
    with pytest.raises(ServerError, match="no trainer has begun"):
        fleet.client.take(0, 0.1)
    fleet.begin()
    start = time.monotonic()
    assert fleet.client.take(0, 0.3) is None
    assert 0.3 <= time.monotonic() - start < 5
    assert fleet.client.blockers == ("no task service is registered",)
    fleet.add("sums")
    assert len(fleet.train()) == 4 and fleet.client.blockers == ()
