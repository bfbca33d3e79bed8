"""Starts the roles of an experiment on this machine and supervises them until the run ends.

    python -m launch.local --experiment=experiments/pretrain.py:tiny [--hosts=2] [--devices=4] [--workdir=DIR]

An experiment that defines no `roles` is one training role: --hosts processes (default 1), each with --devices accelerators
(default: all of this machine, divided among the processes). On a machine without accelerators --devices is the number of
CPU devices.

- A process sees only the accelerators that are assigned to it.
- It gets the XLA options for their kind (launch/xla_flags.py). Options set in XLA_FLAGS, or LIBTPU_INIT_ARGS for TPUs,
  take precedence.
- A process that dies is restarted. If it dies too often, the run ends with the last lines of its log and exit code 1.
- Logs and events are in DIR/roles.
- Ctrl-C or SIGTERM stops all processes, in order.

A user's error is one line and exit code 2.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from glm5_jax.runtime.http_server import find_free_port
from glm5_jax.runtime.placement import Role
from glm5_jax.runtime.process import ChildProcess
from glm5_jax.runtime.ready_file import read_port_file
from launch import run_plan, xla_flags
from pallas_kernels.chips import find_chip_name

# From jax (jax/_src/test_multiprocess.py), for the chips of one host that one process uses.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# From jax (jax/_src/hardware_utils.py): Google's PCI vendor id, and the device ids of TPUs.
_GOOGLE = "0x1ae0"
_TPUS = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalMachine:
    """Accelerators and cores of this machine.

    Attributes:
      platform: jax's platform: cpu, cuda or tpu.
      devices: accelerator names for the platform's environment variable; empty for a CPU, which takes any number of devices.
      cores: CPU cores that this process may use.
      chip: kind of the accelerators, a key of `pallas_kernels.chips.CHIPS`; None: another kind, or not known.
    """

    platform: str
    devices: Sequence[str]
    cores: Sequence[int]
    chip: str | None = None


def this_machine(
    environment: Mapping[str, str] = os.environ, devices: str = "/dev", system: str = "/"
) -> LocalMachine:
    """Returns the accelerators and cores of this machine without starting jax, which would take the accelerators.

    system: folder that holds proc and sys.
    """
    cores, platforms = sorted(os.sched_getaffinity(0)), environment.get("JAX_PLATFORMS", "")
    device_files = pathlib.Path(devices)
    gpus = [p.name.removeprefix("nvidia") for p in device_files.glob("nvidia[0-9]*")]
    chips = [p.name.removeprefix("accel") for p in device_files.glob("accel[0-9]*")]
    chips = chips or [p.name for p in device_files.glob("vfio/[0-9]*")]
    for platform, names, variable in (
        ("cuda", gpus, "CUDA_VISIBLE_DEVICES"),
        ("tpu", chips, "TPU_VISIBLE_CHIPS"),
    ):
        if names and (not platforms or platform in platforms):
            visible = environment.get(variable)
            selected = sorted(names, key=int) if visible is None else visible.split(",")
            chip = _chip(platform, pathlib.Path(system))
            return LocalMachine(
                platform=platform,
                devices=[name for name in selected if name],
                cores=cores,
                chip=chip,
            )
    return LocalMachine(platform="cpu", devices=[], cores=cores)


def _chip(platform: str, system: pathlib.Path) -> str | None:
    """Returns the kind of the first accelerator, from its driver or its PCI device id; None: not known."""
    if platform == "cuda":
        descriptions = [p.read_text() for p in system.glob("proc/driver/nvidia/gpus/*/information")]
        return find_chip_name(descriptions[0]) if descriptions else None
    for vendor in system.glob("sys/bus/pci/devices/*/vendor"):
        if vendor.read_text().strip() == _GOOGLE:
            number = vendor.with_name("device").read_text().strip()
            if number in _TPUS:  # a machine has other PCI devices of Google too
                return _TPUS[number]
    return None


def visibility(platform: str, devices: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables with which a jax process sees only these accelerators of its machine."""
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
    """Placement on this machine, which assigns each process its accelerators and cores."""

    def __init__(self, machine: LocalMachine | None = None):
        self._machine = machine or this_machine()
        self._assigned: dict[tuple[str, int, int], tuple[list[str], list[int]]] = {}

    def check(self, roles: Sequence[Role]) -> None:
        """Assigns devices and cores. Raises ValueError if there are too few, or a role needs an unsupported number."""
        machine = self._machine
        devices, cores = list(machine.devices), list(machine.cores)
        for role in roles:
            for index in range(role.count):
                for process in range(role.hosts):
                    if machine.platform == "cpu":
                        devices = [str(number) for number in range(role.devices)]
                    share = _take(devices, role.devices), _take(cores, role.cpus)
                    self._assigned[role.name, index, process] = share
            if machine.platform == "tpu" and role.devices not in (0, *_TPU_BOUNDS):
                raise ValueError(
                    f"role {role.name} asks for {role.devices} chips; a process of a TPU host has 1, 2, 4 or 8"
                )
        for resource, available in (("devices", machine.devices), ("cpus", machine.cores)):
            if resource == "devices" and machine.platform == "cpu":
                continue
            requested = {r.name: r.count * r.hosts * getattr(r, resource) for r in roles}
            if sum(requested.values()) > len(available):
                shares = ", ".join(
                    f"{name} {number}" for name, number in requested.items() if number
                )
                raise ValueError(
                    f"the roles ask for {sum(requested.values())} {resource} ({shares}), this machine has {len(available)}; ask "
                    "for fewer, or start them on several machines (launch/on_ray.py, slurm.py, gke.py)"
                )

    def claim(self, role: Role, index: int, process: int, stem: str | os.PathLike) -> "LocalSlot":
        devices, cores = self._assigned[role.name, index, process]
        env = visibility(self._machine.platform, devices) | dict(role.env)
        if devices:
            env |= xla_flags.flag_environment(self._machine.chip, {**os.environ, **env})
        return LocalSlot(stem, "127.0.0.1", env, cores)


def _take(available: list, count: int) -> list:
    taken, available[:count] = available[:count], []
    return taken


class LocalSlot:
    """Slot for one process on the machine of this process.

    Attributes:
      host: host name by which other slots reach it.
      python: path of this interpreter.
      log: file for the output of the process.
      ready: file that a server writes its port to.

    The argument env is added to this process's environment. The argument cores lists the CPU cores that the process may
    use; empty: all.
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
        self._program: ChildProcess | None = None

    def start(self, argv: Sequence[str]) -> int:
        pathlib.Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(self.ready).unlink(missing_ok=True)
        # Unbuffered, so that the log is complete at any time.
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env}
        self._program = ChildProcess(argv, log=self.log, env=env, cwd=self._cwd, cores=self._cores)
        return self._program.pid

    def exit_code(self) -> int | None:
        return None if self._program is None else self._program.exit_code()

    def port(self) -> int | None:
        return read_port_file(self.ready)

    def free_port(self) -> int:
        return find_free_port(self.host)

    def tail(self, lines: int) -> str:
        with open(self.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 500 * lines))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def terminate(self) -> None:
        if self._program is not None:
            self._program.terminate()

    def kill(self) -> None:
        if self._program is not None:
            self._program.kill()

    def release(self) -> None:
        self.kill()


def main(argv: list[str]) -> int:
    """Starts the roles of the experiment and returns the exit code; argv[0] is the program's name."""
    machine = this_machine()
    placement = contextlib.nullcontext(LocalPlacement(machine))
    return run_plan.start(argv, __doc__, lambda values: placement, len(machine.devices))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
