"""Lists the roles of a run: the commands of its programs, their devices, and who waits for whom to start."""

import dataclasses
from collections.abc import Sequence

from glm5_jax.rl.programs.cluster import ENGINE, GATEWAY, ORCHESTRATOR, TASK, TRAIN
from glm5_jax.rl.programs.trainer import AgenticRlConfig
from glm5_jax.runtime.placement import Role

PORT_DISTANCE = 1000  # between the first ports of two roles
ENGINE_START_TIMEOUT_S = 1800.0


def list_roles(config: AgenticRlConfig, command: Sequence[str]) -> list[Role]:
    """Returns the roles of a run; none if its engine runs in the trainer's process.

    Args:
      config: configuration of the run.
      command: flags that pass the configuration and the workdir to launch/run.py.
    """
    if not config.has_engine_processes:
        return []
    cluster, grace_s = config.cluster, config.cluster.grace_s

    def role(name: str, *flags: str, program: str = "", **options) -> Role:
        argv = ["{python}", "-m", "launch.run", *command]
        argv += [f"--experiment.program.{flag}" for flag in (f"role={program or name}", *flags)]
        return Role(name=name, argv=argv, grace_s=2 * grace_s, **options)

    def server(name: str, *flags: str, index: int, **options) -> Role:
        listen_flags = ("host={host}", "port={port}", "ready_file={ready}", f"grace_s={grace_s}")
        listen_flags = [f"listen.{flag}" for flag in listen_flags]
        port = cluster.port and cluster.port + PORT_DISTANCE * index
        return role(name, *listen_flags, *flags, port=port, **options)

    engine = server(
        ENGINE,
        "number={index}",
        index=0,
        count=cluster.engines,
        hosts=cluster.engine_hosts,
        devices=cluster.engine_devices,
        tpu_topology=cluster.engine_topology,
        memory_gib=cluster.engine_memory,
        start_timeout_s=ENGINE_START_TIMEOUT_S,
    )
    gateway = server(GATEWAY, "engines={engine.urls}", index=1)
    orchestrator = server(ORCHESTRATOR, "gateway={gateway.url}", index=2)
    # One task service for each kind of tasks.
    tasks = [
        server(
            f"{TASK}-{i}",
            f"number={i}",
            "orchestrator={orchestrator.url}",
            "url={self.url}",
            index=3 + i,
            program=TASK,
        )
        for i in range(len(config.task_shares))
    ]
    # The trainer, in as many processes as the cluster has hosts. Its first evaluation needs the task services.
    trainer = role(
        TRAIN,
        "orchestrator={orchestrator.url}",
        "engines={engine.urls}",
        hosts=cluster.hosts,
        devices=cluster.devices,
        tpu_topology=cluster.topology,
        memory_gib=cluster.memory,
        main=True,
        after=[task.name for task in tasks],
    )
    return [_joined(engine), gateway, orchestrator, *tasks, _joined(trainer)]


def _joined(role: Role) -> Role:
    """Returns the role with the flag by which the processes of a replica join."""
    if role.hosts == 1:
        return role
    return dataclasses.replace(role, argv=[*role.argv, "--distributed={distributed}"])
