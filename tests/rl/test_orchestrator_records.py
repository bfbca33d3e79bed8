"""Token records go from the gateway to the trainer. The orchestrator stores only their summaries, and deletes the
records."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from tests.rl.fleet import Engine, Fleet, gateway, num_sessions, post_json, until
from tests.rl.test_gateway_journal import send_request

CLEANUP = {"dispatcher": DispatcherConfig(cleanup_interval_s=0.05)}


def take_summaries(fleet, step=0):
    """Returns the orchestrator's response to a request for a batch, without the records."""
    lease = post_json(fleet.url, "/trainer/begin", {"step": step, "version": step})["lease"]
    body = {"step": step, "lease": lease, "timeout_s": 20.0}
    response = post_json(fleet.url, "/groups/take", body)
    assert response["groups"], response
    return response


def finished(gate):
    """Returns the ids of finished sessions."""
    return set(send_request(gate, "/sessions")[1]["finished"])


def rollout_ids(groups):
    """Returns the ids of all rollouts of groups."""
    return {member.rollout_id for group in groups for member in group.members}


@pytest.fixture
def private_gate(engine, tmp_path):
    """Runs a gateway with a journal, for one test."""
    with gateway(engine, journal=str(tmp_path / "gateway")) as url:
        yield url


def test_orchestrator_sends_and_stores_no_tokens(stack, private_gate, tmp_path):
    fleet = Fleet(stack, private_gate, journal=str(tmp_path / "orchestrator"))
    response = take_summaries(fleet)
    assert response["gateway"] == private_gate
    member = response["groups"][0]["members"][0]
    assert member["summary"]["versions"] == [0] and member["summary"]["lengths"][0] > 20
    fleet.client.pause()
    until(lambda: fleet.client.status()["running"] == 0)  # the journal is at rest
    entries = [
        path.read_text(errors="replace") for path in (tmp_path / "orchestrator").glob("*.entry")
    ]
    assert entries
    for text in (json.dumps(response), *entries):
        assert "token_ids" not in text and "content" not in text
    assert member["rollout_id"] in finished(private_gate)


def test_deletes_records_after_training(stack, private_gate):
    fleet = Fleet(stack, private_gate, **CLEANUP).begin()
    groups = fleet.train(2)
    until(lambda: not rollout_ids(groups) & finished(private_gate))
    batch = fleet.client.take(2, 20)
    fleet.client.pause()
    until(lambda: fleet.client.status()["running"] == 0)
    num_waiting = fleet.client.status()["waiting"]
    until(lambda: len(finished(private_gate)) == 4 * num_waiting)
    assert rollout_ids(batch) <= finished(private_gate) and num_sessions(private_gate) == 0


def test_deletes_records_of_dropped_groups_and_evaluations(stack, private_gate):
    options = {"dispatcher": DispatcherConfig(cleanup_interval_s=0.05, max_tries=1)}
    fleet = Fleet(stack, private_gate, **options)
    fleet.services["sums"].is_broken = lambda request: request.rollout_id.endswith(("-1", "-2"))
    fleet.begin()
    until(lambda: fleet.client.status()["metrics"]["groups/failed"] >= 4)
    assert fleet.client.evaluate(2, 20)["sums"]["count"] == 2
    assert not any("held-out" in name for name in finished(private_gate))
    fleet.client.pause()
    until(lambda: fleet.client.status()["running"] == 0)
    until(lambda: not finished(private_gate))


def test_evaluates_with_distribution_of_its_own(stack):
    engine = Engine()
    url = stack.enter_context(engine.running())
    fleet = Fleet(stack, stack.enter_context(gateway(url, temperature=0.8))).begin()
    until(lambda: engine.distributions == {(0.8, 1.0)})
    result = fleet.client.evaluate(2, 20, group=3, temperature=0.0, top_p=0.95)["sums"]
    assert result["count"] == 6 and engine.distributions == {(0.8, 1.0), (0.0, 0.95)}


def test_leaves_records_of_other_runs(stack, private_gate):
    send_request(private_gate, "/sessions", {"id": "another-0-0-0"})
    send_request(private_gate, "/sessions/another-0-0-0/finish", {})
    fleet = Fleet(stack, private_gate, **CLEANUP).begin()
    groups = fleet.train()
    until(lambda: not rollout_ids(groups) & finished(private_gate))
    assert "another-0-0-0" in finished(private_gate)


def test_repairs_groups_whose_records_are_lost(stack, private_gate, tmp_path):
    """One of four lost: padded. Three of four lost: replaced. Changed on the disk: treated as lost."""
    fleet = Fleet(stack, private_gate, max_staleness=0)
    first, second, third, _ = take_summaries(fleet)["groups"]
    names = {group["group_id"]: group["member_ids"] for group in (first, second, third)}
    lost = [names[first["group_id"]][1], *names[second["group_id"]][:3]]
    changed = names[third["group_id"]][0]
    for name in lost:
        assert send_request(private_gate, f"/sessions/{name}", method="DELETE")[0] == 200
    path = tmp_path / "gateway" / f"{changed}.records"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    groups = fleet.begin().client.take(0, 20)
    assert groups is not None and len(groups) == 4
    by_order = {group.order: group for group in groups}
    repaired = by_order[first["order"]]
    assert len(repaired.baseline) == 3 and repaired.members[3] is repaired.members[0]
    replaced = by_order[second["order"]]
    assert replaced.number == second["number"] and replaced.group_id != second["group_id"]
    assert not rollout_ids(groups) & {*lost, changed}
    assert all(member.reward.value is not None for g in groups for member in g.members)
    assert all(member.records for group in groups for member in group.members)
    metrics = fleet.client.status()["metrics"]
    assert (metrics["members/lost"], metrics["groups/failed"]) == (5, 1)
    # The batch stays the same until it is trained on.
    repeated = fleet.client.take(0, 20)
    assert [group.group_id for group in repeated] == [group.group_id for group in groups]
    assert rollout_ids(repeated) == rollout_ids(groups)
    fleet.train(2)


def test_restarted_gateway_has_records_of_taken_batch(stack, engine, tmp_path):
    options = {"journal": str(tmp_path)}
    with gateway(engine, **options) as gate:
        fleet = Fleet(stack, gate).begin()
        before = fleet.client.take(0, 20)
    with gateway(engine, port=int(gate.rpartition(":")[2]), **options):
        after = fleet.client.take(0, 20)
        for group, same_group in zip(before, after, strict=True):
            assert group.group_id == same_group.group_id
            for member, same_member in zip(group.members, same_group.members, strict=True):
                assert member.summary == same_member.summary
                [record], [same_record] = member.records, same_member.records
                assert record.token_ids.tolist() == same_record.token_ids.tolist()
        fleet.train()


def test_run_continues_after_gateway_lost_records(stack, engine):
    with gateway(engine) as gate:
        fleet = Fleet(stack, gate).begin()
        before = fleet.client.take(0, 20)
    with gateway(engine, port=int(gate.rpartition(":")[2])):
        groups = fleet.train()
        assert len(groups) == 4 and not rollout_ids(groups) & rollout_ids(before)
        # Which of the lost groups end first depends on the machine.
        assert {group.number for group in groups} & {group.number for group in before}


def test_batch_is_not_ready_while_gateway_is_down(stack, engine, tmp_path):
    options = {"journal": str(tmp_path)}
    with gateway(engine, **options) as gate:
        fleet = Fleet(stack, gate).begin()
        until(lambda: fleet.client.status()["waiting"] >= 4)
    assert fleet.client.take(0, 0.1) is None
    [blocker] = fleet.client.blockers
    assert f"the gateway at {gate} fails: no server answers" in blocker
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(fleet.client.take, 0, 20)
        with gateway(engine, port=int(gate.rpartition(":")[2]), **options):
            assert len(waiting.result(30)) == 4 and fleet.client.blockers == ()


def test_trainer_sends_key_of_run_to_gateway(engine):
    from glm5_jax.rl.rollouts.client import RecordClient

    with gateway(engine, api_key="secret") as url:
        with pytest.raises(ServerError) as raised:
            RecordClient(url).fetch({"s": ""})
        assert raised.value.status == 401
        assert RecordClient(url, "secret").fetch({"s": ""}) == {}
        with Client(url, "secret").open("/server_info") as response:
            assert json.load(response)["finished"] == 0
