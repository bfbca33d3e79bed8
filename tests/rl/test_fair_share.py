"""Whose turn it is, how fast, and who is left alone: in virtual time."""

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


class World:
    """An orchestrator in virtual time: so many groups run at once, and each takes and yields what its task says."""

    def __init__(self, weights, running=32, config=FairShareConfig(), **tasks):
        """tasks: by name, (seconds of a group, share of its groups that are accepted)."""
        self.shares, self.running, self.now = FairShare(config), running, 0.0
        self.tasks, self.away = tasks, set()
        self.accepted, self.begun = collections.Counter(), collections.Counter()
        self._under_way, self._random = [], random.Random(0)
        for name, weight in weights.items():
            self.shares.set(name, weight)

    def run(self, groups):
        """Until so many more groups have come."""
        for _ in range(groups):
            while len(self._under_way) < self.running:
                name = self.shares.next_task(self.accepted, self.tasks.keys() - self.away)
                if name is None:
                    break
                self.shares.start(name, GROUP)
                self.begun[name] += 1
                ends = self.now + self.tasks[name][0] * self._random.uniform(0.5, 1.5)
                heapq.heappush(self._under_way, (ends, self._random.random(), name))
            self.now, _, name = heapq.heappop(self._under_way)
            kept = self._random.random() < self.tasks[name][1]
            self.shares.finish(name, GROUP, kept)
            self.accepted[name] += GROUP * kept

    def share(self, name, since=None):
        """Of what was accepted, since the counts of then."""
        own = self.accepted - (since or collections.Counter())
        return own[name] / sum(own.values())


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}


@pytest.mark.parametrize(
    "tasks",
    [
        dict(a=(1, 1), b=(1, 1), c=(1, 1)),
        dict(a=(1, 1), b=(20, 1), c=(3, 1)),  # slow ones take more of the places
        dict(a=(1, 0.6), b=(1, 1), c=(2, 0.8)),  # more of what is dropped is begun
    ],
    ids=["alike", "slow", "dropped"],
)
def test_shares_of_what_is_accepted_are_the_weights(tasks):
    world = World(WEIGHTS, **tasks)
    world.run(3000)
    for name, weight in WEIGHTS.items():
        assert world.share(name) == pytest.approx(weight / 8, rel=0.02)


def test_those_equally_far_behind_take_turns_by_name_whoever_came_first():
    for names in ("abc", "cab"):
        shares, order = FairShare(), []
        for name in names:
            shares.set(name, 1.0)
        for _ in range(6):
            order.append(shares.next_task({}, names))
            shares.start(order[-1], GROUP)
        assert order == [*"abcabc"]


def test_what_is_in_flight_counts():
    shares = FairShare()
    for name in "ab":
        shares.set(name, 1.0)
    turns = []
    for _ in range(6):
        turns.append(shares.next_task({}, "ab"))
        shares.start(turns[-1], GROUP)
    assert turns == list("ababab")
    # One that is called off is begun again; it says nothing of the task.
    shares.finish("a", GROUP, None)
    assert shares.next_task({}, "ab") == "a"


def test_who_cannot_take_a_group_is_passed_over_and_catches_up():
    world = World({"a": 1.0, "b": 1.0}, running=4, a=(1, 1), b=(1, 1))
    world.run(100)
    world.away = {"a"}
    world.run(20)
    assert world.accepted["b"] - world.accepted["a"] > 10 * GROUP
    world.away = set()
    world.run(100)
    assert abs(world.share("a") - 0.5) < 0.02


def test_who_was_away_for_long_does_not_have_the_engines_to_itself():
    world = World({"a": 1.0, "b": 1.0}, running=4, a=(1, 1), b=(1, 1))
    world.away = {"a"}
    world.run(1000)
    world.away, before, begun = set(), +world.accepted, +world.begun
    world.run(500)
    bound = FairShareConfig().max_deficit / GROUP
    # It is ahead by what it may make up for, to within what runs, and no more.
    ahead = (world.begun - begun)["a"] - (world.begun - begun)["b"]
    assert bound / 2 < ahead <= 2 * bound + 8
    before = +world.accepted
    world.run(1000)
    assert abs(world.share("a", before) - 0.5) < 0.02


def test_who_comes_late_begins_beside_the_others():
    world = World({"b": 1.0}, running=4, a=(1, 1), b=(1, 1))
    world.away = {"a"}
    world.run(1000)
    world.shares.set("a", 1.0)
    world.away, before = set(), +world.accepted
    world.run(1000)
    assert 0.5 <= world.share("a", before) < 0.6


def test_of_whom_nothing_is_ever_accepted_leaves_the_others_their_turn():
    """It fails too fast for a breaker, or not often enough in a row."""
    world = World({"a": 1.0, "b": 1.0}, running=16, a=(1, 0), b=(1, 1))
    world.run(4000)
    assert 0.4 < world.begun["b"] / sum(world.begun.values()) < 0.6


def test_a_weight_can_change():
    world = World({"a": 1.0, "b": 1.0}, a=(1, 1), b=(1, 1))
    world.run(500)
    world.shares.set("a", 3.0)
    world.run(1000)
    before = +world.accepted
    world.run(2000)
    assert abs(world.share("a", before) - 0.75) < 0.03
    world.shares.remove("a")
    assert world.shares.next_task(world.accepted, "ab") == "b"
    world.shares.finish("a", GROUP, True)  # of one that is gone


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.data())
def test_someone_who_is_ready_is_always_next(weights, data):
    shares, accepted = FairShare(), {}
    names = [f"t{i}" for i in range(len(weights))]
    for name, weight in zip(names, weights):
        shares.set(name, weight)
        accepted[name] = data.draw(st.integers(0, 10_000))
    ready = set(data.draw(st.lists(st.sampled_from(names))))
    found = shares.next_task(accepted, ready)
    assert found in ready if ready else found is None


def test_told_are_the_shares():
    shares = FairShare()
    assert shares.next_task({}, {"a"}) is None
    shares.set("a", 1.0)
    shares.set("b", 3.0)
    told = shares.status({"a": 8, "b": 8})
    assert (told["b"]["share"], told["b"]["accepted_share"]) == (0.75, 0.5)


@pytest.mark.parametrize("weight", [0, -1.0, 1e-320, 1e12, float("nan"), float("inf")])
def test_rejects_weight_that_leaves_others_nothing(weight):
    """With a weight of 1e-320 quotients are infinite, after which the first task by name had every turn."""
    with pytest.raises(ValueError, match=f"weight is {weight}; it must be from 1e-06 to 1e.06"):
        FairShare().set("a", weight)


@pytest.mark.parametrize("weight", [MIN_WEIGHT, MAX_WEIGHT])
def test_others_have_their_shares_after_any_weight(weight):
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


def test_a_bucket_lets_so_many_pass():
    bucket, now, passed = TokenBucket(4.0, burst=3.0), 10.0, []
    while now < 20:
        if not bucket.wait(now):
            bucket.take(now)
            passed.append(now)
        now += 0.01
    assert passed[2] < 10.05 < passed[3]  # the burst
    assert len(passed) == pytest.approx(3 + 10 * 4, abs=1)
    # After a pause a burst again, not all that was missed.
    bucket.take(1000.0), bucket.take(1000.0), bucket.take(1000.0)
    assert bucket.wait(1000.0) == pytest.approx(0.25)


def test_a_bucket_without_a_rate_lets_all_pass():
    bucket = TokenBucket(None)
    for _ in range(100):
        assert bucket.wait(0.0) == 0
        bucket.take(0.0)


def test_a_bucket_that_waits_as_told_passes():
    bucket, now = TokenBucket(3.0), 0.0
    for _ in range(20):
        now += bucket.wait(now) + 1e-9
        assert bucket.wait(now) == 0
        bucket.take(now)
    assert now == pytest.approx(19 / 3)


def test_a_breaker_opens_after_failures_in_a_row_and_tries_one():
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=3, reset_timeout_s=10))
    for _ in range(5):  # never three in a row
        breaker.record_failure(0.0)
        breaker.record_failure(0.0)
        breaker.record_success()
    assert breaker.state == CLOSED and breaker.wait(0.0) == 0
    for then in (1.0, 2.0, 3.0):
        breaker.record_failure(then)
    assert breaker.state == OPEN and breaker.wait(4.0) == 9.0
    breaker.record_failure(8.0)  # of something that began before
    assert breaker.wait(13.0) == 0 and breaker.state == OPEN
    breaker.start_trial(13.0)
    assert breaker.state == HALF_OPEN and breaker.wait(14.0) == 9.0
    breaker.record_failure(15.0)
    assert breaker.state == OPEN and breaker.wait(15.0) == 10.0
    breaker.start_trial(25.0)
    breaker.record_success()
    assert breaker.state == CLOSED and breaker.wait(25.0) == 0
    breaker.record_failure(26.0)
    assert breaker.state == CLOSED  # failures are counted anew


def test_a_breaker_waits_for_what_is_under_way():
    """Of a thousand rollouts that begin together, those whose sandboxes fail are the first to come."""
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=3, reset_timeout_s=10))
    for under_way in range(20, 11, -1):
        breaker.record_failure(0.0, under_way)
    assert breaker.state == CLOSED
    breaker.record_failure(0.0, 10)
    assert breaker.state == OPEN


def test_a_breaker_whose_try_is_never_heard_of_tries_again():
    breaker = CircuitBreaker(CircuitBreakerConfig(failure_threshold=1, reset_timeout_s=10))
    breaker.record_failure(0.0)
    breaker.start_trial(10.0)
    assert breaker.wait(19.0) == 1.0 and breaker.wait(20.0) == 0


def test_an_order_has_all_and_is_one_of_many():
    orders = [
        tuple(shuffled_indices(*of, 50))
        for of in ((0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0))
    ]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4 and orders[0] == tuple(shuffled_indices(0, "a", 0, 50))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FairShareConfig(max_deficit=0), "max_deficit is 0"),
        (lambda: FairShareConfig(max_drops=0), "max_drops is 0"),
        (lambda: CircuitBreakerConfig(failure_threshold=0), "failure_threshold is 0"),
        (lambda: CircuitBreakerConfig(reset_timeout_s=0), "reset_timeout_s is 0"),
        (lambda: TokenBucket(0.0), "rate is 0.0"),
        (lambda: TokenBucket(1.0, 0.5), "burst is 0.5"),
    ],
)
def test_values_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
