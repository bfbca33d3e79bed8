"""Writes the command that each machine of a list runs, for hosts that no scheduler knows.

    python -m launch.machines --experiment=FILE.py:VARIANT --workdir=/DIR --machines=a,b,c [--port=8476] >run.sh
    bash run.sh

Each line is a machine's, by ssh; run it any other way as well. The first machine is where the others meet, at --port. All see DIR, and
have this repository, with an environment whose python3 runs it, in the folder that this is started in. A process trains with all
accelerators of its machine, under the options of XLA for --chip=h200 (launch/xla_flags.py) if that is said, behind which those of the
machine count more; a mesh that does not fit the --devices=8 that each has, if that is said, is an error here. When one dies, so do
the others, within minutes, and the same lines go on from the last checkpoint: with fewer machines too (launch/run.py says what
else). The script ends when all have, with an exit code of one that failed; what is to stop is told so on its machine. An error of the
user is one line and exit code 2.
"""

import os
import re
import shlex
import sys

from absl import flags

from glm5_jax.core.placement import filled
from launch import topology, xla_flags

_NAME = re.compile(
    r"([a-z_][a-z0-9_-]*@)?([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])"
)


def define() -> flags.FlagValues:
    """The program's flags, besides those of the experiment."""
    values = topology.define()
    flags.DEFINE_list("machines", [], "names or addresses, with commas between", flag_values=values)
    flags.DEFINE_integer("port", 8476, "where they meet", 1, 65535, flag_values=values)
    chips = list(xla_flags.FLAGS)
    flags.DEFINE_enum("chip", None, chips, "that their accelerators are", flag_values=values)
    return values


def script(run: topology.Topology, values: flags.FlagValues, folder: str) -> str:
    """The lines, for machines that have the repository in `folder`; ValueError if a role cannot be placed so."""
    [*others, role] = run.roles
    machines = values.machines
    meeting = machines[0].rpartition("@")[2]
    if others or role.count > 1 or role.hosts != len(machines):
        raise ValueError(
            f"{run.name} is not one program that trains, which alone a list of machines can take; launch/slurm.py, gke.py and "
            "on_ray.py place others"
        )
    lines, options = ["#!/usr/bin/env bash", "# Written by launch/machines.py."], ""
    if values.chip:
        name = xla_flags.variable(values.chip)
        options = f'export {name}="{xla_flags.words(values.chip)} ${{{name}:-}}" && '
    for number, machine in enumerate(machines):
        own = {
            "python": "python3",
            "distributed": f"{meeting}:{values.port},{len(machines)},{number}",
        }
        command = f"cd {shlex.quote(folder)} && {options}exec {shlex.join(filled(role.argv, own))}"
        host = machine.replace("[", "").replace("]", "")
        lines += [f"ssh {host} {shlex.quote(command)} &", "started+=($!)"]
    lines += ["code=0", 'for process in "${started[@]}"; do wait "$process" || code=$?; done']
    return "\n".join([*lines, "exit $code"]) + "\n"


def _check(values: flags.FlagValues) -> None:
    machines = values.machines
    if not machines:
        raise ValueError("--machines is not given; use --machines=NAME,NAME")
    for machine in machines:
        if not _NAME.fullmatch(machine):
            raise ValueError(
                f"--machines has {machine!r}; give names, or addresses of IPv4, or of IPv6 in brackets, or USER@ and one"
            )
    if len({machine.rpartition("@")[2].lower() for machine in machines}) < len(machines):
        raise ValueError(
            f"--machines={','.join(machines)} names one twice; each machine has one process"
        )
    for name in ("hosts", "tpu_topology", "slices"):
        if values[name].present:
            raise ValueError(f"--{name} is not for lists of machines; leave it out")


def main(argv: list[str]) -> int:
    """Exit code of the program with these arguments (the program's name first)."""
    values = define()

    def answer() -> int:
        values(argv, known_only=True)
        _check(values)
        values.hosts = len(values.machines)
        # Of machines whose --devices are not said a process counts its own.
        run = topology.read(argv, values, 0, values.chip)
        print(script(run, values, os.getcwd()), end="")
        return 0

    return topology.asked(argv, __doc__, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
