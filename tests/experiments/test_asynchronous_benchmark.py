"""The benchmark of asynchronous training: discrete events by hand, and a short run of the real system."""

import dataclasses
import itertools

import numpy as np
import pytest

from experiments.benchmarks import asynchronous
from experiments.benchmarks.asynchronous import (
    LEARNS,
    WAITS,
    WorkloadArm,
    arms,
    concurrency,
    measure,
)
from experiments.benchmarks.discrete_event_model import (
    SystemRun,
    Update,
    Workload,
    WorkloadTurn,
    ideal,
    mean_concurrency,
    merge_spans,
)
from glm5_jax.rl.rollouts.sessions import derive_seed

# A reply takes a second.
ONE = Workload(
    name="one",
    group=1,
    batch_groups=1,
    max_staleness=0,
    turns=1,
    tokens=(4, 4),
    speed=4.0,
    engines=1,
    slots=9,
    update_s=1.0,
    push_s=0.5,
)


def push_times(workload, attempts, updates):
    """Returns the times at which updates are pushed, and the run.

    attempts: seconds of environments by (order, tries, place); 0 for all others.
    """

    def met(*key):
        return [WorkloadTurn(seconds, 4) for seconds in attempts.get(key, (0,))]

    run = ideal(workload, updates, attempts=met)
    return [update.pushed for update in run.updates], run


# -- discrete events, by hand ---------------------------------------------------------------------------------


def test_synchronous_update_takes_sum_of_its_times():
    times, run = push_times(ONE, {(0, 0, 0): (2,), (1, 0, 0): (3,)}, 3)
    assert times == [4.5, 10.0, 12.5]
    assert run.updates[1] == Update(requested=4.5, received=8.5, updated=9.5, pushed=10.0)
    assert run.replies == [(2, 3), (7.5, 8.5), (10, 11)]
    assert run.answers == [(0, 2), (4.5, 7.5), (10, 10)]
    assert run.ages == [[0], [0], [0]] and run.met == [[2], [3], [0]]


def test_batch_waits_for_slowest_member():
    work = dataclasses.replace(ONE, group=2, batch_groups=2)
    times, run = push_times(work, {(0, 0, 1): (2,), (1, 0, 0): (5,)}, 1)
    assert times == [7.5]
    assert run.met == [[0, 2, 5, 0]]


def test_turns_are_sequential():
    times, run = push_times(ONE, {(0, 0, 0): (2, 3, 0.5)}, 1)
    assert times == [2 + 1 + 3 + 1 + 0.5 + 1 + 1.5]
    assert run.replies == [(2, 3), (6, 7), (7.5, 8.5)]
    assert run.met == [[5.5]]


def test_replies_wait_for_slot_in_order():
    work = dataclasses.replace(ONE, group=3, slots=2)
    attempts = {(0, 0, 0): (2.5,), (0, 0, 1): (2.25,), (0, 0, 2): (2,)}
    times, run = push_times(work, attempts, 1)
    assert run.replies == [(2, 3), (2.25, 3.25), (3, 4)]
    assert times == [4 + 1.5]
    [time], _ = push_times(dataclasses.replace(work, engines=2), attempts, 1)
    assert time == 3.5 + 1.5


def test_samples_stale_rollouts_while_training():
    work = dataclasses.replace(ONE, max_staleness=1)
    # Each rollout takes 3 s, an update with its push 1.5 s, and two are outstanding.
    times, run = push_times(work, {(order, 0, 0): (2,) for order in range(5)}, 5)
    assert times == [4.5, 6, 9, 10.5, 13.5]
    # Version 0 samples the first two. Rollouts that begin at 4.5 and at 6 have their first token two seconds later.
    assert run.ages == [[0], [1], [0], [1], [0]]


def test_batch_waits_for_rollout_that_would_become_too_old():
    work = dataclasses.replace(ONE, max_staleness=1, push_s=0.0)
    # The first token arrives immediately, the last after 10.5 s.
    slow = {(1, 0, 0): (0, 8.5)}
    times, run = push_times(work, slow, 4)
    assert times == [2, 11.5, 12.5, 13.5]
    assert run.ages == [[0], [1], [1], [1]] and run.dropped == 0


def test_restarts_rollout_that_is_too_old_without_pacing():
    work = dataclasses.replace(ONE, max_staleness=1, push_s=0.0, pacing=False)
    times, run = push_times(work, {(1, 0, 0): (0, 8.5)}, 7)
    # Dropped at 10.5; its next try is complete at 11.5, while the trainer trains.
    assert times == [2, 4, 6, 8, 10, 12, 13]
    assert run.ages == [[0]] * 6 + [[1]] and run.dropped == 1
    assert run.met == [[0]] * 7


def test_trains_on_rest_of_partly_stale_group():
    work = dataclasses.replace(ONE, group=3, max_staleness=1, push_s=0.0, pacing=False)
    # Two members have their first tokens late, from weights that are new enough.
    late = {(1, 0, 0): (0, 8.5), (1, 0, 1): (9.5,), (1, 0, 2): (9.5,)}
    _, run = push_times(work, late, 6)
    assert run.dropped == 0 and run.padded == 1
    assert run.met[5] == [9.5, 9.5]


@pytest.mark.parametrize(
    "max_staleness", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_speedup_is_bounded_by_staleness(max_staleness, sigma):
    work = Workload(
        name="slow",
        max_staleness=max_staleness,
        sigma=sigma,
        median_answer_s=3.0,
        max_answer_s=60.0,
    )
    learns, waits = ideal(work, 80), ideal(work.synchronous(), 80)
    speed_up = learns.rate(max_staleness + 1) / waits.rate(1)
    # The batches in the window change the rate by some per cent.
    assert speed_up < 1.04 * (max_staleness + 1)
    assert max(map(max, learns.ages)) == max_staleness
    if not sigma:
        assert speed_up > 0.96 * (max_staleness + 1)


@pytest.mark.slow
def test_workloads_have_documented_bounds():
    for workload in (asynchronous.SHORT, asynchronous.LONG):
        learns, waits = ideal(workload, 100), ideal(workload.synchronous(), 100)
        first = workload.max_staleness + 1
        assert learns.rate(first) / waits.rate(1) >= asynchronous.BOUNDS[workload.name]
        assert learns.rate(first) * (workload.update_s + workload.push_s) > 0.97


# -- results of runs -------------------------------------------------------------------------------------


def test_window_skips_first_updates():
    updates = [Update(0, 4, 5, 6), Update(6, 6.5, 7, 8), Update(8, 8.25, 9, 9.5)]
    run = SystemRun(updates=updates, replies=[(5, 7), (7, 12)], answers=[], ages=[], met=[])
    assert run.window(1) == (6, 9.5)
    assert run.rate(1) == 2 / 3.5 and run.rate(2) == 1 / 1.5
    assert run.waiting(1) == 0.75 / 3.5
    assert mean_concurrency(run.replies, run.window(1)) == (1 + 2.5) / 3.5
    with pytest.raises(ValueError, match="more than 3"):
        run.rate(3)


def test_merges_overlapping_spans():
    assert merge_spans([(4, 5), (0, 2), (1, 3), (5, 6)]) == [(0, 3), (4, 6)]
    assert concurrency([(4, 5), (0, 2), (1, 3)], np.array([0.5, 1.5, 3.5, 4.5])) == [1, 2, 0, 1]


def test_trainer_is_idle_between_training_and_pushing():
    updates = [Update(4 * i, 4 * i + 2, 4 * i + 3, 4 * i + 4) for i in range(4)]
    arm = WorkloadArm(
        ONE, [run := SystemRun(updates=updates, replies=[], answers=[], ages=[], met=[])]
    )
    assert arm.idle(run) == 1 - 1.5 / 4


def make_arms(rate_of_waiting, rate_of_learning):
    """Returns arms with these numbers of updates a second."""
    arms_of = {}
    for workload in (asynchronous.SHORT, asynchronous.LONG):
        arms_of[workload.name] = workload_arms = arms(workload)
        for name, arm in workload_arms.items():
            rate = rate_of_waiting if name == WAITS else rate_of_learning[workload.name]
            span = 1 / rate
            updates = [Update(i * span, i * span, i * span, (i + 1) * span) for i in range(20)]
            replies = [(0.0, 1.0)]
            run = SystemRun(
                updates=updates, replies=replies, answers=replies, ages=[[0]] * 20, met=[[1.0]] * 20
            )
            arm.runs.append(run)
            arm.ideals.append(ideal(arm.workload, 20))
    return arms_of


def test_verdict_reports_missed_target():
    work = asynchronous.SHORT
    busy = 1 / (work.update_s + work.push_s)
    fast = dict.fromkeys(("short tails", "long tails"), 0.96 * busy)
    waits = ideal(work.synchronous(), 20).rate(1)
    parts = asynchronous.verdict(make_arms(waits, fast)).split("long tails")
    assert "missed" not in parts[0] and parts[0].count("met") == 4
    # Compared with waiting, short tails save less than long ones.
    assert parts[1].count("missed") == 2
    slow = asynchronous.verdict(make_arms(waits, dict.fromkeys(fast, 0.85 * busy)))
    assert slow.split("long tails")[0].count("missed") == 2


@pytest.mark.parametrize(
    "flag", ["--updates=9", "--waiting=1", "--repetitions=0", "--scale=0", "--scale=-1"]
)
def test_rejects_invalid_options(flag, capsys):
    assert asynchronous.main([flag]) == 2
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"turns": 0}, {"sigma": -1}, {"tokens": (2, 8)}, {"tokens": (9, 8)}, {"slots": 0}]
)
def test_rejects_invalid_workload(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Workload(name="wrong", **wrong)


def test_draws_rollouts_of_workload():
    work = Workload(
        name="drawn", turns=4, median_answer_s=0.5, sigma=1.0, max_answer_s=3.0, tokens=(5, 9)
    )
    turns = list(itertools.chain.from_iterable(map(work.rollout, range(2000))))
    seconds, tokens = np.array(turns).T
    assert np.median(seconds) == pytest.approx(0.5, rel=0.05)
    assert np.std(np.log(seconds[seconds < 3])) == pytest.approx(0.95, abs=0.1)
    assert seconds.max() == 3.0 and set(tokens) == {5, 6, 7, 8, 9}
    assert work.rollout(7) == work.rollout(7) != work.rollout(8)
    assert work.scaled(0.1).rollout(7)[0].answer_s == pytest.approx(
        work.rollout(7)[0].answer_s / 10
    )
    assert work.scaled(0.1).speed == 10 * work.speed


# -- the real system ------------------------------------------------------------------------------------------

TINY = Workload(
    name="tiny",
    group=2,
    batch_groups=2,
    max_staleness=1,
    turns=2,
    median_answer_s=0.05,
    sigma=0.5,
    engines=2,
    slots=1,
    tokens=(4, 8),
    speed=80.0,
    update_s=0.2,
    push_s=0.05,
)
SEED, UPDATES = 3, 5


@pytest.mark.slow
@pytest.mark.parametrize("name", [WAITS, LEARNS])
def test_real_run_matches_workload(name, tmp_path):
    work = arms(TINY)[name].workload
    run = measure(work, UPDATES, SEED, tmp_path / "run")
    assert len(run.updates) == UPDATES
    for update, after in zip(run.updates, [*run.updates[1:], None]):
        assert update.requested <= update.received
        assert (
            update.updated - update.received >= work.update_s
            and update.pushed - update.updated >= work.push_s
        )
        assert after is None or update.pushed <= after.requested
    # A rollout of a place gets the same workload in any run.
    met = {
        (order, place): draw_turns(work, order, place) for order in range(40) for place in range(2)
    }
    known = {sum(turn.answer_s for turn in turns): key for key, turns in met.items()}
    trained_on = [[known[seconds] for seconds in batch] for batch in run.met]
    if name == WAITS:
        assert trained_on == [
            [(order, place) for order in (2 * i, 2 * i + 1) for place in (0, 1)]
            for i in range(UPDATES)
        ]
        assert run.met == ideal(work, UPDATES, SEED).met
        assert all(
            not (b > update.received and a < update.pushed)
            for a, b in run.replies
            for update in run.updates
        )
    else:
        assert any(
            b > update.received and a < update.pushed
            for a, b in run.replies
            for update in run.updates
        )
        assert len({*itertools.chain(*trained_on)}) == UPDATES * 4
    ages = list(itertools.chain(*run.ages))
    assert len(ages) == UPDATES * 4 and max(ages) == work.max_staleness
    assert run.dropped == run.padded == 0
    # Every turn that was trained on had an answer and a reply, which took their time.
    assert len(run.answers) >= len(run.replies) >= UPDATES * 4 * work.turns
    shortest = min(turn.answer_s for turns in met.values() for turn in turns)
    assert min(b - a for a, b in run.answers) >= 0.99 * shortest
    assert min(b - a for a, b in run.replies) >= 0.99 * work.tokens[0] / work.speed
    begins = [a for a, _ in run.replies]
    assert max(concurrency(run.replies, np.array(begins) + 1e-4)) <= work.engines * work.slots
    programs = {"orchestrator", "gateway", "engine-0", "engine-1", "search", "terminal", "trainer"}
    assert run.cores.keys() == programs and 0 < sum(run.cores.values()) < 7


def draw_turns(workload, order, place):
    return workload.rollout(derive_seed(SEED, order, 0, place))


@pytest.mark.slow
def test_reports_program_that_cannot_start(tmp_path):
    work = dataclasses.replace(TINY)
    object.__setattr__(work, "sigma", -1)
    with pytest.raises(RuntimeError, match="(?s)engine-0 has ended with 1.*sigma is -1"):
        measure(work, UPDATES, SEED, tmp_path / "run")
