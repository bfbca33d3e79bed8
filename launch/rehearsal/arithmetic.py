"""Checks of a run plan that need no start: hosts, chips, meshes, ports, addresses, folders, inputs and memory.

Each check returns findings. An error means that the run would not start, or would run out of memory.
"""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from glm5_jax.checkpoint import models
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import AXES, BATCH_AXES, Region, resolve
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.programs.cluster import ENGINE, TRAIN
from glm5_jax.rl.programs.trainer import NETWORK
from glm5_jax.runtime.placement import Role
from glm5_jax.training.experiment import StageConfig
from launch.pods import TORUS
from launch.rehearsal import memory
from launch.rehearsal.push_cost import MAX_DURATION_S, describe_push, push_cost
from pallas_kernels.chips import CHIPS

ERROR, NOTE = "error", "note"
GB = 1e9
# Fields with the path of a file or folder that a run reads.
PATHS = (
    "checkpoint",
    "served_checkpoint",
    "adapter",
    "tokenizer",
    "path",
    "chats",
    "file",
    "verdicts",
    "stronger_verdicts",
    "reward_model",
    "anchors",
)
_PACKAGES = ("experiments", "glm5_jax")  # folders of this repository with data files
_URL = re.compile(r"http://([A-Za-z0-9.-]+):(\d+)")
_SLURM_COORDINATORS = range(61_440, 65_536)  # jax picks the port from the number of the job


class PlanFinding(NamedTuple):
    """Result of a check.

    Attributes:
      level: "error" or "note".
      subject: hosts, mesh, ports, addresses, folders, inputs, memory or push.
      role: name of the role.
      text: what was found, with the fix of an error.
    """

    level: str
    subject: str
    role: str
    text: str


class Cluster(NamedTuple):
    """Machines of a launcher.

    Attributes:
      scheduler: slurm, gke or machines.
      chip: kind of the accelerators; None: not given.
      shared_folder: only folder that all hosts see; None: they see the same files.
      host_memory_gib: memory of a host, in GiB; 0: not given.
    """

    scheduler: str
    chip: str | None
    shared_folder: pathlib.PurePath | None
    host_memory_gib: int = 0


def check_hosts(roles: Sequence[Role], cluster: Cluster) -> Iterator[PlanFinding]:
    """Yields roles whose processes no host of the chip can run."""
    for role in roles:
        if role.hosts > 1 and "distributed" not in role.words:
            text = f"has {role.hosts} processes and no {{distributed}} in its argv; add it"
            yield PlanFinding(ERROR, "hosts", role.name, text)
        if not role.devices or cluster.chip is None:
            continue
        per_host = CHIPS[cluster.chip].per_host
        if role.devices > per_host:
            text = (
                f"a process has {role.devices} {cluster.chip} and a host {per_host}; its program must run in "
                f"{math.ceil(role.devices / per_host)} processes, or on fewer chips"
            )
            yield PlanFinding(ERROR, "hosts", role.name, text)
        elif cluster.chip in TORUS and role.hosts > 1 and role.devices != per_host:
            text = f"a process has {role.devices} {cluster.chip}; on several hosts it has all {per_host} of each"
            yield PlanFinding(ERROR, "hosts", role.name, text)


def check_meshes(config: Any, cluster: Cluster) -> Iterator[PlanFinding]:
    """Yields the meshes of a run of several programs that do not fit their devices.

    launch/run_plan.py checks those of one stage of training.
    """
    if hasattr(config, "prefill"):  # servers
        for role, part, mesh in (
            ("server", config, config.mesh),
            ("prefill", config.prefill, config.prefill.mesh),
        ):
            try:
                resolve(
                    dataclasses.asdict(mesh), num_devices(part.hosts * part.devices, cluster.chip)
                )
            except ValueError as error:
                yield PlanFinding(ERROR, "mesh", role, str(error))
    if not getattr(config, "has_engine_processes", False):
        return
    shape = config.cluster
    for role, mesh, chips in (
        (TRAIN, config.mesh, shape.hosts * shape.devices),
        (ENGINE, shape.engine_mesh, shape.engine_hosts * shape.engine_devices),
    ):
        try:
            sizes = resolve(dataclasses.asdict(mesh), num_devices(chips, cluster.chip))
            region = Region(**dict(zip(AXES, sizes)))
            if role == TRAIN:
                config.check_rows(region)
        except ValueError as error:
            yield PlanFinding(ERROR, "mesh", role, str(error))
            continue
        if role == ENGINE and shape.ranks != (dp_size := region.size(BATCH_AXES)):
            text = f"cluster.ranks is {shape.ranks} and the engine's mesh has {dp_size} data-parallel ranks; set it to {dp_size}"
            yield PlanFinding(ERROR, "mesh", role, text)


def num_devices(chips: int, chip: str | None) -> int:
    """Returns the JAX devices of chips; 0 chips: the one CPU device."""
    return max(1, chips * (CHIPS[chip].num_devices if chip else 1))


def check_ports(roles: Sequence[Role], cluster: Cluster) -> Iterator[PlanFinding]:
    """Yields ports that need privileges, and those that the coordinator of jax may take."""
    for role in roles:
        ports = range(role.port, role.port + role.count) if role.port else range(0)
        if ports and ports[0] < 1024:
            text = f"port {ports[0]} is for programs of root; use 1024 or more"
            yield PlanFinding(ERROR, "ports", role.name, text)
        if cluster.scheduler == "slurm" and ports and ports[-1] in _SLURM_COORDINATORS:
            text = f"port {ports[-1]} may be that of jax's coordinator under Slurm; use ports below {_SLURM_COORDINATORS[0]}"
            yield PlanFinding(ERROR, "ports", role.name, text)


def check_addresses(
    commands: Mapping[str, Sequence[str]], servers: Mapping[str, int]
) -> Iterator[PlanFinding]:
    """Yields URLs in commands at which no server listens.

    commands: words of the command of each process, by its host name or replica.
    servers: port of the server on each host, as `HOST:PORT` keys with the number of servers there.
    """
    for address, count in servers.items():
        if count > 1:
            yield PlanFinding(ERROR, "addresses", address, f"{count} servers listen at {address}")
    for name, words in commands.items():
        # Other fields of an experiment may name servers outside of the run, such as a judge.
        addresses = [w for w in words if not w.startswith("--experiment.") or ".program." in w]
        for host, port in (match for word in addresses for match in _URL.findall(word)):
            if f"{host}:{port}" not in servers:
                text = f"its command names http://{host}:{port}, where no role listens"
                yield PlanFinding(ERROR, "addresses", name, text)


def check_folders(
    config: Any, workdir: pathlib.PurePath, cluster: Cluster
) -> Iterator[PlanFinding]:
    """Yields paths of the config that not all hosts see."""
    shared = cluster.shared_folder
    if shared is None:
        return
    for name, value in paths_of(config):
        path = pathlib.PurePath(value)
        in_image = path.parts[0] in _PACKAGES and (memory.ROOT / path).exists()
        if path.is_relative_to(shared) or in_image:
            continue
        text = f"{name}={value} is not in {shared}, the only volume of the pods; put it there, or mount a parent (--mount)"
        yield PlanFinding(ERROR, "folders", "", text)


def paths_of(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the names and values of the fields that hold paths of files."""
    if isinstance(config, (tuple, list)):
        for number, item in enumerate(config):
            yield from paths_of(item, f"{prefix}{number}.")
        return
    if not dataclasses.is_dataclass(config):
        return
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in PATHS and isinstance(value, str) and "/" in value:
            yield f"{prefix}{field.name}", value
        else:
            yield from paths_of(value, f"{prefix}{field.name}.")


def check_inputs(config: Any) -> Iterator[PlanFinding]:
    """Yields inputs that the recipe leaves to the user and that are missing."""
    for name, stage in stages_of(config):
        try:
            stage.check_data()
        except ValueError as error:
            yield PlanFinding(ERROR, "inputs", name or TRAIN, str(error))
        is_first = not name or name == "pretrain"
        if is_first and stage.requires_checkpoint and stage.checkpoint is None:
            text = f"{stage.name} starts from trained weights; give --experiment.checkpoint=PATH"
            yield PlanFinding(ERROR, "inputs", name or TRAIN, text)


def stages_of(config: Any) -> list[tuple[str, StageConfig]]:
    """Returns the stages of a config, by field; a config that is a stage has the name ""."""
    if isinstance(config, StageConfig):
        return [("", config)]
    fields = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    return [(name, value) for name, value in fields if isinstance(value, StageConfig)]


def check_memory(
    config: Any, roles: Sequence[Role], cluster: Cluster
) -> Iterator[tuple[memory.DeviceMemory, PlanFinding]]:
    """Yields the memory of a device for each program, with its finding."""
    if cluster.chip is None:
        return
    for role, uses in _uses(config, roles, cluster.chip):
        level = NOTE if uses.fits else ERROR
        parts = [f"{name} {size / GB:,.1f}" for name, size in uses.parts.items()]
        if uses.temporary_bytes is not None:
            parts.append(f"temporaries {uses.temporary_bytes / GB:,.1f} (layout {uses.source})")
        limit = "?" if uses.usable_bytes is None else f"{uses.usable_bytes / GB:,.1f}"
        text = f"{uses.program}: {' + '.join(parts)} = {uses.used_bytes / GB:,.1f} of {limit} GB a device"
        if uses.temporary_bytes is None:
            text += ", without temporaries: no compiled layout matches"
        yield uses, PlanFinding(level, "memory", role, text)


def _uses(
    config: Any, roles: Sequence[Role], chip: str
) -> Iterator[tuple[str, memory.DeviceMemory]]:
    """Yields the role and the memory of each program whose mesh fits its devices."""
    by_name = {role.name: role for role in roles}
    for name, stage in stages_of(config):
        role = by_name[TRAIN]
        devices = num_devices(role.hosts * role.devices, chip)
        label = name or role.name
        try:
            yield label, memory.train_memory(stage, chip, devices)
            if isinstance(stage, RlConfig) and stage.has_engine_processes and ENGINE in by_name:
                recipe: Any = stage  # of a class with a `cluster`
                engine = by_name[ENGINE]
                count = num_devices(engine.hosts * engine.devices, chip)
                mesh, quantised = recipe.cluster.engine_mesh, is_quantised(recipe)
                options = recipe.model, recipe.engine, mesh, chip, count, quantised
                yield ENGINE, memory.engine_memory("engine", *options)
            elif isinstance(stage, RlConfig) and not stage.has_engine_processes:
                options = stage.model, _engine_of(stage), stage.mesh, chip, devices, False
                yield label, memory.engine_memory("engine on these devices", *options)
        except ValueError:
            continue  # check_meshes, or the launcher, reports it


def _engine_of(stage: RlConfig) -> EngineConfig:
    """Returns the engine's options with the length that the trainer gives it."""
    return dataclasses.replace(stage.engine, max_length=stage.engine.max_length or stage.length)


def is_quantised(config: Any) -> bool:
    """Returns whether engines serve quantised weights: as the checkpoint says, or assumed of one that is not here."""
    if config.served_checkpoint is None:
        return False
    try:
        return models.read_config(config.served_checkpoint)[1]
    except ValueError:
        return True


def check_push(config: Any, cluster: Cluster) -> Iterator[PlanFinding]:
    """Yields the cost of a push of weights, and hosts whose memory it exceeds."""
    if not getattr(config, "has_engine_processes", False) or cluster.chip is None:
        return
    try:
        cost = push_cost(config, cluster.chip, is_quantised(config))
    except ValueError:
        return  # check_meshes reports it
    if config.transport == NETWORK:
        yield PlanFinding(NOTE, "push", TRAIN, describe_push(cost))
        if cost.duration_s is not None and cost.duration_s > MAX_DURATION_S:
            text = f"a push takes {cost.duration_s:,.0f} s and should take at most {MAX_DURATION_S:.0f} s; use more hosts"
            yield PlanFinding(NOTE, "push", TRAIN, text)
    limit = config.cluster.engine_memory or cluster.host_memory_gib
    if config.transport == NETWORK and limit and cost.received_bytes > limit * 2**30:
        size = cost.received_bytes / GB
        text = f"an engine's host holds {size:,.0f} GB during a push and has {limit} GiB; use transport=storage"
        yield PlanFinding(ERROR, "push", ENGINE, text)


def count_servers(addresses: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Returns the number of servers at each HOST:PORT."""
    return dict(collections.Counter(f"{host}:{port}" for host, port in addresses))
