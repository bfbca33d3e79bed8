"""A buffer resumes after a kill at any moment, with any damage to its files."""

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
class Ticket:
    """Stands for the ticket of a group."""

    group_id: str = "g"
    task: str = "t"
    number: int = 7


def finish_group(buffer, ticket, version=0, rewards=None):
    """Puts a group that has ended. version: version of all tokens."""
    return buffer.put(ticket.group_id, group(ticket, [[version]] * 2, rewards))


def full_trajectories():
    """Returns trajectories with a value in each field."""
    trajectory = rollout(
        Ticket(), 0, [3], 0.1, metrics={"calls": 2.0}, duration_s=1.5, has_used_tools=True
    )
    reward = Reward(0.1, {"style": None, "naïve \u2028": 1.0}, "no room")
    return [dataclasses.replace(trajectory, reward=reward), rollout(Ticket(), 1, [], None)]


@pytest.mark.parametrize("durable", [False, True])
def test_reads_all_fields_of_entries(tmp_path, durable):
    journal, members = Journal(tmp_path / "new", durable), full_trajectories()
    journal.write("a", {"x": [1, "y"]}, members)
    journal.write("b", {"first": 1})
    journal.write("b", {"second": 2})
    journal.write("c", {})
    journal.remove("c")
    journal.remove("c")
    entries, torn = Journal(tmp_path / "new").read()
    assert set(entries) == {"a", "b"} and torn == []
    assert entries["a"].head == {"x": [1, "y"]} and entries["b"] == ({"second": 2}, ())
    assert entries["a"].members == tuple(members)


def test_skips_torn_entry(tmp_path):
    Journal(tmp_path).write("a", {"x": 1}, full_trajectories())
    [path] = tmp_path.iterdir()
    original = path.read_bytes()
    flipped = bytearray(original)
    flipped[len(original) // 2] ^= 1
    truncated = [original[:n] for n in [*range(0, len(original), 7), len(original) - 1]]
    for content in [*truncated, bytes(flipped), original + b"\0", bytes(len(original))]:
        path.write_bytes(content)
        assert Journal(tmp_path).read() == ({}, ["a"])
        assert Journal(tmp_path).read() == ({}, [])  # the torn file is set aside


def test_ignores_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "a.entry.new").write_bytes(b"cut off")
    assert Journal(tmp_path).read() == ({}, [])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_restores_all_groups_but_running_ones(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path, "run-")
    groups = [buffer.admit("t", i) for i in range(4)]
    for ticket in groups[:2]:
        finish_group(buffer, ticket)
    buffer.take(0)
    buffer.mark_trained(0)
    buffer.push(1)
    new = [buffer.admit("u", i) for i in range(2)]
    for ticket in groups[2:]:
        finish_group(buffer, ticket)
    batch = buffer.take(1)
    finish_group(buffer, new[0], version=1, rewards=[None, None])
    assert buffer.running == 1

    restored = GroupBuffer(CONFIG, tmp_path, "another-")
    assert restored.run_id == "run-"
    assert (restored.step, restored.version, restored.waiting, restored.running) == (1, 1, 2, 0)
    assert restored.accepted == {"t": 8} and restored.num_started == {"t": 4, "u": 2}
    assert restored.num_admissible() == 2
    assert restored.pop_resamples() == [("u", 0), ("u", 1)] and restored.pop_resamples() == []
    assert not finish_group(restored, new[1], version=1)  # it was running
    assert restored.take(1) == batch
    restored.mark_trained(1)
    restored.push(2)
    tickets = [restored.admit("u", 1), restored.admit("u", 0), restored.admit("u", 2)]
    assert [(ticket.order, ticket.tries) for ticket in tickets] == [(5, 1), (4, 1), (6, 0)]
    assert not {ticket.group_id for ticket in tickets} & {
        ticket.group_id for ticket in groups + new
    }
    assert GroupBuffer(CONFIG, tmp_path).waiting == 0


def test_restores_loss_of_records(tmp_path):
    config = BufferConfig(group=3, batch_groups=1, max_staleness=1)
    buffer = GroupBuffer(config, tmp_path)
    tickets = [buffer.admit("t", i) for i in range(2)]
    for ticket in tickets:
        buffer.put(ticket.group_id, group(ticket, [[0]] * 3))
    [batch_group], [other] = buffer.take(0), buffer.take(1)
    buffer.mark_lost(
        [batch_group.members[0].rollout_id, *(m.rollout_id for m in other.members[:2])]
    )
    restored = GroupBuffer(config, tmp_path)
    assert restored.pop_resamples() == [("t", 1)] and restored.take(0) == buffer.take(0)
    [repaired] = restored.take(0)
    assert repaired.members == (*batch_group.members[1:], batch_group.members[1])


def test_restores_rollback(tmp_path):
    buffer = GroupBuffer(BufferConfig(group=3, batch_groups=1, max_staleness=2), tmp_path)
    for step in range(2):
        ticket = buffer.admit("t", step)
        buffer.put(ticket.group_id, group(ticket, [[step]] * 3))
        buffer.take(step)
        buffer.mark_trained(step)
        buffer.push(step + 1)
    ticket = buffer.admit("t", 2)
    buffer.put(ticket.group_id, group(ticket, [[2], [1], [1]], [9.0, 1.0, 0.0]))
    other = buffer.admit("t", 3)
    buffer.put(other.group_id, group(other, [[1]] * 3))
    buffer.begin(1, 1)
    restored = GroupBuffer(BufferConfig(group=3, batch_groups=1, max_staleness=2), tmp_path)
    batches = [restored.take(1), restored.take(2)]
    assert [batch_group.number for [batch_group] in batches] == [2, 3]
    assert batches[0][0].baseline == (1.0, 0.0)


def test_lease_is_larger_than_all_earlier_ones(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path)
    assert buffer.lease == 0
    leases = []
    for min_lease in (0, 0, 7, 7, 3):
        buffer = GroupBuffer(CONFIG, tmp_path)
        buffer.begin(0, 0, min_lease=min_lease)
        leases.append(buffer.lease)
    assert leases == [1, 2, 7, 8, 9] and GroupBuffer(CONFIG, tmp_path).lease == 9


def test_torn_entry_loses_only_its_group(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path)
    groups = [buffer.admit("t", i) for i in range(4)]
    for ticket in groups:
        finish_group(buffer, ticket)
    buffer.take(0)
    path = tmp_path / "000000000001.entry"
    path.write_bytes(path.read_bytes()[:-1])
    restored = GroupBuffer(CONFIG, tmp_path)
    assert restored.metrics()["groups/torn"] == 1 and restored.waiting == 3
    # The batch that held it is completed with another group.
    assert [batch_group.number for batch_group in restored.take(0)] == [0, 2]
    assert restored.admit("t", 4).order == 4


def test_rejects_journal_without_state_or_of_other_config(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path)
    finish_group(buffer, buffer.admit("t", 0))
    for name, other in {"group": 4, "batch_groups": 3, "max_staleness": 2}.items():
        original = getattr(CONFIG, name)
        with pytest.raises(ValueError, match=f"is of {name}={original}, not {other}; take that"):
            GroupBuffer(dataclasses.replace(CONFIG, **{name: other}), tmp_path)
    assert GroupBuffer(dataclasses.replace(CONFIG, pacing=False), tmp_path).waiting == 1
    (tmp_path / "state.entry").write_bytes(b"torn")
    for _ in range(2):
        with pytest.raises(ValueError, match="no readable state.*empty the folder"):
            GroupBuffer(CONFIG, tmp_path)


class Killed(BaseException):
    """Raised where the process is killed."""


class KilledRun:
    """Trainer and one service with a buffer that is killed at a given change of the disk.

    The trainer and the service remember what they did; the buffer knows only its journal.

    left: number of the disk change at which the process is killed.
    """

    def __init__(self, folder, num_changes_left, monkeypatch):
        self.folder, self.num_changes_left = folder, num_changes_left
        self.step, self.crashed, self.trained, self.killed = 0, False, [], False
        for name in ("replace", "unlink"):
            monkeypatch.setattr(*self._kill_in(name))

    def _kill_in(self, name):
        """Returns the arguments of setattr that make a function of the file system die."""
        owner = pathlib.Path if name == "unlink" else os
        real = getattr(owner, name)

        def change(*args, **options):
            self.num_changes_left -= 1
            if self.num_changes_left == 0:
                self.killed = True
                raise Killed
            return real(*args, **options)

        return owner, name, change

    def run(self):
        """Runs until the trainer has done 6 updates, with a new buffer after the kill."""
        buffer = None
        for _ in range(20):
            if self.step == 6:
                return
            try:
                buffer = buffer or GroupBuffer(CONFIG, self.folder)
                self._train_step(buffer)
            except Killed:
                buffer = None
        raise AssertionError(f"the run stays at step {self.step}")

    def _train_step(self, buffer):
        """Runs up to the next update."""
        if buffer.step < self.step:
            buffer.mark_trained(self.step - 1)
        if buffer.version < self.step:
            buffer.push(self.step)
        resamples = buffer.pop_resamples()
        for _ in range(10):
            while buffer.num_admissible():
                number = resamples.pop(0)[1] if resamples else buffer.num_started.get("t", 0)
                ticket = buffer.admit("t", number)
                # The first group of each third number fails.
                has_failed = number % 3 == 2 and ticket.tries == 0
                assert ticket.tries < 5
                finish_group(buffer, ticket, buffer.version, [None, None] if has_failed else None)
                resamples += buffer.pop_resamples()
            batch = buffer.take(self.step)
            if batch is not None:
                break
        assert batch is not None, f"no batch of step {self.step}"
        if self.step == 3 and not self.crashed:
            self.crashed = True
            buffer.begin(3, 3)
            return
        self.trained += [(g.group_id, g.number) for g in batch]
        self.step += 1
        buffer.mark_trained(self.step - 1)
        buffer.push(self.step)


def test_kill_at_any_moment_loses_and_repeats_nothing(tmp_path, monkeypatch):
    for kill_at in range(1, 500):
        with monkeypatch.context() as patcher:
            run = KilledRun(tmp_path / str(kill_at), kill_at, patcher)
            run.run()
        buffer = GroupBuffer(CONFIG, run.folder)
        buffer.mark_trained(5)  # a trainer without a response repeats its report
        after = GroupBuffer(CONFIG, run.folder)
        ids, numbers = [list(column) for column in zip(*run.trained)]
        assert len({*ids}) == len(ids) == 12 and len({*numbers}) == 12
        assert (buffer.step, after.step) == (6, 6)
        num_resamples = len(after.pop_resamples())
        assert after.num_started == {"t": 12 + after.waiting + num_resamples}
        max_admissible = (1 + after.version - 6 + 1) * 2 - after.waiting
        assert after.num_admissible() == max_admissible
        if not run.killed:
            break
    assert kill_at > 50


def test_entry_is_readable_json(tmp_path):
    GroupBuffer(CONFIG, tmp_path).admit("sums", 3)
    content = (tmp_path / "000000000000.entry").read_bytes()
    entry = json.loads(content[content.index(b"{") :])
    assert entry["head"]["ticket"]["task"] == "sums"


@pytest.mark.parametrize("copy", ["000000000007", "000000000000", "old"])
def test_rejects_copied_or_renamed_entries(tmp_path, copy):
    buffer = GroupBuffer(CONFIG, tmp_path)
    for number in range(2):
        finish_group(buffer, buffer.admit("t", number))
    content = (tmp_path / "000000000001.entry").read_bytes()
    (tmp_path / f"{copy}.entry").write_bytes(content)
    with pytest.raises(
        ValueError, match=f"entry '{copy}', which is that of 000000000001; somebody copied"
    ):
        GroupBuffer(CONFIG, tmp_path)


def test_rejects_foreign_entry(tmp_path):
    finish_group(GroupBuffer(CONFIG, tmp_path), Ticket(group_id="unknown"))
    (tmp_path / "old.entry").write_bytes(b"text")
    with pytest.raises(ValueError, match="entry 'old', which is that of no group"):
        GroupBuffer(CONFIG, tmp_path)
