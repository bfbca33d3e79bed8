"""Services as the orchestrator knows them, in virtual time; what they are refused for is in test_orchestrator.py."""

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


def registry(**spec):
    """With one service."""
    made = TaskRegistry(
        GROUP,
        RegistryConfig(
            heartbeat_timeout_s=10.0,
            breaker=CircuitBreakerConfig(failure_threshold=2, reset_timeout_s=5.0),
        ),
    )
    own, _ = made.register({**SPEC, **spec}, 0.0)
    return made, own


def begin(made, now):
    """The number whose group begins, None if none can."""
    ready = made.ready_tasks(now)
    if not ready:
        return None
    own, number = made.next_group({}, ready)
    made.start_group(own, now)
    return number


def come(made, own, accepted, error="", now=0.0):
    """A group of a service comes, all of its rollouts alike."""
    for _ in range(GROUP):
        own.in_flight -= 1
        own.record_try(error, now)
    made.finish_group(own, accepted)


def test_numbers_that_come_again_come_first_and_in_order():
    made, own = registry(max_inflight=80)
    assert [begin(made, 0.0) for _ in range(3)] == [0, 1, 2]
    for number in (1, 0):
        come(made, own, False)
        made.resample("a", number)
    assert [begin(made, 0.0) for _ in range(3)] == [1, 0, 3]
    # Those of an orchestrator before this one, of which nothing else may be known.
    made.resample("a", 9)
    assert [begin(made, 0.0) for _ in range(2)] == [9, 10]
    assert made.status({}, 0.0)["a"]["num_drawn"] == 11


def test_numbers_go_on_when_a_service_comes_back():
    made, own = registry()
    begin(made, 0.0)
    come(made, own, True)
    made.leave("a")
    assert begin(made, 0.0) is None and made.expire(0.0) == [] and not made.services
    made.resample("b", 3)  # of one that is not there
    made.register(SPEC, 1.0)
    assert begin(made, 1.0) == 1


def test_a_service_is_full_at_its_limit():
    made, own = registry()
    assert [begin(made, 0.0) for _ in range(3)] == [0, 1, None]
    own.in_flight -= 3
    assert begin(made, 0.0) is None  # 5 of 8
    own.in_flight -= 1
    own.num_evaluations = 1  # for an evaluation
    assert begin(made, 0.0) is None and own.blocked_reason(GROUP, 0.0) == "full"
    own.num_evaluations = 0
    assert begin(made, 0.0) == 2


def test_no_faster_than_its_rate():
    made, own = registry(rate=0.5, max_inflight=80)
    found = [begin(made, 0.25 * i) for i in range(32)]
    assert [i for i, number in enumerate(found) if number is not None] == [0, 8, 16, 24]
    assert own.blocked_reason(GROUP, 7.75) == "rate" and own.state == ""


def test_what_fails_is_tried_with_one_group():
    made, own = registry(max_inflight=80)
    begin(made, 0.0)
    come(made, own, False, "the disk is full", 0.0)
    assert (own.state, begin(made, 4.9)) == ("open", None)
    assert made.blockers() == ["the service of a is open: the disk is full"]
    assert begin(made, 5.0) == 1
    assert begin(made, 5.0) is None and own.state == "half_open"
    come(made, own, True, now=6.0)
    assert begin(made, 6.0) == 2 and own.state == "" and made.blockers() == []


def test_who_is_not_heard_of_is_lost_until_it_registers():
    made, own = registry()
    made.heartbeat("a", "one", 8.0)
    assert made.expire(18.0) == [] and made.expire(18.1) == [own] and made.expire(19.0) == []
    assert own.state == "lost" and begin(made, 19.0) is None
    assert made.blockers() == ["the service of a is lost: no heartbeat for 10.1 s"]
    with pytest.raises(ApiError, match="register it"):
        made.heartbeat("a", "one", 19.0)
    # At any place, as the other is lost.
    again, other = made.register({**SPEC, "url": "http://127.0.0.1:10", "instance": "two"}, 20.0)
    assert again is own and other and own.state == "" and begin(made, 20.0) == 0


def test_who_says_again_what_it_is_keeps_its_rollouts():
    made, own = registry()
    begin(made, 0.0)
    assert made.register({**SPEC, "weight": 3.0}, 1.0) == (own, False)
    assert (own.spec.weight, own.in_flight) == (3.0, 4)
    assert made.register({**SPEC, "instance": "two"}, 1.0) == (own, True)
    with pytest.raises(
        ApiError, match="already served at http://127.0.0.1:9, and http://127.0.0.1:8"
    ):
        made.register({**SPEC, "url": "http://127.0.0.1:8"}, 1.0)


def test_who_leaves_is_there_until_its_rollouts_have_ended():
    made, own = registry()
    begin(made, 0.0)
    made.leave("a")
    made.heartbeat("a", "one", 5.0)
    assert made.expire(5.0) == [] and "a" in made.services and made.blockers() == []
    come(made, own, True)
    own.in_flight += 1  # an evaluation
    made.expire(5.0)
    assert "a" in made.services
    own.in_flight -= 1
    made.expire(5.0)
    assert "a" not in made.services
    with pytest.raises(ApiError, match="no service 'a' is registered; there are none"):
        made.leave("a")


def test_means_are_of_what_says_something():
    made, own = registry()
    rollouts = [(1.0, 2.0, [-1, 3]), (0.0, 4.0, [-1, 3]), (None, 9.0, [-1, 3])]
    for value, seconds, versions in rollouts:
        reward = Reward(value)
        own.record_rollout(
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
    told = made.status({"a": 8}, 1.5)["a"]
    assert (told["reward"], told["mean_duration_s"], told["heartbeat_age_s"]) == (0.5, 3.0, 1.5)
    assert (told["rollouts"], told["failed"], told["accepted"]) == (3, 1, 8)
