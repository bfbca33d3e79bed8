"""A run in two processes, as on a pod: one training, one set of checkpoints, data for each."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from glm5_jax.core import metrics_log
from tests.contracts.source_tree import ROOT
from tests.journeys.test_pretrain import command, losses

DEVICES = 4  # over all processes
UNCACHED = {
    "JAX_ENABLE_COMPILATION_CACHE": "false"
}  # pallas_kernels.compat.read_no_program_of_a_mesh says why


def start(workdir, processes: int, **more) -> list[subprocess.Popen]:
    """The processes of a run; the first one's output is piped."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes}"
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


def finish(processes) -> str:
    """Output of the first process; all must have ended well."""
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
    return outputs[0]


@pytest.mark.slow
def test_processes_that_share_a_row_read_the_same_data(tmp_path):
    shape = {"mesh.context": DEVICES, "train.steps": 5}
    for processes in (1, 2):
        finish(start(tmp_path / str(processes), processes, **shape))
    one, two = (losses(tmp_path / str(n)) for n in (1, 2))
    assert len(one) > 10
    for log, count in ((tmp_path / "2", 1), (tmp_path / "2" / "hosts" / "1", 0)):
        assert len(metrics_log.column(metrics_log.read(log), "baseline/unigram")[0]) == count
    assert [row[:2] for row in one] == [row[:2] for row in two]
    np.testing.assert_allclose([r[2] for r in two], [r[2] for r in one], rtol=2e-5)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_one_process_is_an_error_in_all(broken):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    code = f"""
import sys, jax
jax.distributed.initialize("localhost:{port}", 2, int(sys.argv[1]))
from glm5_jax.core import hosts
hosts.agree(None)
assert hosts.everyones([jax.process_index()]) == [[0], [1]]
assert hosts.of_first(lambda: {{"a": [jax.process_index(), "\u00e9"]}}) == {{"a": [0, "\u00e9"]}}
for attempt in (
    lambda: hosts.agree(ValueError("mine") if jax.process_index() == {broken} else None),
    lambda: hosts.first_does(lambda: open("/nowhere/file")),
    lambda: hosts.of_first(lambda: [][0] if jax.process_index() else int("x")),
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
def test_a_signal_to_one_process_stops_all_and_nothing_is_lost(tmp_path):
    shape = {"mesh.fsdp": 2, "mesh.expert": 2}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole, 2, **shape))
    processes = start(broken, 2, **shape)
    while processes[0].poll() is None and not metrics_log.read(broken):
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    assert "stopped after step" in finish(processes)
    assert "going on from step" in finish(start(broken, 2, **shape))
    assert losses(broken) == losses(whole)
    assert any((broken / "hosts" / "1").iterdir())


@pytest.mark.slow
def test_a_process_that_is_killed_takes_the_others_with_it_and_all_go_on(tmp_path):
    shape = {"mesh.fsdp": 2, "mesh.expert": 2}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole, 2, **shape))
    flags = [*command(broken, **shape)[1:], "--hosts=2", f"--devices={DEVICES // 2}"]
    launched = subprocess.Popen(
        [sys.executable, "-m", "launch.local", *flags],
        cwd=ROOT,
        env=os.environ | UNCACHED,
        stdout=subprocess.PIPE,
        text=True,
    )
    while launched.poll() is None and not list(broken.glob("checkpoints/[0-9]")):
        time.sleep(0.01)
    first, second = (Path(f"/proc/{pid}") for pid in processes_of(broken))
    os.kill(int(second.name), signal.SIGKILL)
    out = launched.communicate(timeout=600)[0]
    assert launched.returncode == 0, out
    assert "train-0 died was killed by SIGKILL" in out and "train-0 started (life 2)" in out
    assert not first.exists()
    assert "going on from step" in (broken / "roles" / "train-0.0.log").read_text()
    assert losses(broken) == losses(whole)


def processes_of(workdir) -> list[int]:
    """Of the run in a folder, in the order of their numbers."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if f"--workdir={workdir}" in words and words[-2].startswith("--distributed="):
            found[int(words[-2].rpartition(",")[2])] = int(folder.name)
    return [found[number] for number in sorted(found)]
