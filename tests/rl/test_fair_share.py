"""Weighted fair scheduling of tasks, rate limits and circuit breakers, in virtual time."""

import collections
import heapq
import random

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.rl.orchestrator.fair_share import (
    CLOSED,
    HALF_OPEN,
    MAX_WEIGHT,
    MIN_WEIGHT,
    OPEN,
    CircuitBreaker,
    CircuitBreakerConfig,
    FairShare,
    FairShareConfig,
    TokenBucket,
    shuffled_indices,
)

GROUP = 8


class Simulation:
    """An orchestrator in virtual time, with up to `running` groups at once.

    Attributes:
      shares: the scheduler under test.
      away: tasks that cannot take a group.
      accepted: accepted rollouts by task.
      num_started: started groups by task.
    """

    def __init__(self, weights, running=32, config=FairShareConfig(), **tasks):
        """tasks: (seconds of a group, share of its groups that are accepted) by name."""
        self.shares, self.running, self.now = FairShare(config), running, 0.0
        self.tasks, self.away = tasks, set()
        self.accepted, self.num_started = collections.Counter(), collections.Counter()
        self._ends, self._random = [], random.Random(0)
        for name, weight in weights.items():
            self.shares.set(name, weight)

    def run(self, groups):
        """Runs until `groups` more groups have ended."""
        for _ in range(groups):
            while len(self._ends) < self.running:
                name = self.shares.next_task(self.accepted, self.tasks.keys() - self.away)
                if name is None:
                    break
                self.shares.start(name, GROUP)
                self.num_started[name] += 1
                end = self.now + self.tasks[name][0] * self._random.uniform(0.5, 1.5)
                heapq.heappush(self._ends, (end, self._random.random(), name))
            self.now, _, name = heapq.heappop(self._ends)
            is_accepted = self._random.random() < self.tasks[name][1]
            self.shares.finish(name, GROUP, is_accepted)
            self.accepted[name] += GROUP * is_accepted

    def share(self, name, since=None):
        """Returns the share of a task in the accepted rollouts. since: counts to subtract."""
        counts = self.accepted - (since or collections.Counter())
        return counts[name] / sum(counts.values())


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}


@pytest.mark.parametrize(
    "tasks",
    [
        dict(a=(1, 1), b=(1, 1), c=(1, 1)),
        dict(a=(1, 1), b=(20, 1), c=(3, 1)),  # slow groups occupy more of the slots
        dict(a=(1, 0.6), b=(1, 1), c=(2, 0.8)),  # tasks with dropped groups start more
    ],
    ids=["equal", "slow", "dropped"],
)
def test_accepted_shares_equal_weights(tasks):
    simulation = Simulation(WEIGHTS, **tasks)
    simulation.run(3000)
    for name, weight in WEIGHTS.items():
        assert simulation.share(name) == pytest.approx(weight / 8, rel=0.02)


def test_breaks_ties_by_name():
    for names in ("abc", "cab"):
        shares, order = FairShare(), []
        for name in names:
            shares.set(name, 1.0)
        for _ in range(6):
            order.append(shares.next_task({}, names))
            shares.start(order[-1], GROUP)
        assert order == [*"abcabc"]


def test_counts_groups_in_flight():
    shares = FairShare()
    for name in "ab":
        shares.set(name, 1.0)
    turns = []
    for _ in range(6):
        turns.append(shares.next_task({}, "ab"))
        shares.start(turns[-1], GROUP)
    assert turns == list("ababab")
    # A cancelled group is started again, and does not count against the task.
    shares.finish("a", GROUP, None)
    assert shares.next_task({}, "ab") == "a"


def test_task_that_was_away_catches_up():
    simulation = Simulation({"a": 1.0, "b": 1.0}, running=4, a=(1, 1), b=(1, 1))
    simulation.run(100)
    simulation.away = {"a"}
    simulation.run(20)
    assert simulation.accepted["b"] - simulation.accepted["a"] > 10 * GROUP
    simulation.away = set()
    simulation.run(100)
    assert abs(simulation.share("a") - 0.5) < 0.02


def test_limits_deficit_of_task_that_was_away():
    simulation = Simulation({"a": 1.0, "b": 1.0}, running=4, a=(1, 1), b=(1, 1))
    simulation.away = {"a"}
    simulation.run(1000)
    simulation.away, before, num_started = set(), +simulation.accepted, +simulation.num_started
    simulation.run(500)
    bound = FairShareConfig().max_deficit / GROUP
    # It gets at most its maximum deficit more, up to the groups that run.
    ahead = (simulation.num_started - num_started)["a"] - (simulation.num_started - num_started)[
        "b"
    ]
    assert bound / 2 < ahead <= 2 * bound + 8
    before = +simulation.accepted
    simulation.run(1000)
    assert abs(simulation.share("a", before) - 0.5) < 0.02


def test_late_task_starts_without_deficit():
    simulation = Simulation({"b": 1.0}, running=4, a=(1, 1), b=(1, 1))
    simulation.away = {"a"}
    simulation.run(1000)
    simulation.shares.set("a", 1.0)
    simulation.away, before = set(), +simulation.accepted
    simulation.run(1000)
    assert 0.5 <= simulation.share("a", before) < 0.6


def test_task_without_accepted_groups_leaves_others_their_share():
    """Its groups fail too fast for a breaker, or without enough consecutive failures."""
    simulation = Simulation({"a": 1.0, "b": 1.0}, running=16, a=(1, 0), b=(1, 1))
    simulation.run(4000)
    assert 0.4 < simulation.num_started["b"] / sum(simulation.num_started.values()) < 0.6


def test_follows_changed_weight():
    simulation = Simulation({"a": 1.0, "b": 1.0}, a=(1, 1), b=(1, 1))
    simulation.run(500)
    simulation.shares.set("a", 3.0)
    simulation.run(1000)
    before = +simulation.accepted
    simulation.run(2000)
    assert abs(simulation.share("a", before) - 0.75) < 0.03
    simulation.shares.remove("a")
    assert simulation.shares.next_task(simulation.accepted, "ab") == "b"
    simulation.shares.finish("a", GROUP, True)  # a group of a removed task


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.data())
def test_next_task_is_always_a_ready_one(weights, data):
    shares, accepted = FairShare(), {}
    names = [f"t{i}" for i in range(len(weights))]
    for name, weight in zip(names, weights):
        shares.set(name, weight)
        accepted[name] = data.draw(st.integers(0, 10_000))
    ready = set(data.draw(st.lists(st.sampled_from(names))))
    task = shares.next_task(accepted, ready)
    assert task in ready if ready else task is None


def test_status_has_shares():
    shares = FairShare()
    assert shares.next_task({}, {"a"}) is None
    shares.set("a", 1.0)
    shares.set("b", 3.0)
    status = shares.status({"a": 8, "b": 8})
    assert (status["b"]["share"], status["b"]["accepted_share"]) == (0.75, 0.5)


@pytest.mark.parametrize("weight", [0, -1.0, 1e-320, 1e12, float("nan"), float("inf")])
def test_rejects_weight_that_starves_others(weight):
    """With a weight of 1e-320 quotients are infinite, and the first task by name got every group."""
    with pytest.raises(ValueError, match=f"weight is {weight}; it must be from 1e-06 to 1e.06"):
        FairShare().set("a", weight)


@pytest.mark.parametrize("weight", [MIN_WEIGHT, MAX_WEIGHT])
def test_extreme_weight_leaves_shares_of_others(weight):
    shares, accepted = FairShare(), collections.Counter(odd=8)
    shares.set("odd", weight)

    def turns(ready, count):
        counts = collections.Counter()
        for _ in range(count):
            name = shares.next_task(accepted, ready)
            shares.start(name, 8)
            shares.finish(name, 8, True)
            accepted[name] += 8
            counts[name] += 1
        return counts

    turns(["odd"], 4)
    shares.set("b", 1.0)
    shares.set("c", 1.0)
    turns(["odd", "b", "c"], 60)
    shares.remove("odd")
    turns(["b", "c"], 60)
    assert max(abs(count - 10) for count in turns(["b", "c"], 20).values()) <= 1


def test_token_bucket_limits_rate():
    bucket, now, times = TokenBucket(4.0, burst=3.0), 10.0, []
    while now < 20:
        if not bucket.wait(now):
            bucket.take(now)
            times.append(now)
        now += 0.01
    assert times[2] < 10.05 < times[3]  # the burst
    assert len(times) == pytest.approx(3 + 10 * 4, abs=1)
    # After a pause it allows one burst, not all missed tokens.
    bucket.take(1000.0), bucket.take(1000.0), bucket.take(1000.0)
    assert bucket.wait(1000.0) == pytest.approx(0.25)


def test_token_bucket_without_rate_never_waits():
    bucket = TokenBucket(None)
    for _ in range(100):
        assert bucket.wait(0.0) == 0
        bucket.take(0.0)


def test_token_bucket_admits_after_returned_wait():
    bucket, now = TokenBucket(3.0), 0.0
    for _ in range(20):
        now += bucket.wait(now) + 1e-9
        assert bucket.wait(now) == 0
        bucket.take(now)
    assert now == pytest.approx(19 / 3)


def test_breaker_opens_after_consecutive_failures():
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=3, reset_timeout_s=10))
    for _ in range(5):  # never three in a row
        breaker.record_failure(0.0)
        breaker.record_failure(0.0)
        breaker.record_success()
    assert breaker.state == CLOSED and breaker.wait(0.0) == 0
    for time in (1.0, 2.0, 3.0):
        breaker.record_failure(time)
    assert breaker.state == OPEN and breaker.wait(4.0) == 9.0
    breaker.record_failure(8.0)  # of an earlier request
    assert breaker.wait(13.0) == 0 and breaker.state == OPEN
    breaker.start_trial(13.0)
    assert breaker.state == HALF_OPEN and breaker.wait(14.0) == 9.0
    breaker.record_failure(15.0)
    assert breaker.state == OPEN and breaker.wait(15.0) == 10.0
    breaker.start_trial(25.0)
    breaker.record_success()
    assert breaker.state == CLOSED and breaker.wait(25.0) == 0
    breaker.record_failure(26.0)
    assert breaker.state == CLOSED  # the count of failures starts at 0 again


def test_breaker_considers_rollouts_in_flight():
    """If a thousand rollouts start together, those with failing sandboxes end first."""
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=3, reset_timeout_s=10))
    for in_flight in range(20, 11, -1):
        breaker.record_failure(0.0, in_flight)
    assert breaker.state == CLOSED
    breaker.record_failure(0.0, 10)
    assert breaker.state == OPEN


def test_breaker_repeats_trial_without_result():
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=1, reset_timeout_s=10))
    breaker.record_failure(0.0)
    breaker.start_trial(10.0)
    assert breaker.wait(19.0) == 1.0 and breaker.wait(20.0) == 0


def test_shuffled_indices_depend_on_all_arguments():
    orders = [
        tuple(shuffled_indices(*key, 50))
        for key in ((0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0))
    ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4 and orders[0] == tuple(shuffled_indices(0, "a", 0, 50))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FairShareConfig(max_deficit=0), "max_deficit is 0"),
        (lambda: FairShareConfig(max_drops=0), "max_drops is 0"),
        (lambda: CircuitBreakerConfig(failure_threshold=0), "failure_threshold is 0"),
        (lambda: CircuitBreakerConfig(reset_timeout_s=0), "reset_timeout_s is 0"),
        (lambda: TokenBucket(0.0), "rate is 0.0"),
        (lambda: TokenBucket(1.0, 0.5), "burst is 0.5"),
    ],
)
def test_rejects_values_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
