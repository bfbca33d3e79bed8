"""Tests that a full disk or an incomplete line loses events or samples, but neither the run nor its report."""

import json
import threading

from glm5_jax.runtime import utilization
from glm5_jax.runtime.supervisor import read_events
from glm5_jax.runtime.utilization import UtilizationRecorder, read_utilization
from tests.runtime.test_supervisor import roles, shell, until


def run_once(folder):
    """Runs a role that exits immediately."""
    with roles(folder, shell("a", "exit 0", main=True)) as running:
        assert running.wait(60)


def test_reads_events_around_incomplete_line(tmp_path):
    run_once(tmp_path)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"time": 1.5, "ro')
    run_once(tmp_path)
    events = [event.what for event in read_events(tmp_path)]
    assert events.count("started") == events.count("finished") == 2 and events[-1] == "finished"


def test_run_continues_if_events_cannot_be_written(tmp_path):
    (tmp_path / "events.jsonl").mkdir()  # cannot be appended to, as on a full disk
    seen = []
    with roles(tmp_path, shell("a", "sleep 0.1", main=True), on_event=seen.append) as running:
        assert running.wait(60)
    assert {event.what for event in seen} >= {"started", "finished"}


def test_utilization_resumes_when_file_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(utilization, "SAMPLE_INTERVAL_S", 0.01)
    folder, was_polled = tmp_path / utilization.FOLDER, threading.Event()
    folder.write_text("")  # a file instead of the folder

    def active():
        was_polled.set()
        return 1

    with UtilizationRecorder(folder / "orchestrator.jsonl", active):
        assert was_polled.wait(20)
        folder.unlink()
        until(lambda: read_utilization(tmp_path), "a life is written")
    path = folder / "orchestrator.jsonl"
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
