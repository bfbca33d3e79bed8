"""Starts the roles of an experiment on a Ray cluster, and watches them until the run ends.

    python -m launch.on_ray --experiment=FILE.py:VARIANT --address=auto [--hosts=2] [--devices=8] [--workdir=DIR]

As launch/local.py, on whatever machines of the cluster have room; Ray, which is an extra (pip install '.[ray]'), finds
them and keeps the processes' accelerators apart. Without --address it is a cluster of this machine alone, for this run. All machines see
the folder that this is started in, and DIR. A role whose machine is lost is started on another; those that were told its
address are started again.
"""

import collections
import os
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from glm5_jax.core.placement import PlaceError, Role
from launch import topology, xla_flags
from launch.local import LocalPlace, this_machine, visibility

_SECONDS = 60.0  # that an actor may take to answer: what it is asked for takes none


class _Actor:
    """A place of the machine that Ray chose, for as long as the actor lives. host: None: as Ray knows the machine.
    accelerated: whether it has accelerators."""

    def __init__(
        self, stem: str, host: str | None, env: Mapping[str, str], cwd: str, accelerated: bool
    ):
        import ray

        if accelerated:
            env = env | xla_flags.environment(this_machine().chip, {**os.environ, **env})
        self._place = LocalPlace(stem, host or ray.util.get_node_ip_address(), env, cwd=cwd)

    def about(self) -> dict[str, str]:
        return {name: getattr(self._place, name) for name in ("host", "python", "log", "ready")}

    def ask(self, name: str, *arguments):
        return getattr(self._place, name)(*arguments)


class RayPlacement:
    """Actors of Ray, one for each process; a context manager, which leaves the cluster at its end.

    address: of a running cluster; None: one is started on this machine, whose roles listen at 127.0.0.1. claim_seconds: that a cluster
    may take to have room for a process. ValueError if Ray is not installed or there is no cluster.
    """

    def __init__(self, address: str | None = None, *, claim_seconds: float = 300.0):
        try:
            import ray
        except ImportError:
            raise ValueError(
                "Ray is not installed; pip install '.[ray]' in this repository"
            ) from None
        folders = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        path = {"PYTHONPATH": os.pathsep.join(folders)}  # actors import this file
        more = {} if address else {"include_dashboard": False}
        try:
            ray.init(address, runtime_env={"env_vars": path}, log_to_driver=False, **more)
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(f"no cluster of Ray at --address={address}: {error}") from None
        self._ray, self._seconds = ray, claim_seconds
        self._host = None if address else "127.0.0.1"
        there = ray.cluster_resources()
        self._devices = next((name for name in ("TPU", "GPU") if there.get(name)), None)

    def __enter__(self) -> "RayPlacement":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._ray.shutdown()

    def check(self, roles: Sequence[Role]) -> None:
        """ValueError if the cluster has less than all roles ask for together."""
        there, asked = self._ray.cluster_resources(), collections.Counter()
        for role in roles:
            for name, number in self._resources(role).items():
                asked[name] += role.count * role.hosts * number
        for name, number in asked.items():
            has = there.get(name, 0)
            if number > has:
                unit, what = (2**30, "GiB of memory") if name == "memory" else (1, name)
                raise ValueError(
                    f"the roles ask for {number / unit:g} {what}, the cluster has {has / unit:.4g}; ask for fewer, or "
                    "add machines"
                )

    def _resources(self, role: Role) -> dict[str, int]:
        """What Ray counts; devices that a CPU plays are none of it."""
        wanted = {"CPU": role.cpus, "memory": role.memory * 2**30}
        if self._devices:
            wanted[self._devices] = role.devices
        return {name: number for name, number in wanted.items() if number}

    def claim(self, role: Role, index: int, process: int, stem: str | os.PathLike) -> "_RayPlace":
        resources = self._resources(role)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "scheduling_strategy": "SPREAD",
        }
        env = dict(role.env)
        accelerated = bool(role.devices and self._devices)
        if not accelerated:  # otherwise Ray says which ones a process sees
            env = visibility("cpu", [str(number) for number in range(role.devices)]) | env
        make = self._ray.remote(_Actor).options(**options)
        actor = make.remote(os.path.abspath(stem), self._host, env, os.getcwd(), accelerated)
        return _RayPlace(self._ray, actor, self._seconds)


class _RayPlace:
    """A place behind an actor."""

    def __init__(self, ray, actor, seconds: float):
        self._ray, self._actor = ray, actor
        about = self._answer(actor.about.remote(), seconds)
        self.host, self.python = about["host"], about["python"]
        self.log, self.ready = about["log"], about["ready"]

    def _answer(self, reference, seconds: float = _SECONDS):
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=seconds)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.GetTimeoutError:
            self.release()
            raise PlaceError(f"had no answer from its place within {seconds:g} s") from None
        except errors.RayActorError as error:
            self.release()
            raise PlaceError(f"lost its place ({type(error).__name__})") from None

    def _ask(self, name: str, *arguments):
        return self._answer(self._actor.ask.remote(name, *arguments))

    def start(self, argv: Sequence[str]) -> int:
        return self._ask("start", list(argv))

    def exit_code(self) -> int | None:
        return self._ask("exit_code")

    def port(self) -> int | None:
        return self._ask("port")

    def free_port(self) -> int:
        return self._ask("free_port")

    def tail(self, lines: int) -> str:
        return self._ask("tail", lines)

    def terminate(self) -> None:
        self._ask("terminate")

    def kill(self) -> None:
        self._ask("kill")

    def release(self) -> None:
        """With its actor all that runs there dies (`core.process.Program`)."""
        self._ray.kill(self._actor)


def define() -> flags.FlagValues:
    """The program's flags, besides those of the experiment."""
    values = topology.define()
    flags.DEFINE_string("address", None, "of a cluster of Ray", flag_values=values)
    return values


def main(argv: list[str]) -> int:
    """Exit code of the program with these arguments (the program's name first)."""
    return topology.start(argv, __doc__, lambda v: RayPlacement(v.address), define=define)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
