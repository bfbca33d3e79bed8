"""Runs the programs of asynchronous RL as threads of one process; on a pod each is a process (rl_agentic.py)."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import jax

from experiments import rl_reasoning
from experiments.rl_reasoning import TaskWeight
from glm5_jax.agents.context import ContextConfig
from glm5_jax.agents.loop import LoopConfig
from glm5_jax.agents.tools import Toolbox
from glm5_jax.checkpoint.models import make_weight_loader
from glm5_jax.envs.service import AgentService
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.server import Orchestrator, OrchestratorConfig
from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.trainers.async_trainer import AsyncRlConfig, AsyncRlTrainer
from glm5_jax.rl.types import Verifier
from glm5_jax.rl.weights.weight_sync import NetworkPusher
from glm5_jax.runtime.utilization import FOLDER
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.loop import TrainConfig

ENGINE = EngineConfig(page_size=32, max_num_seqs=64, prefill_chunk=128, max_length=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskProgram:
    """Tasks of one kind, for a task service.

    Attributes:
      tasks: the tasks.
      verify: verifier, which may be slow.
    """

    tasks: TaskWeight
    verify: Verifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSystem:
    """Running system.

    Attributes:
      urls: address of each program.
      trainer: its trainer, which has not started.
      client: client of the orchestrator.
    """

    urls: Mapping[str, str]
    trainer: AsyncRlTrainer
    client: OrchestratorClient


def small_config(steps: int, max_staleness: int = 2) -> AsyncRlConfig:
    """Returns options to train 0.13M parameters from random weights, in batches of 8 groups of 8 rollouts."""
    base = rl_reasoning.addition()
    return AsyncRlConfig(
        name="notebook",
        model=base.model,
        tokenizer="bytes",
        requires_checkpoint=False,
        optimizer=base.optimizer,
        schedule=dataclasses.replace(base.schedule, total_steps=steps),
        step=base.step,
        policy=dataclasses.replace(base.policy, correction="double_sided"),
        credit=base.credit,
        train=TrainConfig(eval_interval=0, sample_interval=0, save_interval=0),
        rollout=dataclasses.replace(base.rollout, prompts=8, group=8),
        evaluation=dataclasses.replace(base.evaluation, tasks=0),
        mismatch=dataclasses.replace(base.mismatch, attempts=0),
        length=64,
        rows=16,
        max_staleness=max_staleness,
    )


@contextlib.contextmanager
def running_system(
    config: AsyncRlConfig, programs: Mapping[str, TaskProgram], workdir: str
) -> Iterator[AsyncSystem]:
    """Starts an engine, a gateway, an orchestrator and a task service for each program; stops them at the end.

    Each gets the addresses of the servers that it calls, and records in the workdir when it is busy.
    """
    tokenizer = Tokenizer.load("bytes")

    def listen(name: str) -> dict:
        file = pathlib.Path(workdir) / FOLDER / f"{name}.jsonl"
        return {"port": 0, "utilization_file": str(file)}

    model = glm5.Glm5(config.model, params=glm5.init_params(config.model, jax.random.key(0)))
    engine = Server(
        Engine(model, tokenizer, ENGINE),
        tokenizer,
        ServerConfig(**listen("engine")),
        make_weight_loader(model),
    )
    urls = {}
    with contextlib.ExitStack() as servers:
        urls["engine"] = servers.enter_context(engine.running())
        gateway_config = GatewayConfig(**listen("gateway"), max_tokens=config.rollout.max_tokens)
        gateway = Gateway(tokenizer, [urls["engine"]], gateway_config)
        urls["gateway"] = servers.enter_context(gateway.running())
        orchestrator_config = OrchestratorConfig(
            **listen("orchestrator"), gateway=urls["gateway"], buffer=config.make_buffer_config()
        )
        orchestrator = Orchestrator(orchestrator_config)
        urls["orchestrator"] = servers.enter_context(orchestrator.running())
        for name, program in programs.items():
            service_config = ServiceConfig(
                **listen(name),
                name=name,
                orchestrator=urls["orchestrator"],
                rollout_timeout_s=900.0,
            )
            service = _task_service(service_config, program, tokenizer)
            urls[name] = servers.enter_context(service.running())
        client = OrchestratorClient(urls["orchestrator"])
        pusher = NetworkPusher(config.model, [urls["engine"]])
        trainer = AsyncRlTrainer(config, workdir, client, pusher)
        yield AsyncSystem(urls=urls, trainer=trainer, client=client)


def _task_service(
    config: ServiceConfig, program: TaskProgram, tokenizer: Tokenizer
) -> AgentService:
    tasks = program.tasks.tasks_of()
    loop = LoopConfig(
        max_tokens=64,
        reply_tokens=4,
        timeout_s=600.0,
        context=ContextConfig(keep_rounds=None, max_prompt_tokens=None),
    )
    return AgentService(
        config,
        tasks,
        program.tasks.tasks_of(evaluation=True),
        Toolbox({}, tasks),
        program.verify,
        tokenizer,
        loop,
        thinking=False,
    )
