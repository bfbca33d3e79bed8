"""Task services in the orchestrator's registry, in virtual time. Invalid requests are tested in test_orchestrator.py."""

import pytest

from glm5_jax.rl.orchestrator.fair_share import CircuitBreakerConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig, TaskRegistry
from glm5_jax.rl.trajectory import Trajectory, summarize_records
from glm5_jax.rl.types import Reward
from glm5_jax.runtime.http_server import ApiError
from tests.rl.test_trajectory import record

GROUP = 4
SPEC = {
    "schema": 2,
    "name": "a",
    "url": "http://127.0.0.1:9",
    "weight": 1.0,
    "size": 10,
    "held_out": 0,
    "max_inflight": 8,
    "rollout_timeout_s": 60.0,
    "instance": "one",
}


def make_registry(**spec):
    """Returns a registry with one service, and the service."""
    tasks = TaskRegistry(
        GROUP,
        RegistryConfig(
            heartbeat_timeout_s=10.0,
            breaker=CircuitBreakerConfig(failure_threshold=2, reset_timeout_s=5.0),
        ),
    )
    service, _ = tasks.register({**SPEC, **spec}, 0.0)
    return tasks, service


def start_group(tasks, now):
    """Starts the next group, and returns its task number; None: no group may start."""
    ready = tasks.ready_tasks(now)
    if not ready:
        return None
    service, number = tasks.next_group({}, ready)
    tasks.start_group(service, now)
    return number


def finish_group(tasks, service, accepted, error="", now=0.0):
    """Finishes a group whose rollouts all have the same result."""
    for _ in range(GROUP):
        service.in_flight -= 1
        service.record_try(error, now)
    tasks.finish_group(service, accepted)


def test_resampled_numbers_come_first_in_order():
    tasks, service = make_registry(max_inflight=80)
    assert [start_group(tasks, 0.0) for _ in range(3)] == [0, 1, 2]
    for number in (1, 0):
        finish_group(tasks, service, False)
        tasks.resample("a", number)
    assert [start_group(tasks, 0.0) for _ in range(3)] == [1, 0, 3]
    # Numbers of an earlier orchestrator, which this registry has not drawn.
    tasks.resample("a", 9)
    assert [start_group(tasks, 0.0) for _ in range(2)] == [9, 10]
    assert tasks.status({}, 0.0)["a"]["num_drawn"] == 11


def test_numbers_continue_when_service_returns():
    tasks, service = make_registry()
    start_group(tasks, 0.0)
    finish_group(tasks, service, True)
    tasks.leave("a")
    assert start_group(tasks, 0.0) is None and tasks.expire(0.0) == [] and not tasks.services
    tasks.resample("b", 3)  # a task without a service
    tasks.register(SPEC, 1.0)
    assert start_group(tasks, 1.0) == 1


def test_service_is_full_at_max_inflight():
    tasks, service = make_registry()
    assert [start_group(tasks, 0.0) for _ in range(3)] == [0, 1, None]
    service.in_flight -= 3
    assert start_group(tasks, 0.0) is None  # 5 of 8
    service.in_flight -= 1
    service.num_evaluations = 1  # for an evaluation
    assert start_group(tasks, 0.0) is None and service.blocked_reason(GROUP, 0.0) == "full"
    service.num_evaluations = 0
    assert start_group(tasks, 0.0) == 2


def test_starts_groups_at_most_at_rate():
    tasks, service = make_registry(rate=0.5, max_inflight=80)
    numbers = [start_group(tasks, 0.25 * i) for i in range(32)]
    assert [i for i, number in enumerate(numbers) if number is not None] == [0, 8, 16, 24]
    assert service.blocked_reason(GROUP, 7.75) == "rate" and service.state == ""


def test_failing_service_is_tried_with_one_group():
    tasks, service = make_registry(max_inflight=80)
    start_group(tasks, 0.0)
    finish_group(tasks, service, False, "the disk is full", 0.0)
    assert (service.state, start_group(tasks, 4.9)) == ("open", None)
    assert tasks.blockers() == ["the service of a is open: the disk is full"]
    assert start_group(tasks, 5.0) == 1
    assert start_group(tasks, 5.0) is None and service.state == "half_open"
    finish_group(tasks, service, True, now=6.0)
    assert start_group(tasks, 6.0) == 2 and service.state == "" and tasks.blockers() == []


def test_service_without_heartbeat_is_lost_until_it_registers():
    tasks, service = make_registry()
    tasks.heartbeat("a", "one", 8.0)
    assert tasks.expire(18.0) == [] and tasks.expire(18.1) == [service] and tasks.expire(19.0) == []
    assert service.state == "lost" and start_group(tasks, 19.0) is None
    assert tasks.blockers() == ["the service of a is lost: no heartbeat for 10.1 s"]
    with pytest.raises(ApiError, match="register it"):
        tasks.heartbeat("a", "one", 19.0)
    # At any URL, because the other process is lost.
    same, has_changed = tasks.register(
        {**SPEC, "url": "http://127.0.0.1:10", "instance": "two"}, 20.0
    )
    assert same is service and has_changed and service.state == "" and start_group(tasks, 20.0) == 0


def test_registering_again_keeps_rollouts():
    tasks, service = make_registry()
    start_group(tasks, 0.0)
    assert tasks.register({**SPEC, "weight": 3.0}, 1.0) == (service, False)
    assert (service.spec.weight, service.in_flight) == (3.0, 4)
    assert tasks.register({**SPEC, "instance": "two"}, 1.0) == (service, True)
    with pytest.raises(
        ApiError, match="already served at http://127.0.0.1:9, and http://127.0.0.1:8"
    ):
        tasks.register({**SPEC, "url": "http://127.0.0.1:8"}, 1.0)


def test_leaving_service_stays_until_its_rollouts_end():
    tasks, service = make_registry()
    start_group(tasks, 0.0)
    tasks.leave("a")
    tasks.heartbeat("a", "one", 5.0)
    assert tasks.expire(5.0) == [] and "a" in tasks.services and tasks.blockers() == []
    finish_group(tasks, service, True)
    service.in_flight += 1  # an evaluation
    tasks.expire(5.0)
    assert "a" in tasks.services
    service.in_flight -= 1
    tasks.expire(5.0)
    assert "a" not in tasks.services
    with pytest.raises(ApiError, match="no service 'a' is registered; there are none"):
        tasks.leave("a")


def test_status_averages_rollouts_without_failures():
    tasks, service = make_registry()
    rollouts = [(1.0, 2.0, [-1, 3]), (0.0, 4.0, [-1, 3]), (None, 9.0, [-1, 3])]
    for value, seconds, versions in rollouts:
        reward = Reward(value)
        service.record_rollout(
            Trajectory(
                rollout_id="g-0",
                group_id="g",
                task="a",
                number=0,
                reward=reward,
                summary=summarize_records((record(versions),)),
                duration_s=seconds,
            )
        )
    status = tasks.status({"a": 8}, 1.5)["a"]
    assert (status["reward"], status["mean_duration_s"], status["heartbeat_age_s"]) == (
        0.5,
        3.0,
        1.5,
    )
    assert (status["rollouts"], status["failed"], status["accepted"]) == (3, 1, 8)
