"""Tests of the recorder: rows and throughput."""

import numpy as np
import pytest

from glm5_jax.metrics import metrics_log
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.training import metrics
from glm5_jax.training.metrics import Counters, Recorder


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock; clock[0] is its time."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    return now


def values(loss=1.0, skipped=False):
    return {
        "loss": {"total": loss, "ce": loss / 2},
        "router": {"load": np.array([0.5, 1.5])},
        "skipped": skipped,
    }


def record(tmp_path, capsys, feed, **settings):
    with metrics_log.MetricsLog(tmp_path) as log, ProgressBar(9) as progress:
        recorder = Recorder(log, progress, Counters(), **settings)
        feed(recorder)
    return metrics_log.read(tmp_path), "".join(capsys.readouterr())


def test_throughput_excludes_compilation_and_pauses(tmp_path, capsys, clock):
    def feed(recorder):
        for step in range(1, 5):
            clock[0] += 100.0 if step == 1 else 2.0  # the first step compiles
            recorder.add(step, 50, values())
            recorder.settle()
        clock[0] += 1000.0  # an evaluation
        recorder.restart_clock()
        clock[0] += 2.0
        recorder.add(5, 50, values())
        recorder.settle()

    rows, out = record(tmp_path, capsys, feed, flops_per_token=8.0, peak_flops=1000.0)
    assert [row.get("speed/tokens_per_second") for row in rows] == [None, 25.0, 25.0, 25.0, 25.0]
    assert rows[1]["speed/mfu"] == pytest.approx(25 * 8 / 1000)
    assert rows[1]["speed/model_tflops_per_second"] == pytest.approx(25 * 8 / 1e12)
    assert [row["tokens"] for row in rows] == [50, 100, 150, 200, 250]
    assert "step 1/9  loss 1.0000" in out


def test_throughput_excludes_first_step_of_batch_size(tmp_path, capsys, clock):
    def feed(recorder):
        for step, tokens in enumerate((50, 50, 100, 100), 1):
            clock[0] += 2.0 if step % 2 == 0 else 70.0
            recorder.add(step, tokens, values())
            recorder.settle()

    rows, _ = record(tmp_path, capsys, feed)
    assert [row.get("speed/tokens_per_second") for row in rows] == [None, 25.0, None, 50.0]


def test_logs_no_mfu_without_known_peak(tmp_path, capsys):
    def feed(recorder):
        for step in (1, 2):
            recorder.add(step, 50, values())
        recorder.settle()

    rows, _ = record(tmp_path, capsys, feed, flops_per_token=8.0)
    assert "speed/mfu" not in rows[1] and "speed/model_tflops_per_second" in rows[1]


def test_logs_nested_metrics_and_notes(tmp_path, capsys):
    def feed(recorder):
        recorder.add(1, 50, values(3.0))
        recorder.settle()
        recorder.note(1, {"held_out/loss": 2.5})

    rows, out = record(tmp_path, capsys, feed)
    assert rows[0]["loss/ce"] == 1.5
    assert rows[0]["router/load"] == [0.5, 1.5]
    assert rows[1] == {"step": 1, "held_out/loss": 2.5}
    assert "step 1  held_out/loss 2.5000" in out


@pytest.fixture
def unfinished_steps(monkeypatch):
    """Makes steps run until the next one is started."""
    monkeypatch.setattr(metrics, "is_ready", lambda value: False)


def test_waits_for_step_after_starting_next(tmp_path, capsys, unfinished_steps):
    def feed(recorder):
        recorder.add(1, 50, values())
        assert recorder.counters.tokens == 0
        recorder.add(2, 50, values())
        assert recorder.counters.tokens == 50
        recorder.settle()
        recorder.settle()
        assert recorder.counters.tokens == 100

    record(tmp_path, capsys, feed)


@pytest.mark.parametrize("completes", ["at once", "later"])
def test_measures_time_of_each_step(tmp_path, capsys, clock, completes, monkeypatch):
    """Times are right whether the device completes a step immediately or during the next one."""
    monkeypatch.setattr(metrics, "is_ready", lambda value: completes == "at once")

    def feed(recorder):
        for step in range(1, 5):
            clock[0] += 2.0
            recorder.add(step, 50, values())
        clock[0] += 2.0 * (completes == "later")
        recorder.settle()

    rows, _ = record(tmp_path, capsys, feed)
    assert [row.get("speed/tokens_per_second") for row in rows] == [None, 25.0, 25.0, 25.0]


def test_logs_skipped_steps_at_any_interval(tmp_path, capsys):
    def feed(recorder):
        for step in range(1, 6):
            recorder.add(step, 50, values(skipped=step == 3))
        recorder.settle()
        assert recorder.counters.skipped == 1
        assert recorder.counters.consecutive_skipped == 0

    rows, out = record(tmp_path, capsys, feed, log_interval=5)
    assert [(row["step"], row["skipped"]) for row in rows] == [(3, 1), (5, 1)]
