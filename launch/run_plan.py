"""Reads the plan of a run, its roles and workdir, from a launcher's command line.

local.py and on_ray.py start the roles; slurm.py, gke.py and ssh_commands.py write commands or manifests for them.

- An experiment of several programs defines `roles(config, command)`, which returns its roles (runtime/placement.py). The
  argument `command` holds the flags that select this experiment in launch/run.py, with the fields set on the command
  line, and the workdir. A config that is one program has none.
- An experiment of several stages has a plan for each of them (--stage=NAME). local.py and on_ray.py start one after the
  other.
- Any other experiment is one role that trains, with one process on each host.
"""

import contextlib
import dataclasses
import pathlib
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from glm5_jax.parallel.mesh import AXES, Region, resolve
from glm5_jax.runtime.http_server import ListenConfig
from glm5_jax.runtime.placement import Placement, Role, escape_words, topological_order
from glm5_jax.runtime.preemption import PreemptionGuard, signal_handlers
from glm5_jax.runtime.supervisor import RoleError, RoleEvent, RoleSupervisor
from glm5_jax.runtime.terminal import print_error
from glm5_jax.training import lifecycle_report
from glm5_jax.training.experiment import MeshConfig, StageConfig
from launch import command_line
from launch.stage_plan import needs_plan_per_stage, plan_stages, select_stage
from pallas_kernels.chips import CHIPS


class RunPlan(NamedTuple):
    """Roles and workdir of a run.

    Attributes:
      name: job name for schedulers.
      roles: roles in the order of their start.
      workdir: folder of the run.
      check: function that raises ValueError if the experiment needs something that this machine lacks.
      config: config of the experiment; None: not read.
    """

    name: str
    roles: tuple[Role, ...]
    workdir: pathlib.Path
    check: Callable[[], None] = lambda: None
    config: Any = None


def define() -> flags.FlagValues:
    """Returns the flags that all launchers have, in addition to the experiment's and --workdir."""
    values = flags.FlagValues()
    flags.DEFINE_integer("hosts", 1, "number of training processes", 1, flag_values=values)
    flags.DEFINE_integer("devices", None, "accelerators of each process", 1, flag_values=values)
    flags.DEFINE_string("tpu_topology", "", "topology of each TPU slice", flag_values=values)
    flags.DEFINE_integer("slices", 1, "number of TPU slices of the hosts", 1, flag_values=values)
    return values


def read(
    argv: list[str],
    values: flags.FlagValues,
    devices: int | None = None,
    chip: str | None = None,
) -> RunPlan:
    """Returns the run plan of a launcher's arguments. Raises ValueError or flags.Error for invalid ones.

    devices: accelerators of all hosts together, if --devices is not given.
    chip: kind of the accelerators; None: not known.
    """
    rest = values(command_line.expand(argv, values), known_only=True)
    command = command_line.parse(rest, values)
    if command.distributed:
        raise ValueError("--distributed is set for each process here; leave it out")
    command_flags = tuple(rest[1:])
    if not any(re.match("--?workdir(=|$)", word) for word in command_flags):
        command_flags += (f"--workdir={command.workdir}",)
    # Values of users may hold a word in braces, such as \boxed{answer}.
    command_flags = tuple(map(escape_words, command_flags))
    if command.stage is None and needs_plan_per_stage(command.config):
        names = [stage.folder.name for stage in plan_stages(command.config, command.workdir)]
        raise ValueError(
            f"{command.module.__name__} has stages of several programs; start one after the other with --stage=NAME: "
            f"{', '.join(names)}"
        )
    command = select_stage(command)
    list_roles: Callable[..., Sequence[Role]] = getattr(
        command.module, "roles", lambda config, command: ()
    )
    if listed := tuple(list_roles(command.config, command_flags)):
        for name in ("hosts", "devices", "tpu_topology", "slices"):
            # With --stage these flags may be for the other stages.
            if values[name].present and command.stage is None:
                raise ValueError(
                    f"--{name} is for one stage of training; {command.module.__name__} lists its roles itself"
                )
        roles = topological_order([_address_stage(role, command.stage) for role in listed])
    elif hasattr(command.module, "run"):
        raise ValueError(
            f"{command.module.__name__} is one program for one host; start it with launch.run"
        )
    else:
        num_devices = values.devices
        if num_devices is None and devices is None:
            raise ValueError("--devices is missing; give the number of accelerators of each host")
        num_devices = devices // values.hosts if num_devices is None else num_devices
        _check_processes(command.config, values.hosts)
        _check_mesh(command.config, values.hosts, num_devices, chip)
        roles = (_training_role(command_flags, values, num_devices),)
    variant = command_line.spec_of(rest).partition(":")[2]
    name = re.sub("[^a-z0-9]+", "-", f"{command.module.__name__}-{variant}".lower())
    check = getattr(command.module, "check", lambda config: None)
    return RunPlan(
        name.strip("-"), roles, command.workdir, lambda: check(command.config), command.config
    )


def _address_stage(role: Role, stage: str | None) -> Role:
    """Returns a role whose flags set the fields of a stage of the experiment; None: the experiment is one stage."""
    if stage is None:
        return role
    prefix = "--experiment.program."
    argv = [word.replace(prefix, f"--experiment.{stage}.program.", 1) for word in role.argv]
    return dataclasses.replace(role, argv=argv)


def _check_mesh(config, hosts: int, devices: int, chip: str | None) -> None:
    """Raises ValueError if a stage's mesh or batch does not fit the devices of all hosts; nothing for 0 devices."""
    per_accelerator = CHIPS[chip].num_devices if chip else 1
    for stage in _stages_of(config) if devices else ():
        mesh = getattr(stage, "mesh", None)
        if isinstance(mesh, MeshConfig):
            try:
                sizes = resolve(dataclasses.asdict(mesh), hosts * devices * per_accelerator)
                if isinstance(stage, StageConfig):
                    stage.check_rows(Region(**dict(zip(AXES, sizes))))
            except ValueError as error:
                several = per_accelerator > 1
                unit = f", {per_accelerator} devices of JAX each" if several else ""
                raise ValueError(
                    f"{hosts} hosts of {devices} accelerators{unit}: {error}"
                ) from None


def _check_processes(config, hosts: int) -> None:
    """Raises ValueError if a stage cannot train in as many processes as there are hosts."""
    for stage in _stages_of(config):
        limit = stage.max_processes if isinstance(stage, StageConfig) else None
        if limit is not None and hosts > limit:
            raise ValueError(
                f"{hosts} hosts: {stage.name} trains in {limit} process; give it one host and all devices of that host"
            )


def _stages_of(config) -> list:
    """Returns the config and its fields, which may be stages."""
    return [config, *(getattr(config, field.name) for field in dataclasses.fields(config))]


def _training_role(command: Sequence[str], values: flags.FlagValues, devices: int) -> Role:
    argv = ["{python}", "-m", "launch.run", *command]
    if values.hosts > 1:
        argv.append("--distributed={distributed}")
    shape = dict(hosts=values.hosts, slices=values.slices, tpu_topology=values.tpu_topology)
    return Role(name="train", argv=argv, devices=devices, main=True, grace_s=300, **shape)


def run_cli(argv: list[str], doc: str | None, command: Callable[[], int]) -> int:
    """Returns the exit code of `command`, or prints a user's error in one line and returns 2."""
    if {"-h", "--help"} & set(argv[1:]):
        print(doc)
        return 0
    try:
        return command()
    except (ValueError, OSError, flags.Error) as error:
        print_error(error)
        return 2


def start(
    argv: list[str],
    doc: str | None,
    placement: Callable[[flags.FlagValues], contextlib.AbstractContextManager[Placement]],
    devices: int | None = None,
    define: Callable[[], flags.FlagValues] = define,
) -> int:
    """Starts the roles on a placement and waits until the run ends. Returns the exit code."""
    values = define()

    def start_stages() -> int:
        rest = values(command_line.expand(argv, values), known_only=True)
        command = command_line.parse(rest, values)
        if command.stage is not None or not needs_plan_per_stage(command.config):
            return start_roles(argv)
        stages = list(plan_stages(command.config, command.workdir))
        for stage in stages:
            if not stage.is_finished:
                print(f"stage {stage.folder.name}", flush=True)
                if code := start_roles([*argv, f"--stage={stage.folder.name}"]):
                    return code
        page = lifecycle_report.write_page(command.workdir, [stage.folder for stage in stages])
        print(f"all stages          {page}")
        return 0

    def start_roles(argv: list[str]) -> int:
        with PreemptionGuard(ends=True):
            plan = read(argv, values, devices)
            plan.check()
        folder = plan.workdir / "roles"
        try:
            with placement(values) as slots, signal_handlers(signal.default_int_handler):
                with RoleSupervisor(plan.roles, slots, folder, on_event=_show) as running:
                    running.wait()
        except RoleError as error:
            print_error(error)
            return 1
        except KeyboardInterrupt:
            print("stopped; the same command goes on from there")
            return 130
        return 0

    return run_cli(argv, doc, start_stages)


def _show(event: RoleEvent) -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    restarted = event.what == "started" and event.num_starts > 1
    count = f" (start {event.num_starts})" if restarted else ""
    text = f"{clock} {event.role}-{event.index} {event.what}{count} {event.detail}"
    print(text.rstrip(), flush=True)


def check_ports(roles: Sequence[Role], scheduler: str) -> None:
    """Raises ValueError if a role picks its own port under a scheduler that cannot pass it on."""
    for role in roles:
        if role.port == 0 and {"port", "ready"} & set(role.words):
            raise ValueError(
                f"role {role.name} listens at any free port; {scheduler} must know the port: set it"
            )


def check_reach(config: Any, scheduler: str) -> None:
    """Raises ValueError if a served model would be open to everybody on the scheduler's network."""
    server = getattr(config, "server", None)
    if not isinstance(server, ListenConfig):
        return
    try:
        server.check_reach()
    except ValueError:
        raise ValueError(
            f"under {scheduler} the server listens on every network, and it has no API key; give "
            "--experiment.server.api_key_file=FILE on a file system that its hosts see, or "
            "--experiment.server.trusted_network=True where all machines trust each other"
        ) from None


def resolve_addresses(role: Role, addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the values of the words of argv that name other roles, from the addresses of their replicas."""
    return {word: ",".join(addresses[word.partition(".")[0]]) for word in role.addresses}
