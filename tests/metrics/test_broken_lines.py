"""Files of events and activity: a full disk or a line that was cut off costs lines, and neither a run nor its report."""

import json
import threading

from glm5_jax.metrics.jsonl import append_lines, read_objects
from glm5_jax.runtime import utilization
from glm5_jax.runtime.supervisor import read_events
from glm5_jax.runtime.utilization import UtilizationRecorder, read_utilization
from tests.runtime.test_supervisor import roles, shell, until


def test_appends_after_line_that_was_cut_off(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    append_lines(path, b'{"a": 3}\n')
    append_lines(path, b"[4]\n")
    assert list(read_objects(path)) == [{"a": 1}, {"a": 3}]


def once(folder):
    """A run of a role that ends at once."""
    with roles(folder, shell("a", "exit 0", main=True)) as running:
        assert running.wait(60)


def test_reads_events_around_line_that_was_cut_off(tmp_path):
    once(tmp_path)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"time": 1.5, "ro')
    once(tmp_path)
    whats = [event.what for event in read_events(tmp_path)]
    assert whats.count("started") == whats.count("finished") == 2 and whats[-1] == "finished"


def test_run_goes_on_without_room_for_events(tmp_path):
    (tmp_path / "events.jsonl").mkdir()  # which cannot be appended to, as a full disk cannot
    seen = []
    with roles(tmp_path, shell("a", "sleep 0.1", main=True), on_event=seen.append) as running:
        assert running.wait(60)
    assert {event.what for event in seen} >= {"started", "finished"}


def test_activity_goes_on_once_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(utilization, "SAMPLE_INTERVAL_S", 0.01)
    folder, was_polled = tmp_path / utilization.FOLDER, threading.Event()
    folder.write_text("")  # a file where the folder should be

    def active():
        was_polled.set()
        return 1

    with UtilizationRecorder(folder / "hub.jsonl", active):
        assert was_polled.wait(20)
        folder.unlink()
        until(lambda: read_utilization(tmp_path), "a life is written")
    path = folder / "hub.jsonl"
    path.write_text(path.read_text() + '{"time": 7, "pi\n')
    assert [life.busy for life in read_utilization(tmp_path)] == [1.0]
    assert json.loads(path.read_text().split("\n")[0])["active"] == 1


def test_rejects_second_run_in_same_folder(tmp_path):
    with roles(tmp_path, shell("a", "exec sleep 600")):
        second = roles(tmp_path, shell("b", "exec sleep 600"))
        try:
            second.start()
        except OSError as error:
            assert f"{tmp_path} is in use by process" in str(error)
        else:
            second.stop()
            raise AssertionError("two runs share a folder")
    assert {event.role for event in read_events(tmp_path)} == {"a"}
