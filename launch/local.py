"""Starts the roles of an experiment on this machine, and watches them until the run ends.

    python -m launch.local --experiment=experiments/pretrain.py:tiny [--hosts=2] [--devices=4] [--workdir=DIR]

An experiment that lists no roles of its own is one of training: --hosts processes (default 1) with --devices accelerators
each (default: all that this machine has), or so many devices that a CPU plays. Every process sees its own accelerators and
none of the others', and the options of XLA for their kind (launch/xla_flags.py), of which those that XLA_FLAGS, or
LIBTPU_INIT_ARGS of TPUs, says already stay as they are. What dies is started again; what dies too often ends the run with the last
lines of its log and exit code 1. Logs and events are in DIR/roles. Ctrl-C or SIGTERM stops all, in order. An error of the user is
one line and exit code 2.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from glm5_jax.core.placement import Role
from glm5_jax.core.process import Program
from glm5_jax.core.server import free_port, read_port
from launch import topology, xla_flags
from pallas_kernels.chips import name_of

# jax's own (jax/_src/test_multiprocess.py), for chips of one host that a process has for itself.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# jax's own (jax/_src/hardware_utils.py): the maker's number of PCI devices, and theirs.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a machine has.

    Attributes:
      platform: of jax: cpu, cuda or tpu.
      devices: names of its accelerators as the platform's environment variable takes them; a CPU plays as many as it is asked for.
      cores: that this process may use.
      chip: that its accelerators are, as in `pallas_kernels.chips.CHIPS`; None: another, or not known.
    """

    platform: str
    devices: Sequence[str]
    cores: Sequence[int]
    chip: str | None = None


def this_machine(
    environment: Mapping[str, str] = os.environ, devices: str = "/dev", system: str = "/"
) -> Machine:
    """What is here, without a start of jax, which would take the accelerators. system: the folder with proc and sys."""
    cores, wanted = sorted(os.sched_getaffinity(0)), environment.get("JAX_PLATFORMS", "")
    found = pathlib.Path(devices)
    gpus = [p.name.removeprefix("nvidia") for p in found.glob("nvidia[0-9]*")]
    chips = [p.name.removeprefix("accel") for p in found.glob("accel[0-9]*")]
    chips = chips or [p.name for p in found.glob("vfio/[0-9]*")]
    for platform, names, variable in (
        ("cuda", gpus, "CUDA_VISIBLE_DEVICES"),
        ("tpu", chips, "TPU_VISIBLE_CHIPS"),
    ):
        if names and (not wanted or platform in wanted):
            visible = environment.get(variable)
            own = sorted(names, key=int) if visible is None else visible.split(",")
            chip = _chip(platform, pathlib.Path(system))
            return Machine(platform, [name for name in own if name], cores, chip)
    return Machine("cpu", [], cores)


def _chip(platform: str, system: pathlib.Path) -> str | None:
    """The kind of the first accelerator, as its driver or its number on the PCI bus says."""
    if platform == "cuda":
        found = [p.read_text() for p in system.glob("proc/driver/nvidia/gpus/*/information")]
        return name_of(found[0]) if found else None
    for vendor in system.glob("sys/bus/pci/devices/*/vendor"):
        if vendor.read_text().strip() == _GOOGLE:
            number = vendor.with_name("device").read_text().strip()
            if number in _TPUS:  # a machine has other devices of Google's too
                return _TPUS[number]
    return None


def visibility(platform: str, devices: Sequence[str]) -> dict[str, str]:
    """The environment variables with which a process of jax sees these accelerators of its machine, and no others."""
    if not devices:
        return {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if platform == "cpu":
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(devices))}
    names = ",".join(devices)
    if platform == "cuda":
        return {"CUDA_VISIBLE_DEVICES": names}
    return {
        "TPU_VISIBLE_CHIPS": names,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[len(devices)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


class LocalPlacement:
    """Processes of this machine, whose accelerators and cores are dealt out among them."""

    def __init__(self, machine: Machine | None = None):
        self._machine = machine or this_machine()
        self._dealt: dict[tuple[str, int, int], tuple[list[str], list[int]]] = {}

    def check(self, roles: Sequence[Role]) -> None:
        """Deals out; ValueError if there is not enough, or a role asks for what this machine cannot give."""
        machine = self._machine
        devices, cores = list(machine.devices), list(machine.cores)
        for role in roles:
            for index in range(role.count):
                for process in range(role.hosts):
                    if machine.platform == "cpu":
                        devices = [str(number) for number in range(role.devices)]
                    own = _take(devices, role.devices), _take(cores, role.cpus)
                    self._dealt[role.name, index, process] = own
            if machine.platform == "tpu" and role.devices not in (0, *_TPU_BOUNDS):
                raise ValueError(
                    f"role {role.name} asks for {role.devices} chips; a process of a TPU host has 1, 2, 4 or 8"
                )
        for what, there in (("devices", machine.devices), ("cpus", machine.cores)):
            if what == "devices" and machine.platform == "cpu":
                continue
            asked = {r.name: r.count * r.hosts * getattr(r, what) for r in roles}
            if sum(asked.values()) > len(there):
                shares = ", ".join(f"{name} {number}" for name, number in asked.items() if number)
                raise ValueError(
                    f"the roles ask for {sum(asked.values())} {what} ({shares}), this machine has {len(there)}; ask "
                    "for fewer, or start them on several (launch/on_ray.py, slurm.py, gke.py)"
                )

    def claim(self, role: Role, index: int, process: int, stem: str | os.PathLike) -> "LocalPlace":
        devices, cores = self._dealt[role.name, index, process]
        env = visibility(self._machine.platform, devices) | dict(role.env)
        if devices:
            env |= xla_flags.environment(self._machine.chip, {**os.environ, **env})
        return LocalPlace(stem, "127.0.0.1", env, cores)


def _take(there: list, number: int) -> list:
    taken, there[:number] = there[:number], []
    return taken


class LocalPlace:
    """A place of the machine that this process is on.

    host: how others reach it. env: added to this process's environment. cores: that a process may use; none: all.
    """

    python = sys.executable

    def __init__(
        self,
        stem: str | os.PathLike,
        host: str,
        env: Mapping[str, str],
        cores: Sequence[int] = (),
        cwd: str | None = None,
    ):
        self.host = host
        self.log, self.ready = f"{stem}.log", f"{stem}.ready"
        self._env, self._cores, self._cwd = env, cores, cwd
        self._program: Program | None = None

    def start(self, argv: Sequence[str]) -> int:
        pathlib.Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(self.ready).unlink(missing_ok=True)
        # What a role says is to be in its log when it says it.
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env}
        self._program = Program(argv, log=self.log, env=env, cwd=self._cwd, cores=self._cores)
        return self._program.pid

    def exit_code(self) -> int | None:
        return self._program.exit_code()

    def port(self) -> int | None:
        return read_port(self.ready)

    def free_port(self) -> int:
        return free_port(self.host)

    def tail(self, lines: int) -> str:
        with open(self.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 500 * lines))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def terminate(self) -> None:
        self._program.terminate()

    def kill(self) -> None:
        if self._program is not None:
            self._program.kill()

    def release(self) -> None:
        self.kill()


def main(argv: list[str]) -> int:
    """Exit code of the program with these arguments (the program's name first)."""
    machine = this_machine()
    here = contextlib.nullcontext(LocalPlacement(machine))
    return topology.start(argv, __doc__, lambda values: here, len(machine.devices))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
