"""A buffer goes on where another was killed, wherever that was, and whatever the disk was left with."""

import dataclasses
import json
import os
import pathlib

import pytest

from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer
from glm5_jax.rl.orchestrator.journal import Journal
from glm5_jax.rl.types import Reward
from tests.rl.simulated import group, rollout

CONFIG = BufferConfig(group=2, batch_groups=2, max_staleness=1)


@dataclasses.dataclass
class Whose:
    """Stands for a group that was admitted."""

    group_id: str = "g"
    task: str = "t"
    number: int = 7


def come(buffer, admitted, version=0, rewards=None):
    return buffer.put(admitted.group_id, group(admitted, [[version]] * 2, rewards))


def full():
    """Trajectories with something in each field."""
    one = rollout(Whose(), 0, [3], 0.1, metrics={"calls": 2.0}, duration_s=1.5, has_used_tools=True)
    reward = Reward(0.1, {"style": None, "naïve \u2028": 1.0}, "no room")
    return [dataclasses.replace(one, reward=reward), rollout(Whose(), 1, [], None)]


@pytest.mark.parametrize("durable", [False, True])
def test_what_was_written_is_read_with_all_it_holds(tmp_path, durable):
    journal, members = Journal(tmp_path / "new", durable), full()
    journal.write("a", {"x": [1, "y"]}, members)
    journal.write("b", {"first": 1})
    journal.write("b", {"second": 2})
    journal.write("c", {})
    journal.remove("c")
    journal.remove("c")
    found, torn = Journal(tmp_path / "new").read()
    assert set(found) == {"a", "b"} and torn == []
    assert found["a"].head == {"x": [1, "y"]} and found["b"] == ({"second": 2}, ())
    assert found["a"].members == tuple(members)


def test_a_torn_entry_is_never_read(tmp_path):
    Journal(tmp_path).write("a", {"x": 1}, full())
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    cut = [whole[:n] for n in [*range(0, len(whole), 7), len(whole) - 1]]
    for content in [*cut, bytes(flipped), whole + b"\0", bytes(len(whole))]:
        path.write_bytes(content)
        assert Journal(tmp_path).read() == ({}, ["a"])
        assert Journal(tmp_path).read() == ({}, [])  # it is set aside


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "a.entry.new").write_bytes(b"cut off")
    assert Journal(tmp_path).read() == ({}, [])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_all_groups_but_those_under_way_are_there_again(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path, "life-")
    groups = [buffer.admit("t", i) for i in range(4)]
    for own in groups[:2]:
        come(buffer, own)
    buffer.take(0)
    buffer.mark_trained(0)
    buffer.push(1)
    new = [buffer.admit("u", i) for i in range(2)]
    for own in groups[2:]:
        come(buffer, own)
    batch = buffer.take(1)
    come(buffer, new[0], version=1, rewards=[None, None])
    assert buffer.running == 1

    again = GroupBuffer(CONFIG, tmp_path, "another-")
    assert again.run_id == "life-"
    assert (again.step, again.version, again.waiting, again.running) == (1, 1, 2, 0)
    assert again.accepted == {"t": 8} and again.num_started == {"t": 4, "u": 2}
    assert again.num_admissible() == 2
    assert again.pop_resamples() == [("u", 0), ("u", 1)] and again.pop_resamples() == []
    assert not come(again, new[1], version=1)  # it was under way
    assert again.take(1) == batch
    again.mark_trained(1)
    again.push(2)
    names = [again.admit("u", 1), again.admit("u", 0), again.admit("u", 2)]
    assert [(own.order, own.tries) for own in names] == [(5, 1), (4, 1), (6, 0)]
    assert not {own.group_id for own in names} & {own.group_id for own in groups + new}
    assert GroupBuffer(CONFIG, tmp_path).waiting == 0


def test_lost_records_stay_lost(tmp_path):
    config = BufferConfig(group=3, batch_groups=1, max_staleness=1)
    buffer = GroupBuffer(config, tmp_path)
    admitted = [buffer.admit("t", i) for i in range(2)]
    for ticket in admitted:
        buffer.put(ticket.group_id, group(ticket, [[0]] * 3))
    [taken], [other] = buffer.take(0), buffer.take(1)
    buffer.mark_lost([taken.members[0].rollout_id, *(m.rollout_id for m in other.members[:2])])
    again = GroupBuffer(config, tmp_path)
    assert again.pop_resamples() == [("t", 1)] and again.take(0) == buffer.take(0)
    [repaired] = again.take(0)
    assert repaired.members == (*taken.members[1:], taken.members[1])


def test_what_was_lost_stays_lost(tmp_path):
    buffer = GroupBuffer(BufferConfig(group=3, batch_groups=1, max_staleness=2), tmp_path)
    for step in range(2):
        own = buffer.admit("t", step)
        buffer.put(own.group_id, group(own, [[step]] * 3))
        buffer.take(step)
        buffer.mark_trained(step)
        buffer.push(step + 1)
    own = buffer.admit("t", 2)
    buffer.put(own.group_id, group(own, [[2], [1], [1]], [9.0, 1.0, 0.0]))
    other = buffer.admit("t", 3)
    buffer.put(other.group_id, group(other, [[1]] * 3))
    buffer.begin(1, 1)
    again = GroupBuffer(BufferConfig(group=3, batch_groups=1, max_staleness=2), tmp_path)
    batches = [again.take(1), again.take(2)]
    assert [own.number for [own] in batches] == [2, 3]
    assert batches[0][0].baseline == (1.0, 0.0)


def test_a_lease_is_later_than_all_before_it(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path)
    assert buffer.lease == 0
    found = []
    for least in (0, 0, 7, 7, 3):
        buffer = GroupBuffer(CONFIG, tmp_path)
        buffer.begin(0, 0, min_lease=least)
        found.append(buffer.lease)
    assert found == [1, 2, 7, 8, 9] and GroupBuffer(CONFIG, tmp_path).lease == 9


def test_a_group_that_is_torn_is_missed_and_no_other(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path)
    groups = [buffer.admit("t", i) for i in range(4)]
    for own in groups:
        come(buffer, own)
    buffer.take(0)
    path = tmp_path / "000000000001.entry"
    path.write_bytes(path.read_bytes()[:-1])
    again = GroupBuffer(CONFIG, tmp_path)
    assert again.metrics()["groups/torn"] == 1 and again.waiting == 3
    # The batch that it was in is made anew.
    assert [own.number for own in again.take(0)] == [0, 2]
    assert again.admit("t", 4).order == 4


def test_a_journal_without_state_or_of_another_config_is_refused(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path)
    come(buffer, buffer.admit("t", 0))
    for name, other in {"group": 4, "batch_groups": 3, "max_staleness": 2}.items():
        was = getattr(CONFIG, name)
        with pytest.raises(ValueError, match=f"is of {name}={was}, not {other}; take that"):
            GroupBuffer(dataclasses.replace(CONFIG, **{name: other}), tmp_path)
    assert GroupBuffer(dataclasses.replace(CONFIG, pacing=False), tmp_path).waiting == 1
    (tmp_path / "state.entry").write_bytes(b"torn")
    for _ in range(2):
        with pytest.raises(ValueError, match="no readable state.*empty the folder"):
            GroupBuffer(CONFIG, tmp_path)


class Killed(BaseException):
    """The process is no more."""


class Story:
    """A trainer with one service, told to a buffer that is killed at a given change of the disk.

    What the trainer and the services did is remembered, what the orchestrator knew is not.
    """

    def __init__(self, folder, left, monkeypatch):
        self.folder, self.left = folder, left
        self.step, self.crashed, self.trained, self.killed = 0, False, [], False
        for name in ("replace", "unlink"):
            monkeypatch.setattr(*self._dies_in(name))

    def _dies_in(self, name):
        where = pathlib.Path if name == "unlink" else os
        real = getattr(where, name)

        def act(*args, **more):
            self.left -= 1
            if self.left == 0:
                self.killed = True
                raise Killed
            return real(*args, **more)

        return where, name, act

    def tell(self):
        buffer = None
        for _ in range(20):
            if self.step == 6:
                return
            try:
                buffer = buffer or GroupBuffer(CONFIG, self.folder)
                self._go_on(buffer)
            except Killed:
                buffer = None
        raise AssertionError(f"it has come to step {self.step} and no further")

    def _go_on(self, buffer):
        """As far as the next update."""
        if buffer.step < self.step:
            buffer.mark_trained(self.step - 1)
        if buffer.version < self.step:
            buffer.push(self.step)
        due = buffer.pop_resamples()
        for _ in range(10):
            while buffer.num_admissible():
                number = due.pop(0)[1] if due else buffer.num_started.get("t", 0)
                own = buffer.admit("t", number)
                # Of each third number the first group fails.
                failed = number % 3 == 2 and own.tries == 0
                assert own.tries < 5
                come(buffer, own, buffer.version, [None, None] if failed else None)
                due += buffer.pop_resamples()
            batch = buffer.take(self.step)
            if batch is not None:
                break
        assert batch is not None, f"no batch of step {self.step}"
        if self.step == 3 and not self.crashed:
            self.crashed = True
            buffer.begin(3, 3)
            return
        self.trained += [(own.group_id, own.number) for own in batch]
        self.step += 1
        buffer.mark_trained(self.step - 1)
        buffer.push(self.step)


def test_whenever_it_is_killed_nothing_is_lost_or_learnt_from_twice(tmp_path, monkeypatch):
    for stories in range(1, 500):
        with monkeypatch.context() as patch:
            story = Story(tmp_path / str(stories), stories, patch)
            story.tell()
        buffer = GroupBuffer(CONFIG, story.folder)
        buffer.mark_trained(5)  # who got no answer says it again
        after = GroupBuffer(CONFIG, story.folder)
        ids, numbers = [list(own) for own in zip(*story.trained)]
        assert len({*ids}) == len(ids) == 12 and len({*numbers}) == 12
        assert (buffer.step, after.step) == (6, 6)
        owed = len(after.pop_resamples())
        assert after.num_started == {"t": 12 + after.waiting + owed}
        most = (1 + after.version - 6 + 1) * 2 - after.waiting
        assert after.num_admissible() == most
        if not story.killed:
            break
    assert stories > 50


def test_the_text_of_an_entry_is_json_that_people_can_read(tmp_path):
    GroupBuffer(CONFIG, tmp_path).admit("sums", 3)
    content = (tmp_path / "000000000000.entry").read_bytes()
    said = json.loads(content[content.index(b"{") :])
    assert said["head"]["ticket"]["task"] == "sums"
