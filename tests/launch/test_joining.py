"""Processes of a pod join by a list of hosts, or by the environment of a scheduler."""

import os
import random
import socket
import subprocess
import sys

import pytest

from glm5_jax.runtime.http_server import find_free_port
from launch import run
from tests.contracts.source_tree import ROOT

TINY = f"--experiment={ROOT}/experiments/pretrain.py:tiny"
CODE = """
import sys
from launch import run
run.join_pod(sys.argv[1])
import jax
from glm5_jax.parallel import multihost
print(multihost.all_gather_objects(jax.process_index()), jax.device_count(), jax.local_device_count())
"""


def run_processes(each: list[tuple[str, dict[str, str]]], before: str = "") -> list[str]:
    """Returns the last output line of each process, from (value of the flag, additional environment).

    Each process has two devices. before: code that the processes run first.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "XLA_", "JAX_NUM"))}
    env |= {"JAX_NUM_CPU_DEVICES": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", before + CODE, word],
            cwd=ROOT,
            env=env | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for word, extra in each
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    for process, output in zip(started, outputs):
        assert process.returncode == 0, output
    return [output.splitlines()[-1] for output in outputs]


def slurm(job: int, index: int) -> dict[str, str]:
    """Returns the environment of one of two tasks on two nodes; this machine is the first."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost,node2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": "0",
    }


def job_with_a_free_port() -> int:
    """Returns a job number whose port, as jax/_src/clusters/slurm_cluster.py derives it, is free."""
    while True:
        job = random.randrange(4096)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 65535 - 4095 + job)):
                return job


def test_joins_processes_of_host_list():
    port = find_free_port("127.0.0.1")
    outputs = run_processes([(f"localhost:{port},2,{index}", {}) for index in range(2)])
    assert outputs == ["[0, 1] 4 2"] * 2


@pytest.mark.slow
def test_joins_tasks_of_slurm():
    job = job_with_a_free_port()
    outputs = run_processes([("auto", slurm(job, index)) for index in range(2)])
    assert outputs == ["[0, 1] 4 2"] * 2


TPU = """
import jax._src.clusters.cluster as cluster
import jax._src.clusters.cloud_tpu_cluster as tpu
cluster.running_in_cloud_tpu_vm = tpu.running_in_cloud_tpu_vm = True
"""


@pytest.mark.slow
@pytest.mark.parametrize("slices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_joins_hosts_of_tpu_slices(slices):
    """GKE sets the addresses in the environment. Only the TPU devices are simulated."""
    hosts = 2 // slices
    each = [
        {
            "TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * hosts),
            "TPU_WORKER_ID": str(index % hosts),
            "MEGASCALE_COORDINATOR_ADDRESS": "localhost" if slices > 1 else "",
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(index // hosts),
            "JAX_COORDINATOR_PORT": str(port),
        }
        for port in [find_free_port("127.0.0.1")]
        for index in range(2)
    ]
    assert run_processes([("auto", extra) for extra in each], TPU) == ["[0, 1] 4 2"] * 2


@pytest.mark.slow
def test_host_list_overrides_slurm_task():
    """Programs that a task starts have other numbers and devices than the task."""
    task, port = slurm(1, 1), find_free_port("127.0.0.1")
    outputs = run_processes([(f"localhost:{port},2,{index}", task) for index in range(2)])
    assert outputs == ["[0, 1] 4 2"] * 2


@pytest.mark.parametrize(
    ("environment", "takes_all"),
    [
        ({}, False),
        (slurm(1, 0), True),
        (slurm(1, 0) | {"SLURM_NTASKS": "16"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, False),
    ],
)
def test_single_task_of_host_takes_all_gpus(environment, takes_all, monkeypatch):
    """jax gives a task of Slurm or MPI one GPU by default."""
    import jax

    from launch import local

    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    machine = local.LocalMachine(
        platform="cuda", devices=[str(number) for number in range(8)], cores=[0]
    )
    monkeypatch.setattr(local, "this_machine", lambda: machine)
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run.join_pod("auto")
    [options] = calls
    assert options == {"local_device_ids": range(8) if takes_all else None}


@pytest.mark.slow
def test_names_other_form_without_recognised_pod():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
    env.pop("KUBERNETES_SERVICE_HOST", None)
    argv = [sys.executable, "-m", "launch.run", TINY, "--distributed=auto"]
    ended = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "error: --distributed=auto: neither a TPU pod nor Slurm, MPI or Kub" in ended.stderr
    assert ended.stderr.endswith("use HOST:PORT,N,I\n")
