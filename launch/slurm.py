"""Writes the roles of an experiment as a script for Slurm.

    python -m launch.slurm --experiment=FILE.py:VARIANT --workdir=DIR [--hosts=16] [--devices=8] [--partition=NAME] >run.sbatch
    sbatch run.sbatch

Roles with accelerators have nodes of their own, each role a component of a heterogeneous job; those without share --cpu_nodes
nodes (default 1) of --cpu_partition. --chip=h200 says what the accelerators are: the script then sets the options of XLA for them
(launch/xla_flags.py); what XLA_FLAGS, or LIBTPU_INIT_ARGS of TPUs, says where sbatch is called counts more. Each replica is a step
(srun), which the script starts when the roles that it needs answer, and starts again when it dies (one that hangs is not noticed).
The job ends with its main roles, or when a role has died too often. Before its time limit, or when Slurm pre-empts it, what trains
saves and the job goes back into the queue, unless it was cancelled. To go on with fewer nodes, write a script with fewer --hosts
for the same DIR (launch/run.py says what else). All nodes see DIR, which
gets the logs in DIR/roles, and have the environment that sbatch is called in. An experiment that lists no roles of its own is
one of training, on --hosts nodes with --devices accelerators each. An error of the user is one line and exit code 2.
"""

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from glm5_jax.core.placement import AGAIN, SELF_URL, Role, filled
from launch import topology, xla_flags
from launch.pods import TORUS

# In bash, because nothing but Slurm's commands and what the roles need is certain to be on a node.
_FUNCTIONS = r"""
# keep NAME MAIN LIMIT WINDOW DELAY LONGEST COMMAND...: runs a step, and again when it dies; only if MAIN is 1 it may end with
# code 0, or with code AGAIN, which puts the job back into the queue: its steps were told to stop, and have saved. More than LIMIT
# deaths within WINDOW seconds, or code 2 (a mistake of the user), end the job.
keep() {
  local name=$1 main=$2 limit=$3 window=$4 delay=$5 longest=$6 code pause deaths=() stopping=0
  shift 6
  trap stopping=1 TERM # which the step has, too; it is waited for
  while true; do
    echo "$(date +%T) $name started"
    code=0
    "$@" || code=$?
    echo "$(date +%T) $name ended with code $code"
    if ((stopping || main && code == 0)); then return; fi
    if ((main && code == again)); then
      kill -TERM $$
      return "$code"
    fi
    deaths+=("$SECONDS")
    while ((SECONDS - deaths[0] > window)); do deaths=("${deaths[@]:1}"); done
    if ((code == 2 || ${#deaths[@]} > limit)); then
      echo "error: $name died ${#deaths[@]} times within $window s, at last with code $code; $logs/$name.log ends:" >&2
      tail -n 20 "$logs/$name.log" >&2
      kill -USR1 $$
      return 1
    fi
    pause=$((delay << (${#deaths[@]} - 1)))
    sleep $((pause < longest ? pause : longest))
    if ((stopping)); then return; fi
  done
}

# stop: ends all steps, within their grace; what is left then dies with the job.
stop() {
  trap "" TERM
  kill -TERM 0
  local end=$((SECONDS + grace))
  while [[ $(jobs -rp) ]] && ((SECONDS < end)); do sleep 0.2; done
}

# requeue: ends the job, and has it start again, from its beginning; but not if somebody has cancelled it. A job that ended by
# itself while Slurm waits to pre-empt it would not start again.
requeue() {
  stop
  if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
  exit "$again"
}

# answers SECONDS URL...: waits until each URL is answered.
answers() {
  local began=$SECONDS seconds=$1 url
  shift
  for url in "$@"; do
    until python3 - "$url" 2>/dev/null <<'CODE'
import sys
import urllib.request

direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
direct.open(sys.argv[1], timeout=5)
CODE
    do
      if ((SECONDS - began > seconds)); then
        echo "error: $url did not answer within $seconds s" >&2
        exit 1
      fi
      sleep 1
    done
  done
}

trap requeue TERM # of Slurm, before the time limit of the job
trap 'exit 1' USR1
trap stop EXIT
"""


@dataclasses.dataclass(frozen=True)
class _Component:
    """Nodes of one kind. array: of bash, with their names. each: processes of its only role on a node; 0: of several roles."""

    array: str
    roles: Sequence[Role]
    num_nodes: int
    each: int

    def nodes(self, role: Role, index: int) -> list[str]:
        """The hosts of a replica's processes; a name between null characters is bash's to look up."""
        if role.hosts > 1:
            numbers = range(index * role.hosts, (index + 1) * role.hosts)
        else:
            numbers = [index // self.each if self.each else index % self.num_nodes]
        return [f"\0{self.array}[{number}]\0" for number in numbers]

    def share(self, role: Role) -> int:
        """Processes of a role on a node, at most."""
        return self.each or math.ceil(role.count / self.num_nodes)


def define() -> flags.FlagValues:
    """The program's flags, besides those of the experiment."""
    values = topology.define()
    options = dict(flag_values=values)
    flags.DEFINE_integer("devices_per_node", 8, "accelerators of a node", 1, **options)
    flags.DEFINE_enum("chip", None, list(xla_flags.FLAGS), "that accelerators are", **options)
    flags.DEFINE_integer("cpu_nodes", 1, "nodes for roles without accelerators", 1, **options)
    flags.DEFINE_string("partition", None, "of nodes with accelerators", **options)
    flags.DEFINE_string("cpu_partition", None, "of the others; --partition if not given", **options)
    flags.DEFINE_string("account", None, "that is charged", **options)
    flags.DEFINE_string("time", None, "limit of the job, as in 2-00:00:00", **options)
    return values


def script(run: topology.Topology, values: flags.FlagValues) -> str:
    """The text for sbatch; ValueError if a role cannot be placed so."""
    topology.check_ports(run.roles, "Slurm")
    components = _components(run.roles, values)
    grace = math.ceil(max(role.grace for role in run.roles))
    lines = [
        "#!/usr/bin/env bash",
        "# Written by launch/slurm.py.",
        f"#SBATCH --job-name={run.name}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=B:TERM@{grace}",
    ]
    for number, component in enumerate(components):
        lines += ["#SBATCH hetjob"] * (number > 0)
        lines += [f"#SBATCH --{name}={value}" for name, value in _asked(component, values)]
    logs = shlex.quote(str(run.workdir / "roles"))
    lines += [
        "",
        "set -euo pipefail",
        f"logs={logs} grace={grace} again={AGAIN}",
        'mkdir -p "$logs"',
    ]
    if values.chip:
        name = xla_flags.variable(values.chip)
        lines += [
            f"# Options of XLA for {values.chip} (launch/xla_flags.py); of two that differ the later one counts.",
            f'xla_flags="{xla_flags.words(values.chip)} ${{{name}:-}}"',
        ]
    lines.append(_FUNCTIONS)
    groups: dict[str, str] = {}
    for number, component in enumerate(components):
        groups[component.array] = f"_HET_GROUP_{number}" if len(components) > 1 else ""
        nodes = f'"$SLURM_JOB_NODELIST{groups[component.array]}"'
        lines.append(f"mapfile -t {component.array} < <(scontrol show hostnames {nodes})")
    home = {role.name: component for component in components for role in component.roles}
    addresses = {
        role.name: [
            f"http://{home[role.name].nodes(role, i)[0]}:{role.port + i}" for i in range(role.count)
        ]
        for role in run.roles
    }
    by_name, awaited = {role.name: role for role in run.roles}, set()
    for role in run.roles:
        lines.append("")
        for needed in (by_name[name] for name in role.needs if name not in awaited):
            awaited.add(needed.name)
            if needed.serves and needed.health:
                urls = [_quoted(url + needed.health.path) for url in addresses[needed.name]]
                lines.append(f"answers {math.ceil(needed.start_seconds)} {' '.join(urls)}")
        words = topology.words_of(role, addresses)
        for index in range(role.count):
            words[SELF_URL] = addresses[role.name][index]
            group = groups[home[role.name].array].rpartition("_")[2]
            lines += _step(role, index, home[role.name], group, words, values.chip)
    number = sum(role.count for role in run.roles if role.main)
    lines += ["", "# The first that ends is a main role, or one that is given up."]
    lines += [
        f"for ((left = {number}; left > 0; left--)); do wait -n; done" if number else "wait -n"
    ]
    return "\n".join(lines) + "\n"


def _components(roles: Sequence[Role], values: flags.FlagValues) -> list[_Component]:
    """Nodes without accelerators first: the script itself runs on the first node of the first component."""
    there, found = values.devices_per_node, []
    plain = [role for role in roles if not role.devices and role.hosts == 1]
    taken: dict[int, str] = {}
    for role in plain:
        for port in range(role.port, role.port + role.count) if role.port else ():
            if taken.setdefault(port, role.name) != role.name:
                raise ValueError(
                    f"roles {taken[port]} and {role.name} share nodes and port {port}; give one another"
                )
    if plain:
        found.append(_Component("nodes", plain, values.cpu_nodes, 0))
    for role in (role for role in roles if role not in plain):
        if role.devices > there:
            raise ValueError(
                f"role {role.name} asks for {role.devices} devices of a node, --devices_per_node is {there}; give it "
                "more hosts"
            )
        each = min(there // role.devices, role.count) if role.hosts == 1 else 1
        if each > 1 and values.chip in TORUS:
            raise ValueError(
                f"{each} replicas of role {role.name} share a node of {values.chip}, which Slurm does not divide; give each "
                f"its node with --devices_per_node={role.devices}"
            )
        if each > 1 and not (role.memory and role.cpus):
            raise ValueError(
                f"{each} replicas of role {role.name} share a node, and Slurm must know what each has of it; set its "
                "memory and cpus"
            )
        num_nodes = math.ceil(role.count * role.hosts / each)
        found.append(_Component(f"nodes_{role.name.replace('-', '_')}", [role], num_nodes, each))
    return found


def _asked(component: _Component, values: flags.FlagValues) -> list[tuple[str, object]]:
    """Options of sbatch for a component, without those that are left to Slurm."""
    shares = [(component.share(role), role) for role in component.roles]
    memory = sum(number * role.memory for number, role in shares)
    partition = values.partition if component.each else values.cpu_partition or values.partition
    gpus = 0 if values.chip in TORUS else sum(number * role.devices for number, role in shares)
    options = {
        "nodes": component.num_nodes,
        "ntasks-per-node": sum(number for number, _ in shares),
        "cpus-per-task": max(role.cpus for _, role in shares),
        "gpus-per-node": gpus,
        "mem": f"{memory}G" if memory else "",
        "partition": partition,
        "account": values.account,
        "time": values.time,
    }
    return [(name, value) for name, value in options.items() if value]


def _step(
    role: Role, index: int, component: _Component, group: str, urls, chip: str | None
) -> list[str]:
    """The lines that start a replica, and keep it running."""
    name, limits = f"{role.name}-{index}", role.restarts
    options = {
        "het-group": group,
        "nodelist": ",".join(component.nodes(role, index)),
        "nodes": role.hosts,
        "ntasks": role.hosts,
        "cpus-per-task": role.cpus,
        "gpus-per-task": 0 if chip in TORUS else role.devices,
        "mem": f"{role.memory}G" if role.memory else "",
        "output": f"\0logs\0/{name}.log",
    }
    # A step has all cores of a node, which no other then has, unless it is told which are enough (exact) or that others
    # have them too (overlap).
    shares = ["--overlap"] if not component.each else ["--exact"] if component.each > 1 else []
    flags = [*shares, "--open-mode=append", "--unbuffered", "--kill-on-bad-exit=1"]
    step = [*(f"--{k}={v}" for k, v in options.items() if v), *flags]
    own = {
        "python": "python3",
        "index": str(index),
        "host": "0.0.0.0",
        "port": str(role.port + index),
        "ready": f"\0logs\0/{name}.ready",
        "distributed": "auto",  # jax knows Slurm's steps
    }
    given = dict(role.env)
    if chip and role.devices:
        variable = xla_flags.variable(chip)
        given[variable] = f"\0xla_flags\0 {given.get(variable, '')}".strip()
    env = [f"{k}={v}" for k, v in given.items()]
    command = [*(["env", *env] if env else []), *filled(role.argv, own | urls)]
    seconds = [math.ceil(x) for x in (limits.window, limits.delay, limits.longest_delay)]
    return [
        f"keep {name} {int(role.main)} {limits.limit} {' '.join(map(str, seconds))} \\",
        f"  srun {' '.join(map(_quoted, step))} \\",
        f"  {' '.join(map(_quoted, command))} &",
    ]


def _quoted(text: str) -> str:
    """A word of bash; what stands between null characters is looked up there."""
    if "\0" not in text:
        return shlex.quote(text)
    literal, looked_up = text.split("\0")[::2], text.split("\0")[1::2]
    literal = [re.sub(r'[\\"$`]', r"\\\g<0>", part) for part in literal]
    names = [f"${{{name}}}" for name in looked_up] + [""]
    return f'"{"".join(part + name for part, name in zip(literal, names))}"'


def main(argv: list[str]) -> int:
    """Exit code of the program with these arguments (the program's name first)."""
    values = define()

    def answer() -> int:
        values(argv, known_only=True)
        for name in ("slices", "tpu_topology"):
            if values[name].present:
                raise ValueError(f"--{name} is not for Slurm, whose nodes are given; leave it out")
        for name in ("partition", "cpu_partition", "account", "time"):
            if re.search(r"\s", values[name].value or ""):
                raise ValueError(f"--{name}={values[name].value!r} is not one word")
        print(script(topology.read(argv, values, chip=values.chip), values), end="")
        return 0

    return topology.asked(argv, __doc__, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
