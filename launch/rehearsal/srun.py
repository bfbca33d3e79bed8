"""Stand-in for Slurm's srun on emulated hosts: starts one process of a step on each of its nodes.

    python -m launch.rehearsal.srun OPTIONS COMMAND

- The file that GLM5_REHEARSAL_HOSTS names has the process of each host, and the variables of each role.
- Each process has Slurm's variables, by which JAX finds the others, and CPU devices in place of its accelerators.
- SIGTERM goes to every process once. When one fails, the others are killed (--kill-on-bad-exit).
- The exit code is the highest one; a process that a signal killed counts as 128 and its number.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from launch.rehearsal import HOSTS_FILE
from launch.rehearsal.hosts import enter_command

KILL_WAIT_S = 30.0  # Slurm's default KillWait


def main(argv: list[str]) -> int:
    """Runs the step and returns its exit code; argv[0] is the program's name."""
    num_options = next(i for i, word in enumerate(argv[1:], 1) if not word.startswith("--"))
    fields = (word[2:].partition("=") for word in argv[1:num_options])
    options = {name: value for name, _, value in fields}
    known = json.loads(pathlib.Path(os.environ[HOSTS_FILE]).read_text())
    output, nodes = pathlib.Path(options["output"]), options["nodelist"].split(",")
    step = output.name.removesuffix(".log")
    devices = known["environments"][step.rpartition("-")[0]]
    processes: list[subprocess.Popen] = []

    def forward(number, frame):
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    with output.open("ab") as log:
        for index, node in enumerate(nodes):
            environment = os.environ | task_environment(nodes, index) | devices
            command = enter_command(known["pids"][node], argv[num_options:])
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            )
    start = {"replica": step, "pids": [process.pid for process in processes]}
    with open(known["starts"], "a") as file:
        file.write(json.dumps(start) + "\n")
    return wait(processes)


def task_environment(nodes: list[str], index: int) -> Mapping[str, str]:
    """Returns Slurm's variables of a task; one runs on each node."""
    count = str(len(nodes))
    return {
        "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_STEP_NUM_NODES": count,
        "SLURM_NTASKS": count,
        "SLURM_PROCID": str(index),
        "SLURM_NODEID": str(index),
        "SLURM_LOCALID": "0",
    }


def wait(processes: list[subprocess.Popen]) -> int:
    """Waits for all processes, and kills the others `KILL_WAIT_S` after one has failed. Returns the highest code."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > KILL_WAIT_S:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    return max(128 - code if code < 0 else code for code in (p.returncode for p in processes))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
