"""The orchestrator when environments, services and the gateway fail: who is tried again, who is left alone, who is blamed."""

import collections
import contextlib
import time

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig
from tests.rl.fleet import ENGINE, Fleet, Sums, gateway, service_config, sessions, told, until


def register(fleet, port):
    """Says to the orchestrator what a process of the service `sums` does that has just begun."""
    spec = dict(schema=2, name="sums", url=f"http://127.0.0.1:{port}", instance="another")
    spec |= dict(
        weight=1.0, size=100, held_out=4, max_inflight=64, rate=None, rollout_timeout_s=60.0
    )
    told(fleet.url, "/tasks", spec)


def test_an_environment_that_fails_once_is_tried_again(stack, gate):
    fleet = Fleet(stack, gate)
    own = fleet.services["sums"]
    own.broken = lambda asked: asked.rollout_id.endswith("-1")
    groups = fleet.begin().train(2)
    names = {member.rollout_id for group in groups for member in group.members}
    assert {f"{group.group_id}-1.1" for group in groups} <= names and len(names) == 32
    told = fleet.told()
    assert told["failures"] >= 8 and told["failed"] == 0 and told["dropped_groups"] == 0
    assert told["error"] == "OSError: the sandbox is gone"
    # With the same seed as before.
    seeds = collections.defaultdict(set)
    for asked in own.seen:
        seeds[asked.rollout_id.removesuffix(".1")].add(asked.seed)
    assert all(len(own) == 1 for own in seeds.values())


def test_groups_whose_members_fail_partly_are_repaired_or_come_again(stack, gate):
    """One of four: padded. Two of four in the first try: dropped, and the number comes again in its place."""
    fleet = Fleet(stack, gate, dispatcher=DispatcherConfig(max_tries=1))
    fleet.services["sums"].broken = lambda asked: (
        asked.rollout_id.endswith("-1")
        or asked.rollout_id.endswith("-2")
        and asked.number == 1
        and asked.group_id.endswith("-0")
    )
    groups = fleet.begin().train(4)
    assert 1 in [group.number for group in groups]
    for group in groups:
        assert group.order == group.number
        ids = [member.rollout_id.rpartition("-")[2] for member in group.members]
        assert ids == ["0", "2", "3", "0"] and len(group.baseline) == 3
        assert group.members[3] is group.members[0]
        assert group.group_id.split("-")[1:] == [str(group.order), str(int(group.number == 1))]
    assert fleet.told()["dropped_groups"] == 1


def test_a_batch_comes_with_what_was_counted_since_the_one_before(stack, gate):
    fleet = Fleet(stack, gate, dispatcher=DispatcherConfig(max_tries=1), max_staleness=0)
    own = fleet.services["sums"]
    own.broken = lambda asked: (
        asked.rollout_id.endswith("-1") or asked.rollout_id.endswith(("1-0-2", "1-0-3"))
    )
    fleet.begin().client.take(0, 20)
    counts = dict(fleet.client.counts)
    # Four groups, each with one failure, and the first try of one of them, which had three.
    assert (counts["groups/failed"], counts["groups/taken"]) == (1, 4)
    assert (counts["attempts/failed"], counts["attempts/ended"]) == (4 + 3, 5 * 4)
    assert (counts["members/taken"], counts["members/padded"]) == (12, 4)
    own.broken = lambda asked: False  # before the step that admits the next groups
    fleet.train()  # asks again
    assert fleet.client.counts == counts
    fleet.train()
    assert fleet.client.counts == {"groups/taken": 4, "members/taken": 16, "attempts/ended": 16}
    assert fleet.client.status()["metrics"]["attempts/ended"] == 36


def slow(mode):
    return pytest.param(mode, marks=pytest.mark.slow)


@pytest.mark.parametrize("mode", [slow("500"), slow("garbage"), "fails"])
def test_a_service_that_fails_is_left_alone_until_it_works_again(stack, gate, mode):
    fleet = Fleet(stack, gate, ("bad", "good"))
    bad = fleet.services["bad"]
    bad.mode = mode
    fleet.begin()
    assert {group.task for group in fleet.train(5)} == {"good"}
    told = until(lambda: fleet.told("bad")["state"] == "open" and fleet.told("bad"))
    assert told["accepted"] == 0 and told["failures"] >= 4
    words = {"500": "the disk is full", "garbage": "no outcome", "fails": "sandbox is gone"}[mode]
    assert words in told["error"]
    assert any("service of bad is" in line for line in fleet.client.status()["blockers"])
    if mode == "fails":
        # It is tried with one group at a time: at most a few within the second or two that this takes.
        assert len(bad.seen) < 60
    bad.mode = "ok"
    until(lambda: fleet.train() and fleet.told("bad")["accepted"])
    assert fleet.told("bad")["state"] in ("ok", "full")


@pytest.mark.parametrize("mode", [slow("hangs"), "deaf"])
def test_a_service_that_hangs_costs_its_deadline_and_no_more(stack, gate, mode):
    services = {"bad": {"rollout_timeout_s": 0.3}, "good": {}}
    fleet = Fleet(
        stack, gate, services, dispatcher=DispatcherConfig(max_tries=1, response_grace_s=0.2)
    ).begin()
    bad = fleet.services["bad"]
    bad.mode = mode
    groups = fleet.train(5)
    assert "good" in {group.task for group in groups}
    told = until(lambda: fleet.told("bad")["breaker"] != "closed" and fleet.told("bad"))
    assert "within 0." in told["error"]
    if mode == "hangs":
        until(lambda: set(bad.cancelled) == {asked.rollout_id for asked in bad.seen})
    if mode == "deaf":
        # One that does not see whether anybody listens is told.
        until(lambda: len(bad.called_off) >= told["failures"])
    bad.mode = "ok"
    until(lambda: "bad" in {group.task for group in fleet.train()})


def test_a_service_that_is_not_heard_of_is_waited_for_no_longer(stack, gate):
    """Whatever its connections and its deadline: it does not answer, and sends no heartbeat."""
    fleet = Fleet(stack, gate, [], registry=RegistryConfig(heartbeat_timeout_s=0.5))
    silent = Sums(service_config("http://127.0.0.1:9", rollout_timeout_s=60.0))
    silent.mode = "deaf"
    stack.enter_context(silent.running())
    fleet.begin()  # before the service is known, which is lost so soon
    register(fleet, silent.port)
    until(lambda: fleet.told()["state"] == "lost" and not fleet.told()["in_flight"], 10)
    assert fleet.told()["to_resample"] == fleet.told()["num_drawn"] > 0


@pytest.mark.slow
def test_a_service_that_is_gone_is_lost_and_taken_up_again(stack, gate):
    registry = RegistryConfig(heartbeat_timeout_s=1.5)
    fleet = Fleet(stack, gate, ["good"], registry=registry).begin()
    with contextlib.ExitStack() as own:
        bad = fleet.add("bad", own, pause=0.2)
        fleet.train(2)
        until(lambda: fleet.told("bad")["in_flight"])
    # What was under way has failed, and is another's to wait for no longer.
    until(lambda: fleet.told("bad")["state"] == "lost")
    until(lambda: not fleet.told("bad")["in_flight"])
    numbers = [group.number for group in fleet.train(4) if group.task == "bad"]
    again = fleet.told("bad")["to_resample"]
    assert again + fleet.told("bad")["accepted_groups"] == fleet.told("bad")["num_drawn"]
    assert any("bad is lost: no heartbeat" in line for line in fleet.client.status()["blockers"])
    fleet.add("bad", port=bad.port)
    groups = until(lambda: [group for group in fleet.train() if group.task == "bad"])
    assert again == 0 or groups[0].number not in numbers
    assert fleet.told("bad")["to_resample"] == 0


def test_a_service_that_was_started_anew_is_known_to_have_forgotten(stack, gate):
    """Nothing else tells the orchestrator of a machine that is gone: its connections are as open as before."""
    fleet = Fleet(stack, gate, registry=RegistryConfig(heartbeat_timeout_s=60.0))
    fleet.services["sums"].mode = "hangs"
    fleet.begin()
    until(lambda: len(fleet.services["sums"].seen) == 48)
    fleet.services["sums"].mode = "ok"
    register(fleet, fleet.services["sums"].port)
    until(lambda: fleet.told()["failures"] >= 48)
    assert len(fleet.train()) == 4


def test_a_gateway_that_is_gone_is_told_and_blamed_on_nobody_else(stack, engine, tmp_path):
    options = {"journal": str(tmp_path)}
    with contextlib.ExitStack() as own:
        gate = own.enter_context(gateway(engine, **options))
        fleet = Fleet(stack, gate, {"sums": {"pause": 0.1}}).begin()
        fleet.train(2)
    until(lambda: fleet.client.status()["gateway"]["state"] == "open")
    until(lambda: fleet.told()["in_flight"] == 0)
    assert fleet.told()["breaker"] == "closed"
    began = time.monotonic()
    assert fleet.client.take(fleet.step, 0.2) is None and time.monotonic() - began < 10
    assert any(f"the gateway at {gate} fails: no server" in line for line in fleet.client.blockers)
    port = int(gate.rpartition(":")[2])
    with gateway(engine, port=port, **options):
        fleet.client.push(fleet.step)
        ENGINE.version = fleet.step
        fleet.train(2)
        # Sessions that could not be ended are.
        fleet.client.pause()
        until(lambda: fleet.client.status()["running"] == 0 and sessions(gate) == 0)


def test_without_any_service_a_trainer_is_told_so_in_time(stack, gate):
    fleet = Fleet(stack, gate, [])
    with pytest.raises(ServerError, match="no trainer has begun"):
        fleet.client.take(0, 0.1)
    fleet.begin()
    began = time.monotonic()
    assert fleet.client.take(0, 0.3) is None
    assert 0.3 <= time.monotonic() - began < 5
    assert fleet.client.blockers == ("no task service is registered",)
    fleet.add("sums")
    assert len(fleet.train()) == 4 and fleet.client.blockers == ()
