"""Runs a script of launch/slurm.py on emulated hosts, with stand-ins for Slurm's commands.

`parse_script` reads nodes and steps from the script. `SlurmJob` starts it on its first node, as slurmd does. The script finds
`srun` (launch/rehearsal/srun.py) and `scontrol` on its PATH.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.runtime.process import ChildProcess
from launch import local
from launch.rehearsal import HOSTS_FILE
from launch.rehearsal.hosts import EmulatedHosts
from launch.rehearsal.job import Death

JOB_ID = "7"
_ARRAY = re.compile(r"\$\{(\w+)\[(\d+)\]\}")
_MAPFILE = re.compile(r'mapfile -t (\w+) < <\(scontrol show hostnames "\$(\w+)"\)')
_END = re.compile(r"\S+ (\S+) ended with code (\d+)")  # after the time
_SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") echo "$3" | tr , '\\n' ;;
"show job") echo "JobId=$3 JobState=RUNNING Reason=None" ;;
"requeue {job}") echo requeued >>{folder}/requeues ;;
*) echo "scontrol: this rehearsal has no $*" >&2; exit 1 ;;
esac
"""


class NodeGroup(NamedTuple):
    """Nodes of one kind in a job.

    Attributes:
      array: bash array with the names of the nodes.
      variable: variable of Slurm with the list of the nodes.
      num_nodes: number of nodes.
    """

    array: str
    variable: str
    num_nodes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStep:
    """Step of a job, one replica of a role.

    Attributes:
      name: name of the replica, ROLE-INDEX.
      is_main: whether the job ends with it.
      nodes: names of its nodes, one for each process.
      options: options of srun.
      command: words of its command, with node names in place of bash's variables.
    """

    name: str
    is_main: bool
    nodes: tuple[str, ...]
    options: Mapping[str, str]
    command: tuple[str, ...]

    @property
    def role(self) -> str:
        """Name of its role."""
        return self.name.rpartition("-")[0]


class JobScript(NamedTuple):
    """Nodes and steps of a script."""

    groups: tuple[NodeGroup, ...]
    steps: tuple[JobStep, ...]

    @property
    def nodes(self) -> dict[str, list[str]]:
        """Names of the nodes of each group, by its bash array."""
        names = [c.array.removeprefix("nodes").strip("_").replace("_", "-") for c in self.groups]
        return {
            group.array: [f"{name or 'cpu'}-node-{number}" for number in range(group.num_nodes)]
            for group, name in zip(self.groups, names)
        }


def parse_script(text: str) -> JobScript:
    """Returns the nodes and steps of a script. Raises ValueError if it is not one of launch/slurm.py."""
    counts = [int(number) for number in re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)]
    arrays = _MAPFILE.findall(text)
    if not counts or len(counts) != len(arrays):
        raise ValueError(
            f"the script has {len(counts)} lines with --nodes and {len(arrays)} lists of nodes; write it with launch/slurm.py"
        )
    groups = tuple(
        NodeGroup(array, variable, count) for (array, variable), count in zip(arrays, counts)
    )
    nodes = JobScript(groups, ()).nodes
    [logs] = [
        shlex.split(word)[0] for word in re.findall(r"^logs=(.*?) grace=", text, re.MULTILINE)
    ]
    joined = text.replace("\\\n", " ")
    lines = re.findall(
        r"^supervise .*? &$", joined, re.MULTILINE | re.DOTALL
    )  # a word may have lines
    return JobScript(groups, tuple(_parse_step(line, nodes, logs) for line in lines))


def _parse_step(line: str, nodes: Mapping[str, Sequence[str]], logs: str) -> JobStep:
    """Returns the step of a line `supervise NAME MAIN ... srun OPTIONS COMMAND &`."""
    line = _ARRAY.sub(lambda match: nodes[match[1]][int(match[2])], line.removesuffix("&"))
    _, name, is_main, *words = shlex.split(line)
    words = [re.sub(r'\\([\\"$`])', r"\1", word) for word in words[words.index("srun") + 1 :]]
    words = [word.replace("${logs}", logs) for word in words]
    num_options = next(i for i, word in enumerate(words) if not word.startswith("--"))
    fields = (word[2:].partition("=") for word in words[:num_options])
    options = {name: value for name, _, value in fields}
    listed = options["nodelist"].split(",")
    if len(listed) != int(options["ntasks"]):
        raise ValueError(
            f"step {name} has {options['ntasks']} tasks on {len(listed)} nodes; a process must have a node"
        )
    return JobStep(
        name=name,
        is_main=is_main == "1",
        nodes=tuple(listed),
        options=options,
        command=tuple(words[num_options:]),
    )


class SlurmJob:
    """Job of a script. `start` may be called again after the end, as Slurm starts a requeued job.

    - script: text of the script.
    - hosts: emulated hosts, which have the names of the script's nodes.
    - folder: receives the script, its output, the stand-ins and the list of started processes.
    - devices: emulated devices of a process of each role.
    """

    def __init__(
        self,
        script: str,
        hosts: EmulatedHosts,
        folder: pathlib.Path,
        devices: Mapping[str, int],
    ):
        self._hosts, self._folder = hosts, folder
        self._job = parse_script(script)
        self._process: ChildProcess | None = None
        self._is_stopping, self._num_lines, self._num_requeues = False, 0, 0
        self._log = folder / "script.log"
        self._main_steps = {step.name for step in self._job.steps if step.is_main}
        self._log_folder = pathlib.Path(self._job.steps[0].options["output"]).parent
        (folder / "script").write_text(script)
        commands = folder / "commands"
        commands.mkdir(exist_ok=True)
        python = shlex.quote(sys.executable)
        quoted = shlex.quote(str(folder))
        for name, text in {
            "srun": f'#!/bin/sh\nexec {python} -m launch.rehearsal.srun "$@"\n',
            "python3": f'#!/bin/sh\nexec {python} "$@"\n',
            "scontrol": _SCONTROL.format(job=JOB_ID, folder=quoted),
        }.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        known = {
            "pids": hosts.pids,
            "environments": {
                role: local.visibility("cpu", list(map(str, range(count))))
                for role, count in devices.items()
            },
            "starts": str(folder / "starts.jsonl"),
        }
        (folder / "hosts.json").write_text(json.dumps(known))
        nodes = self._job.nodes
        self._environment = {
            **os.environ,
            **{c.variable: ",".join(nodes[c.array]) for c in self._job.groups},
            "SLURM_JOB_ID": JOB_ID,
            HOSTS_FILE: str(folder / "hosts.json"),
            "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
        }

    def start(self) -> None:
        """Starts the script on its first node."""
        self._num_lines = len(self._lines())
        self._num_requeues = self._count_requeues()
        self._is_stopping = False
        first = self._job.nodes[self._job.groups[0].array][0]
        command = self._hosts.command(first, ["bash", str(self._folder / "script")])
        self._process = ChildProcess(command, log=self._log, env=self._environment)

    def poll(self) -> int | None:
        """Returns the exit code of the script; None while it runs."""
        return None if self._process is None else self._process.exit_code()

    @property
    def deaths(self) -> list[Death]:
        """Steps that have ended since the start, before a stop was requested, other than main steps with code 0."""
        if self._is_stopping:
            return []
        deaths = []
        for line in self._lines()[self._num_lines :]:
            end = _END.fullmatch(line)
            if end and end[1] in self._main_steps and end[2] == "0":
                break  # the job is finished, and ends the other steps
            if end:
                log = self._log_folder / f"{end[1]}.log"
                deaths.append(Death(end[1], int(end[2]), log))
        return deaths

    @property
    def num_processes(self) -> dict[str, int]:
        """Number of started processes of each role; a restarted replica counts once."""
        file = self._folder / "starts.jsonl"
        starts = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        by_replica = {start["replica"]: len(start["pids"]) for start in starts}
        roles = {step.name: step.role for step in self._job.steps}
        counts = collections.Counter()
        for replica, count in by_replica.items():
            counts[roles[replica]] += count
        return dict(counts)

    def request_stop(self) -> None:
        """Sends the script SIGTERM, as Slurm does before the time limit."""
        assert self._process is not None, "it was started"
        self._is_stopping = True
        self._process.terminate()

    def stop_problems(self) -> list[str]:
        """Returns what went wrong at the stop: a script that ended without a requeue."""
        code, requeues = self.poll(), self._count_requeues() - self._num_requeues
        if (code, requeues) == (EXIT_RESTART, 1):
            return []
        return [
            f"the script ended with code {code} and {requeues} requeues, not {EXIT_RESTART} and 1"
        ]

    def kill(self) -> None:
        """Kills the script and its steps."""
        if self._process is not None:
            self._process.kill()

    def _lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def _count_requeues(self) -> int:
        file = self._folder / "requeues"
        return len(file.read_text().splitlines()) if file.exists() else 0
