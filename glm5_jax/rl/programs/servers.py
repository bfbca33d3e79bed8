"""Makes the server of each role of a run, and serves the one that this process is."""

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable

from glm5_jax.checkpoint import models
from glm5_jax.config import ModelConfig
from glm5_jax.inference.checkpoint_server import make_checkpoint_server
from glm5_jax.inference.server import ServerConfig
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.orchestrator.server import Orchestrator, OrchestratorConfig
from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.rl.programs.cluster import ENGINE, GATEWAY, ORCHESTRATOR, TASK
from glm5_jax.rl.programs.trainer import AgenticRlConfig
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.rollouts.sessions import SessionConfig
from glm5_jax.runtime.http_server import HttpServer
from glm5_jax.runtime.terminal import print_error
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.schedule import make_schedule

# Of an attempt's time, after which an engine returns what a reply has so far. Without a reply nothing could be said of a
# policy that thinks without end: its attempt would be left out of training, in place of a reward of 0.
_REPLY_SHARE = 0.95


def serve(config: AgenticRlConfig, workdir: pathlib.Path) -> int | None:
    """Runs a server role until it is stopped. Returns its exit code, or None for the trainer role."""
    make = SERVERS.get(config.program.role)
    if make is None:
        return None
    try:
        server = make(config, workdir)
        asyncio.run(server.serve())
    except (ValueError, OSError) as error:
        print_error(error)
        # A port in use or a full disk may be free at the next try: 1, with which launchers restart the role. 2 is a
        # user error, which ends the run.
        return 1 if isinstance(error, OSError) else 2
    return 1 if server.failed else 0


def make_engine(config: AgenticRlConfig, workdir: pathlib.Path) -> HttpServer:
    """Returns the server of an engine, or of one of its processes."""
    name = f"{ENGINE}-{config.program.number}"
    server_config = ServerConfig(
        **config.program.listen_options(workdir, name),
        variant=config.rollout.variant,
        timeout_s=_REPLY_SHARE * config.agent_timeout_s,
        pull_hosts=config.program.pull_hosts,
    )
    return make_checkpoint_server(
        _served_checkpoint(config),
        make_mesh(dataclasses.asdict(config.cluster.engine_mesh)),
        # The gateway requests no log-probs of prompts.
        dataclasses.replace(config.engine, warms_prompt_logprobs=False),
        server_config,
        warm=config.cluster.warm,
        # SFT trains int4 experts and RL does not: a push would not fit the model of the SFT checkpoint.
        trained=_trained_model(config),
    )


def make_gateway(config: AgenticRlConfig, workdir: pathlib.Path) -> HttpServer:
    """Returns the gateway in front of all ranks of all engines."""
    engines, ranks = config.program.engine_urls, config.cluster.ranks
    if ranks > 1:
        engines = [f"{engine}@{rank}" for engine in engines for rank in range(ranks)]
    gateway_config = GatewayConfig(
        **config.program.listen_options(workdir, GATEWAY),
        temperature=config.policy.temperature,
        max_tokens=config.rollout.max_tokens,
        reply_timeout_s=config.agent_timeout_s,
        max_sessions=4 * config.max_running * config.rollout.group,
        journal=str(workdir / GATEWAY),
        session=SessionConfig(variant=config.rollout.variant, max_turns=config.rollout.max_turns),
        router=config.router,
    )
    return Gateway(load_tokenizer(config), engines, gateway_config)


def make_orchestrator(config: AgenticRlConfig, workdir: pathlib.Path) -> HttpServer:
    """Returns the orchestrator."""
    orchestrator_config = OrchestratorConfig(
        **config.program.listen_options(workdir, ORCHESTRATOR),
        gateway=config.program.gateway,
        seed=config.seed,
        journal=str(workdir / ORCHESTRATOR),
        buffer=config.make_buffer_config(),
        registry=config.registry,
        dispatcher=config.dispatcher,
    )
    return Orchestrator(orchestrator_config)


def make_task_service(config: AgenticRlConfig, workdir: pathlib.Path) -> HttpServer:
    """Returns the task service with number `program.number`."""
    share = config.task_shares[config.program.number]
    service_config = ServiceConfig(
        **config.program.listen_options(workdir, share.name),
        name=share.name,
        orchestrator=config.program.orchestrator,
        url=config.program.url or None,
        weight=share.weight,
        max_inflight=config.max_inflight,
        rate=config.rates[config.program.number] if config.rates else None,
        rollout_timeout_s=config.agent_timeout_s + config.judge_timeout_s,
        seed=config.seed,
    )
    return config.make_task_service(service_config, load_tokenizer(config))


def _trained_model(config: AgenticRlConfig) -> ModelConfig:
    """Returns the model whose weights the trainer pushes. Raises ValueError if the checkpoint has none."""
    if not config.model_of_checkpoint:
        return config.model
    stored, _ = models.read_config(_served_checkpoint(config))
    return config.change_model(stored)


def load_tokenizer(config: AgenticRlConfig) -> Tokenizer:
    """Returns the checkpoint's tokenizer. Raises ValueError if there is no checkpoint."""
    if config.checkpoint is None:
        raise ValueError("there is no checkpoint; give --experiment.checkpoint=PATH")
    return models.load_tokenizer(config.checkpoint)


Maker = Callable[[AgenticRlConfig, pathlib.Path], HttpServer]
SERVERS: dict[str, Maker] = {
    ENGINE: make_engine,
    GATEWAY: make_gateway,
    ORCHESTRATOR: make_orchestrator,
    TASK: make_task_service,
}


def check(config: AgenticRlConfig) -> None:
    """Raises ValueError for a missing checkpoint or data, or an invalid schedule, before any program starts.

    A run with its engine in the trainer's process is checked by its trainer.
    """
    if not config.has_engine_processes:
        return
    config.check_data()
    try:
        make_schedule(config.schedule)
    except ValueError as error:
        raise ValueError(f"--experiment.schedule: {error}") from None
    models.read_config(_served_checkpoint(config))


def _served_checkpoint(config: AgenticRlConfig) -> str:
    """Returns the checkpoint that engines load. Raises ValueError if there is none."""
    checkpoint = config.served_checkpoint or config.checkpoint
    if checkpoint is None:
        raise ValueError(
            f"{config.name} has no weights to sample from; give --experiment.checkpoint=PATH, a workdir, one of its "
            "checkpoints/STEP or an HF folder"
        )
    return checkpoint
