"""Starts the roles of an experiment on a Ray cluster, and watches them until the run ends.

    python -m launch.on_ray --experiment=FILE.py:VARIANT --address=auto [--hosts=2] [--devices=8] [--workdir=DIR]

As launch/local.py, on whatever machines of the cluster have room; Ray, which is an extra (pip install 'glm5_jax[ray]'), finds
them and keeps the processes' accelerators apart. Without --address it is a cluster of this machine alone, for this run. All machines see
the folder that this is started in, and DIR. A role whose machine is lost is started on another; those that were told its
address are started again.
"""

import os
import sys
from collections.abc import Sequence

from absl import flags

from glm5_jax.core.placement import PlaceError, Role
from launch import topology
from launch.local import LocalPlace

_SECONDS = 60.0  # that an actor may take to answer: what it is asked for takes none


class _Actor:
    """A place of the machine that Ray chose, for as long as the actor lives."""

    def __init__(self, stem: str, env: dict[str, str], cwd: str):
        import ray

        self._place = LocalPlace(stem, ray.util.get_node_ip_address(), env, cwd=cwd)

    def about(self) -> dict[str, str]:
        return {name: getattr(self._place, name) for name in ("host", "python", "log", "ready")}

    def ask(self, name: str, *arguments):
        return getattr(self._place, name)(*arguments)


class RayPlacement:
    """Actors of Ray, one for each process; a context manager, which leaves the cluster at its end.

    address: of a running cluster; None: one is started on this machine. start_seconds: until a machine must be found for a process.
    ValueError if Ray is not installed or there is no cluster.
    """

    def __init__(self, address: str | None = None, *, start_seconds: float = 300.0):
        try:
            import ray
        except ImportError:
            raise ValueError("Ray is not installed; pip install 'glm5_jax[ray]'") from None
        self._ray, self._seconds = ray, start_seconds
        folders = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        path = {"PYTHONPATH": os.pathsep.join(folders)}  # actors import this file
        # What one machine alone is for, others need not reach.
        own = {} if address else {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
        try:
            ray.init(address, runtime_env={"env_vars": path}, log_to_driver=False, **own)
        except ConnectionError as error:
            raise ValueError(f"--address={address}: {error}") from None

    def __enter__(self) -> "RayPlacement":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._ray.shutdown()

    def check(self, roles: Sequence[Role]) -> None:
        """ValueError if the cluster has less than all roles ask for together."""
        there = self._ray.cluster_resources()
        asked: dict[str, float] = {}
        for role in roles:
            for name, number in self._resources(role).items():
                asked[name] = asked.get(name, 0) + role.count * role.hosts * number
        for name, number in asked.items():
            if number > there.get(name, 0):
                raise ValueError(
                    f"the roles ask for {number:g} {name}, the cluster has {there.get(name, 0):g}; ask for fewer, or "
                    "add machines"
                )

    def _resources(self, role: Role) -> dict[str, float]:
        there = self._ray.cluster_resources()
        devices = "TPU" if there.get("TPU") else "GPU"
        wanted = {"CPU": role.cpus, "memory": role.memory * 2**30, devices: role.devices}
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
        if not role.devices:
            env = {"JAX_PLATFORMS": "cpu"} | env
        make = self._ray.remote(_Actor).options(**options)
        actor = make.remote(os.path.abspath(stem), env, os.getcwd())
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
            raise error.as_instanceof_cause() from None
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            self.release()
            raise PlaceError(f"lost its place: {type(error).__name__}") from None

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
