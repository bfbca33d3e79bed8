"""Runs agentic RL: a policy trains on multi-turn tool use while engines sample for it (GLM-5 4).

    python -m launch.local --experiment=experiments/rl_agentic.py:tiny --experiment.checkpoint=WORKDIR --workdir=DIR

WORKDIR is a run of sft.py or of a later stage. A run consists of several programs on separate devices:

- engines;
- a gateway, which keeps the sampled token ids of every session;
- a hub (the orchestrator), which divides the engines' capacity among the task services;
- the task services;
- the trainer.

launch/local.py starts all of them on this machine and restarts those that fail. launch/on_ray.py, slurm.py and gke.py
do so on several machines. DIR has the report, with a timeline of all programs, and each program's output in DIR/roles.
DIR/run.key is the API key of the run: created at its start with mode 600, sent and required by every program. The same
command resumes a run that was stopped or killed. It is refused while another run uses DIR.

:tiny    two services, on two CPU cores in about ten minutes: products, for which the policy must call a calculator and
         report its answer, and chains of four values
:small   an engine and a trainer on one accelerator each: search, products and programs
:glm5    64 engines of 8 chips each, and a trainer on 1,024. Provide tasks; few are shipped.

--experiment.max_staleness=0 is synchronous training: no sampling during updates.
--experiment.tasks="({'folder': 'DIR'},)" selects terminal tasks: folders in Harbor's format in DIR. Each is attempted
with a shell in a sandbox, as in experiments/evaluate.py, for which their program needs root.
"""

import asyncio
import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence

from experiments import rl_reasoning, serve as serving
from experiments.rl_reasoning import TaskWeight
from glm5_jax.agents.context import CONTEXTS, ContextConfig
from glm5_jax.agents.loop import LoopConfig
from glm5_jax.checkpoint import models
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.envs.service import AgentService
from glm5_jax.envs.terminal import AttemptConfig
from glm5_jax.envs.terminal.service import TerminalService, TerminalShare
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import ServerConfig
from glm5_jax.rl.algorithm.credit import CreditConfig
from glm5_jax.rl.algorithm.losses import PolicyConfig
from glm5_jax.rl.config import EvaluationConfig
from glm5_jax.rl.orchestrator.client import HubClient
from glm5_jax.rl.orchestrator.dispatcher import RemoteConfig
from glm5_jax.rl.orchestrator.program import PlaceConfig
from glm5_jax.rl.orchestrator.server import HubConfig, Orchestrator
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig
from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.rollouts.router import RouterConfig
from glm5_jax.rl.rollouts.sessions import SessionConfig
from glm5_jax.rl.trainers.async_trainer import Asynchronous, AsynchronousConfig
from glm5_jax.rl.trainers.mismatch_monitor import AgreementConfig
from glm5_jax.rl.weights.pusher import SyncConfig
from glm5_jax.rl.weights.weight_sync import Network, SharedStorage
from glm5_jax.runtime.config_flags import flags_between
from glm5_jax.runtime.http_server import HttpServer
from glm5_jax.runtime.placement import Role
from glm5_jax.runtime.terminal import print_error
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import MeshConfig, choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.schedule import ScheduleConfig, make_schedule
from glm5_jax.training.stages import Stage

TRAIN, ENGINE, GATEWAY, HUB, TASK = "train", "engine", "gateway", "hub", "task"
NETWORK, STORAGE = "network", "storage"
ALL = (
    TaskWeight(TaskConfig(kind="musique", size=10_000, python=True)),
    TaskWeight(TaskConfig(kind="worlds", size=10_000, hops=4, python=True)),
    TaskWeight(TaskConfig(kind="products", size=10_000, digits=6, python=True)),
    TaskWeight(TaskConfig(kind="mbpp", size=10_000)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Devices and processes of each program of a run.

    Attributes:
      engines: number of engines.
      ranks: data-parallel size of each engine; the gateway chooses the rank of a session.
      engine_devices, engine_topology, engine_memory: resources of an engine process, see `runtime.placement.Role`.
      engine_mesh: mesh of an engine's devices.
      warm: whether an engine compiles all programs before the first request.
      hosts: number of trainer processes.
      devices, topology, memory: resources of a trainer process, see `runtime.placement.Role`.
      port: port of the first engine. Those of the gateway, the hub and the services follow 1000 apart. 0: any free
        ports, which only launch/local.py and on_ray.py support.
      grace_s: time limit for a server to finish its requests and for the trainer to save, in seconds.
    """

    engines: int = 1
    ranks: int = 1
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
        for name in ("engines", "ranks", "hosts", "grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgenticConfig(AsynchronousConfig):
    """Configuration of asynchronous RL with agents.

    Replies and turns of an attempt are limited by `rollout`, its tokens by `length`. `rollout.tool_seconds` applies too,
    except in terminals.

    Attributes:
      tasks: task services, each with its weight in the training data.
      context: part of a conversation that each request sends; all of it by default. GLM-5 4.2.4 shortens it for search
        agents at inference; 3.1 keeps the thinking of coding agents. A shortened turn is a training record of its own.
      agent_timeout_s: time limit of an attempt, in seconds.
      judge_timeout_s: further time in which its service must have judged it, in seconds.
      max_inflight: concurrent attempts of a service.
      served_checkpoint: checkpoint that engines load, such as a folder of quantise.py; None: `checkpoint`.
      transport: way of weights to engines: "network", or "storage" (a folder in the workdir that all programs see).
      sync, registry, remote, router: see their classes.
      cluster: devices and processes of the programs.
      place: role of this process in the run.
    """

    policy: PolicyConfig = PolicyConfig(correction="double_sided")  # GLM-5 4.1.2
    credit: CreditConfig = CreditConfig("centred")  # GLM-5 3.3
    agreement: AgreementConfig = AgreementConfig(attempts=0)
    tasks: tuple[TaskWeight | TerminalShare, ...] = rl_reasoning.ALL
    verifier: VerifierConfig = VerifierConfig()
    context: ContextConfig = CONTEXTS["everything"]
    agent_timeout_s: float = 7200.0  # GLM-5 B.2: of Terminal-Bench 2.0
    judge_timeout_s: float = 600.0  # ours
    # Ours: batches wait for slow groups, and an attempt whose service hangs takes `remote.tries` times its time.
    batch_seconds: float = 16_200.0
    max_inflight: int = 512  # ours
    served_checkpoint: str | None = None
    transport: str = NETWORK
    sync: SyncConfig = SyncConfig()
    registry: RegistryConfig = RegistryConfig()
    remote: RemoteConfig = RemoteConfig()
    router: RouterConfig = RouterConfig()
    cluster: ClusterConfig = ClusterConfig()
    place: PlaceConfig = PlaceConfig()

    def __post_init__(self):
        super().__post_init__()
        if not self.tasks:
            raise ValueError("tasks is empty; name at least one kind")
        names = [share.name for share in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the tasks have one name: {sorted(names)}; join them into one")
        if self.transport not in (NETWORK, STORAGE):
            raise ValueError(f"transport is {self.transport!r}; use {NETWORK} or {STORAGE}")
        known = ("", TRAIN, *PROGRAMS)
        if self.place.role not in known:
            raise ValueError(
                f"place.role is {self.place.role!r}; use one of {', '.join(known[1:])}"
            )
        if self.agreement.attempts:
            raise ValueError(
                f"agreement.attempts is {self.agreement.attempts}; remote engines return only log-probs, so give 0"
            )
        self.loop()

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        """Fields that may differ when a run is resumed."""
        prefixes = ("cluster.", "place.", "registry.", "remote.", "router.", "sync.")
        return (
            *super().changeable_on_resume,
            *prefixes,
            "transport",
            "agent_timeout_s",
            "judge_timeout_s",
            "max_inflight",
            "served_checkpoint",
        )

    def loop(self) -> LoopConfig:
        """Returns the limits of an attempt."""
        rollout = self.rollout
        return LoopConfig(
            max_turns=rollout.max_turns,
            max_tokens=self.length,
            reply_tokens=rollout.max_tokens,
            timeout_s=self.agent_timeout_s,
            tool_timeout_s=rollout.tool_seconds,
            context=self.context,
        )

    def make_stage(
        self,
        workdir: str | os.PathLike,
        evaluator: object = None,
        previous_stage: Stage | None = None,
        **options,
    ) -> "Agentic":
        del evaluator
        return Agentic(self, workdir, previous_stage=previous_stage, **options)

    def programs(self) -> tuple[str, ...]:
        """Returns the flags of launch/local.py that start this run. Empty for a process that is one of its programs."""
        if self.place.role:
            return ()
        variant = self.name.partition(":")[2]
        changes = flags_between(get_config(variant), self)
        return (
            f"--experiment={pathlib.Path(__file__).resolve()}:{variant}",
            *(f"--experiment.{path}={text}" for path, text in changes),
        )


class Agentic(Asynchronous):
    """Trainer of the run. Without `place.role` it can be validated, but not run."""

    def __init__(
        self, config: AgenticConfig, workdir, previous_stage: Stage | None = None, **options
    ):
        hub, sync = None, config.sync
        if config.place.role:
            key = config.place.key(pathlib.Path(workdir))
            hub = HubClient(config.place.hub, key)
            if sync.api_key is None and sync.api_key_file is None:
                sync = dataclasses.replace(sync, api_key=key)
        super().__init__(config, workdir, hub, None, previous_stage=previous_stage, **options)
        engines = self.config.place.addresses
        if self.config.transport == NETWORK:
            self._pusher = Network(self.config.model, engines, sync)
        else:
            folder = self.workdir / "weights"
            self._pusher = SharedStorage(self.config.model, folder, engines, sync, self.tokenizer)


# -- the other programs ---------------------------------------------------------------------------------------


def serve(config: AgenticConfig, workdir: pathlib.Path) -> int | None:
    """Runs a server role until it is stopped. Returns its exit code, or None for the trainer role."""
    make = PROGRAMS.get(config.place.role)
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


def _engine(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    name = f"{ENGINE}-{config.place.number}"
    server = ServerConfig(**config.place.listening(workdir, name), variant=config.rollout.variant)
    checkpoint = config.served_checkpoint or config.checkpoint
    return serving.make_server(
        serving.ServeConfig(
            checkpoint=checkpoint,
            warm=config.cluster.warm,
            mesh=config.cluster.engine_mesh,
            engine=config.engine,
            server=server,
        )
    )


def _gateway(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    engines, ranks = config.place.addresses, config.cluster.ranks
    if ranks > 1:
        engines = [f"{engine}@{rank}" for engine in engines for rank in range(ranks)]
    gateway_config = GatewayConfig(
        **config.place.listening(workdir, GATEWAY),
        temperature=config.policy.temperature,
        max_tokens=config.rollout.max_tokens,
        seconds=config.agent_timeout_s,
        max_sessions=4 * config.max_running * config.rollout.group,
        journal=str(workdir / GATEWAY),
        session=SessionConfig(config.rollout.variant, config.rollout.max_turns),
        router=config.router,
    )
    return Gateway(load_checkpoint_tokenizer(config), engines, gateway_config)


def _hub(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    hub_config = HubConfig(
        **config.place.listening(workdir, HUB),
        gateway=config.place.gateway,
        seed=config.seed,
        journal=str(workdir / HUB),
        buffer=config.buffer(),
        registry=config.registry,
        remote=config.remote,
    )
    return Orchestrator(hub_config)


def _task(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    share = config.tasks[config.place.number]
    service_config = ServiceConfig(
        **config.place.listening(workdir, share.name),
        name=share.name,
        hub=config.place.hub,
        url=config.place.url or None,
        weight=share.weight,
        max_inflight=config.max_inflight,
        seconds=config.agent_timeout_s + config.judge_timeout_s,
        seed=config.seed,
    )
    # Terminal tasks have a service of their own.
    if isinstance(share, TerminalShare):
        limits = AttemptConfig(
            max_turns=config.rollout.max_turns,
            max_tokens=config.length,
            reply_tokens=config.rollout.max_tokens,
            timeout_s=config.agent_timeout_s,
            reply_timeout_s=config.agent_timeout_s,
            context=config.context,
            bash=share.bash,
            thinking=config.rollout.thinking,
        )
        return TerminalService(
            service_config,
            *share.load(),
            load_checkpoint_tokenizer(config),
            limits,
            images=share.images,
            build=share.build,
            task_limits=share.task_limits,
            variant=config.rollout.variant,
        )
    tasks, held_out = share.tasks_of(), share.tasks_of(evaluation=True)
    return AgentService(
        service_config,
        tasks,
        held_out,
        rl_reasoning.make_toolbox((*tasks, *held_out)),
        rl_reasoning.Verifiers(config.verifier, False),
        load_checkpoint_tokenizer(config),
        config.loop(),
        variant=config.rollout.variant,
        thinking=config.rollout.thinking,
    )


def load_checkpoint_tokenizer(config: AgenticConfig) -> Tokenizer:
    """Returns the checkpoint's tokenizer. Raises ValueError if there is no checkpoint."""
    if config.checkpoint is None:
        raise ValueError("there is no checkpoint; give --experiment.checkpoint=PATH")
    return models.load_tokenizer(config.checkpoint)


Program = Callable[[AgenticConfig, pathlib.Path], HttpServer]
PROGRAMS: dict[str, Program] = {ENGINE: _engine, GATEWAY: _gateway, HUB: _hub, TASK: _task}


def check(config: AgenticConfig) -> None:
    """Raises ValueError for a missing checkpoint, missing tasks or an invalid schedule, before any program starts."""
    try:
        make_schedule(config.schedule)
    except ValueError as error:
        raise ValueError(f"--experiment.schedule: {error}") from None
    checkpoint = config.served_checkpoint or config.checkpoint
    if checkpoint is None:
        raise ValueError(
            f"{config.name} has no weights to sample from; give --experiment.checkpoint=PATH, a workdir, one of its "
            "checkpoints/STEP or an HF folder"
        )
    models.read_config(checkpoint)
    for share in config.tasks:
        if isinstance(share, TerminalShare):
            share.load()


def roles(config: AgenticConfig, command: Sequence[str]) -> list[Role]:
    """Returns the roles of a run.

    Args:
      config: configuration of the run.
      command: flags that pass the configuration and the workdir to launch/run.py.
    """
    cluster, grace_s = config.cluster, config.cluster.grace_s

    def role(name: str, *flags: str, program: str = "", **options) -> Role:
        argv = ["{python}", "-m", "launch.run", *command]
        argv += [f"--experiment.place.{flag}" for flag in (f"role={program or name}", *flags)]
        return Role(name=name, argv=argv, grace_s=2 * grace_s, **options)

    def server(name: str, *flags: str, index: int, **options) -> Role:
        listen_flags = ("host={host}", "port={port}", "ready_file={ready}", f"grace_s={grace_s}")
        listen_flags = [f"listen.{flag}" for flag in listen_flags]
        port = cluster.port and cluster.port + 1000 * index
        return role(name, *listen_flags, *flags, port=port, **options)

    # One task service for each kind of tasks.
    devices = {"devices": cluster.engine_devices, "tpu_topology": cluster.engine_topology}
    devices |= {"count": cluster.engines, "memory_gib": cluster.engine_memory}
    tasks = [
        server(
            f"{TASK}-{i}",
            f"number={i}",
            "hub={hub.url}",
            "url={self.url}",
            index=3 + i,
            program=TASK,
        )
        for i in range(len(config.tasks))
    ]
    # The trainer, in as many processes as the cluster has hosts.
    trainer_devices = {
        "devices": cluster.devices,
        "tpu_topology": cluster.topology,
        "memory_gib": cluster.memory,
    }
    trainer = role(
        TRAIN,
        "hub={hub.url}",
        "engines={engine.urls}",
        hosts=cluster.hosts,
        main=True,
        **trainer_devices,
    )
    # The evaluation before the first step needs the task services.
    trainer = dataclasses.replace(trainer, after=[task.name for task in tasks])
    if cluster.hosts > 1:
        trainer = dataclasses.replace(trainer, argv=[*trainer.argv, "--distributed={distributed}"])
    return [
        server(ENGINE, "number={index}", index=0, start_timeout_s=1800.0, **devices),
        server(GATEWAY, "engines={engine.urls}", index=1),
        server(HUB, "gateway={gateway.url}", index=2),
        *tasks,
        trainer,
    ]


# -- variants -------------------------------------------------------------------------------------------------


def get_config(variant: str = "tiny") -> AgenticConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def tiny() -> AgenticConfig:
    """Uses our own rate, batch and lengths, as rl_reasoning.py does.

    Few batch shapes suffice for an engine whose requests arrive one by one, so that little is compiled.
    """
    base = rl_reasoning.tools()
    return AgenticConfig(
        name="rl_agentic:tiny",
        model=base.model,
        optimizer=base.optimizer,
        schedule=ScheduleConfig(kind="linear", peak=3e-4, end=3e-5, warmup_steps=5, total_steps=40),
        step=base.step,
        train=TrainConfig(eval_interval=10, sample_interval=0, save_interval=10),
        credit=CreditConfig("centred", drop_flat=True),
        rollout=dataclasses.replace(base.rollout, prompts=8),
        engine=EngineConfig(
            page_size=128,
            num_pages=1024,
            max_num_seqs=64,
            prefill_chunk=256,
            max_length=512,
            min_prefill_bucket=64,
        ),
        evaluation=EvaluationConfig(tasks=32),
        length=base.length,
        rows=64,
        max_staleness=2,
        # Adam's first step after a reset of its moments uses only the gradient's signs: too coarse for so short a run.
        new_moments=False,
        max_running=24,
        agent_timeout_s=600.0,
        judge_timeout_s=60.0,
        batch_seconds=1500.0,
        registry=RegistryConfig(lost_after=60.0),
        tasks=(
            TaskWeight(TaskConfig(kind="products", size=4000, digits=2), 0.75),
            TaskWeight(TaskConfig(kind="chain", size=4000, steps=4), 0.25),
        ),
        cluster=ClusterConfig(warm=False),
    )


def small() -> AgenticConfig:
    """Runs on two accelerators."""
    base = rl_reasoning.small()
    return AgenticConfig(
        name="rl_agentic:small",
        model=base.model,
        mesh=base.mesh,
        schedule=base.schedule,
        step=base.step,
        rollout=RolloutConfig(prompts=16, group=8, max_tokens=4096, max_turns=32),
        engine=EngineConfig(max_num_seqs=128, prefill_chunk=8192, max_length=32_768),
        length=32_768,
        tasks=ALL,
        cluster=ClusterConfig(engine_devices=1, devices=1),
    )


def glm5() -> AgenticConfig:
    """Runs the trainer on the mesh of rl_reasoning.py, one pod slice of v5p, and engines as W4A8 on 8 chips each.

    The W4A8 checkpoint is --experiment.served_checkpoint=FOLDER of quantise.py. The paper does not disclose the number of
    engines.
    """
    base, serve_config = rl_reasoning.glm5(), serving.glm5()
    return AgenticConfig(
        name="rl_agentic:glm5",
        model=base.model,
        mesh=base.mesh,
        step=base.step,
        rollout=RolloutConfig(prompts=32, group=8, max_turns=100),
        engine=serve_config.engine,
        length=202_752,  # GLM-5 B.2
        rows=base.rows,
        max_running=256,  # 2,048 rollouts at most; GLM-5 4.1.1: more than 1,000
        tasks=ALL,
        cluster=ClusterConfig(
            engines=64,
            ranks=8,
            engine_devices=8,
            engine_mesh=serve_config.mesh,
            engine_topology="2x2x2",
            hosts=256,
            devices=4,
            topology="8x8x16",
            port=7000,
        ),
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
