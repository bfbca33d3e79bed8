"""Rehearses a run: checks a recipe at its real size, then starts its real commands on emulated hosts with a small model.

    python -m launch.rehearse pretrain:glm5 --on=slurm --hosts=256 --devices=4 --chip=v5p --workdir=/DIR \\
        --data.sources="[{'kind': 'jsonl', 'path': '/DIR/texts/*.jsonl'}]"
    python -m launch.rehearse sft:glm5,mixed --on=gke --image=IMAGE --claim=NAME --accelerator=tpu-v5p-slice --hosts=256 \\
        --devices=4 --tpu_topology=8x8x16 --workdir=/DIR/sft --mount=/DIR --checkpoint=/DIR/sparse \\
        --data.sources="[{'chats': '/DIR/chats/*.jsonl'}]"

--on names the launcher: slurm, gke, or machines (launch/ssh_commands.py). The other flags are those of the launcher.

1. The plan is checked at its real size: hosts, chips, meshes, ports, addresses, folders, inputs, and the memory of chips and
   hosts. With --check_only this is all.
2. The launcher writes the script or manifest again, for at most --max_processes processes of a replica and replicas of a
   role. The commands must be the same words.
3. All programs start on emulated hosts: network namespaces of this machine, with the host names of the pods or nodes. A
   stand-in for srun, or for the controller of JobSets, starts them. Models, data, batches and devices are small ones
   (launch/rehearsal/substitution.py), and are listed.
4. The run makes two steps. Then all of it gets SIGTERM, saves, starts again, and makes two more steps. A server answers a
   request, stops, and answers another one after its restart.

A process that dies in between is a failure. The output is in --folder (default: workdir/rehearsal/NAME-LAUNCHER).

The exit code is 0 after a successful rehearsal, 1 if a check or the rehearsal has failed, and 2 for a user's error. Hosts need
Linux, util-linux, iproute2, and root or user namespaces.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from absl import flags

from glm5_jax import presets
from glm5_jax.metrics import metrics_log
from launch import command_line, gke, rehearsal, run_plan, slurm, ssh_commands
from launch.layouts import format_table
from launch.rehearsal import arithmetic, checkpoints
from launch.rehearsal.arithmetic import ERROR, GB, Cluster, PlanFinding
from launch.rehearsal.hosts import EmulatedHosts, enter_namespaces
from launch.rehearsal.job import (
    STEPS,
    Job,
    RehearsalFailed,
    Times,
    run_parts,
    run_server_parts,
)
from launch.rehearsal.job_set_run import JobSetRun, list_pods
from launch.rehearsal.slurm_job import SlurmJob, parse_script
from launch.rehearsal.ssh_job import SshJob, machine_name
from launch.rehearsal.substitution import Rehearsal, differences, small_model, small_topology

LAUNCHERS: dict[str, ModuleType] = {"slurm": slurm, "gke": gke, "machines": ssh_commands}
# Options of XLA that save a third of the time of compilation, for programs that need not be fast.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
SERVERS = ("serve", "decode")  # roles of experiments/serve.py that clients use
_REPLACED = ("hosts", "machines", "mount", "tpu_topology", "workdir")


def define(launcher: ModuleType) -> flags.FlagValues:
    """Returns the program's flags, with those of a launcher, in addition to the experiment's."""
    values = launcher.define()
    flags.DEFINE_enum("on", "slurm", list(LAUNCHERS), "launcher", flag_values=values)
    flags.DEFINE_bool("check_only", False, "check the plan and start nothing", flag_values=values)
    flags.DEFINE_integer(
        "max_processes",
        2,
        "maximum processes of a replica, and replicas of a role",
        2,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "host_memory_gib", 0, "memory of a host, in GiB; 0: not checked", 0, flag_values=values
    )
    flags.DEFINE_float(
        "timeout_s", 3600.0, "time limit of each part, in seconds", 1, flag_values=values
    )
    flags.DEFINE_string("folder", None, "new folder for the output", flag_values=values)
    return values


def main(argv: list[str]) -> int:
    """Rehearses the run and returns the exit code; argv[0] is the program's name."""
    return run_plan.run_cli(argv, __doc__, lambda: rehearse(argv))


def rehearse(argv: list[str]) -> int:
    """Checks and rehearses the run of the program's arguments. Returns the exit code. Raises ValueError for invalid ones."""
    launcher = LAUNCHERS[_launcher_name(argv)]
    values = define(launcher)
    argv = command_line.expand(argv, values)
    values(argv, known_only=True)
    if not values.check_only:
        enter_namespaces(["-m", "launch.rehearse", *argv[1:]])
    plan, output = launcher.generate(argv, values)
    memory = list(arithmetic.check_memory(plan.config, plan.roles, cluster_of(plan, values)))
    findings = list(check_plan(plan, output, values, [finding for _, finding in memory]))
    print(format_findings(findings), flush=True)
    if any(finding.level == ERROR for finding in findings):
        return 1
    if values.check_only:
        return 0
    if names := [name for name, _ in arithmetic.stages_of(plan.config) if name]:
        raise ValueError(
            f"{plan.name} has {len(names)} stages, and a rehearsal starts one; rehearse each by its recipe, or use --check_only"
        )
    if several := [role.name for role in plan.roles if role.slices > 1]:
        raise ValueError(
            f"role {several[0]} has several slices; rehearse it with one, or use --check_only"
        )
    folder = pathlib.Path(values.folder or f"workdir/rehearsal/{plan.name}-{values.on}").absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--folder={folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        device_bytes = {finding.role: uses.used_bytes for uses, finding in memory}
        start_small(plan, argv, values, launcher, folder, device_bytes)
    except RehearsalFailed as error:
        print(f"failed: {error}")
        return 1
    return 0


def _launcher_name(argv: Sequence[str]) -> str:
    """Returns the value of --on, which decides about the other flags. Raises ValueError for an unknown launcher."""
    names = [word.partition("=")[2] for word in argv if word.startswith(("--on=", "-on="))]
    name = names[-1] if names else "slurm"
    if name not in LAUNCHERS:
        raise ValueError(f"--on={name} is not a launcher; use one of {', '.join(LAUNCHERS)}")
    return name


# -- checks at the real size ------------------------------------------------------------------------------


def check_plan(
    plan: run_plan.RunPlan,
    output: Any,
    values: flags.FlagValues,
    memory_findings: Sequence[PlanFinding],
) -> Iterator[PlanFinding]:
    """Yields the findings of all checks of a plan.

    output: the launcher's script or manifest. memory_findings: findings of `arithmetic.check_memory`.
    """
    cluster = cluster_of(plan, values)
    yield from arithmetic.check_hosts(plan.roles, cluster)
    yield from arithmetic.check_meshes(plan.config, cluster)
    yield from arithmetic.check_ports(plan.roles, cluster)
    commands, servers = commands_of(plan, output, values.on)
    # URLs in flags of the user are of other systems.
    user_words = {word for role in plan.roles for word in role.argv}
    written = {name: [w for w in words if w not in user_words] for name, words in commands.items()}
    yield from arithmetic.check_addresses(written, servers)
    yield from arithmetic.check_folders(plan.config, plan.workdir, cluster)
    yield from arithmetic.check_inputs(plan.config)
    yield from memory_findings
    yield from arithmetic.check_push(plan.config, cluster)


def cluster_of(plan: run_plan.RunPlan, values: flags.FlagValues) -> Cluster:
    """Returns the machines that the launcher's flags name."""
    if values.on == "gke":
        folder = pathlib.PurePath(values.mount or plan.workdir)
        return Cluster("gke", gke.CHIPS.get(values.accelerator), folder, values.host_memory_gib)
    return Cluster(values.on, values.chip, None, values.host_memory_gib)


def commands_of(
    plan: run_plan.RunPlan, output: Any, scheduler: str
) -> tuple[dict[str, Sequence[str]], dict[str, int]]:
    """Returns the command of each process in a launcher's output, and the number of servers at each HOST:PORT."""
    roles = {role.name: role for role in plan.roles}
    commands: dict[str, Sequence[str]] = {}
    servers: list[tuple[str, int]] = []
    if scheduler == "gke":
        for pod in list_pods(output):
            commands[pod.name] = pod.command
            servers += [(pod.domain, pod.port)] if pod.port else []
    elif scheduler == "slurm":
        for step in parse_script(output).steps:
            commands[step.name] = step.command
            role, index = roles[step.role], int(step.name.rpartition("-")[2])
            servers += [(step.nodes[0], role.port + index)] if role.port else []
    return commands, arithmetic.count_servers(servers)


def format_findings(findings: Sequence[PlanFinding]) -> str:
    """Returns a table of the findings, the errors first."""
    rows = sorted(findings, key=lambda finding: finding.level != ERROR)
    return format_table(("level", "subject", "role", "finding"), rows)


# -- the small run ----------------------------------------------------------------------------------------


def start_small(
    plan: run_plan.RunPlan,
    argv: list[str],
    values: flags.FlagValues,
    launcher: ModuleType,
    folder: pathlib.Path,
    device_bytes: Mapping[str, int],
) -> None:
    """Runs the small form of a plan through its two parts, and prints what it is and how long it took.

    device_bytes: memory of a device of each role at the real size.

    Raises RehearsalFailed.
    """
    # The small form, whose sizes all programs read from one file.
    file, options = folder / "rehearsal.json", make_rehearsal(plan, values)
    options.write(file)
    os.environ[rehearsal.VARIABLE] = str(file)
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILATION]).strip()
    small_values = define(launcher)
    small_argv = reduced_argv(argv, plan, values, folder / "run")
    small, output = launcher.generate(small_argv, small_values)
    check_commands(plan, small)
    stages = arithmetic.stages_of(small.config)
    model = stages[0][1].model if stages else small_model(presets.tiny())
    checkpoint, served = checkpoints.write(plan.config, model, folder)
    options = dataclasses.replace(options, checkpoint=checkpoint, served_checkpoint=served)
    options.write(file)
    small, output = launcher.generate(small_argv, small_values)
    print(format_replacements(plan, small), flush=True)
    small.check()
    # The run.
    with EmulatedHosts(host_names(output, small_values), folder) as hosts:
        job = make_job(small, output, small_values, hosts, folder)
        try:
            if stages:
                times = run_parts(job, small.workdir, options, file, values.timeout_s)
            else:
                url, is_split = server_of(small, output, values.on), len(small.roles) > 1
                times = run_server_parts(job, url, values.timeout_s, is_split)
            if getattr(small.config, "has_engine_processes", False):
                check_pushes(small.workdir)
        finally:
            job.kill()
        started = job.num_processes
    expected = {role.name: role.count * role.hosts for role in small.roles}
    if started != expected:
        raise RehearsalFailed(f"processes by role are {started}, and the plan has {expected}")
    print(format_times(plan, small, started, times, device_bytes))


def make_rehearsal(plan: run_plan.RunPlan, values: flags.FlagValues) -> Rehearsal:
    """Returns the sizes of the small form of a plan."""
    chip, limit = cluster_of(plan, values).chip, values.max_processes
    by_name = {role.name: role for role in plan.roles}

    def emulated_devices(*names: str) -> int:
        role = next((by_name[name] for name in names if name in by_name), None)
        if role is None:
            return 1
        return arithmetic.num_devices(min(role.hosts, limit) * max(1, role.devices), chip)

    return Rehearsal(
        max_processes=limit,
        devices=emulated_devices(arithmetic.TRAIN),
        engine_devices=emulated_devices(arithmetic.ENGINE, *SERVERS),
        steps=10**6,
    )


def server_of(plan: run_plan.RunPlan, output: Any, scheduler: str) -> str:
    """Returns the URL of the server in a launcher's output that clients use."""
    role = next(role for role in plan.roles if role.name in SERVERS)
    if scheduler == "gke":
        pod = next(pod for pod in list_pods(output) if pod.role == role.name)
        return f"http://{pod.domain}:{pod.port}"
    step = next(step for step in parse_script(output).steps if step.role == role.name)
    return f"http://{step.nodes[0]}:{role.port}"


def reduced_argv(
    argv: Sequence[str], plan: run_plan.RunPlan, values: flags.FlagValues, workdir: pathlib.Path
) -> list[str]:
    """Returns the arguments with fewer hosts, a topology of their chips, and another workdir.

    Roles that an experiment lists are reduced by `substitution`.
    """
    limit = values.max_processes
    remaining = [word for word in argv if word.lstrip("-").partition("=")[0] not in _REPLACED]
    reduced = [*remaining, f"--workdir={workdir}"]
    if values["hosts"].present:
        reduced.append(f"--hosts={min(values.hosts, limit)}")
    if values.on == "machines":
        reduced.append(f"--machines={','.join(values.machines[:limit])}")
    if values["tpu_topology"].present:
        chips = min(values.hosts, limit) * plan.roles[0].devices
        reduced.append(f"--tpu_topology={small_topology(values.tpu_topology, chips)}")
    return reduced


def check_commands(plan: run_plan.RunPlan, small: run_plan.RunPlan) -> None:
    """Raises RehearsalFailed unless both plans have the same roles with the same words, apart from the workdir."""

    def words_of(one: run_plan.RunPlan) -> dict[str, list[str]]:
        workdir = f"--workdir={one.workdir}"
        return {role.name: [word for word in role.argv if word != workdir] for role in one.roles}

    real_words, small_words = words_of(plan), words_of(small)
    if real_words != small_words:
        differing = [n for n in real_words | small_words if real_words.get(n) != small_words.get(n)]
        raise RehearsalFailed(
            f"the small form has other commands for {', '.join(differing)}: {real_words} and {small_words}"
        )


def host_names(output: Any, values: flags.FlagValues) -> dict[str, tuple[str, ...]]:
    """Returns the host names in a launcher's output, each with its further names."""
    if values.on == "gke":
        return {pod.name: (pod.domain,) for pod in list_pods(output)}
    if values.on == "machines":
        return {machine_name(machine): () for machine in values.machines}
    return {name: () for names in parse_script(output).nodes.values() for name in names}


def make_job(
    plan: run_plan.RunPlan,
    output: Any,
    values: flags.FlagValues,
    hosts: EmulatedHosts,
    folder: pathlib.Path,
) -> Job:
    """Returns the job of a launcher's output."""
    chip = cluster_of(plan, values).chip
    devices = {
        role.name: arithmetic.num_devices(role.devices, chip) if role.devices else 0
        for role in plan.roles
    }
    if values.on == "gke":
        return JobSetRun(output, hosts, folder, devices)
    if values.on == "machines":
        [num_devices] = devices.values()
        return SshJob(output, values.machines, hosts, folder, num_devices)
    return SlurmJob(output, hosts, folder, devices)


def check_pushes(workdir: pathlib.Path) -> None:
    """Raises RehearsalFailed if no weights were pushed to the engines."""
    _, num_bytes = metrics_log.column(metrics_log.read(workdir), "push/bytes")
    if not any(num_bytes):
        raise RehearsalFailed(
            f"no weights were pushed to the engines; see the metrics in {workdir}"
        )


# -- tables -----------------------------------------------------------------------------------------------


def format_replacements(plan: run_plan.RunPlan, small: run_plan.RunPlan) -> str:
    """Returns a table of what the small form replaces."""
    rows = [("workdir", str(plan.workdir), str(small.workdir))]
    for before, after in zip(plan.roles, small.roles):
        if (before.count, before.hosts) != (after.count, after.hosts):
            old, new = (
                f"{role.count} replicas of {role.hosts} processes" for role in (before, after)
            )
            rows.append((f"role {before.name}", old, new))
    rows.append(("accelerators", "as below", "CPU devices"))
    rows += [row for row in differences(plan.config, small.config)]
    cut = [[word if len(word) <= 60 else f"{word[:57]}..." for word in row] for row in rows]
    return format_table(("replaced", "recipe", "rehearsal"), cut)


def format_times(
    plan: run_plan.RunPlan,
    small: run_plan.RunPlan,
    started: Mapping[str, int],
    times: Times,
    device_bytes: Mapping[str, int],
) -> str:
    """Returns a table of roles, processes, devices, bytes and seconds of a rehearsal.

    started: processes by role. device_bytes: memory of a device of each role at the real size.
    """
    rows = [
        [
            role.name,
            f"{before.count * before.hosts:,}",
            str(started[role.name]),
            f"{before.count * before.hosts * before.devices:,}",
            str(started[role.name] * role.devices),
            f"{device_bytes[role.name] / GB:,.1f}" if role.name in device_bytes else "",
            "yes" if role.serves else "no",
        ]
        for before, role in zip(plan.roles, small.roles)
    ]
    head = ("role", "processes", "started", "devices", "emulated", "GB a device", "server")
    goal = f"step {STEPS}" if any(role.main for role in plan.roles) else "a reply"
    seconds = f"{times.first_steps:.0f} s to {goal}, {times.stop:.0f} s to stop, {times.last_steps:.0f} s to the end"
    return f"{format_table(head, rows)}\n\nrehearsed: {seconds}"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
