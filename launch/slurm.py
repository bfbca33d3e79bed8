"""Writes the roles of an experiment as a script for Slurm.

    python -m launch.slurm --experiment=FILE.py:VARIANT --workdir=DIR [--hosts=16] [--devices=8] [--partition=NAME] >run.sbatch
    sbatch run.sbatch

- Nodes: each role with accelerators is one component of a heterogeneous job, on separate nodes. The roles without
  accelerators share --cpu_nodes nodes (default 1) of --cpu_partition.
- Options: --chip=h200 names the kind of the accelerators, and the script sets the XLA options for it
  (launch/xla_flags.py). XLA_FLAGS, or LIBTPU_INIT_ARGS for TPUs, of sbatch's environment takes precedence.
- Job: --account=NAME is charged, and --time=2-00:00:00 is the time limit. --devices_per_node (default 8) is the number of
  accelerators of a node.
- Steps: each replica is a step (srun). The script starts it once the roles that it needs are healthy, and restarts it
  when it dies. A replica that hangs is not detected.
- End: the job ends with its main roles, or when a role has died too often.
- Preemption: before the time limit, or when Slurm preempts the job, training saves and the job is requeued, unless it
  was cancelled.
- Fewer nodes: to continue on fewer nodes, write a script with fewer --hosts for the same DIR (the conditions are in
  launch/run.py).
- Files: all nodes see DIR and have the environment in which sbatch is called. Logs are in DIR/roles.

An experiment that defines no `roles` is one training role on --hosts nodes with --devices accelerators each. A user's
error is one line and exit code 2.
"""

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from glm5_jax.runtime.placement import EXIT_RESTART, SELF_URL, Role, substitute_words
from launch import run_plan, xla_flags
from launch.pods import TORUS

# In bash, because a node is only certain to have Slurm's commands and the programs of the roles.
_FUNCTIONS = r"""
# supervise NAME MAIN LIMIT WINDOW DELAY MAX_DELAY COMMAND...: runs a step and restarts it when it dies. With MAIN=1 the step
# may end with code 0, or with code EXIT_RESTART, which requeues the job (its steps got SIGTERM and have saved). More than
# LIMIT deaths within WINDOW seconds, or code 2 (a user's error), end the job.
supervise() {
  local name=$1 main=$2 limit=$3 window=$4 delay=$5 max_delay=$6 code pause deaths=() stopping=0 step=
  shift 6
  trap 'stopping=1; kill -TERM $step 2>/dev/null || true' TERM
  while true; do
    echo "$(date +%T) $name started"
    "$@" &
    step=$! code=0
    wait "$step" || code=$?
    while kill -0 "$step" 2>/dev/null; do # a signal has ended the wait
      code=0
      wait "$step" || code=$?
    done
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
    sleep $((pause < max_delay ? pause : max_delay)) &
    step=$!
    wait "$step" || true
    if ((stopping)); then return; fi
  done
}

# stop: sends all steps SIGTERM and waits up to their grace period; the rest is killed with the job. Main steps are first,
# because they need the others until they have saved.
stop() {
  trap "" TERM
  local end=$((SECONDS + grace)) pid
  for pid in "${main_steps[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${main_steps[@]}"; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < end)); do sleep 0.2; done
  done
  for pid in $(jobs -rp); do kill -TERM "$pid" 2>/dev/null || true; done
  while [[ $(jobs -rp) ]] && ((SECONDS < end)); do sleep 0.2; done
}

# requeue: ends the job and requeues it, unless it was cancelled. Slurm itself does not restart a job that ends while it waits
# to preempt it.
requeue() {
  stop
  if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
  exit "$again"
}

# wait_until_healthy SECONDS URL...: waits until a GET of each URL succeeds.
wait_until_healthy() {
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

main_steps=()
trap requeue TERM # Slurm sends it before the time limit of the job
trap 'exit 1' USR1
trap stop EXIT
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Component:
    """Nodes of one kind in a heterogeneous job.

    Attributes:
      array: bash array with the names of the nodes.
      roles: roles that run on the nodes.
      num_nodes: number of nodes.
      replicas_per_node: replicas on a node, of the only role; 0: several roles share the nodes.
    """

    array: str
    roles: Sequence[Role]
    num_nodes: int
    replicas_per_node: int

    def nodes(self, role: Role, index: int) -> list[str]:
        """Returns the hosts of a replica's processes; bash expands the names between null characters."""
        if role.hosts > 1:
            numbers = range(index * role.hosts, (index + 1) * role.hosts)
        else:
            numbers = [
                index // self.replicas_per_node
                if self.replicas_per_node
                else index % self.num_nodes
            ]
        return [f"\0{self.array}[{number}]\0" for number in numbers]

    def processes_per_node(self, role: Role) -> int:
        """Returns the maximum number of processes of a role on a node."""
        return self.replicas_per_node or math.ceil(role.count / self.num_nodes)


def define() -> flags.FlagValues:
    """Returns the program's flags, in addition to the experiment's."""
    values = run_plan.define()
    flags.DEFINE_integer("devices_per_node", 8, "accelerators of a node", 1, flag_values=values)
    flags.DEFINE_enum(
        "chip", None, list(xla_flags.FLAGS), "kind of accelerators", flag_values=values
    )
    flags.DEFINE_integer(
        "cpu_nodes", 1, "nodes for roles without accelerators", 1, flag_values=values
    )
    flags.DEFINE_string("partition", None, "partition with accelerators", flag_values=values)
    flags.DEFINE_string(
        "cpu_partition", None, "partition without; default: --partition", flag_values=values
    )
    flags.DEFINE_string("account", None, "account that is charged", flag_values=values)
    flags.DEFINE_string(
        "time", None, "time limit of the job, such as 2-00:00:00", flag_values=values
    )
    return values


def make_script(plan: run_plan.RunPlan, values: flags.FlagValues) -> str:
    """Returns the script for sbatch. Raises ValueError if Slurm cannot place a role."""
    run_plan.check_ports(plan.roles, "Slurm")
    run_plan.check_reach(plan.config, "Slurm")
    # Options of the job and of its components.
    components = _components(plan.roles, values)
    grace = math.ceil(max(role.grace_s for role in plan.roles))
    lines = [
        "#!/usr/bin/env bash",
        "# Written by launch/slurm.py.",
        f"#SBATCH --job-name={plan.name}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=B:TERM@{grace}",
    ]
    for number, component in enumerate(components):
        lines += ["#SBATCH hetjob"] * (number > 0)
        lines += [f"#SBATCH --{name}={value}" for name, value in _sbatch_options(component, values)]
    # Variables, functions and the names of the nodes.
    logs = shlex.quote(str(plan.workdir / "roles"))
    lines += [
        "",
        "set -euo pipefail",
        f"logs={logs} grace={grace} again={EXIT_RESTART}",
        'mkdir -p "$logs"',
    ]
    if values.chip:
        name = xla_flags.flags_variable(values.chip)
        lines += [
            f"# XLA options for {values.chip} (launch/xla_flags.py); the last value of an option counts.",
            f'xla_flags="{xla_flags.format_flags(values.chip)} ${{{name}:-}}"',
        ]
    lines.append(_FUNCTIONS)
    group_suffixes: dict[str, str] = {}
    for number, component in enumerate(components):
        group_suffixes[component.array] = f"_HET_GROUP_{number}" if len(components) > 1 else ""
        nodes = f'"$SLURM_JOB_NODELIST{group_suffixes[component.array]}"'
        lines.append(f"mapfile -t {component.array} < <(scontrol show hostnames {nodes})")
    component_of = {role.name: component for component in components for role in component.roles}
    addresses = {
        role.name: [
            f"http://{component_of[role.name].nodes(role, i)[0]}:{role.port + i}"
            for i in range(role.count)
        ]
        for role in plan.roles
    }
    # A step for each replica, in the order of the roles, each after the servers that it needs are healthy.
    by_name, awaited = {role.name: role for role in plan.roles}, set()
    for role in plan.roles:
        lines.append("")
        for needed in (by_name[name] for name in role.needs if name not in awaited):
            awaited.add(needed.name)
            if needed.serves and needed.health:
                urls = [_quote(url + needed.health.path) for url in addresses[needed.name]]
                lines.append(
                    f"wait_until_healthy {math.ceil(needed.start_timeout_s)} {' '.join(urls)}"
                )
        words = run_plan.resolve_addresses(role, addresses)
        for index in range(role.count):
            words[SELF_URL] = addresses[role.name][index]
            group = group_suffixes[component_of[role.name].array].rpartition("_")[2]
            lines += _step(role, index, component_of[role.name], group, words, values.chip)
    number = sum(role.count for role in plan.roles if role.main)
    lines += [
        "",
        "# A supervisor ends with a finished main role, or with a role that died too often.",
    ]
    lines += [
        f"for ((left = {number}; left > 0; left--)); do wait -n; done" if number else "wait -n"
    ]
    return "\n".join(lines) + "\n"


def _components(roles: Sequence[Role], values: flags.FlagValues) -> list[_Component]:
    """Returns the components, that without accelerators first, because the script runs on the first node."""
    devices_per_node, components = values.devices_per_node, []
    cpu_roles = [role for role in roles if not role.devices and role.hosts == 1]
    role_of_port: dict[int, str] = {}
    for role in cpu_roles:
        for port in range(role.port, role.port + role.count) if role.port else ():
            if role_of_port.setdefault(port, role.name) != role.name:
                raise ValueError(
                    f"roles {role_of_port[port]} and {role.name} share nodes and port {port}; give one of them another port"
                )
    if cpu_roles:
        components.append(
            _Component(
                array="nodes", roles=cpu_roles, num_nodes=values.cpu_nodes, replicas_per_node=0
            )
        )
    for role in (role for role in roles if role not in cpu_roles):
        if role.devices > devices_per_node:
            raise ValueError(
                f"role {role.name} asks for {role.devices} devices of a node, --devices_per_node is {devices_per_node}; give it "
                "more hosts"
            )
        replicas_per_node = (
            min(devices_per_node // role.devices, role.count) if role.hosts == 1 else 1
        )
        if replicas_per_node > 1 and values.chip in TORUS:
            raise ValueError(
                f"{replicas_per_node} replicas of role {role.name} share a node of {values.chip}, which Slurm does not divide; give each of them "
                f"a node with --devices_per_node={role.devices}"
            )
        if replicas_per_node > 1 and not (role.memory_gib and role.cpus):
            raise ValueError(
                f"{replicas_per_node} replicas of role {role.name} share a node, and Slurm must know the share of each; set its "
                "memory and cpus"
            )
        num_nodes = math.ceil(role.count * role.hosts / replicas_per_node)
        components.append(
            _Component(
                array=f"nodes_{role.name.replace('-', '_')}",
                roles=[role],
                num_nodes=num_nodes,
                replicas_per_node=replicas_per_node,
            )
        )
    return components


def _sbatch_options(component: _Component, values: flags.FlagValues) -> list[tuple[str, object]]:
    """Returns the sbatch options of a component; options without a value are left out."""
    counts = [(component.processes_per_node(role), role) for role in component.roles]
    memory = sum(number * role.memory_gib for number, role in counts)
    partition = (
        values.partition
        if component.replicas_per_node
        else values.cpu_partition or values.partition
    )
    gpus = 0 if values.chip in TORUS else sum(number * role.devices for number, role in counts)
    options = {
        "nodes": component.num_nodes,
        "ntasks-per-node": sum(number for number, _ in counts),
        "cpus-per-task": max(role.cpus for _, role in counts),
        "gpus-per-node": gpus,
        "mem": f"{memory}G" if memory else "",
        "partition": partition,
        "account": values.account,
        "time": values.time,
    }
    return [(name, value) for name, value in options.items() if value]


def _step(
    role: Role, index: int, component: _Component, group: str, addresses, chip: str | None
) -> list[str]:
    """Returns the lines that start a replica and restart it when it dies."""
    name, limits = f"{role.name}-{index}", role.restarts
    options = {
        "het-group": group,
        "nodelist": ",".join(component.nodes(role, index)),
        "nodes": role.hosts,
        "ntasks": role.hosts,
        "cpus-per-task": role.cpus,
        "gpus-per-task": 0 if chip in TORUS else role.devices,
        "mem": f"{role.memory_gib}G" if role.memory_gib else "",
        "output": f"\0logs\0/{name}.log",
    }
    # A step reserves all cores of a node unless --exact limits it to those that it requests, or --overlap lets it share
    # them.
    shares = (
        ["--overlap"]
        if not component.replicas_per_node
        else ["--exact"]
        if component.replicas_per_node > 1
        else []
    )
    srun_flags = [*shares, "--open-mode=append", "--unbuffered", "--kill-on-bad-exit=1"]
    step = [*(f"--{k}={v}" for k, v in options.items() if v), *srun_flags]
    words = {
        "python": "python3",
        "index": str(index),
        "host": "0.0.0.0",
        "port": str(role.port + index),
        "ready": f"\0logs\0/{name}.ready",
        "distributed": "auto",  # jax detects Slurm's steps
    }
    env_values = dict(role.env)
    if chip and role.devices:
        variable = xla_flags.flags_variable(chip)
        env_values[variable] = f"\0xla_flags\0 {env_values.get(variable, '')}".strip()
    env = [f"{k}={v}" for k, v in env_values.items()]
    command = [*(["env", *env] if env else []), *substitute_words(role.argv, words | addresses)]
    limits_s = [math.ceil(x) for x in (limits.window_s, limits.initial_delay_s, limits.max_delay_s)]
    record = ["main_steps+=($!)"] if role.main else []
    return [
        f"supervise {name} {int(role.main)} {limits.max_restarts} {' '.join(map(str, limits_s))} \\",
        f"  srun {' '.join(map(_quote, step))} \\",
        f"  {' '.join(map(_quote, command))} &",
        *record,
    ]


def _quote(text: str) -> str:
    """Returns the text as a word of bash, which expands the names between null characters."""
    if "\0" not in text:
        return shlex.quote(text)
    literal, looked_up = text.split("\0")[::2], text.split("\0")[1::2]
    literal = [re.sub(r'[\\"$`]', r"\\\g<0>", part) for part in literal]
    names = [f"${{{name}}}" for name in looked_up] + [""]
    return f'"{"".join(part + name for part, name in zip(literal, names))}"'


def generate(argv: list[str], values: flags.FlagValues) -> tuple[run_plan.RunPlan, str]:
    """Returns the run plan of the program's arguments and its script. Raises ValueError or flags.Error for invalid ones."""
    values(argv, known_only=True)
    for name in ("slices", "tpu_topology"):
        if values[name].present:
            raise ValueError(f"--{name} is not for Slurm, which assigns the nodes; leave it out")
    for name in ("partition", "cpu_partition", "account", "time"):
        if re.search(r"\s", values[name].value or ""):
            raise ValueError(f"--{name}={values[name].value!r} is not one word")
    plan = run_plan.read(argv, values, chip=values.chip)
    return plan, make_script(plan, values)


def main(argv: list[str]) -> int:
    """Prints the script and returns the exit code; argv[0] is the program's name."""

    def print_script() -> int:
        print(generate(argv, define())[1], end="")
        return 0

    return run_plan.run_cli(argv, __doc__, print_script)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
