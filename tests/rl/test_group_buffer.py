"""Batches of the buffer, and the rules of admission and repair; test_group_buffer_simulated.py tests them in virtual
time."""

import dataclasses
import itertools

import pytest

from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer
from glm5_jax.rl.orchestrator.group_repair import (
    FAILED,
    ROLLED_BACK,
    STALE,
    exclusion_reason,
    repair_group,
)
from glm5_jax.rl.orchestrator.staleness import must_wait
from tests.rl.simulated import group, rollout


def make_buffer(group=2, batch_groups=2, max_staleness=1, **options):
    """Returns a buffer with small limits."""
    return GroupBuffer(
        BufferConfig(group=group, batch_groups=batch_groups, max_staleness=max_staleness, **options)
    )


def fill(buffer, first_number=0):
    """Admits as many groups as possible."""
    return [buffer.admit("t", first_number + i) for i in range(buffer.num_admissible())]


def finish_group(buffer, ticket, version=0, rewards=None):
    """Puts a finished group whose tokens all have one version."""
    size = buffer.config.group
    return buffer.put(ticket.group_id, group(ticket, [[version]] * size, rewards))


def numbers(batch):
    """Returns the task numbers of a batch."""
    return [batch_group.number for batch_group in batch]


# Rules.


@pytest.mark.parametrize("size", range(1, 9))
def test_pads_or_drops_group_by_number_of_valid_members(size):
    for count in range(size + 1):
        valid = [size - count + i for i in range(count)]
        indices = repair_group(valid, size)
        if count <= size // 2:
            assert indices is None
        else:
            repeated = itertools.cycle(valid)
            assert list(indices) == [next(repeated) for _ in range(size)]


def test_reasons_of_excluded_members():
    assert exclusion_reason(None, 0) == FAILED
    assert exclusion_reason((6, 9), 6) is None and exclusion_reason((5, 9), 6) == STALE
    assert exclusion_reason((6, 9), 6, 9) is None and exclusion_reason((6, 9), 6, 8) == ROLLED_BACK
    # (10, 12] was rolled back: this also excludes versions between the oldest and the newest.
    assert exclusion_reason((10, 13), 6, 13, [(10, 12)]) is None
    assert exclusion_reason((9, 11, 13), 6, 13, [(10, 12)]) == ROLLED_BACK
    assert exclusion_reason((9, 12), 6, 13, [(2, 3), (10, 12)]) == ROLLED_BACK


def test_repairs_and_drops_groups_of_example():
    buffer = make_buffer(8, 1, 4)
    buffer.begin(10, 6)
    a = buffer.admit("t", 0)
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, None, 1.0]
    buffer.put(a.group_id, group(a, [[v, 10] for v in (9, 9, 8, 8, 7, 6, 6, 5)], rewards))
    [batch_group] = buffer.take(10)
    indices = [member.rollout_id.partition(".")[2] for member in batch_group.members]
    assert indices == ["0", "1", "2", "3", "4", "5", "0", "1"]
    assert batch_group.baseline == (1.0, 0.0, 1.0, 0.0, 0.0, 1.0)
    assert (batch_group.group_id, batch_group.task, batch_group.number, batch_group.order) == (
        a.group_id,
        "t",
        0,
        0,
    )
    assert batch_group.staleness == 4
    buffer.mark_trained(10)
    buffer.push(11)
    b = buffer.admit("t", 1)
    assert not buffer.put(b.group_id, group(b, [[9]] * 8, [1.0] * 4 + [None] * 4))
    assert buffer.pop_resamples() == [("t", 1)] and buffer.take(11) is None


def test_waits_if_rest_would_not_fit_into_later_batches():
    config = BufferConfig(group=1, batch_groups=2, max_staleness=3)
    queue = [(0, i) for i in range(8)]
    # Eight groups are due by step 3, and batches 0 to 3 take exactly eight: none may be overtaken.
    assert must_wait(config, 0, last=(1, 9), rest=[], running=queue)
    assert must_wait(config, 0, last=(1, 9), rest=queue[2:4], running=[queue[0], *queue[4:]])
    assert not must_wait(config, 0, last=queue[1], rest=queue[2:4], running=queue[4:])
    # Six groups leave room for one of another version.
    assert not must_wait(config, 0, last=(1, 9), rest=[], running=queue[:6])
    # A group that is too old for this batch delays nothing, and neither does one after all of the batch.
    assert must_wait(config, 3, last=(1, 9), rest=[], running=queue[:1])
    assert not must_wait(config, 4, last=(2, 9), rest=[], running=queue)
    assert not must_wait(config, 3, last=(0, 0), rest=queue[1:5], running=queue[5:])
    without_pacing = dataclasses.replace(config, pacing=False)
    assert not must_wait(without_pacing, 0, last=(1, 9), rest=[], running=queue)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 0}, "group is 0"),
        ({"batch_groups": 0}, "batch_groups is 0"),
        ({"max_running": 0}, "max_running is 0"),
        ({"max_tries": 0}, "max_tries is 0"),
        ({"max_staleness": -1}, "max_staleness is -1; 0 is the synchronous"),
    ],
)
def test_rejects_config_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        BufferConfig(**change)


# Admission.


def test_admits_groups_that_trainer_can_take_in_time():
    buffer = make_buffer(2, 2, 1)
    assert buffer.num_admissible() == 4  # (max_staleness + version - step + 1) * batch_groups
    groups = fill(buffer)
    assert buffer.num_admissible() == 0 and buffer.running == 4
    with pytest.raises(ValueError, match="0 groups wait and 4 run.*call num_admissible"):
        buffer.admit("t", 9)
    for ticket in groups[:2]:
        finish_group(buffer, ticket)
    assert buffer.num_admissible() == 0 and (buffer.waiting, buffer.running) == (2, 2)
    buffer.take(0)
    assert (
        buffer.num_admissible() == 0 and buffer.waiting == 2
    )  # they count until they are trained on
    buffer.mark_trained(0)
    assert buffer.num_admissible() == 0  # (1 + 0 - 1 + 1) * 2, and two are running
    buffer.push(1)
    assert buffer.num_admissible() == 2
    buffer.cancel(groups[2].group_id)
    assert buffer.num_admissible() == 3


def test_max_running_limits_admission():
    buffer = make_buffer(2, 4, 3, max_running=3)
    groups = fill(buffer)
    assert len(groups) == 3
    finish_group(buffer, groups[0])
    assert buffer.num_admissible() == 1


def test_zero_staleness_alternates_sampling_and_training():
    buffer = make_buffer(2, 3, 0)
    for step in range(4):
        groups = fill(buffer, 3 * step)
        assert len(groups) == 3
        for ticket in reversed(groups):
            assert buffer.take(step) is None
            finish_group(buffer, ticket, step)
        assert numbers(buffer.take(step)) == [3 * step + i for i in range(3)]
        assert buffer.num_admissible() == 0
        buffer.mark_trained(step)
        assert buffer.num_admissible() == 0
        buffer.push(step + 1)


def test_zero_staleness_batches_do_not_depend_on_finish_order():
    outcomes = set()
    for order in itertools.permutations(range(4)):
        buffer, batches = make_buffer(2, 4, 0), []
        for step in range(2):
            tickets = fill(buffer, 4 * step)
            pending = [tickets[i] for i in order]
            while pending:
                ticket = pending.pop(0)
                assert ticket.tries < 3
                # The first group of number 1 fails, and the first two of number 6.
                has_failed = ticket.tries < {1: 1, 6: 2}.get(ticket.number, 0)
                finish_group(buffer, ticket, step, [None, None] if has_failed else None)
                pending += [buffer.admit(task, number) for task, number in buffer.pop_resamples()]
            batch = buffer.take(step)
            batches.append(tuple((g.order, g.number, g.group_id) for g in batch))
            buffer.mark_trained(step)
            buffer.push(step + 1)
        outcomes.add(tuple(batches))
    [(first, second)] = outcomes
    assert [number for _, number, _ in first] == [0, 1, 2, 3]
    assert [number for _, number, _ in second] == [4, 5, 6, 7]


# Finished groups.


def test_puts_group_once():
    buffer = make_buffer()
    a, b, *_ = fill(buffer)
    assert finish_group(buffer, a) and finish_group(buffer, a, rewards=[0.0, 0.0])
    finish_group(buffer, b)
    assert (buffer.waiting, buffer.running) == (2, 2)
    [first, _] = buffer.take(0)
    assert first.baseline == (1.0, 1.0)
    assert finish_group(buffer, a)
    buffer.mark_trained(0)
    assert not finish_group(buffer, a) and not buffer.put("nobody", [])
    assert buffer.metrics()["groups/unknown"] == 2 and buffer.waiting == 0


def test_rejects_invalid_group_and_accepts_it_later():
    buffer = make_buffer()
    a, b, *_ = fill(buffer)
    members = group(a, [[0], [0]])
    with pytest.raises(ValueError, match="has 1 trajectories; it must have 2"):
        buffer.put(a.group_id, members[:1])
    with pytest.raises(ValueError, match=f"group {a.group_id} has trajectories of {b.group_id}"):
        buffer.put(a.group_id, [members[0], rollout(b, 1, [0])])
    with pytest.raises(ValueError, match="a rollout twice"):
        buffer.put(a.group_id, members[:1] * 2)
    assert finish_group(buffer, a) and buffer.running == 3


def test_accepts_samples_of_unreported_version():
    """Engines may have a version before its push is reported, and before the batch is reported as trained on."""
    buffer = make_buffer(1, 1, 2)
    a, b, _ = fill(buffer)
    finish_group(buffer, a)
    buffer.take(0)
    assert finish_group(buffer, b, version=1)
    buffer.push(1)
    buffer.mark_trained(0)
    [batch_group] = buffer.take(1)
    assert batch_group.number == 1 and batch_group.staleness == 0


# Lost records.


def test_repairs_group_in_batch_whose_records_are_lost():
    buffer = make_buffer(group=3, batch_groups=1, max_staleness=1)
    a, *_ = fill(buffer)
    finish_group(buffer, a, rewards=[1.0, 0.0, 0.5])
    [before] = buffer.take(0)
    lost = before.members[1].rollout_id
    buffer.mark_lost([lost, "nobody's"])
    [after] = buffer.take(0)
    first, _, third = before.members
    assert after.members == (first, third, first) and after.baseline == (1.0, 0.5)
    assert after.group_id == before.group_id
    buffer.mark_lost([lost])
    assert buffer.metrics()["members/lost"] == 1 and buffer.accepted == {"t": 2}
    buffer.mark_trained(0)
    assert buffer.waiting == 0


def test_replaces_group_in_batch_that_lost_most_records():
    buffer = make_buffer(group=2, batch_groups=2, max_staleness=1)
    a, b, c, d = fill(buffer)
    for ticket in (a, b):
        finish_group(buffer, ticket)
    batch = buffer.take(0)
    assert numbers(batch) == [0, 1] and buffer.has_group(a.group_id)
    buffer.mark_lost([member.rollout_id for member in batch[0].members])
    assert not buffer.has_group(a.group_id) and buffer.has_group(c.group_id)
    assert buffer.pop_resamples() == [("t", 0)] and buffer.take(0) is None
    replacement = buffer.admit("t", 0)
    assert (replacement.order, replacement.tries) == (0, 1)
    finish_group(buffer, replacement)
    assert [g.group_id for g in buffer.take(0)] == [replacement.group_id, b.group_id]
    assert buffer.metrics()["groups/failed"] == 1


def test_lost_records_of_later_batch_keep_earlier_one():
    buffer = make_buffer(group=2, batch_groups=1, max_staleness=1)
    a, b = fill(buffer)
    for ticket in (a, b):
        finish_group(buffer, ticket)
    first, [second] = buffer.take(0), buffer.take(1)
    buffer.mark_lost([member.rollout_id for member in second.members])
    assert buffer.take(0) == first and buffer.take(1) is None
    buffer.mark_trained(0)
    assert buffer.step == 1 and buffer.pop_resamples() == [("t", 1)]


# Dropped groups.


def test_resamples_number_of_dropped_group_in_its_place():
    buffer = make_buffer(2, 2, 1)
    a, b, c, d = fill(buffer)
    for ticket in (c, a):
        finish_group(buffer, ticket, rewards=[None, 1.0])
    assert buffer.pop_resamples() == [("t", 0), ("t", 2)] and buffer.pop_resamples() == []
    assert buffer.num_admissible() == 2
    replacement = buffer.admit("t", 2)
    assert (replacement.order, replacement.tries) == (2, 1) and replacement.group_id != c.group_id
    new = buffer.admit("t", 4)
    assert (new.order, new.tries) == (4, 0)
    assert not finish_group(buffer, c)  # the dropped group is not expected any more
    finish_group(buffer, new)
    finish_group(buffer, replacement)
    finish_group(buffer, b)
    assert numbers(buffer.take(0)) == [1, 2]
    assert buffer.num_started == {"t": 5}
    assert buffer.metrics()["groups/failed"] == 2 and buffer.metrics()["members/failed"] == 2


def test_gives_up_number_whose_environment_always_fails():
    buffer = make_buffer(2, 1, 0, max_tries=3)
    queue = [("t", 0)]
    for tries in range(3):
        ticket = buffer.admit(*queue.pop())
        assert ticket.tries == tries
        finish_group(buffer, ticket, rewards=[None, None])
        queue += buffer.pop_resamples()
    assert not queue and buffer.metrics()["groups/given_up"] == 1
    finish_group(buffer, buffer.admit("t", 1))
    assert numbers(buffer.take(0)) == [1]


def test_cancelled_group_frees_its_slot():
    buffer = make_buffer(2, 2, 0)
    a, b = fill(buffer)
    buffer.cancel(a.group_id)
    buffer.cancel(a.group_id)
    assert buffer.num_admissible() == 1 and buffer.pop_resamples() == [("t", 0)]
    buffer.cancel(b.group_id, should_resample=False)
    assert buffer.num_admissible() == 2 and buffer.pop_resamples() == []
    assert buffer.metrics()["groups/cancelled"] == 2
    finish_group(buffer, a)
    assert buffer.waiting == 0


def test_repairs_stale_members():
    buffer = make_buffer(3, 1, 1, pacing=False)
    buffer.begin(2, 1)
    a = buffer.admit("t", 0)
    buffer.put(a.group_id, group(a, [[0, 1], [1], [1]], [0.5, 1.0, 0.0]))
    [batch_group] = buffer.take(2)
    assert batch_group.baseline == (1.0, 0.0)
    assert [member.reward.value for member in batch_group.members] == [1.0, 0.0, 1.0]
    assert buffer.metrics()["members/stale"] == 1


def test_drops_waiting_group_that_becomes_stale():
    buffer = make_buffer(1, 1, 1, pacing=False)
    buffer.begin(1, 1)
    a, b = fill(buffer)
    finish_group(buffer, b, version=1)
    buffer.take(1)
    finish_group(buffer, a, version=0)
    assert buffer.waiting == 2
    buffer.mark_trained(1)
    assert buffer.take(2) is None
    assert buffer.waiting == 0 and buffer.pop_resamples() == [("t", 0)]
    assert buffer.metrics()["groups/stale"] == buffer.metrics()["members/stale"] == 1


# Batches.


def buffer_with_slow_group(pacing=True):
    """Returns (buffer at step 1, ticket of a slow group); the slow group is due, and two others have finished."""
    buffer = make_buffer(1, 1, 1, pacing=pacing)
    slow, fast = fill(buffer)
    finish_group(buffer, fast)
    assert numbers(buffer.take(0)) == [1]
    buffer.mark_trained(0)
    buffer.push(1)
    finish_group(buffer, buffer.admit("t", 2), version=1)
    return buffer, slow


def test_waits_for_slow_group_that_is_due():
    buffer, slow = buffer_with_slow_group()
    assert buffer.take(1) is None
    finish_group(buffer, slow)
    assert numbers(buffer.take(1)) == [0]
    buffer, slow = buffer_with_slow_group(pacing=False)
    assert numbers(buffer.take(1)) == [2]


def test_does_not_wait_for_slow_group_with_time_left():
    buffer = make_buffer(1, 1, 2)
    slow, fast = buffer.admit("t", 0), buffer.admit("t", 1)
    finish_group(buffer, fast)
    assert numbers(buffer.take(0)) == [1]
    buffer.mark_trained(0)
    buffer.push(1)
    faster, new = buffer.admit("t", 2), buffer.admit("t", 3)
    finish_group(buffer, new, version=1)
    assert numbers(buffer.take(1)) == [3]
    buffer.mark_trained(1)
    finish_group(buffer, faster, version=1)
    assert buffer.take(2) is None  # now it is due
    finish_group(buffer, slow)
    assert numbers(buffer.take(2)) == [0]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_releases_batch_after_slow_group_is_dropped(end):
    buffer, slow = buffer_with_slow_group()
    assert buffer.take(1) is None
    if end == "failed":
        finish_group(buffer, slow, rewards=[None])
    else:
        buffer.cancel(slow.group_id)
    assert numbers(buffer.take(1)) == [2]


def test_batch_is_always_complete():
    buffer = make_buffer(1, 3, 1)
    groups = fill(buffer)
    for ticket in groups[:2]:
        finish_group(buffer, ticket)
    assert buffer.take(0) is None
    finish_group(buffer, groups[2])
    assert len(buffer.take(0)) == 3


def test_repeated_take_returns_same_batch():
    buffer = make_buffer(1, 2, 2)
    groups = fill(buffer)
    for ticket in groups:
        finish_group(buffer, ticket)
    first = buffer.take(0)
    assert buffer.take(0) == first
    second = buffer.take(1)
    assert numbers(first + second) == [0, 1, 2, 3]
    assert buffer.take(1) == second and buffer.take(0) == first
    assert buffer.metrics()["groups/taken"] == 4
    buffer.mark_trained(0)
    buffer.mark_trained(0)
    assert buffer.step == 1 and buffer.take(1) == second and buffer.waiting == 4


def test_rejects_steps_out_of_order():
    buffer = make_buffer(1, 1, 1)
    finish_group(buffer, fill(buffer)[0])
    with pytest.raises(ValueError, match="no batch of step 3: the next is of step 0.*begin"):
        buffer.take(3)
    with pytest.raises(ValueError, match="batch of step 0 cannot be trained on"):
        buffer.mark_trained(0)
    buffer.take(0)
    with pytest.raises(
        ValueError, match=r"step 1 cannot be trained on: 0 updates.*\[0\] are taken"
    ):
        buffer.mark_trained(1)
    with pytest.raises(ValueError, match="version is 2; .*up to 1"):
        buffer.push(2)
    buffer.push(1)
    with pytest.raises(ValueError, match="version is 0; after version 1"):
        buffer.push(0)
    with pytest.raises(ValueError, match="version is 1 at step 0; push"):
        buffer.begin(0, 1)


# A trainer that resumes from a checkpoint.


def buffer_at(step, **options):
    """Returns a buffer after `step` updates, each with a push, without any outstanding group."""
    buffer = make_buffer(**options)
    for version in range(step):
        for ticket in [
            buffer.admit("old", version * 10 + i) for i in range(buffer.config.batch_groups)
        ]:
            finish_group(buffer, ticket, version=version)
        buffer.take(version)
        buffer.mark_trained(version)
        buffer.push(version + 1)
    return buffer


def test_begin_returns_untrained_batch():
    buffer = buffer_at(3, group=1, batch_groups=1, max_staleness=2)
    ticket = fill(buffer)[0]
    finish_group(buffer, ticket, version=3)
    first = buffer.take(3)
    buffer.begin(3, 3)
    assert buffer.waiting == 1 and buffer.num_admissible() == 0 and buffer.running == 2
    assert buffer.take(3) == first


def test_begin_counts_unreported_batch_as_trained():
    buffer = buffer_at(3, group=1, batch_groups=1, max_staleness=2)
    a, b, _ = fill(buffer)
    finish_group(buffer, a, version=3)
    finish_group(buffer, b, version=3)
    [first] = buffer.take(3)
    buffer.begin(4, 3)  # its checkpoint has the update
    assert (buffer.step, buffer.waiting) == (4, 1)
    assert buffer.accepted == {"old": 3, "t": 2}
    [second] = buffer.take(4)
    assert {first.number, second.number} == {0, 1}


def test_begin_drops_samples_of_newer_weights():
    buffer = buffer_at(5, group=2, batch_groups=1, max_staleness=4, max_tries=1)
    waiting, dropped, _, in_flight, dropped_in_flight = fill(buffer)
    buffer.put(waiting.group_id, group(waiting, [[2, 3], [3]]))
    finish_group(buffer, dropped, version=5)
    buffer.begin(3, 3)
    assert buffer.pop_resamples() == [("t", 1)]
    assert (buffer.waiting, buffer.running) == (1, 3)
    assert buffer.num_admissible() == (4 + 3 - 3 + 1) - 4
    assert finish_group(buffer, in_flight, version=3)
    assert not finish_group(buffer, dropped_in_flight, version=4)
    assert (
        buffer.metrics()["groups/rolled_back"] == 2 and buffer.metrics()["members/rolled_back"] == 4
    )
    assert {buffer.take(3)[0].number, buffer.take(4)[0].number} == {0, 3}


def test_repairs_group_after_partial_rollback():
    buffer = buffer_at(2, group=3, batch_groups=2, max_staleness=2)
    waiting, in_flight, *_ = fill(buffer)
    buffer.put(waiting.group_id, group(waiting, [[1], [1, 2], [0]], [0.0, 1.0, 0.5]))
    buffer.begin(1, 1)
    buffer.put(in_flight.group_id, group(in_flight, [[2], [1], [0, 1]], [1.0, 0.0, 0.5]))
    batch = buffer.take(1)
    assert [batch_group.baseline for batch_group in batch] == [(0.0, 0.5), (0.0, 0.5)]


def test_rolled_back_version_stays_invalid():
    buffer = buffer_at(3, group=3, batch_groups=1, max_staleness=4)
    waiting, in_flight, *others = fill(buffer)
    buffer.put(waiting.group_id, group(waiting, [[3], [1], [1]], [9.0, 1.0, 0.0]))
    buffer.begin(1, 1)
    assert buffer.take(1)[0].baseline == (1.0, 0.0)
    # After other updates there is a new version 3 with other weights.
    for step in (1, 2, 3):
        assert buffer.take(step) is not None
        buffer.mark_trained(step)
        buffer.push(step + 1)
        finish_group(buffer, others.pop(), version=1)
    buffer.put(in_flight.group_id, group(in_flight, [[1, 3], [1, 4], [4]], [9.0, 1.0, 0.0]))
    [batch_group] = buffer.take(4)
    assert batch_group.number == 1 and batch_group.baseline == (1.0, 0.0)


def test_begin_drops_samples_of_unreported_version():
    """The trainer pushed the weights to the engines, and died before it reported the push."""
    buffer = buffer_at(3, group=3, batch_groups=1, max_staleness=2)
    a, waiting, in_flight = fill(buffer)
    finish_group(buffer, a, version=3)
    buffer.take(3)
    buffer.put(waiting.group_id, group(waiting, [[4], [3], [3]], [9.0, 1.0, 0.0]))
    buffer.begin(3, 3)
    buffer.put(in_flight.group_id, group(in_flight, [[4], [3], [3]], [9.0, 1.0, 0.5]))
    buffer.take(3)
    buffer.mark_trained(3)
    buffer.push(4)
    assert [buffer.take(step)[0].baseline for step in (4, 5)] == [(1.0, 0.0), (1.0, 0.5)]


def test_new_groups_may_have_rolled_back_version_numbers():
    buffer = buffer_at(3, group=1, batch_groups=1, max_staleness=1)
    buffer.begin(1, 1)
    for step in (1, 2, 3):
        for ticket in fill(buffer, 2 * step):
            assert finish_group(buffer, ticket, version=step)
        assert buffer.take(step)[0].staleness <= 1
        buffer.mark_trained(step)
        buffer.push(step + 1)
    assert buffer.metrics()["groups/rolled_back"] == 0


def test_running_group_is_due_by_version_after_rollback():
    buffer = buffer_at(3, group=1, batch_groups=1, max_staleness=1)
    slow, fast = fill(buffer)
    buffer.begin(2, 2)
    finish_group(buffer, fast, version=2)
    assert numbers(buffer.take(2)) == [1]
    buffer.mark_trained(2)
    buffer.push(3)
    finish_group(buffer, buffer.admit("t", 2), version=3)
    assert buffer.take(3) is None
    finish_group(buffer, slow, version=2)
    assert numbers(buffer.take(3)) == [0]


def test_begin_restores_number_of_admissible_groups():
    """AReaL #1388: the version was restored but not the count of accepted rollouts, and staleness was unbounded."""
    buffer = buffer_at(6, group=1, batch_groups=4, max_staleness=2)
    groups = fill(buffer)
    for ticket in groups[:5]:
        finish_group(buffer, ticket, version=6)
    buffer.take(6)
    buffer.begin(6, 6)
    assert buffer.num_admissible() == 3 * 4 - 12
    buffer.begin(4, 4)  # samples of version 6 are dropped
    assert (buffer.waiting, buffer.running, buffer.num_admissible()) == (0, 7, 5)
    buffer.begin(4, 2)  # the engines still have older weights
    assert buffer.num_admissible() == 0


# Metrics.


def test_counts_trainable_trajectories_as_accepted():
    buffer = make_buffer(3, 1, 2)
    a, b, _ = buffer.admit("a", 0), buffer.admit("b", 0), buffer.admit("b", 1)
    finish_group(buffer, a)
    finish_group(buffer, b, rewards=[1.0, None, 0.0])
    assert buffer.accepted == {"a": 3, "b": 2}
    for step in range(2):
        buffer.take(step)
        buffer.mark_trained(step)
    assert buffer.accepted == {"a": 3, "b": 2} and buffer.waiting == 0


def test_metrics_count_taken_and_excluded_members():
    buffer = make_buffer(4, 2, 2)
    buffer.begin(2, 2)
    a, b, c, *_ = fill(buffer)
    buffer.put(a.group_id, group(a, [[0], [1, 2], [2], [2]]))
    buffer.put(b.group_id, group(b, [[2], [1], [2], [0]], [None, 1.0, 0.0, 0.0]))
    finish_group(buffer, c, version=2, rewards=[None] * 3 + [1.0])
    buffer.take(2)
    metrics = buffer.metrics()
    assert metrics["groups/taken"] == 2 and metrics["groups/repaired"] == 1
    assert metrics["groups/failed"] == 1 and metrics["members/failed"] == 4
    assert metrics["members/taken"] == 7 and metrics["members/padded"] == 1
    assert metrics["padded_share"] == 1 / 8
    assert metrics["staleness/histogram"] == {0: 3, 1: 2, 2: 2}
    assert metrics["staleness/mean"] == 6 / 7 and metrics["staleness/max"] == 2
