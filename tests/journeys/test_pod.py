"""A run in two processes, as on a pod: one training, one set of checkpoints, data for each process."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from glm5_jax.checkpoint.store import latest_step
from glm5_jax.metrics import metrics_log
from glm5_jax.runtime.placement import EXIT_RESTART
from tests.contracts.source_tree import ROOT
from tests.journeys.test_pretrain import command, losses

DEVICES = 4  # over all processes
# Weights are sharded over processes. There are no samples, which only one process can write.
SHAPE = {"mesh.fsdp": -1, "mesh.expert": 2, "sample.prompts": ()}
UNCACHED = {
    "JAX_ENABLE_COMPILATION_CACHE": "false"
}  # reason: pallas_kernels.compat.disable_mesh_program_cache


def start(workdir, processes: int, devices: int | None = None, **more) -> list[subprocess.Popen]:
    """Starts the processes of a run, each with `devices` devices (None: its share of DEVICES), with piped outputs."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices or DEVICES // processes}"
    pods = [f"--distributed=localhost:{port},{processes},{i}" for i in range(processes)]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "launch.run", *command(workdir, **more)[1:], pod],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}"} | UNCACHED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for pod in pods
    ]


def finish(processes, code: int = 0) -> list[str]:
    """Returns the outputs of the processes, each of which must end with this code."""
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == code, output
    return outputs


def wait_for(met, processes) -> None:
    while not met():
        assert processes[0].poll() is None, processes[0].communicate()[0]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """The folder of a run in two processes that nothing breaks."""
    workdir = tmp_path_factory.mktemp("whole")
    finish(start(workdir, 2, **SHAPE))
    return workdir


@pytest.mark.slow
def test_processes_of_one_row_read_same_data(tmp_path):
    shape = {"mesh.context": DEVICES, "train.steps": 5}
    for processes in (1, 2):
        finish(start(tmp_path / str(processes), processes, **shape))
    one, two = (losses(tmp_path / str(n)) for n in (1, 2))
    assert len(one) > 10
    for log, count in ((tmp_path / "2", 1), (tmp_path / "2" / "hosts" / "1", 0)):
        assert len(metrics_log.column(metrics_log.read(log), "baseline/unigram")[0]) == count
    assert [row[:2] for row in one] == [row[:2] for row in two]
    np.testing.assert_allclose([r[2] for r in two], [r[2] for r in one], rtol=2e-5)


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_error_in_one_process_reaches_all(broken):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    code = f"""
import sys, jax
jax.distributed.initialize("localhost:{port}", 2, int(sys.argv[1]))
from glm5_jax.parallel import multihost
multihost.raise_on_all(None)
assert multihost.all_gather_objects([jax.process_index()]) == [[0], [1]]
assert multihost.broadcast_from_first(lambda: {{"a": [jax.process_index(), "\u00e9"]}}) == {{"a": [0, "\u00e9"]}}
for attempt in (
    lambda: multihost.raise_on_all(ValueError("mine") if jax.process_index() == {broken} else None),
    lambda: multihost.run_on_first(lambda: open("/nowhere/file")),
    lambda: multihost.broadcast_from_first(lambda: [][0] if jax.process_index() else int("x")),
):
    try:
        attempt()
    except (ValueError, OSError) as error:
        print(type(error).__name__.replace("FileNotFoundError", "OSError"), error)
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    for process in started:
        out = process.communicate(timeout=120)[0]
        assert process.returncode == 0
        assert "ValueError mine" in out and "OSError [Errno 2]" in out
        assert "ValueError invalid literal" in out


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [[1], [0, 1]], ids=["one", "all"])
def test_signal_saves_same_step_in_all_processes(unbroken, tmp_path, signalled):
    processes = start(tmp_path, 2, **SHAPE)
    # Until a step is made; the evaluation before the first has step 0.
    wait_for(lambda: any(step for step, *_ in losses(tmp_path)), processes)
    for number in signalled:
        processes[number].send_signal(signal.SIGTERM)
    outputs = finish(processes, EXIT_RESTART)
    step = latest_step(tmp_path)
    assert step < 12 and all(f"stopped after step {step};" in out for out in outputs)
    assert f"resuming at step {step}" in finish(start(tmp_path, 2, **SHAPE))[0]
    assert losses(tmp_path) == losses(unbroken)
    assert any((tmp_path / "hosts" / "1").iterdir())


@pytest.mark.slow
def test_all_processes_restart_after_one_is_killed(unbroken, tmp_path):
    flags = [*command(tmp_path, **SHAPE)[1:], "--hosts=2", f"--devices={DEVICES // 2}"]
    launched = subprocess.Popen(
        [sys.executable, "-m", "launch.local", *flags],
        cwd=ROOT,
        env=os.environ | UNCACHED,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: list(tmp_path.glob("checkpoints/[0-9]")), [launched])
    first, second = (Path(f"/proc/{pid}") for pid in processes_of(tmp_path))
    os.kill(int(second.name), signal.SIGKILL)
    out = launched.communicate(timeout=600)[0]
    assert launched.returncode == 0, out
    assert "train-0 died was killed by SIGKILL" in out and "train-0 started (start 2)" in out
    assert not first.exists()
    assert "resuming at step" in (tmp_path / "roles" / "train-0.0.log").read_text()
    assert losses(tmp_path) == losses(unbroken)


@pytest.mark.slow
def test_resumes_on_fewer_and_more_hosts_with_same_losses(unbroken, tmp_path):
    """Simulates the loss of a slice: one process has all rows of each batch after the last checkpoint."""
    processes = start(tmp_path, 2, **SHAPE)
    wait_for(lambda: latest_step(tmp_path), processes)
    for process in processes:
        process.kill()
        process.communicate()
    step = latest_step(tmp_path)
    [half] = finish(start(tmp_path, 1, DEVICES // 2, **SHAPE, **{"train.steps": step + 2}))
    assert "on 2 cpu device(s)" in half and f"resuming at step {step}" in half
    assert f"resuming at step {step + 2}" in finish(start(tmp_path, 2, **SHAPE))[0]
    losses_at, wanted = (
        {row[:2]: row[2] for row in losses(folder)} for folder in (tmp_path, unbroken)
    )
    assert wanted.keys() <= losses_at.keys()
    for at, value in wanted.items():
        np.testing.assert_allclose(losses_at[at], value, rtol=2e-5, err_msg=str(at))
    tokens = [
        metrics_log.column(metrics_log.read(folder), "tokens") for folder in (tmp_path, unbroken)
    ]
    assert tokens[0] == tokens[1], "a batch is as large as before"


def processes_of(workdir) -> list[int]:
    """Returns the processes of the run in a folder, in the order of their numbers."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if f"--workdir={workdir}" in words and words[-2].startswith("--distributed="):
            pids[int(words[-2].rpartition(",")[2])] = int(folder.name)
    return [pids[number] for number in sorted(pids)]
