"""A policy trains on the tasks of the example file, and learns them."""

import pytest

from glm5_jax.metrics.metrics_log import column
from tests.contracts.source_tree import ROOT
from tests.journeys.command import run_experiment


@pytest.mark.slow
def test_learns_tasks_of_example_file(tmp_path, plain_env):
    file = ROOT / "experiments" / "tasks" / "reverse.py"
    fields = {
        "tasks": f"({{'file': '{file}', 'held_out_fraction': 0.2}},)",
        "partial_credit": False,
        "train.steps": 200,
    }
    rows = run_experiment(plain_env, "rl_reasoning.py:addition", tmp_path, fields)
    _, rewards = column(rows, "reward/mean")
    _, held_out = column(rows, "held_out/reverse")
    assert rewards[0] < 0.1
    assert held_out[-1] > 0.8
