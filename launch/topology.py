"""The roles of an experiment, from the command line: what local.py and on_ray.py start, slurm.py and gke.py write down.

An experiment that is several programs has `roles(config, command)`: its roles (core/placement.py), where command are the flags
that give launch/run.py this experiment, with what was set on the command line, and this workdir. Any other is a role of
training alone, in as many processes as it has hosts.
"""

import contextlib
import dataclasses
import pathlib
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from absl import flags

from glm5_jax.core.mesh import Region, resolve
from glm5_jax.core.placement import Placement, Role, ordered
from glm5_jax.core.roles import Event, RoleError, Roles
from glm5_jax.core.stopping import StopSignal, answered_by
from glm5_jax.training.experiment import MeshConfig, StageConfig
from launch import run
from pallas_kernels.chips import CHIPS


class Topology(NamedTuple):
    """A name for schedulers, the roles in the order of their start, the folder of the run. check: ValueError for what an
    experiment misses where its roles start."""

    name: str
    roles: tuple[Role, ...]
    workdir: pathlib.Path
    check: Callable[[], None] = lambda: None


def define() -> flags.FlagValues:
    """The flags that all launchers have, besides those of the experiment and --workdir."""
    values = flags.FlagValues()
    flags.DEFINE_integer("hosts", 1, "processes that train", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("devices", None, "accelerators of each", 0, flag_values=values)
    flags.DEFINE_string("tpu_topology", "", "of a slice of TPUs that trains", flag_values=values)
    flags.DEFINE_integer("slices", 1, "of TPUs that the hosts are in", 1, flag_values=values)
    return values


def read(
    argv: list[str],
    values: flags.FlagValues,
    devices: int | None = None,
    chip: str | None = None,
) -> Topology:
    """The topology of a launcher's arguments. ValueError, flags.Error.

    devices: that all its hosts have, if --devices does not say; chip: what they are, if that is known.
    """
    rest = values(argv, known_only=True)
    command = run.parse(rest)
    if command.distributed:
        raise ValueError("--distributed is set for each process here; leave it out")
    words = tuple(rest[1:])
    if not any(re.match("--?workdir(=|$)", word) for word in words):
        words += (f"--workdir={command.workdir}",)
    listed = getattr(command.module, "roles", None)
    if listed:
        for name in ("hosts", "devices", "tpu_topology", "slices"):
            if values[name].present:
                raise ValueError(
                    f"--{name} is for one stage of training; {command.module.__name__} lists its roles itself"
                )
        roles = ordered(tuple(listed(command.config, words)))
    elif hasattr(command.module, "run"):
        raise ValueError(
            f"{command.module.__name__} is one program for one host; start it with launch.run"
        )
    else:
        own = values.devices
        if own is None and devices is None:
            raise ValueError("--devices is not given; say how many accelerators each host has")
        own = devices // values.hosts if own is None else own
        _check_mesh(command.config, values.hosts, own, chip)
        roles = (_training(words, values, own),)
    variant = run.spec_of(argv).partition(":")[2]
    name = re.sub("[^a-z0-9]+", "-", f"{command.module.__name__}-{variant}".lower())
    check = getattr(command.module, "check", lambda config: None)
    return Topology(name.strip("-"), roles, command.workdir, lambda: check(command.config))


def _check_mesh(config, hosts: int, devices: int, chip: str | None) -> None:
    """ValueError for a mesh of other than the devices of all hosts, if these have some, and for rows that these cannot
    share."""
    each = CHIPS[chip].num_devices if chip else 1
    stages = [config, *(getattr(config, field.name) for field in dataclasses.fields(config))]
    for stage in stages if devices else ():
        mesh = getattr(stage, "mesh", None)
        if isinstance(mesh, MeshConfig):
            try:
                sizes = resolve(dataclasses.asdict(mesh), hosts * devices * each)
                if isinstance(stage, StageConfig):
                    stage.check_rows(Region(*sizes))
            except ValueError as error:
                twice = f", {each} devices of JAX each" if each > 1 else ""
                raise ValueError(
                    f"{hosts} hosts of {devices} accelerators{twice}: {error}"
                ) from None


def _training(command: Sequence[str], values: flags.FlagValues, devices: int) -> Role:
    argv = ["{python}", "-m", "launch.run", *command]
    if values.hosts > 1:
        argv.append("--distributed={distributed}")
    shape = dict(hosts=values.hosts, slices=values.slices, tpu_topology=values.tpu_topology)
    return Role("train", argv, devices=devices, main=True, grace=300, **shape)


def asked(argv: list[str], doc: str, answer: Callable[[], int]) -> int:
    """The exit code of `answer`, or 2 with one line about a mistake of the user."""
    if {"-h", "--help"} & set(argv[1:]):
        print(doc)
        return 0
    try:
        return answer()
    except (ValueError, OSError, flags.Error) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def start(
    argv: list[str],
    doc: str,
    placement: Callable[[flags.FlagValues], contextlib.AbstractContextManager[Placement]],
    devices: int | None = None,
    define: Callable[[], flags.FlagValues] = define,
) -> int:
    """Starts the roles on a placement and waits for their end; the exit code."""
    values = define()

    def answer() -> int:
        with StopSignal(ends=True):
            topology = read(argv, values, devices)
            topology.check()
        folder = topology.workdir / "roles"
        try:
            with placement(values) as there, answered_by(signal.default_int_handler):
                with Roles(topology.roles, there, folder, tell=_show) as running:
                    running.wait()
        except RoleError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped; the same command goes on from there")
            return 130
        return 0

    return asked(argv, doc, answer)


def _show(event: Event) -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    life = f" (life {event.life})" if event.life > 1 and event.what == "started" else ""
    print(
        f"{clock} {event.role}-{event.index} {event.what}{life} {event.detail}".rstrip(), flush=True
    )


def check_ports(roles: Sequence[Role], scheduler: str) -> None:
    """ValueError if a role would have to tell its port, which nobody is there to hear."""
    for role in roles:
        if role.port == 0 and {"port", "ready"} & set(role.words):
            raise ValueError(
                f"role {role.name} listens at any port that is free; {scheduler} must know it: set its port"
            )


def words_of(role: Role, addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the values of the words of argv that name other roles, from the addresses of their replicas."""
    return {word: ",".join(addresses[word.partition(".")[0]]) for word in role.addresses}
