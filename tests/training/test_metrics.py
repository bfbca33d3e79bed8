"""The recorder: rows, throughput, limits."""

import numpy as np
import pytest

from glm5_jax.metrics import metrics_log
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.training import metrics
from glm5_jax.training.metrics import Counters, Recorder


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: clock[0] is the time."""
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


def test_throughput_leaves_out_compiling_and_pauses(tmp_path, capsys, clock):
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


def test_a_new_batch_size_compiles_and_is_left_out_too(tmp_path, capsys, clock):
    def feed(recorder):
        for step, tokens in enumerate((50, 50, 100, 100), 1):
            clock[0] += 2.0 if step % 2 == 0 else 70.0
            recorder.add(step, tokens, values())
            recorder.settle()

    rows, _ = record(tmp_path, capsys, feed)
    assert [row.get("speed/tokens_per_second") for row in rows] == [None, 25.0, None, 50.0]


def test_without_a_known_peak_there_is_no_mfu(tmp_path, capsys):
    def feed(recorder):
        for step in (1, 2):
            recorder.add(step, 50, values())
        recorder.settle()

    rows, _ = record(tmp_path, capsys, feed, flops_per_token=8.0)
    assert "speed/mfu" not in rows[1] and "speed/model_tflops_per_second" in rows[1]


def test_parts_and_layers_become_columns(tmp_path, capsys):
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
def late(monkeypatch):
    """Steps that have not ended when the next one is sent off."""
    monkeypatch.setattr(metrics, "is_ready", lambda value: False)


def test_a_step_is_waited_for_when_the_next_is_under_way(tmp_path, capsys, late):
    def feed(recorder):
        recorder.add(1, 50, values())
        assert recorder.counters.tokens == 0
        recorder.add(2, 50, values())
        assert recorder.counters.tokens == 50
        recorder.settle()
        recorder.settle()
        assert recorder.counters.tokens == 100

    record(tmp_path, capsys, feed)


@pytest.mark.parametrize("ends", ["at once", "later"])
def test_each_step_has_its_own_time(tmp_path, capsys, clock, ends, monkeypatch):
    """Whether the device has done it when it is sent off or while the next one is; the last is waited for alone."""
    monkeypatch.setattr(metrics, "is_ready", lambda value: ends == "at once")

    def feed(recorder):
        for step in range(1, 5):
            clock[0] += 2.0
            recorder.add(step, 50, values())
        clock[0] += 2.0 * (ends == "later")
        recorder.settle()

    rows, _ = record(tmp_path, capsys, feed)
    assert [row.get("speed/tokens_per_second") for row in rows] == [None, 25.0, 25.0, 25.0]


def test_skipped_steps_are_written_whatever_the_interval(tmp_path, capsys):
    def feed(recorder):
        for step in range(1, 6):
            recorder.add(step, 50, values(skipped=step == 3))
        recorder.settle()
        assert recorder.counters.skipped == 1
        assert recorder.counters.consecutive_skipped == 0

    rows, out = record(tmp_path, capsys, feed, log_interval=5)
    assert [(row["step"], row["skipped"]) for row in rows] == [(3, 1), (5, 1)]
