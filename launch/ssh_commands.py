"""Writes an SSH command for each machine of a list, for hosts without a scheduler.

    python -m launch.ssh_commands --experiment=FILE.py:VARIANT --workdir=/DIR --machines=a,b,c [--port=8476] >run.sh
    bash run.sh

Each line of the script starts the process of one machine by ssh; the command in it can be started in any other way too.

- The first machine is the coordinator, at --port. All machines see DIR. Each has this repository, with an environment
  whose python3 runs it, at the path of the current folder.
- A process trains with all accelerators of its machine. With --chip=h200 it gets the XLA options for that chip
  (launch/xla_flags.py); options set on the machine take precedence. With --devices=8, the number on each machine, a mesh
  that does not fit is an error of this command.
- When one process dies, the others die within minutes. The same lines continue from the last checkpoint, also with fewer
  machines (the conditions are in launch/run.py).
- The script ends after all processes have ended, with the exit code of one that failed. To stop a run, send SIGTERM to
  a process on its machine.

A user's error is one line and exit code 2.
"""

import os
import re
import shlex
import sys

from absl import flags

from glm5_jax.runtime.placement import substitute_words
from launch import run_plan, xla_flags

_NAME = re.compile(
    r"([a-z_][a-z0-9_-]*@)?([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])"
)


def define() -> flags.FlagValues:
    """Returns the program's flags, in addition to the experiment's."""
    values = run_plan.define()
    flags.DEFINE_list("machines", [], "names or addresses, separated by commas", flag_values=values)
    flags.DEFINE_integer("port", 8476, "port of the coordinator", 1, 65535, flag_values=values)
    chips = list(xla_flags.FLAGS)
    flags.DEFINE_enum("chip", None, chips, "kind of the accelerators", flag_values=values)
    return values


def make_script(plan: run_plan.RunPlan, values: flags.FlagValues, folder: str) -> str:
    """Returns the script for machines that have the repository in `folder`.

    Raises ValueError unless the plan is one training role with one process on each machine.
    """
    [*others, role] = plan.roles
    machines = values.machines
    coordinator = machines[0].rpartition("@")[2]
    if others or role.serves or role.count > 1 or role.hosts != len(machines):
        raise ValueError(
            f"{plan.name} is not one program that trains, and a list of machines can run nothing else; use launch/slurm.py, "
            "gke.py or on_ray.py"
        )
    lines, exports = ["#!/usr/bin/env bash", "# Written by launch/ssh_commands.py."], ""
    if values.chip:
        name = xla_flags.flags_variable(values.chip)
        exports = f'export {name}="{xla_flags.format_flags(values.chip)} ${{{name}:-}}" && '
    for number, machine in enumerate(machines):
        words = {
            "python": "python3",
            "distributed": f"{coordinator}:{values.port},{len(machines)},{number}",
        }
        command = f"cd {shlex.quote(folder)} && {exports}exec {shlex.join(substitute_words(role.argv, words))}"
        host = machine.replace("[", "").replace("]", "")
        lines += [f"ssh {host} {shlex.quote(command)} &", "started+=($!)"]
    lines += ["code=0", 'for process in "${started[@]}"; do wait "$process" || code=$?; done']
    return "\n".join([*lines, "exit $code"]) + "\n"


def _check(values: flags.FlagValues) -> None:
    machines = values.machines
    if not machines:
        raise ValueError("--machines is missing; use --machines=NAME,NAME")
    for machine in machines:
        if not _NAME.fullmatch(machine):
            raise ValueError(
                f"--machines has {machine!r}; give names, IPv4 addresses, or IPv6 addresses in brackets, each optionally "
                "with USER@ before it"
            )
    if len({machine.rpartition("@")[2].lower() for machine in machines}) < len(machines):
        raise ValueError(
            f"--machines={','.join(machines)} names one twice; each machine has one process"
        )
    for name in ("hosts", "tpu_topology", "slices"):
        if values[name].present:
            raise ValueError(f"--{name} is not for lists of machines; leave it out")


def generate(argv: list[str], values: flags.FlagValues) -> tuple[run_plan.RunPlan, str]:
    """Returns the run plan of the program's arguments and its script. Raises ValueError or flags.Error for invalid ones."""
    values(argv, known_only=True)
    _check(values)
    values.hosts = len(values.machines)
    # 0 devices: without --devices each process counts the devices of its machine.
    plan = run_plan.read(argv, values, 0, values.chip)
    return plan, make_script(plan, values, os.getcwd())


def main(argv: list[str]) -> int:
    """Prints the script and returns the exit code; argv[0] is the program's name."""

    def print_script() -> int:
        print(generate(argv, define())[1], end="")
        return 0

    return run_plan.run_cli(argv, __doc__, print_script)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
