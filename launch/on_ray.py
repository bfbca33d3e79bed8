"""Starts the roles of an experiment on a Ray cluster and supervises them until the run ends.

    python -m launch.on_ray --experiment=FILE.py:VARIANT --address=auto [--hosts=2] [--devices=8] [--workdir=DIR]

Works like launch/local.py, on the machines of the cluster that have free resources. Ray chooses them and assigns each
process its accelerators. It is an extra: pip install '.[ray]'.

- Without --address a cluster of only this machine is started for this run.
- All machines see the current folder and DIR.
- A role whose machine is lost is started on another one. The roles that have its address are restarted.
"""

import collections
import os
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from glm5_jax.runtime.placement import Role, SlotLostError
from launch import run_plan, xla_flags
from launch.local import LocalSlot, this_machine, visibility

_CALL_TIMEOUT_S = 60.0  # generous: the methods of an actor return at once


class _Actor:
    """Ray actor with a slot on the machine that Ray chose.

    host: host name of the slot; None: the address by which Ray knows the machine.
    has_devices: whether the process has accelerators.
    """

    def __init__(
        self, stem: str, host: str | None, env: Mapping[str, str], cwd: str, has_devices: bool
    ):
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        if has_devices:
            flags_set = {**os.environ, **env}
            env = {**env, **xla_flags.flag_environment(this_machine().chip, flags_set)}
        self._slot = LocalSlot(stem, host or ray.util.get_node_ip_address(), env, cwd=cwd)

    def slot_attributes(self) -> dict[str, str]:
        return {name: getattr(self._slot, name) for name in ("host", "python", "log", "ready")}

    def call(self, name: str, *arguments):
        return getattr(self._slot, name)(*arguments)


class RayPlacement:
    """Placement on a Ray cluster, with one actor for each process; a context manager that disconnects at its end.

    address: address of a running cluster; None: start one on this machine, whose roles listen at 127.0.0.1.
    claim_timeout_s: time limit until the cluster has free resources for a process, in seconds.

    Raises ValueError if Ray is not installed or there is no cluster.
    """

    def __init__(self, address: str | None = None, *, claim_timeout_s: float = 300.0):
        try:
            import ray  # pyright: ignore[reportMissingImports]  # an extra
        except ImportError:
            raise ValueError(
                "Ray is not installed; pip install '.[ray]' in this repository"
            ) from None
        folders = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        env_vars = {"PYTHONPATH": os.pathsep.join(folders)}  # actors import this file
        options = {} if address else {"include_dashboard": False}
        try:
            ray.init(address, runtime_env={"env_vars": env_vars}, log_to_driver=False, **options)
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(f"no cluster of Ray at --address={address}: {error}") from None
        self._ray, self._claim_timeout_s = ray, claim_timeout_s
        self._host = None if address else "127.0.0.1"
        resources = ray.cluster_resources()
        self._devices = next((name for name in ("TPU", "GPU") if resources.get(name)), None)

    def __enter__(self) -> "RayPlacement":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._ray.shutdown()

    def check(self, roles: Sequence[Role]) -> None:
        """Raises ValueError if the roles together need more than the cluster has."""
        available, requested = self._ray.cluster_resources(), collections.Counter()
        for role in roles:
            for name, number in self._resources(role).items():
                requested[name] += role.count * role.hosts * number
        for name, number in requested.items():
            limit = available.get(name, 0)
            if number > limit:
                unit, what = (2**30, "GiB of memory") if name == "memory" else (1, name)
                raise ValueError(
                    f"the roles ask for {number / unit:g} {what}, the cluster has {limit / unit:.4g}; ask for fewer, or "
                    "add machines"
                )

    def _resources(self, role: Role) -> dict[str, int]:
        """Returns the Ray resources of one process; CPU devices that stand for accelerators are not counted."""
        wanted = {"CPU": role.cpus, "memory": role.memory_gib * 2**30}
        if self._devices:
            wanted[self._devices] = role.devices
        return {name: number for name, number in wanted.items() if number}

    def claim(self, role: Role, index: int, process: int, stem: str | os.PathLike) -> "_RaySlot":
        resources = self._resources(role)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "scheduling_strategy": "SPREAD",
        }
        env = dict(role.env)
        has_devices = bool(role.devices and self._devices)
        if not has_devices:  # otherwise Ray sets the visible devices of a process
            env = visibility("cpu", [str(number) for number in range(role.devices)]) | env
        make = self._ray.remote(_Actor).options(**options)
        actor = make.remote(os.path.abspath(stem), self._host, env, os.getcwd(), has_devices)
        return _RaySlot(self._ray, actor, self._claim_timeout_s)


class _RaySlot:
    """Slot of a process on a machine of the cluster; an actor there starts and stops the process."""

    def __init__(self, ray, actor, timeout_s: float):
        self._ray, self._actor = ray, actor
        slot_attributes = self._get(actor.slot_attributes.remote(), timeout_s)
        self.host, self.python = slot_attributes["host"], slot_attributes["python"]
        self.log, self.ready = slot_attributes["log"], slot_attributes["ready"]

    def _get(self, reference, timeout_s: float = _CALL_TIMEOUT_S):
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.GetTimeoutError:
            self.release()
            raise SlotLostError(f"had no answer from its slot within {timeout_s:g} s") from None
        except errors.RayActorError as error:
            self.release()
            raise SlotLostError(f"lost its slot ({type(error).__name__})") from None

    def _call(self, name: str, *arguments):
        return self._get(self._actor.call.remote(name, *arguments))

    def start(self, argv: Sequence[str]) -> int:
        return self._call("start", list(argv))

    def exit_code(self) -> int | None:
        return self._call("exit_code")

    def port(self) -> int | None:
        return self._call("port")

    def free_port(self) -> int:
        return self._call("free_port")

    def tail(self, lines: int) -> str:
        return self._call("tail", lines)

    def terminate(self) -> None:
        self._call("terminate")

    def kill(self) -> None:
        self._call("kill")

    def release(self) -> None:
        """Kills the actor; the processes that it started die with it (`runtime.process.ChildProcess`)."""
        self._ray.kill(self._actor)


def define() -> flags.FlagValues:
    """Returns the program's flags, in addition to the experiment's."""
    values = run_plan.define()
    flags.DEFINE_string("address", None, "address of a Ray cluster", flag_values=values)
    return values


def main(argv: list[str]) -> int:
    """Starts the roles of the experiment and returns the exit code; argv[0] is the program's name."""
    return run_plan.start(argv, __doc__, lambda v: RayPlacement(v.address), define=define)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
