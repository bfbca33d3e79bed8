"""Full disk under the orchestrator's journal: the run pauses, and continues from the same state."""

import threading

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer
from glm5_jax.rl.orchestrator.journal import Journal
from tests.rl.fleet import Fleet, post_json, until
from tests.rl.simulated import group

CONFIG = BufferConfig(group=2, batch_groups=1, max_staleness=1, max_running=4)


class FullDisk:
    """Makes a folder unwritable, as on a full disk: a file takes its name while it is elsewhere."""

    def __init__(self, folder):
        self._folder, self._aside = folder, folder.with_name("aside")

    def __enter__(self):
        self._folder.rename(self._aside)
        self._folder.write_bytes(b"")

    def __exit__(self, *_):
        self._folder.unlink()
        self._aside.rename(self._folder)


def test_writes_changes_in_order_once_disk_has_room(tmp_path):
    folder = tmp_path / "journal"
    journal = Journal(folder)
    journal.write("a", {"x": 1})
    with FullDisk(folder):
        journal.write("a", {"x": 2})
        journal.write("b", {"x": 3})
        journal.remove("a")
        assert "cannot be written" in journal.error and "make room" in journal.error
        journal.flush()
        assert journal.error
    entries, _ = Journal(folder).read()
    assert {name: entry.head for name, entry in entries.items()} == {"a": {"x": 1}}
    journal.flush()
    assert not journal.error
    entries, _ = Journal(folder).read()
    assert {name: entry.head for name, entry in entries.items()} == {"b": {"x": 3}}


def test_restores_buffer_after_full_disk(tmp_path):
    folder = tmp_path / "journal"
    buffer = GroupBuffer(CONFIG, folder)
    buffer.begin(0, 0)
    first = buffer.admit("t", 0)
    with FullDisk(folder):
        second = buffer.admit("t", 1)
        assert buffer.put(first.group_id, group(first, [[0], [0]]))
        assert buffer.take(0) is not None
        buffer.mark_trained(0)
        assert buffer.journal_error
    # A process that restarts before there is room lacks these changes, and still trains on nothing twice.
    before = GroupBuffer(CONFIG, folder)
    assert (before.step, before.waiting) == (0, 0) and before.pop_resamples() == [("t", 0)]
    buffer.write_journal()
    assert not buffer.journal_error
    after = GroupBuffer(CONFIG, folder)
    assert (after.step, after.waiting) == (1, 0) and after.pop_resamples() == [("t", 1)]
    assert second.number == 1


def test_excludes_group_that_cannot_be_encoded(tmp_path):
    buffer = GroupBuffer(CONFIG, tmp_path / "journal")
    buffer.begin(0, 0)
    ticket = buffer.admit("t", 0)
    members = group(ticket, [[0], [0]])
    members[0].metrics["calls"] = object()
    with pytest.raises(TypeError):
        buffer.put(ticket.group_id, members)
    assert (buffer.running, buffer.waiting, buffer.accepted) == (1, 0, {})
    buffer.cancel(ticket.group_id)
    assert buffer.pop_resamples() == [("t", 0)]


def test_pauses_trainer_while_disk_is_full(stack, gate, tmp_path):
    folder = tmp_path / "orchestrator"
    fleet = Fleet(stack, gate, journal=str(folder))
    fleet.begin().train(1)
    # Without patience the client reports an error at once.
    fleet.client = OrchestratorClient(fleet.url, patience_s=0.0)
    with FullDisk(folder):
        until(lambda: any("make room" in line for line in fleet.client.status()["blockers"]))
        with pytest.raises(ServerError, match="make room") as raised:
            post_json(fleet.url, "/trainer/begin", {"step": fleet.step, "version": fleet.step})
        assert raised.value.status == 503
        trainer = threading.Thread(target=lambda: fleet.begin().train(2))
        trainer.start()
        trainer.join(0.2)
        assert trainer.is_alive()
    trainer.join(20)
    assert not trainer.is_alive() and fleet.step == 3
    assert not any("make room" in line for line in fleet.client.status()["blockers"])


def test_holds_batch_back_while_disk_is_full(stack, gate, tmp_path):
    folder = tmp_path / "orchestrator"
    fleet = Fleet(stack, gate, journal=str(folder)).begin()
    until(lambda: fleet.client.status()["waiting"] >= 4)
    batches = []
    with FullDisk(folder):
        take = threading.Thread(target=lambda: batches.append(fleet.client.take(0, 0.05)))
        take.start()
        take.join(0.3)
        assert not batches, "a batch was released that the journal lacks"
    take.join(20)
    fleet.train(2)
