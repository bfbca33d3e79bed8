"""A script for Slurm, run with the commands of a node: roles start, die, and end on signals."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from glm5_jax.runtime.http_server import find_free_port
from glm5_jax.runtime.placement import EXIT_RESTART
from launch import slurm
from tests.contracts.source_tree import ROOT
from tests.runtime.test_process import ends

SYSTEM = f"--experiment={ROOT}/tests/launch/small_system.py"

SRUN = """#!/usr/bin/env bash
# Runs a step of one task.
while [[ $1 == --* ]]; do
  if [[ $1 == --output=* ]]; then output=${1#*=}; fi
  shift
done
exec "$@" >>"$output" 2>&1
"""


SCONTROL = """#!/bin/sh
case "$1 $2 $3" in
"show hostnames node[1-2]") echo 127.0.0.1 ;;
"show job 7") echo "JobId=7 JobState=$JOB_STATE Reason=None" ;;
"requeue 7 ") echo requeued ;;
*) exit 1 ;;
esac
"""


def run_script(tmp_path, *flags: str, state: str = "RUNNING") -> subprocess.Popen:
    """Starts the script of the small system, with the commands that a node of Slurm has."""
    while True:  # ports that are free, the engines' two in a row
        engine, gateway, orchestrator = find_free_port(), find_free_port(), find_free_port()
        if len({engine, engine + 1, gateway, orchestrator}) == 4:
            break
    ports = {"engine": engine, "gateway": gateway, "orchestrator": orchestrator}
    argv = [
        "slurm",
        f"{SYSTEM}:tiny",
        f"--workdir={tmp_path}/my run",
        *flags,
    ]
    argv += [f"--experiment.{name}_port={port}" for name, port in ports.items()]
    argv += [
        "--experiment.engine_devices=1",
        "--experiment.engine_memory=1",
        "--experiment.engine_cpus=1",
    ]
    argv += [f"--experiment.lives={tmp_path}/lives"]
    with open(tmp_path / "script", "w") as script, contextlib.redirect_stdout(script):
        assert slurm.main(argv) == 0
    commands = tmp_path / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "srun").write_text(SRUN)
    (commands / "scontrol").write_text(SCONTROL)
    for path in commands.iterdir():
        path.chmod(0o755)
    path = os.pathsep.join([str(commands), os.path.dirname(sys.executable), os.environ["PATH"]])
    nodes = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": "node[1-2]" for i in (0, 1)}
    nodes |= {"SLURM_JOB_ID": "7", "JOB_STATE": state}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["bash", tmp_path / "script"],
        env=os.environ | nodes | {"PATH": path},
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


def read_arguments(tmp_path, role: str) -> dict:
    """Returns the arguments that the first server of a role reports once it runs; its port is in the script."""
    words = next(
        line
        for line in (tmp_path / "script").read_text().splitlines()
        if f"/{role}-0.ready" in line
    )
    port = words.split("small_role.py 0.0.0.0 ")[1].split()[0]
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/arguments", timeout=30) as answer:
                return json.load(answer)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_starts_roles_in_order_and_restarts_them(tmp_path):
    with run_script(tmp_path, "--experiment.deaths=1", "--experiment.seconds=3") as script:
        for line in script.stdout:
            if "train-0 started" in line:
                break
        pids = {
            role: read_arguments(tmp_path, role)["pid"]
            for role in ("engine", "gateway", "orchestrator")
        }
        os.kill(pids["gateway"], signal.SIGKILL)
        assert "gateway-0 ended with code 137" in script.stdout.readline()
        assert "gateway-0 started" in script.stdout.readline()
        gateway = read_arguments(tmp_path, "gateway")
        pids["new gateway"] = gateway["pid"]
        out, err = script.communicate(timeout=300)
    events = [line.split(" ", 1)[1] for line in out.splitlines()]
    assert events[:2] == ["train-0 ended with code 137", "train-0 started"]
    assert events[2] == "train-0 ended with code 0"
    assert (script.returncode, (tmp_path / "lives").read_text()) == (0, "life\n" * 2), err
    assert gateway["arguments"][1] == 'cost=$5 `a` "b" it\'s'
    assert all(map(ends, pids.values())) and len({*pids.values()}) == 4


@pytest.mark.slow
def test_ends_after_too_many_deaths(tmp_path):
    with run_script(tmp_path, "--experiment.deaths=9", "--experiment.limit=1") as script:
        _, err = script.communicate(timeout=300)
    assert script.returncode == 1
    log = tmp_path / "my run" / "roles" / "train-0.log"
    message = f"error: train-0 died 2 times within 600 s, at last with code 137; {log} ends:\n"
    assert message in err and err.split(message)[1].startswith('{"pid":')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "state", "is_requeued"),
    [("script", "RUNNING", True), ("train", "RUNNING", True), ("train", "COMPLETING", False)],
    ids=["before the time limit", "pre-empted", "cancelled"],
)
def test_ended_job_saves_and_is_requeued(tmp_path, target, state, is_requeued):
    """Slurm signals the script before the time limit, and only the tasks otherwise."""
    with run_script(tmp_path, "--experiment.seconds=600", state=state) as script:
        pids = {
            role: read_arguments(tmp_path, role)["pid"]
            for role in ("engine", "gateway", "orchestrator")
        }
        log = tmp_path / "my run" / "roles" / "train-0.log"
        while not (match := log.exists() and re.search(r"trains as (\d+)\n", log.read_text())):
            assert script.poll() is None
            time.sleep(0.05)
        os.kill(script.pid if target == "script" else int(match[1]), signal.SIGTERM)
        out, err = script.communicate(timeout=300)
    assert script.returncode == EXIT_RESTART, err
    assert "train-0 ended with code 75" in out and out.count("train-0 started") == 1
    assert out.endswith("requeued\n") == is_requeued
    assert (tmp_path / "lives").read_text() == "life\nsaved\n"
    assert all(map(ends, pids.values()))
