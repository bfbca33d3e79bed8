"""Runs launch/run.py in separate processes, as a user starts them."""

import subprocess
import sys

from glm5_jax.metrics.metrics_log import read
from tests.contracts.source_tree import ROOT


def run_experiment(env, experiment, workdir, fields, program=("launch.run",)):
    """Returns the metrics of a run.

    program: module that reads the arguments of launch/run.py, with its additional arguments first.
    """
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    command = [f"--experiment=experiments/{experiment}", f"--workdir={workdir}", *flags]
    completed = subprocess.run(
        [sys.executable, "-m", *program, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return read(workdir)
