"""An engine of two processes with four devices each replies like an engine of one process with eight."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.contracts.source_tree import ROOT
from tests.journeys.test_pod import UNCACHED
from tests.mesh import engine_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_in_two_processes(case: str, file) -> list:
    """Returns the result of a case of engine_cases.py in two processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.mesh.engine_process", address, "2", number, case, file],
            cwd=ROOT,
            env=os.environ | UNCACHED | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in ("0", "1")
    ]
    outputs = [process.communicate(timeout=800)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", engine_cases.CASES)
def test_two_processes_reply_like_one(case, tmp_path):
    """Requests, cancels, new weights, weights that cannot be read, and moved pages; log-probs to the bit."""
    got, want = run_in_two_processes(case, tmp_path / "result.json"), engine_cases.run(case)
    assert got == want and len(want) == engine_cases.NUM_REPLIES
    assert {reply[3] for reply in want} == {"length", "cancelled"}
    assert {tuple(reply[2]) for reply in want} > {(0,) * 6, (2,) * 6}
