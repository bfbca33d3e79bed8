"""Orchestrators and trainers that end and are followed by others: nothing is lost or learnt from twice, and the last trainer alone is
believed."""

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


def test_an_orchestrator_that_ended_is_followed_by_one_that_goes_on(gate, tmp_path):
    """With what has come, what was taken and what was under way: nothing is lost or trained on twice, and each task's
    turn comes once."""
    trained, held, port, under_way = [], [], 0, 0
    client = None
    ENGINE.version = step = 0
    with contextlib.ExitStack() as services:
        for life in range(4):
            orchestrator = Orchestrator(orchestrator_config(gate, journal=str(tmp_path), port=port))
            with orchestrator.running() as url:
                port, client = orchestrator.port, client or OrchestratorClient(url, patience_s=10.0)
                if life == 0:
                    made = Sums(service_config(url), pause=0.1)
                    services.enter_context(made.running())
                    client.begin(0, 0)
                for batch in range(3):
                    taken = until(lambda: client.take(step, 5))  # noqa: B023
                    if batch == 0 and life:
                        assert ids(taken) == held
                    if batch < 2:
                        client.mark_trained(step)
                        trained += taken
                        step += 1
                        ENGINE.version = step
                        client.push(step)
                held, left = ids(taken), client.status()
                under_way += left["running"]
            after = GroupBuffer(orchestrator_config(gate).buffer, tmp_path)
            assert after.step == step and after.running == 0 and after.waiting >= left["waiting"]
    assert under_way > 0
    numbers = [group.number for group in trained]
    assert len(set(numbers)) == len(numbers) == 32 == len(set(ids(trained)))
    assert {group.order for group in trained} == set(numbers)
    # None was skipped: those before the last that are missing wait or were under way.
    assert set(range(max(numbers) - 12)) <= set(numbers)


def ids(groups):
    return [group.group_id for group in groups]


@pytest.mark.slow
def test_an_orchestrator_without_a_journal_is_told_anew_where_the_trainer_is(gate):
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate)
        fleet.begin().train(3)
        port = fleet.orchestrator.port
        taken = fleet.client.take(3, 10)
        assert taken
        services = stack.pop_all()
    with services:
        pass
    with contextlib.ExitStack() as stack:
        orchestrator = Orchestrator(orchestrator_config(gate, port=port))
        stack.enter_context(orchestrator.running())
        stack.enter_context(Sums(service_config(fleet.url)).running())
        # The batch that the dead orchestrator gave out is learnt from; the next one comes from the new one.
        fleet.client.mark_trained(3)
        fleet.step, ENGINE.version = 4, 4
        fleet.client.push(4)
        assert len(fleet.train(2)) == 8
        assert fleet.client.status()["step"] == 6


def test_no_orchestrator_has_sessions_of_the_same_names_as_one_that_left_no_journal(gate):
    """Agents that the dead one began may still chat in theirs."""
    names = []
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            fleet = Fleet(stack, gate).begin()
            names.append({m.rollout_id for group in fleet.train() for m in group.members})
    assert len(names[0]) == 16 and not names[0] & names[1]


def test_an_orchestrator_ends_the_sessions_that_those_before_it_left(gate, tmp_path):
    """Whose gateway was down, perhaps, when they were killed. Others' are left alone."""
    options = {"journal": str(tmp_path), "dispatcher": DispatcherConfig(cleanup_interval_s=0.1)}
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate, **options).begin()
        life = fleet.train()[0].group_id.partition("-")[0]
    theirs, others = f"{life}-99-0-1", "another-99-0-1"
    for name in (theirs, others):
        ask("POST", f"{gate}/sessions", {"id": name})
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, gate, **options)
        until(lambda: theirs not in ask("GET", f"{gate}/sessions")["sessions"])
        fleet.begin()
        assert all(group.group_id.startswith(f"{life}-") for group in fleet.train(4))
    assert ask("GET", f"{gate}/sessions")["sessions"] == [others]
    ask("DELETE", f"{gate}/sessions/{others}")


@pytest.mark.parametrize("journal", [False, True])
def test_a_trainer_that_was_replaced_is_believed_no_more(stack, gate, tmp_path, journal):
    """It was thought dead, and has learnt from a batch that another trainer now learns from."""
    options = {"max_staleness": 0} | ({"journal": str(tmp_path)} if journal else {})
    with contextlib.ExitStack() as life, ThreadPoolExecutor() as threads:
        fleet = Fleet(life, gate, **options).begin()
        old, port = OrchestratorClient(fleet.url), fleet.orchestrator.port
        old.begin(0, 0)
        fleet.begin()
        held = ids(fleet.client.take(0, 20))
        waits = threads.submit(fleet.client.take, 1, 60)
        late = fleet.client
        fleet.client = OrchestratorClient(fleet.url)
        fleet.begin()
        with pytest.raises(ServerError, match="has been replaced: one has begun since with lease"):
            waits.result(20)

        def refused():
            for said in (
                lambda: late.mark_trained(0),
                lambda: late.push(0),
                lambda: late.take(0, 0.1),
                lambda: old.mark_trained(0),
            ):
                with pytest.raises(ServerError, match="has been replaced") as caught:
                    said()
                assert caught.value.status == 409

        refused()
        assert ids(fleet.train()) == held  # they were not learnt from
        if not journal:
            return
    with Orchestrator(orchestrator_config(gate, port=port, **options)).running():
        refused()
        fleet.client.push(1)


def ask(method, url, body=None):
    """What a server answers."""
    request = urllib.request.Request(url, body and json.dumps(body).encode(), method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def weights(gate):
    """What the gateway wants of engines: (version, checksum), or None."""
    told = ask("GET", f"{gate}/server_info")["weights"]
    return told and (told["version"], told["checksum"])


def test_the_gateway_knows_at_once_which_weights_engines_must_have(stack, engine):
    with gateway(engine) as gate:
        fleet = Fleet(stack, gate, [])
        assert weights(gate) is None
        fleet.begin()
        assert weights(gate) == (0, None)
        fleet.add("sums")
        assert fleet.client.take(0, 20)
        fleet.client.mark_trained(0)
        ENGINE.version, ENGINE.checksum = 1, "c"
        try:
            fleet.client.push(1, "c")
            assert weights(gate) == (1, "c")
        finally:
            ENGINE.checksum = None


@pytest.mark.slow
def test_a_gateway_that_was_down_is_told_with_the_next_session(stack, engine):
    """It has no journal, and cannot know what engines must have; nor did it hear of the last push."""
    with gateway(engine) as gate:
        fleet = Fleet(stack, gate).begin()
        fleet.train()
        assert fleet.client.take(1, 20)
    ENGINE.version = 0  # it was started anew, too
    fleet.client.mark_trained(1)
    fleet.client.push(2)
    with gateway(engine, port=int(gate.rpartition(":")[2])):
        until(lambda: weights(gate) == (2, None))
        until(
            lambda: (
                "no engine that has the weights of version 2"
                in fleet.client.status()["gateway"]["error"]
            )
        )
        ENGINE.version = fleet.step = 2
        assert len(fleet.train(2)) == 8
