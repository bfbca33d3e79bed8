"""Tests the activity of programs: samples in files, and the spans computed from them."""

import json
import os
import threading
import time

import pytest

from glm5_jax.runtime import utilization
from glm5_jax.runtime.utilization import UtilizationRecorder, read_utilization
from glm5_jax.training import report


@pytest.fixture
def short_interval(monkeypatch):
    monkeypatch.setattr(utilization, "SAMPLE_INTERVAL_S", 0.01)


def write_samples(workdir, name, *samples):
    folder = workdir / utilization.FOLDER
    folder.mkdir(exist_ok=True)
    keys = ("time", "pid", "active", "cpu")
    lines = (json.dumps(dict(zip(keys, sample))) + "\n" for sample in samples)
    with open(folder / f"{name}.jsonl", "a") as file:
        file.write("".join(lines))


def test_computes_spans_and_shares_from_samples(tmp_path):
    write_samples(tmp_path, "engine", (10, 1, 0, 5), (11, 1, 2, 5), (12, 1, 1, 6), (14, 1, 0, 7.5))
    write_samples(tmp_path, "engine", (20, 2, 1, 0), (21, 2, 0, 0.5), (22, 2, 3, 1), (24, 2, 0, 1))
    write_samples(tmp_path, "single", (20, 3, 1, 0))
    first, second = read_utilization(tmp_path)
    assert first[:4] == ("engine", 1, 10, 14) and second[1] == 2
    assert first.spans == ((11, 14),) and second.spans == ((20, 21), (22, 24))
    assert (first.busy, first.cpu) == (0.75, 0.625) and (second.busy, second.cpu) == (0.75, 0.25)


def test_ignores_earlier_samples_and_partial_line(tmp_path):
    write_samples(tmp_path, "orchestrator", (1, 1, 1, 0), (5, 1, 1, 1), (6, 1, 0, 2))
    with open(tmp_path / utilization.FOLDER / "orchestrator.jsonl", "a") as file:
        file.write('{"time": 7, "pi')
    [run] = read_utilization(tmp_path, begin=5)
    assert (run.begin, run.end, run.cpu) == (5, 6, 1)
    assert not read_utilization(tmp_path / "nowhere")


def test_ignores_lines_of_other_programs_and_clocks_that_stand_still(tmp_path):
    write_samples(tmp_path, "engine", (10, 1, 0, 5), (None, 1, 0, 5), ("x", 1, 0, 5), (10, 1, 0, 5))
    with open(tmp_path / utilization.FOLDER / "engine.jsonl", "a") as file:
        file.write('{}\n{"time": 1}\n')
    [run] = read_utilization(tmp_path)
    assert (run.begin, run.end, run.cpu, run.busy) == (10, 10, 0, 0)


def test_records_activity_while_process_works(tmp_path, short_interval):
    busy = threading.Event()
    path = tmp_path / utilization.FOLDER / "train.jsonl"

    def until_it_says(active, after=0):
        while not path.exists() or f'"active": {active},' not in path.read_text()[after:]:
            time.sleep(0.005)

    with UtilizationRecorder(path, busy.is_set):
        until_it_says(0)
        busy.set()
        spent = time.process_time() + 0.06
        while time.process_time() < spent:
            pass
        until_it_says(1)
        busy.clear()
        until_it_says(0, after=path.read_text().rindex('"active": 1,'))
    with UtilizationRecorder(path, lambda: 2):
        until_it_says(2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["pid"] for line in lines} == {os.getpid()}
    activity = [line["active"] for line in lines]
    assert activity[0] == 0 and 0 in activity[activity.index(1) :] and activity[-1] == 2
    assert lines[-1]["cpu"] - lines[0]["cpu"] > 0.05


def test_records_activity_between_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(utilization, "SAMPLE_INTERVAL_S", 60.0)
    busy, path = threading.Event(), tmp_path / utilization.FOLDER / "train.jsonl"

    def until_it_has(lines):
        end = time.monotonic() + 20
        while not path.exists() or path.read_text().count("\n") < lines:
            assert time.monotonic() < end, path.read_text()
            time.sleep(0.005)

    with UtilizationRecorder(path, busy.is_set):
        for i in range(3):
            until_it_has(2 * i + 1)
            busy.set()
            until_it_has(2 * i + 2)
            busy.clear()
        until_it_has(7)
    [run] = read_utilization(tmp_path)
    assert len(run.spans) == 3


def test_page_of_run_shows_each_process(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "x"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "Programs" not in report.write_page(tmp_path).read_text()
    write_samples(tmp_path, "engine-0", (0, 77, 1, 0), (60, 77, 1, 30), (120, 77, 0, 60))
    write_samples(tmp_path, "train", (0, 78, 0, 0), (30, 78, 1, 0), (120, 78, 1, 45))
    page = report.write_page(tmp_path).read_text()
    assert ">engine-0 77</text>" in page and ">train 78</text>" in page
    assert "<td>100%</td><td>0%</td><td>0.50</td>" in page
    assert "<td>75%</td><td>25%</td><td>0.38</td>" in page
