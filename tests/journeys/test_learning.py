"""A policy learns from rewards, and from nothing else: the whole run, and controls that must fail."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from glm5_jax.metrics.metrics_log import column, read

ROOT = pathlib.Path(__file__).parents[2]
RECENT = 25  # steps of a running mean
# Share of exact answers that a run must reach, and the step by which it must. Runs reach a half between steps 405 and 696,
# by luck: sums that are rounded differently change every later sample (docs/results/reinforcement_learning.md).
EXACT, BY_STEP = 0.25, 600
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def train_policy(workdir, control="none", steps=0, **changes):
    """Returns the metrics of a run."""
    command = ["-m", "tests.journeys.addition", workdir, control, steps, json.dumps(changes)]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    completed = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return read(workdir)


def running(rows, part, end=None):
    return float(np.mean(column(rows, f"reward_part/{part}")[1][:end][-RECENT:]))


def first_passing_step(steps, values, threshold) -> int | None:
    """Returns the first step whose full running mean reaches the threshold; None if there is none."""
    means = np.convolve(values, np.full(RECENT, 1 / RECENT), "valid")
    high = np.flatnonzero(means >= threshold)
    return int(steps[RECENT - 1 + high[0]]) if len(high) else None


def test_passes_threshold_of_running_mean():
    steps = range(1, 101)
    assert first_passing_step(steps, [0.0] * 50 + [1.0] * 50, 0.5) == 63  # 13 of the last 25
    assert first_passing_step(steps, [1.0] * 100, 0.5) == 25
    assert first_passing_step(steps, [1.0] * 12 + [0.0] * 88, 0.5) is None


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """Returns (workdir, metrics) of a run with the variant's own rewards."""
    workdir = tmp_path_factory.mktemp("run")
    return workdir, train_policy(workdir)


def test_learns_sums_of_unseen_operands(trained_run):
    _, rows = trained_run
    steps, exact = column(rows, "reward_part/exact")
    step = first_passing_step(steps, exact, EXACT)
    assert exact[0] < 0.02
    assert step is not None and step <= BY_STEP
    assert running(rows, "exact") >= EXACT
    assert column(rows, "held_out_part/exact")[1][-1] >= EXACT


def test_learns_nothing_from_rewards_of_other_attempts(trained_run, tmp_path):
    _, right = trained_run
    rows = train_policy(tmp_path, "others", 120)
    assert running(right, "digits", 120) > 0.9 > 0.3 > running(rows, "digits")
    assert running(rows, "places") < 0.05 and running(rows, "exact") < 0.01


def test_reversed_rewards_remove_skill(trained_run, tmp_path):
    workdir, right = trained_run
    rows = train_policy(tmp_path, "reversed", 100, checkpoint=str(workdir))
    assert column(rows, "held_out_part/exact")[1][0] >= EXACT
    assert running(rows, "exact") < 0.05 < EXACT <= running(right, "exact")
