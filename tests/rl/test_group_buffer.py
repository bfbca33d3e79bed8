"""What the trainer gets from the buffer, and when; `test_group_buffer_simulated` has the same in virtual time."""

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


def made(group=2, batch_groups=2, max_staleness=1, **more):
    return GroupBuffer(
        BufferConfig(group=group, batch_groups=batch_groups, max_staleness=max_staleness, **more)
    )


def fill(buffer, first=0):
    """Admits as many as there is room for."""
    return [buffer.admit("t", first + i) for i in range(buffer.num_admissible())]


def come(buffer, admitted, version=0, rewards=None):
    """A group comes, all of it sampled by one version."""
    size = buffer.config.group
    return buffer.put(admitted.group_id, group(admitted, [[version]] * size, rewards))


def numbers(batch):
    return [own.number for own in batch]


# The rules by themselves.


@pytest.mark.parametrize("size", range(1, 9))
def test_a_group_is_kept_padded_or_dropped_by_how_many_are_left(size):
    for count in range(size + 1):
        valid = [size - count + i for i in range(count)]
        found = repair_group(valid, size)
        if count <= size // 2:
            assert found is None
        else:
            again = itertools.cycle(valid)
            assert list(found) == [next(again) for _ in range(size)]


def test_why_a_member_is_left_out():
    assert exclusion_reason(None, 0) == FAILED
    assert exclusion_reason((6, 9), 6) is None and exclusion_reason((5, 9), 6) == STALE
    assert exclusion_reason((6, 9), 6, 9) is None and exclusion_reason((6, 9), 6, 8) == ROLLED_BACK
    # (10, 12] was lost: between the oldest and the newest, too.
    assert exclusion_reason((10, 13), 6, 13, [(10, 12)]) is None
    assert exclusion_reason((9, 11, 13), 6, 13, [(10, 12)]) == ROLLED_BACK
    assert exclusion_reason((9, 12), 6, 13, [(2, 3), (10, 12)]) == ROLLED_BACK


def test_the_worked_example():
    buffer = made(8, 1, 4)
    buffer.begin(10, 6)
    a = buffer.admit("t", 0)
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, None, 1.0]
    buffer.put(a.group_id, group(a, [[v, 10] for v in (9, 9, 8, 8, 7, 6, 6, 5)], rewards))
    [found] = buffer.take(10)
    own = [one.rollout_id.partition(".")[2] for one in found.members]
    assert own == ["0", "1", "2", "3", "4", "5", "0", "1"]
    assert found.baseline == (1.0, 0.0, 1.0, 0.0, 0.0, 1.0)
    assert (found.group_id, found.task, found.number, found.order) == (a.group_id, "t", 0, 0)
    assert found.staleness == 4
    buffer.mark_trained(10)
    buffer.push(11)
    b = buffer.admit("t", 1)
    assert not buffer.put(b.group_id, group(b, [[9]] * 8, [1.0] * 4 + [None] * 4))
    assert buffer.pop_resamples() == [("t", 1)] and buffer.take(11) is None


def test_what_would_be_left_behind_must_fit_into_later_batches():
    config = BufferConfig(group=1, batch_groups=2, max_staleness=3)
    line = [(0, i) for i in range(8)]
    # Eight groups are due by step 3, as many as batches 0 to 3 can take: none may be overtaken.
    assert must_wait(config, 0, last=(1, 9), rest=[], running=line)
    assert must_wait(config, 0, last=(1, 9), rest=line[2:4], running=[line[0], *line[4:]])
    assert not must_wait(config, 0, last=line[1], rest=line[2:4], running=line[4:])
    # Six leave room for one of another version.
    assert not must_wait(config, 0, last=(1, 9), rest=[], running=line[:6])
    # Too old for this batch, one holds nothing up; nor does one that comes after all of it.
    assert must_wait(config, 3, last=(1, 9), rest=[], running=line[:1])
    assert not must_wait(config, 4, last=(2, 9), rest=[], running=line)
    assert not must_wait(config, 3, last=(0, 0), rest=line[1:5], running=line[5:])
    without = dataclasses.replace(config, pacing=False)
    assert not must_wait(without, 0, last=(1, 9), rest=[], running=line)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"group": 0}, "group is 0"),
        ({"batch_groups": 0}, "batch_groups is 0"),
        ({"max_running": 0}, "max_running is 0"),
        ({"max_tries": 0}, "max_tries is 0"),
        ({"max_staleness": -1}, "max_staleness is -1; 0 is the synchronous"),
    ],
)
def test_a_config_out_of_range_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        BufferConfig(**change)


# Admission.


def test_room_is_what_the_trainer_can_take_in_time():
    buffer = made(2, 2, 1)
    assert buffer.num_admissible() == 4  # (max_staleness + version - step + 1) * batch_groups
    groups = fill(buffer)
    assert buffer.num_admissible() == 0 and buffer.running == 4
    with pytest.raises(ValueError, match="0 groups wait and 4 run.*call num_admissible"):
        buffer.admit("t", 9)
    for own in groups[:2]:
        come(buffer, own)
    assert buffer.num_admissible() == 0 and (buffer.waiting, buffer.running) == (2, 2)
    buffer.take(0)
    assert buffer.num_admissible() == 0 and buffer.waiting == 2  # until they are trained on
    buffer.mark_trained(0)
    assert buffer.num_admissible() == 0  # (1 + 0 - 1 + 1) * 2, and two are under way
    buffer.push(1)
    assert buffer.num_admissible() == 2
    buffer.cancel(groups[2].group_id)
    assert buffer.num_admissible() == 3


def test_room_is_bound_by_what_runs():
    buffer = made(2, 4, 3, max_running=3)
    groups = fill(buffer)
    assert len(groups) == 3
    come(buffer, groups[0])
    assert buffer.num_admissible() == 1


def test_bound_0_alternates_strictly():
    buffer = made(2, 3, 0)
    for step in range(4):
        groups = fill(buffer, 3 * step)
        assert len(groups) == 3
        for own in reversed(groups):
            assert buffer.take(step) is None
            come(buffer, own, step)
        assert numbers(buffer.take(step)) == [3 * step + i for i in range(3)]
        assert buffer.num_admissible() == 0
        buffer.mark_trained(step)
        assert buffer.num_admissible() == 0
        buffer.push(step + 1)


def test_bound_0_has_the_same_batches_in_whatever_order_groups_come():
    seen = set()
    for order in itertools.permutations(range(4)):
        buffer, batches = made(2, 4, 0), []
        for step in range(2):
            admitted = fill(buffer, 4 * step)
            due = [admitted[i] for i in order]
            while due:
                own = due.pop(0)
                assert own.tries < 3
                # Of number 1 the first group fails, of number 6 the first two.
                failed = own.tries < {1: 1, 6: 2}.get(own.number, 0)
                come(buffer, own, step, [None, None] if failed else None)
                due += [buffer.admit(task, number) for task, number in buffer.pop_resamples()]
            batch = buffer.take(step)
            batches.append(tuple((own.order, own.number, own.group_id) for own in batch))
            buffer.mark_trained(step)
            buffer.push(step + 1)
        seen.add(tuple(batches))
    [(first, second)] = seen
    assert [number for _, number, _ in first] == [0, 1, 2, 3]
    assert [number for _, number, _ in second] == [4, 5, 6, 7]


# What comes.


def test_a_group_is_put_once():
    buffer = made()
    a, b, *_ = fill(buffer)
    assert come(buffer, a) and come(buffer, a, rewards=[0.0, 0.0])
    come(buffer, b)
    assert (buffer.waiting, buffer.running) == (2, 2)
    [first, _] = buffer.take(0)
    assert first.baseline == (1.0, 1.0)
    assert come(buffer, a)
    buffer.mark_trained(0)
    assert not come(buffer, a) and not buffer.put("nobody", [])
    assert buffer.metrics()["groups/unknown"] == 2 and buffer.waiting == 0


def test_a_group_that_is_none_is_refused_and_can_still_come():
    buffer = made()
    a, b, *_ = fill(buffer)
    members = group(a, [[0], [0]])
    with pytest.raises(ValueError, match="has 1 trajectories; it must have 2"):
        buffer.put(a.group_id, members[:1])
    with pytest.raises(ValueError, match=f"group {a.group_id} has trajectories of {b.group_id}"):
        buffer.put(a.group_id, [members[0], rollout(b, 1, [0])])
    with pytest.raises(ValueError, match="a rollout twice"):
        buffer.put(a.group_id, members[:1] * 2)
    assert come(buffer, a) and buffer.running == 3


def test_what_was_sampled_by_weights_that_nobody_heard_of_yet_is_taken():
    """The engines may have them before anybody says so, and before anybody says that the batch was trained on."""
    buffer = made(1, 1, 2)
    a, b, _ = fill(buffer)
    come(buffer, a)
    buffer.take(0)
    assert come(buffer, b, version=1)
    buffer.push(1)
    buffer.mark_trained(0)
    [found] = buffer.take(1)
    assert found.number == 1 and found.staleness == 0


# Lost records.


def test_repairs_group_in_batch_whose_records_are_lost():
    buffer = made(group=3, batch_groups=1, max_staleness=1)
    a, *_ = fill(buffer)
    come(buffer, a, rewards=[1.0, 0.0, 0.5])
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
    buffer = made(group=2, batch_groups=2, max_staleness=1)
    a, b, c, d = fill(buffer)
    for ticket in (a, b):
        come(buffer, ticket)
    taken = buffer.take(0)
    assert numbers(taken) == [0, 1] and buffer.has_group(a.group_id)
    buffer.mark_lost([member.rollout_id for member in taken[0].members])
    assert not buffer.has_group(a.group_id) and buffer.has_group(c.group_id)
    assert buffer.pop_resamples() == [("t", 0)] and buffer.take(0) is None
    again = buffer.admit("t", 0)
    assert (again.order, again.tries) == (0, 1)
    come(buffer, again)
    assert [taken.group_id for taken in buffer.take(0)] == [again.group_id, b.group_id]
    assert buffer.metrics()["groups/failed"] == 1


def test_lost_records_of_later_batch_leave_earlier_one_as_it_is():
    buffer = made(group=2, batch_groups=1, max_staleness=1)
    a, b = fill(buffer)
    for ticket in (a, b):
        come(buffer, ticket)
    first, [second] = buffer.take(0), buffer.take(1)
    buffer.mark_lost([member.rollout_id for member in second.members])
    assert buffer.take(0) == first and buffer.take(1) is None
    buffer.mark_trained(0)
    assert buffer.step == 1 and buffer.pop_resamples() == [("t", 1)]


# Dropped groups.


def test_the_number_of_a_dropped_group_is_admitted_again_in_its_place():
    buffer = made(2, 2, 1)
    a, b, c, d = fill(buffer)
    for own in (c, a):
        come(buffer, own, rewards=[None, 1.0])
    assert buffer.pop_resamples() == [("t", 0), ("t", 2)] and buffer.pop_resamples() == []
    assert buffer.num_admissible() == 2
    again = buffer.admit("t", 2)
    assert (again.order, again.tries) == (2, 1) and again.group_id != c.group_id
    new = buffer.admit("t", 4)
    assert (new.order, new.tries) == (4, 0)
    assert not come(buffer, c)  # the dropped one is none of those
    come(buffer, new)
    come(buffer, again)
    come(buffer, b)
    assert numbers(buffer.take(0)) == [1, 2]
    assert buffer.num_started == {"t": 5}
    assert buffer.metrics()["groups/failed"] == 2 and buffer.metrics()["members/failed"] == 2


def test_a_number_whose_environment_always_fails_is_given_up():
    buffer = made(2, 1, 0, max_tries=3)
    queue = [("t", 0)]
    for tries in range(3):
        own = buffer.admit(*queue.pop())
        assert own.tries == tries
        come(buffer, own, rewards=[None, None])
        queue += buffer.pop_resamples()
    assert not queue and buffer.metrics()["groups/given_up"] == 1
    come(buffer, buffer.admit("t", 1))
    assert numbers(buffer.take(0)) == [1]


def test_a_group_that_was_called_off_makes_room():
    buffer = made(2, 2, 0)
    a, b = fill(buffer)
    buffer.cancel(a.group_id)
    buffer.cancel(a.group_id)
    assert buffer.num_admissible() == 1 and buffer.pop_resamples() == [("t", 0)]
    buffer.cancel(b.group_id, should_resample=False)
    assert buffer.num_admissible() == 2 and buffer.pop_resamples() == []
    assert buffer.metrics()["groups/cancelled"] == 2
    come(buffer, a)
    assert buffer.waiting == 0


def test_stale_members_are_repaired():
    buffer = made(3, 1, 1, pacing=False)
    buffer.begin(2, 1)
    a = buffer.admit("t", 0)
    buffer.put(a.group_id, group(a, [[0, 1], [1], [1]], [0.5, 1.0, 0.0]))
    [found] = buffer.take(2)
    assert found.baseline == (1.0, 0.0)
    assert [one.reward.value for one in found.members] == [1.0, 0.0, 1.0]
    assert buffer.metrics()["members/stale"] == 1


def test_a_group_that_gets_too_old_while_it_waits_is_dropped():
    buffer = made(1, 1, 1, pacing=False)
    buffer.begin(1, 1)
    a, b = fill(buffer)
    come(buffer, b, version=1)
    buffer.take(1)
    come(buffer, a, version=0)
    assert buffer.waiting == 2
    buffer.mark_trained(1)
    assert buffer.take(2) is None
    assert buffer.waiting == 0 and buffer.pop_resamples() == [("t", 0)]
    assert buffer.metrics()["groups/stale"] == buffer.metrics()["members/stale"] == 1


# What is taken.


def overtaken(pacing=True):
    """At step 1, with a slow group that is due and two more that have come; its id."""
    buffer = made(1, 1, 1, pacing=pacing)
    slow, fast = fill(buffer)
    come(buffer, fast)
    assert numbers(buffer.take(0)) == [1]
    buffer.mark_trained(0)
    buffer.push(1)
    come(buffer, buffer.admit("t", 2), version=1)
    return buffer, slow


def test_a_batch_waits_for_a_slow_group_that_would_be_too_old_for_the_next():
    buffer, slow = overtaken()
    assert buffer.take(1) is None
    come(buffer, slow)
    assert numbers(buffer.take(1)) == [0]
    buffer, slow = overtaken(pacing=False)
    assert numbers(buffer.take(1)) == [2]


def test_a_batch_does_not_wait_for_a_slow_group_with_time_left():
    buffer = made(1, 1, 2)
    slow, fast = buffer.admit("t", 0), buffer.admit("t", 1)
    come(buffer, fast)
    assert numbers(buffer.take(0)) == [1]
    buffer.mark_trained(0)
    buffer.push(1)
    faster, new = buffer.admit("t", 2), buffer.admit("t", 3)
    come(buffer, new, version=1)
    assert numbers(buffer.take(1)) == [3]
    buffer.mark_trained(1)
    come(buffer, faster, version=1)
    assert buffer.take(2) is None  # now it is due
    come(buffer, slow)
    assert numbers(buffer.take(2)) == [0]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_batch_is_given_out_once_the_group_it_waited_for_is_lost(end):
    buffer, slow = overtaken()
    assert buffer.take(1) is None
    if end == "failed":
        come(buffer, slow, rewards=[None])
    else:
        buffer.cancel(slow.group_id)
    assert numbers(buffer.take(1)) == [2]


def test_a_batch_is_never_short():
    buffer = made(1, 3, 1)
    groups = fill(buffer)
    for own in groups[:2]:
        come(buffer, own)
    assert buffer.take(0) is None
    come(buffer, groups[2])
    assert len(buffer.take(0)) == 3


def test_who_asks_again_gets_the_same_batch_and_who_asks_ahead_the_next():
    buffer = made(1, 2, 2)
    groups = fill(buffer)
    for own in groups:
        come(buffer, own)
    first = buffer.take(0)
    assert buffer.take(0) == first
    second = buffer.take(1)
    assert numbers(first + second) == [0, 1, 2, 3]
    assert buffer.take(1) == second and buffer.take(0) == first
    assert buffer.metrics()["groups/taken"] == 4
    buffer.mark_trained(0)
    buffer.mark_trained(0)
    assert buffer.step == 1 and buffer.take(1) == second and buffer.waiting == 4


def test_steps_out_of_turn_are_refused():
    buffer = made(1, 1, 1)
    come(buffer, fill(buffer)[0])
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


# A trainer that goes on from a checkpoint.


def trained_to(step, **more):
    """A buffer after so many updates, with weights pushed after each and no group left."""
    buffer = made(**more)
    for at in range(step):
        for own in [buffer.admit("old", at * 10 + i) for i in range(buffer.config.batch_groups)]:
            come(buffer, own, version=at)
        buffer.take(at)
        buffer.mark_trained(at)
        buffer.push(at + 1)
    return buffer


def test_a_batch_that_was_not_trained_on_comes_back():
    buffer = trained_to(3, group=1, batch_groups=1, max_staleness=2)
    own = fill(buffer)[0]
    come(buffer, own, version=3)
    first = buffer.take(3)
    buffer.begin(3, 3)
    assert buffer.waiting == 1 and buffer.num_admissible() == 0 and buffer.running == 2
    assert buffer.take(3) == first


def test_a_batch_that_was_trained_on_and_nobody_said_so_does_not():
    buffer = trained_to(3, group=1, batch_groups=1, max_staleness=2)
    a, b, _ = fill(buffer)
    come(buffer, a, version=3)
    come(buffer, b, version=3)
    [one] = buffer.take(3)
    buffer.begin(4, 3)  # it had saved its checkpoint
    assert (buffer.step, buffer.waiting) == (4, 1)
    assert buffer.accepted == {"old": 3, "t": 2}
    [other] = buffer.take(4)
    assert {one.number, other.number} == {0, 1}


def test_what_newer_weights_sampled_is_purged():
    buffer = trained_to(5, group=2, batch_groups=1, max_staleness=4, max_tries=1)
    waits, lost, _, flies, lost_in_flight = fill(buffer)
    buffer.put(waits.group_id, group(waits, [[2, 3], [3]]))
    come(buffer, lost, version=5)
    buffer.begin(3, 3)
    assert buffer.pop_resamples() == [("t", 1)]
    assert (buffer.waiting, buffer.running) == (1, 3)
    assert buffer.num_admissible() == (4 + 3 - 3 + 1) - 4
    assert come(buffer, flies, version=3)
    assert not come(buffer, lost_in_flight, version=4)
    assert (
        buffer.metrics()["groups/rolled_back"] == 2 and buffer.metrics()["members/rolled_back"] == 4
    )
    assert {buffer.take(3)[0].number, buffer.take(4)[0].number} == {0, 3}


def test_a_group_of_which_less_than_half_was_lost_is_repaired():
    buffer = trained_to(2, group=3, batch_groups=2, max_staleness=2)
    waits, flies, *_ = fill(buffer)
    buffer.put(waits.group_id, group(waits, [[1], [1, 2], [0]], [0.0, 1.0, 0.5]))
    buffer.begin(1, 1)
    buffer.put(flies.group_id, group(flies, [[2], [1], [0, 1]], [1.0, 0.0, 0.5]))
    found = buffer.take(1)
    assert [own.baseline for own in found] == [(0.0, 0.5), (0.0, 0.5)]


def test_a_later_step_of_the_same_number_makes_nothing_valid_that_was_lost():
    buffer = trained_to(3, group=3, batch_groups=1, max_staleness=4)
    waits, flies, *others = fill(buffer)
    buffer.put(waits.group_id, group(waits, [[3], [1], [1]], [9.0, 1.0, 0.0]))
    buffer.begin(1, 1)
    assert buffer.take(1)[0].baseline == (1.0, 0.0)
    # With updates on other groups there is a version 3 again, and it is another one.
    for step in (1, 2, 3):
        assert buffer.take(step) is not None
        buffer.mark_trained(step)
        buffer.push(step + 1)
        come(buffer, others.pop(), version=1)
    buffer.put(flies.group_id, group(flies, [[1, 3], [1, 4], [4]], [9.0, 1.0, 0.0]))
    [found] = buffer.take(4)
    assert found.number == 1 and found.baseline == (1.0, 0.0)


def test_what_weights_sampled_that_nobody_had_heard_of_is_lost_with_them():
    """The trainer gave them to the engines, and died before it said so."""
    buffer = trained_to(3, group=3, batch_groups=1, max_staleness=2)
    a, waits, flies = fill(buffer)
    come(buffer, a, version=3)
    buffer.take(3)
    buffer.put(waits.group_id, group(waits, [[4], [3], [3]], [9.0, 1.0, 0.0]))
    buffer.begin(3, 3)
    buffer.put(flies.group_id, group(flies, [[4], [3], [3]], [9.0, 1.0, 0.5]))
    buffer.take(3)
    buffer.mark_trained(3)
    buffer.push(4)
    assert [buffer.take(step)[0].baseline for step in (4, 5)] == [(1.0, 0.0), (1.0, 0.5)]


def test_what_begins_after_it_went_back_may_have_the_numbers_of_lost_versions():
    buffer = trained_to(3, group=1, batch_groups=1, max_staleness=1)
    buffer.begin(1, 1)
    for step in (1, 2, 3):
        for own in fill(buffer, 2 * step):
            assert come(buffer, own, version=step)
        assert buffer.take(step)[0].staleness <= 1
        buffer.mark_trained(step)
        buffer.push(step + 1)
    assert buffer.metrics()["groups/rolled_back"] == 0


def test_a_group_under_way_is_due_by_the_weights_that_it_goes_on_with():
    buffer = trained_to(3, group=1, batch_groups=1, max_staleness=1)
    slow, fast = fill(buffer)
    buffer.begin(2, 2)
    come(buffer, fast, version=2)
    assert numbers(buffer.take(2)) == [1]
    buffer.mark_trained(2)
    buffer.push(3)
    come(buffer, buffer.admit("t", 2), version=3)
    assert buffer.take(3) is None
    come(buffer, slow, version=2)
    assert numbers(buffer.take(3)) == [0]


def test_after_it_went_back_as_many_may_begin_as_before():
    """AReaL #1388: the version was restored, the count of what was accepted was not, and staleness had no bound."""
    buffer = trained_to(6, group=1, batch_groups=4, max_staleness=2)
    groups = fill(buffer)
    for own in groups[:5]:
        come(buffer, own, version=6)
    buffer.take(6)
    buffer.begin(6, 6)
    assert buffer.num_admissible() == 3 * 4 - 12
    buffer.begin(4, 4)  # what was sampled by version 6 is gone
    assert (buffer.waiting, buffer.running, buffer.num_admissible()) == (0, 7, 5)
    buffer.begin(4, 2)  # the engines have older weights yet
    assert buffer.num_admissible() == 0


# What is told.


def test_accepted_are_trajectories_that_can_be_learnt_from():
    buffer = made(3, 1, 2)
    a, b, _ = buffer.admit("a", 0), buffer.admit("b", 0), buffer.admit("b", 1)
    come(buffer, a)
    come(buffer, b, rewards=[1.0, None, 0.0])
    assert buffer.accepted == {"a": 3, "b": 2}
    for step in range(2):
        buffer.take(step)
        buffer.mark_trained(step)
    assert buffer.accepted == {"a": 3, "b": 2} and buffer.waiting == 0


def test_metrics_count_what_was_taken_and_what_was_left_out():
    buffer = made(4, 2, 2)
    buffer.begin(2, 2)
    a, b, c, *_ = fill(buffer)
    buffer.put(a.group_id, group(a, [[0], [1, 2], [2], [2]]))
    buffer.put(b.group_id, group(b, [[2], [1], [2], [0]], [None, 1.0, 0.0, 0.0]))
    come(buffer, c, version=2, rewards=[None] * 3 + [1.0])
    buffer.take(2)
    found = buffer.metrics()
    assert found["groups/taken"] == 2 and found["groups/repaired"] == 1
    assert found["groups/failed"] == 1 and found["members/failed"] == 4
    assert found["members/taken"] == 7 and found["members/padded"] == 1
    assert found["padded_share"] == 1 / 8
    assert found["staleness/histogram"] == {0: 3, 1: 2, 2: 2}
    assert found["staleness/mean"] == 6 / 7 and found["staleness/max"] == 2
