"""Runs of launch/run.py in processes of their own, as a user starts them."""

import subprocess
import sys

from glm5_jax.metrics.metrics_log import read
from tests.contracts.source_tree import ROOT


def launched(env, experiment, workdir, fields, program=("launch.run",)):
    """The metrics of a run. program: a module that reads the arguments of launch/run.py, and its own before them."""
    flags = [f"--experiment.{name}={value}" for name, value in fields.items()]
    command = [f"--experiment=experiments/{experiment}", f"--workdir={workdir}", *flags]
    made = subprocess.run(
        [sys.executable, "-m", *program, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return read(workdir)
