"""Guarantees of the buffer in virtual time, with heavy-tailed delays and crashes, over hundreds of groups."""

import gc
import tracemalloc

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer
from tests.rl.simulated import Simulation, group, pace_of


def check_each_group_is_trained_once(run):
    """Checks that no group is lost, and none is trained on twice."""
    run.buffer.mark_trained(run.step - 1)  # the report of the last step may still be on its way
    trained = [group for _, batch in run.batches for group in batch]
    assert len({group.group_id for group in trained}) == len(trained)
    assert len({group.number for group in trained}) == len(trained)
    num_given_up = run.buffer.metrics()["groups/given_up"]
    num_outstanding = run.buffer.waiting + run.buffer.running + run.num_to_resample() + num_given_up
    assert run.buffer.num_started == {"t": len(trained) + num_outstanding}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    group=st.integers(1, 5),
    batch=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    push_every=st.integers(1, 3),
    max_running=st.integers(1, 40),
    pacing=st.booleans(),
    fail=st.sampled_from([0.0, 0.1, 0.4]),
    cancel=st.sampled_from([0.0, 0.1]),
)
def test_batches_are_complete_and_fresh_under_any_delays(
    seed, group, batch, max_staleness, push_every, max_running, pacing, fail, cancel
):
    staleness = max(max_staleness, push_every - 1)
    config = BufferConfig(
        group=group,
        batch_groups=batch,
        max_staleness=staleness,
        max_running=max_running,
        pacing=pacing,
        max_tries=1000,
    )
    run = Simulation(config, seed, push_every=push_every, fail=fail, cancel=cancel).run(20)
    assert [step for step, _ in run.batches] == list(range(20))
    check_each_group_is_trained_once(run)
    if pacing:
        assert run.buffer.metrics()["members/stale"] == 0


def seeds_of(seeds, count=1):
    """Returns parameters of seeds; all but the first `count` are slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= count)) for seed in range(seeds)]


@pytest.mark.parametrize("pacing", [True, False])
@pytest.mark.parametrize("seed", seeds_of(6))
def test_keeps_guarantees_when_programs_die_and_records_are_lost(tmp_path, seed, pacing):
    config = BufferConfig(
        group=3, batch_groups=4, max_staleness=2, max_running=30, pacing=pacing, max_tries=1000
    )
    failures = {"fail": 0.1, "cancel": 0.05, "crash": 0.2, "kill": 0.1, "lose": 0.1}
    run = Simulation(config, seed, tmp_path, **failures).run(40)
    assert len(run.rollbacks) >= 3 and run.lost
    check_each_group_is_trained_once(run)


def trained_shares(pacing, seed):
    """Trains 100 updates of 8 groups, and returns ([slow share, fast share], number of dropped groups).

    The shares are the parts that were trained on, of the slowest tenth and of the fastest half of the first 600 task
    numbers.
    """
    run = Simulation(
        BufferConfig(group=4, batch_groups=8, max_staleness=2, max_running=64, pacing=pacing), seed
    ).run(100)
    trained = {group.number for _, batch in run.batches for group in batch}
    by_pace = sorted(range(600), key=pace_of)
    slow, fast = by_pace[540:], by_pace[:300]
    shares = [len(trained & {*numbers}) / len(numbers) for numbers in (slow, fast)]
    return shares, len(run.dropped)


@pytest.mark.parametrize("seed", seeds_of(3))
def test_only_pacing_trains_on_all_slow_groups(seed):
    (slow, fast), dropped = trained_shares(False, seed)
    assert slow < 0.95 and fast == 1 and dropped > 100
    assert trained_shares(True, seed) == ([1, 1], 0)


def test_zero_staleness_trains_in_order_of_admission():
    run = Simulation(BufferConfig(group=2, batch_groups=4, max_staleness=0, max_running=64), 0).run(
        30
    )
    assert run.buffer.metrics()["staleness/histogram"] == {0: 30 * 4 * 2}
    assert all(
        [group.number for group in batch] == list(range(4 * step, 4 * step + 4))
        for step, batch in run.batches
    )


@pytest.mark.slow
def test_memory_does_not_grow_with_trained_groups():
    """Memory follows the outstanding groups: it is the same after 800 groups as after 200."""
    buffer = GroupBuffer(BufferConfig(group=1, batch_groups=8, max_staleness=2))
    tracemalloc.start()
    try:
        sizes = []
        for step in range(100):
            while buffer.num_admissible():
                ticket = buffer.admit("t", step)
                has_failed = ticket.order % 10 == 0 and ticket.tries == 0
                buffer.put(ticket.group_id, group(ticket, [[step]], [None if has_failed else 1.0]))
                if has_failed:
                    buffer.admit(*buffer.pop_resamples()[0])
                    buffer.cancel(f"{ticket.order}-1", should_resample=False)
            assert len(buffer.take(step)) == 8
            buffer.mark_trained(step)
            buffer.push(step + 1)
            if step in (24, 99):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 20_000
