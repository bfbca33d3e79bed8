"""The buffer's promises in virtual time, with heavy-tailed delays and everything that dies, over hundreds of groups."""

import gc
import tracemalloc

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer
from tests.rl.simulated import Simulation, group, pace_of


def check_nothing_is_lost_or_twice(run):
    run.buffer.mark_trained(run.step - 1)  # which may be under way
    trained = [own for _, batch in run.batches for own in batch]
    assert len({own.group_id for own in trained}) == len(trained)
    assert len({own.number for own in trained}) == len(trained)
    given_up = run.buffer.metrics()["groups/given_up"]
    there = run.buffer.waiting + run.buffer.running + run.owed() + given_up
    assert run.buffer.num_started == {"t": len(trained) + there}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    group=st.integers(1, 5),
    batch=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    every=st.integers(1, 3),
    max_running=st.integers(1, 40),
    pacing=st.booleans(),
    fail=st.sampled_from([0.0, 0.1, 0.4]),
    cancel=st.sampled_from([0.0, 0.1]),
)
def test_no_batch_is_too_old_and_all_come_whatever_the_delays(
    seed, group, batch, max_staleness, every, max_running, pacing, fail, cancel
):
    staleness = max(max_staleness, every - 1)
    config = BufferConfig(
        group=group,
        batch_groups=batch,
        max_staleness=staleness,
        max_running=max_running,
        pacing=pacing,
        max_tries=1000,
    )
    run = Simulation(config, seed, every=every, fail=fail, cancel=cancel).run(20)
    assert [step for step, _ in run.batches] == list(range(20))
    check_nothing_is_lost_or_twice(run)
    if pacing:
        assert run.buffer.metrics()["members/stale"] == 0


def few(seeds, count=1):
    """The seeds, all but the first few of which are slow."""
    return [pytest.param(i, marks=[pytest.mark.slow] * (i >= count)) for i in range(seeds)]


@pytest.mark.parametrize("pacing", [True, False])
@pytest.mark.parametrize("seed", few(6))
def test_keeps_promises_when_programs_die_and_records_are_lost(tmp_path, seed, pacing):
    config = BufferConfig(
        group=3, batch_groups=4, max_staleness=2, max_running=30, pacing=pacing, max_tries=1000
    )
    more = {"fail": 0.1, "cancel": 0.05, "crash": 0.2, "kill": 0.1, "lose": 0.1}
    run = Simulation(config, seed, tmp_path, **more).run(40)
    assert len(run.went_back) >= 3 and run.lost
    check_nothing_is_lost_or_twice(run)


def of_slow_and_fast(pacing, seed):
    """Of the slowest tenth of the first 600 task numbers and of the fastest half: the shares that 100 updates on 8 groups
    each had learnt from; and how many groups were dropped."""
    run = Simulation(
        BufferConfig(group=4, batch_groups=8, max_staleness=2, max_running=64, pacing=pacing), seed
    ).run(100)
    trained = {own.number for _, batch in run.batches for own in batch}
    by_pace = sorted(range(600), key=pace_of)
    slow, fast = by_pace[540:], by_pace[:300]
    return [len(trained & {*own}) / len(own) for own in (slow, fast)], len(run.dropped)


@pytest.mark.parametrize("seed", few(3))
def test_slow_groups_are_left_out_without_pacing_alone(seed):
    (slow, fast), dropped = of_slow_and_fast(False, seed)
    assert slow < 0.95 and fast == 1 and dropped > 100
    assert of_slow_and_fast(True, seed) == ([1, 1], 0)


def test_bound_0_is_the_synchronous_trainer():
    run = Simulation(BufferConfig(group=2, batch_groups=4, max_staleness=0, max_running=64), 0).run(
        30
    )
    assert run.buffer.metrics()["staleness/histogram"] == {0: 30 * 4 * 2}
    assert all(
        [own.number for own in batch] == list(range(4 * step, 4 * step + 4))
        for step, batch in run.batches
    )


@pytest.mark.slow
def test_what_was_trained_on_is_forgotten():
    """Memory is that of what is outstanding: the same after 800 groups as after 200."""
    buffer = GroupBuffer(BufferConfig(group=1, batch_groups=8, max_staleness=2))
    tracemalloc.start()
    try:
        sizes = []
        for step in range(100):
            while buffer.num_admissible():
                own = buffer.admit("t", step)
                failed = own.order % 10 == 0 and own.tries == 0
                buffer.put(own.group_id, group(own, [[step]], [None if failed else 1.0]))
                if failed:
                    buffer.admit(*buffer.pop_resamples()[0])
                    buffer.cancel(f"{own.order}-1", should_resample=False)
            assert len(buffer.take(step)) == 8
            buffer.mark_trained(step)
            buffer.push(step + 1)
            if step in (24, 99):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 20_000
