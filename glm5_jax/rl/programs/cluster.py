"""Defines the names of the roles of a run, and `ClusterConfig`, the devices and processes of each."""

import dataclasses

from glm5_jax.training.experiment import MeshConfig

TRAIN, ENGINE, GATEWAY, ORCHESTRATOR, TASK = "train", "engine", "gateway", "orchestrator", "task"
ROLES = (TRAIN, ENGINE, GATEWAY, ORCHESTRATOR, TASK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Devices and processes of each program of a run.

    Attributes:
      engines: number of engines.
      ranks: data-parallel size of each engine; the gateway chooses the rank of a session.
      engine_hosts: number of processes of each engine.
      engine_devices, engine_topology, engine_memory: resources of an engine process, see `runtime.placement.Role`.
      engine_mesh: mesh of an engine's devices.
      warm: whether an engine compiles all programs before the first request.
      hosts: number of trainer processes.
      devices, topology, memory: resources of a trainer process, see `runtime.placement.Role`.
      port: port of the first engine. Those of the gateway, the orchestrator and the services follow 1000 apart. 0: any free
        ports, which only launch/local.py and on_ray.py support.
      grace_s: time limit for a server to finish its requests and for the trainer to save, in seconds.
    """

    engines: int = 1
    ranks: int = 1
    engine_hosts: int = 1
    engine_devices: int = 0
    engine_mesh: MeshConfig = MeshConfig()
    warm: bool = True
    engine_topology: str = ""
    engine_memory: int = 0
    hosts: int = 1
    devices: int = 0
    topology: str = ""
    memory: int = 0
    port: int = 0
    grace_s: float = 60.0

    def __post_init__(self):
        for name in ("engines", "ranks", "engine_hosts", "hosts", "grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
