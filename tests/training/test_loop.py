"""Tests of the training loop: resuming, stopping and skipping steps."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from glm5_jax.checkpoint.store import Store
from glm5_jax.metrics import metrics_log
from glm5_jax.training import loop
from glm5_jax.training.metrics import Diverged, TrainingStopped
from tests.training import bigram
from tests.training.bigram_run import StopAfter, run

ROOT = pathlib.Path(__file__).parents[2]


def losses(workdir) -> list:
    """Returns all logged (step, name, loss)."""
    rows = metrics_log.read(workdir)
    names = ("loss/total", "held_out/loss")
    return [(r["step"], n, r[n]) for r in rows for n in names if n in r]


def is_equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    return workdir, run(workdir)


def test_trains_logs_steps_and_keeps_newest_checkpoints(unbroken):
    workdir, state = unbroken
    steps, values = metrics_log.column(metrics_log.read(workdir), "loss/total")
    assert steps == list(range(1, 13))
    assert values[-1] < values[0] - 0.1
    assert metrics_log.column(metrics_log.read(workdir), "held_out/loss")[0] == [4, 8, 12]
    with Store(workdir) as store:
        assert store.steps == [9, 12]
    assert int(state["step"]) == 12


@pytest.mark.parametrize("stops", [pytest.param((4,), marks=pytest.mark.slow), (2, 3, 7)])
def test_resumed_run_equals_unbroken_run_bitwise(unbroken, tmp_path, stops):
    workdir, last = unbroken
    for at in stops:
        run(tmp_path, stop_at=at)
        with Store(tmp_path) as store:
            assert store.latest == at  # a stopped run saves
    assert is_equal(run(tmp_path), last)
    assert losses(tmp_path) == losses(workdir)


def test_saves_step_of_stop_during_evaluation(tmp_path):
    stop = StopAfter(1)
    run(tmp_path, stop=stop, on_evaluation=lambda step: setattr(stop, "left", 0))
    with Store(tmp_path) as store:
        assert store.latest == 4  # of the first evaluation; saves are due at steps 3 and 6


def test_stop_before_first_step_saves_nothing(tmp_path):
    state = run(tmp_path, stop=True)
    assert int(state["step"]) == 0
    with Store(tmp_path) as store:
        assert store.latest is None


def test_finished_run_does_not_train(unbroken, tmp_path):
    workdir, last = unbroken
    before = losses(workdir)
    assert is_equal(run(workdir), last)
    assert losses(workdir) == before


def test_longer_run_continues_shorter_run(unbroken, tmp_path):
    workdir, last = unbroken
    run(tmp_path, steps=6)
    assert is_equal(run(tmp_path, steps=12), last)


def test_counts_skipped_steps(tmp_path):
    state = run(tmp_path, loader=bigram.Loader(bad=(1, 5, 6)))
    rows = metrics_log.read(tmp_path)
    assert metrics_log.column(rows, "skipped")[1][-1] == 3
    assert [r["step"] for r in rows if "loss/total" in r and r["loss/total"] is None] == [2, 6, 7]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state["params"]))


def test_count_of_skipped_steps_survives_restart(tmp_path):
    run(tmp_path, loader=bigram.Loader(bad=(0, 2, 3)), stop_at=4)
    with pytest.raises(TrainingStopped, match="3 times in a row and 4 times in all"):
        run(tmp_path, loader=bigram.Loader(bad=(0, 2, 3, 4)), max_consecutive_skipped=2)


@pytest.mark.parametrize("limit", [{"max_skipped": 2}, {"max_consecutive_skipped": 2}])
def test_stops_after_too_many_skipped_steps(tmp_path, limit):
    with pytest.raises(Diverged, match=r"step 7: .* last good checkpoint is .*/6$"):
        run(tmp_path, loader=bigram.Loader(bad=(4, 5, 6, 7, 8, 9)), **limit)
    with Store(tmp_path) as store:
        assert store.latest == 6


def test_stops_on_unreadable_data(tmp_path):
    class Torn(bigram.Loader):
        def next(self, batch_size):
            if self.position == 7:
                raise ValueError("texts.jsonl, line 5, has no field 'text'; add it")
            return super().next(batch_size)

    with pytest.raises(
        TrainingStopped, match="step 7: texts.jsonl, line 5.*checkpoints/6"
    ) as error:
        run(tmp_path, loader=Torn())
    assert not isinstance(error.value, Diverged)


def test_stops_without_checkpoint_if_never_finite(tmp_path):
    with pytest.raises(TrainingStopped, match="no checkpoint is complete yet"):
        run(tmp_path, loader=bigram.Loader(bad=range(12)), max_consecutive_skipped=1)


def test_counts_tokens_of_growing_batch(tmp_path):
    run(tmp_path, sizes=lambda seen: 2 if seen < 5 * 18 else 8)
    rows = metrics_log.read(tmp_path)
    assert metrics_log.column(rows, "tokens")[1][-1] == 9 * (5 * 2 + 7 * 8)


def test_log_interval_skips_rows(tmp_path):
    run(tmp_path, log_interval=5)
    rows = metrics_log.read(tmp_path)
    assert metrics_log.column(rows, "loss/total")[0] == [5, 10]


def test_train_config_rejects_invalid_values():
    for field in ("steps", "log_interval", "keep", "eval_batches", "baseline_tokens"):
        with pytest.raises(ValueError, match=f"{field} is 0"):
            loop.TrainConfig(**{field: 0})
    with pytest.raises(ValueError, match="save_interval is -1; it must be at least 0"):
        loop.TrainConfig(save_interval=-1)


def start_process(workdir, steps, *more):
    command = [sys.executable, "-m", "tests.training.bigram_run", str(workdir), str(steps), *more]
    # A process with limited file sizes could not write its coverage either.
    env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_row(workdir, step, process):
    """Waits until the process has logged that step."""
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        if step in metrics_log.column(metrics_log.read(workdir), "loss/total")[0]:
            return
        time.sleep(0.001)
    raise AssertionError(process.communicate()[0])


@pytest.mark.slow
def test_killed_run_equals_unbroken_run(tmp_path):
    for step in (
        7,
        20,
    ):  # saves start every three steps, so each kill is just after the start of one
        process = start_process(tmp_path / "killed", 40)
        wait_for_row(tmp_path / "killed", step, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = run(tmp_path / "killed", 40)
    assert is_equal(last, run(tmp_path / "whole", 40))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_saves_and_exits_cleanly(tmp_path):
    process = start_process(tmp_path, 100_000)
    wait_for_row(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    with Store(tmp_path) as store:
        assert store.latest == metrics_log.read(tmp_path)[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "max_file_bytes", ["3000", "500"]
)  # smaller than a checkpoint; smaller than the log
def test_full_disk_preserves_last_checkpoint(tmp_path, max_file_bytes):
    process = start_process(tmp_path, 100, max_file_bytes)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert "Traceback" not in output
    assert "the disk is full" in error
    assert f"the last good checkpoint is {tmp_path}/checkpoints/3" in error
    assert losses(tmp_path)[-1][0] >= 4
    run(tmp_path, 6)  # without the limit it continues
    with Store(tmp_path) as store:
        assert store.latest == 6
