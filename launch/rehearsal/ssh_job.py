"""Runs a script of launch/ssh_commands.py on emulated hosts, with a stand-in for ssh."""

import os
import pathlib
import shlex
import signal
import sys

from glm5_jax.rl.programs.cluster import TRAIN
from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.runtime.process import ChildProcess
from launch import local
from launch.rehearsal.hosts import EmulatedHosts, enter_command
from launch.rehearsal.job import Death

# The process of a machine has the number of the ssh that started it, because each program replaces the one before.
_SSH = """#!/bin/sh
echo $$ >>{folder}/pids
case $1 in
{cases}
esac
echo "ssh: no machine $1" >&2
exit 255
"""


def machine_name(machine: str) -> str:
    """Returns the host name of a machine of the list: without its user. Raises ValueError for an IPv6 address."""
    name = machine.rpartition("@")[2]
    if name.startswith("["):
        raise ValueError(
            f"--machines has {machine}; a rehearsal needs host names, not IPv6 addresses"
        )
    return name


class SshJob:
    """Processes of a list of machines. `start` may be called again after the end, as a user starts the script again.

    - script: text of the script.
    - machines: machines as in --machines.
    - hosts: emulated hosts with the names of the machines.
    - folder: receives the script, its output and the stand-ins.
    - num_devices: emulated devices of each process.
    """

    def __init__(
        self,
        script: str,
        machines: list[str],
        hosts: EmulatedHosts,
        folder: pathlib.Path,
        num_devices: int,
    ):
        self._folder = folder
        self._process: ChildProcess | None = None
        self._is_stopping = False
        (folder / "script").write_text(script)
        commands = folder / "commands"
        commands.mkdir(exist_ok=True)
        cases = [
            f'{machine}) exec {shlex.join(enter_command(hosts.pids[machine_name(machine)], ["bash", "-c"]))} "$2" ;;'
            for machine in machines
        ]
        ssh = _SSH.format(folder=shlex.quote(str(folder)), cases="\n".join(cases))
        python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
        for name, text in {"ssh": ssh, "python3": python}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        devices = local.visibility("cpu", list(map(str, range(num_devices))))
        path = os.pathsep.join([str(commands), os.environ["PATH"]])
        self._environment = {**os.environ, **devices, "PATH": path}

    def start(self) -> None:
        """Starts the script."""
        (self._folder / "pids").write_text("")
        self._is_stopping = False
        command = ["bash", str(self._folder / "script")]
        log = self._folder / "script.log"
        self._process = ChildProcess(command, log=log, env=self._environment)

    def poll(self) -> int | None:
        """Returns the exit code of the script; None while it runs."""
        return None if self._process is None else self._process.exit_code()

    @property
    def deaths(self) -> list[Death]:
        """The end of the script with an error, while it should run."""
        code = self.poll()
        if self._is_stopping or not code:
            return []
        return [Death("the script", code, self._folder / "script.log")]

    @property
    def num_processes(self) -> dict[str, int]:
        """Number of started processes of each role; the only role trains."""
        return {TRAIN: len((self._folder / "pids").read_text().split())}

    def request_stop(self) -> None:
        """Sends SIGTERM to the process of the first machine, which has all others stop."""
        self._is_stopping = True
        pids = (self._folder / "pids").read_text().split()
        os.kill(int(pids[0]), signal.SIGTERM)

    def stop_problems(self) -> list[str]:
        """Returns what went wrong at the stop: processes that did not save."""
        code = self.poll()
        return (
            []
            if code == EXIT_RESTART
            else [f"the script ended with code {code}, not {EXIT_RESTART}"]
        )

    def kill(self) -> None:
        """Kills the script and its processes."""
        if self._process is not None:
            self._process.kill()
