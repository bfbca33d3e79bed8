"""A policy learns from rewards, and from nothing else: the whole run, and controls that must fail."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from glm5_jax.core.metrics_log import column, read

ROOT = pathlib.Path(__file__).parents[2]
RECENT = 25  # steps of a running mean
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def trained(workdir, control="none", steps=0, **changes):
    """The metrics of a run."""
    command = ["-m", "tests.journeys.addition", workdir, control, steps, json.dumps(changes)]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    made = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return read(workdir)


def running(rows, part, end=None):
    return float(np.mean(column(rows, f"reward_part/{part}")[1][:end][-RECENT:]))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """workdir and metrics by seed, each made once."""
    runs = {}

    def of(seed):
        if seed not in runs:
            workdir = tmp_path_factory.mktemp(f"seed{seed}")
            runs[seed] = workdir, trained(workdir, seed=seed)
        return runs[seed]

    return of


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_are_learnt_also_of_operands_that_were_never_seen(learnt, seed):
    _, rows = learnt(seed)
    assert column(rows, "reward_part/exact")[1][0] < 0.02
    assert running(rows, "exact") >= 0.5
    assert column(rows, "held_out_part/exact")[1][-1] >= 0.5


def test_rewards_of_other_attempts_teach_nothing(learnt, tmp_path):
    _, right = learnt(0)
    rows = trained(tmp_path, "others", 120)
    assert running(right, "digits", 120) > 0.9 > 0.3 > running(rows, "digits")
    assert running(rows, "places") < 0.05 and running(rows, "exact") < 0.01


def test_rewards_of_the_other_sign_unlearn(learnt, tmp_path):
    workdir, right = learnt(0)
    rows = trained(tmp_path, "reversed", 100, checkpoint=str(workdir))
    assert column(rows, "held_out_part/exact")[1][0] >= 0.5
    assert running(rows, "exact") < 0.05 < 0.5 <= running(right, "exact")
