"""Agentic RL: a policy learns to use tools over many turns, while others sample for it (GLM-5 4).

    python -m launch.local --experiment=experiments/rl_agentic.py:tiny --experiment.checkpoint=WORKDIR --workdir=DIR

WORKDIR is a run of sft.py or of a later stage. Several programs on devices of their own: engines, a gateway that keeps
what was sampled token by token, a hub that shares the engines out among the services of the tasks, these services, and
what trains. launch/local.py starts them all on this machine, and again what dies; launch/on_ray.py, slurm.py and gke.py
do so on several. DIR has the report, in which a timeline shows who did what when, and what each program said in
DIR/roles. DIR/run.key is the API key of the run, made at its start with mode 600, which every program sends and requires.
The same command goes on with a run that was stopped or killed.

:tiny    two services, on two CPU cores in about ten minutes: products, by a calculator that must be called and whose
         answer must be told, and chains of four values
:small   an engine and a trainer on an accelerator each: search, products and programs
:glm5    64 engines of 8 chips each, and a trainer on 1,024. Bring tasks of your own; those that are shipped here are few.

--experiment.max_staleness=0 is synchronous training: nobody samples while it learns.
--experiment.tasks="({'folder': 'DIR'},)" are terminal tasks, folders in Harbor's format in DIR, each attempted with a shell
in a sandbox (as experiments/evaluate.py does), for which their program needs root.
"""

import asyncio
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence

from experiments import rl_reasoning, serve as serving
from experiments.rl_reasoning import Share
from glm5_jax.agents.context import CONTEXTS, ContextConfig
from glm5_jax.agents.loop import LoopConfig
from glm5_jax.agents.tools import Toolbox
from glm5_jax.checkpoint import models
from glm5_jax.core.editable import flags_between
from glm5_jax.core.placement import Role
from glm5_jax.core.server import HttpServer
from glm5_jax.envs.reasoning import VerifierConfig
from glm5_jax.envs.reasoning_tasks import TaskConfig
from glm5_jax.envs.service import AgentService
from glm5_jax.envs.terminal import AttemptConfig
from glm5_jax.envs.terminal.service import TerminalService, TerminalShare
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import ServerConfig
from glm5_jax.rl.asynchronous import Asynchronous, AsynchronousConfig
from glm5_jax.rl.client import HubClient
from glm5_jax.rl.experiment import EvaluationConfig
from glm5_jax.rl.gateway import Gateway, GatewayConfig
from glm5_jax.rl.losses import PolicyConfig
from glm5_jax.rl.monitor import AgreementConfig
from glm5_jax.rl.orchestrator import HubConfig, Orchestrator
from glm5_jax.rl.place import PlaceConfig
from glm5_jax.rl.pushed import SyncConfig
from glm5_jax.rl.registry import RegistryConfig
from glm5_jax.rl.remote import RemoteConfig
from glm5_jax.rl.rollout import RolloutConfig
from glm5_jax.rl.router import RouterConfig
from glm5_jax.rl.service import ServiceConfig
from glm5_jax.rl.sessions import SessionConfig
from glm5_jax.rl.streams import CreditConfig
from glm5_jax.rl.weight_sync import Network, SharedStorage
from glm5_jax.training.experiment import MeshConfig, choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.schedule import ScheduleConfig, make_schedule
from glm5_jax.training.stages import Stage

TRAIN, ENGINE, GATEWAY, HUB, TASK = "train", "engine", "gateway", "hub", "task"
NETWORK, STORAGE = "network", "storage"
ALL = (
    Share(TaskConfig("musique", size=10_000)),
    Share(TaskConfig("worlds", size=10_000, hops=4)),
    Share(TaskConfig("products", size=10_000, digits=6)),
    Share(TaskConfig("mbpp", size=10_000)),
)


@dataclasses.dataclass(frozen=True)
class LayoutConfig:
    """What the programs run on. devices, cpus and memory: of a process, see `core.placement.Role`.

    Attributes:
      engines: how many; ranks: data-parallel groups of each, between which the gateway chooses.
      engine_mesh: of an engine's devices; warm: whether it compiles all programs before the first request.
      hosts: processes that train.
      port: of the first engine; those of the gateway, the hub and the services follow 1000 apart; 0: any that are free, which
        only launch/local.py and on_ray.py can do.
      grace: seconds that a server has to end what it does, and the trainer to save.
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
    grace: float = 60.0

    def __post_init__(self):
        for name in ("engines", "ranks", "hosts", "grace"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclasses.dataclass(frozen=True)
class AgenticConfig(AsynchronousConfig):
    """Replies and turns of an attempt are those of `rollout`, its tokens at most `length`; `tool_seconds` of it holds too,
    but in terminals.

    Attributes:
      tasks: each a service of its own, with its share of what is learnt from.
      context: what of a conversation each request sends; all of it by default. GLM-5 4.2.4 shortens it for search agents
        at inference, 3.1 keeps the thinking of coding agents, and a shortened turn becomes a record of its own to train on.
      agent_seconds: of an attempt; judge_seconds: more, until its service must have judged it.
      max_inflight: attempts of a service at once.
      served: what engines start from, such as a folder of quantise.py; None: the checkpoint.
      transport: how weights get to engines: over the "network", or through "storage" that all see, in the workdir.
      sync, registry, remote, router: see their own.
    """

    policy: PolicyConfig = PolicyConfig(correction="double_sided")  # GLM-5 4.1.2
    credit: CreditConfig = CreditConfig("centred")  # GLM-5 3.3
    agreement: AgreementConfig = AgreementConfig(attempts=0)
    tasks: tuple[Share | TerminalShare, ...] = rl_reasoning.ALL
    verifier: VerifierConfig = VerifierConfig()
    context: ContextConfig = CONTEXTS["everything"]
    agent_seconds: float = 7200.0  # GLM-5 B.2: of Terminal-Bench 2.0
    judge_seconds: float = 600.0  # ours
    max_inflight: int = 512  # ours
    served: str | None = None
    transport: str = NETWORK
    sync: SyncConfig = SyncConfig()
    registry: RegistryConfig = RegistryConfig()
    remote: RemoteConfig = RemoteConfig()
    router: RouterConfig = RouterConfig()
    layout: LayoutConfig = LayoutConfig()
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
                f"agreement.attempts is {self.agreement.attempts}; engines are elsewhere and tell log-probs alone, so give 0"
            )
        self.loop()

    @property
    def free(self) -> tuple[str, ...]:
        own = ("layout.", "place.", "registry.", "remote.", "router.", "sync.", "transport")
        return *super().free, *own, "agent_seconds", "judge_seconds", "max_inflight", "served"

    def loop(self) -> LoopConfig:
        """The limits of an attempt."""
        own = self.rollout
        return LoopConfig(
            max_turns=own.max_turns,
            max_tokens=self.length,
            reply_tokens=own.max_tokens,
            seconds=self.agent_seconds,
            tool_seconds=own.tool_seconds,
            context=self.context,
        )

    def stage(self, workdir, evaluator=None, before=None, **options) -> "Agentic":
        del evaluator
        return Agentic(self, workdir, before=before, **options)

    def programs(self) -> tuple[str, ...]:
        """The flags of launch/local.py that start this run; none, if this is one of its programs."""
        if self.place.role:
            return ()
        variant = self.name.partition(":")[2]
        changes = flags_between(get_config(variant), self)
        return (
            f"--experiment={pathlib.Path(__file__).resolve()}:{variant}",
            *(f"--experiment.{path}={text}" for path, text in changes),
        )


class Agentic(Asynchronous):
    """What trains; as long as it is not told where the others are, it can be checked and not run."""

    def __init__(self, config: AgenticConfig, workdir, before: Stage | None = None, **options):
        hub, sync = None, config.sync
        if config.place.role:
            key = config.place.key(pathlib.Path(workdir))
            hub = HubClient(config.place.hub, key)
            if sync.api_key is None and sync.api_key_file is None:
                sync = dataclasses.replace(sync, api_key=key)
        super().__init__(config, workdir, hub, None, before=before, **options)
        engines = self.config.place.addresses
        if self.config.transport == NETWORK:
            self._pusher = Network(self.config.model, engines, sync)
        else:
            folder = self.workdir / "weights"
            self._pusher = SharedStorage(self.config.model, folder, engines, sync, self.tokenizer)


# -- the other programs ---------------------------------------------------------------------------------------


def serve(config: AgenticConfig, workdir: pathlib.Path) -> int | None:
    """Runs a program that serves until it is told to end; its exit code. None: this one trains."""
    make = PROGRAMS.get(config.place.role)
    if make is None:
        return None
    try:
        server = make(config, workdir)
        asyncio.run(server.serve())
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 1 if server.failed else 0


def _engine(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    name = f"{ENGINE}-{config.place.number}"
    server = ServerConfig(**config.place.listening(workdir, name), variant=config.rollout.variant)
    checkpoint = config.served or config.checkpoint
    layout = config.layout
    own = layout.warm, layout.engine_mesh, config.engine, server
    return serving.make_server(serving.ServeConfig(checkpoint, *own))


def _gateway(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    engines, ranks = config.place.addresses, config.layout.ranks
    if ranks > 1:
        engines = [f"{engine}@{rank}" for engine in engines for rank in range(ranks)]
    own = GatewayConfig(
        **config.place.listening(workdir, GATEWAY),
        temperature=config.policy.temperature,
        max_tokens=config.rollout.max_tokens,
        seconds=config.agent_seconds,
        max_sessions=4 * config.max_running * config.rollout.group,
        journal=str(workdir / GATEWAY),
        session=SessionConfig(config.rollout.variant, config.rollout.max_turns),
        router=config.router,
    )
    return Gateway(tokenizer_of(config), engines, own)


def _hub(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    own = HubConfig(
        **config.place.listening(workdir, HUB),
        gateway=config.place.gateway,
        seed=config.seed,
        journal=str(workdir / HUB),
        buffer=config.buffer(),
        registry=config.registry,
        remote=config.remote,
    )
    return Orchestrator(own)


def _task(config: AgenticConfig, workdir: pathlib.Path) -> HttpServer:
    share = config.tasks[config.place.number]
    own = ServiceConfig(
        **config.place.listening(workdir, share.name),
        name=share.name,
        hub=config.place.hub,
        url=config.place.url or None,
        weight=share.weight,
        max_inflight=config.max_inflight,
        seconds=config.agent_seconds + config.judge_seconds,
        seed=config.seed,
    )
    if isinstance(share, TerminalShare):
        limits = AttemptConfig(
            max_turns=config.rollout.max_turns,
            max_tokens=config.length,
            reply_tokens=config.rollout.max_tokens,
            seconds=config.agent_seconds,
            reply_seconds=config.agent_seconds,
            context=config.context,
            bash=share.bash,
            thinking=config.rollout.thinking,
        )
        return TerminalService(
            own,
            *share.load(),
            tokenizer_of(config),
            limits,
            images=share.images,
            task_limits=share.task_limits,
            variant=config.rollout.variant,
        )
    tasks, held_out = share.tasks_of(), share.tasks_of(evaluation=True)
    return AgentService(
        own,
        tasks,
        held_out,
        Toolbox(rl_reasoning.TOOLS, (*tasks, *held_out)),
        rl_reasoning.Verifiers(config.verifier, False),
        tokenizer_of(config),
        config.loop(),
        variant=config.rollout.variant,
        thinking=config.rollout.thinking,
    )


def tokenizer_of(config: AgenticConfig):
    """Returns the checkpoint's tokenizer. Raises ValueError if there is no checkpoint."""
    if config.checkpoint is None:
        raise ValueError("there is no checkpoint; give --experiment.checkpoint=PATH")
    return models.load_tokenizer(config.checkpoint)


Program = Callable[[AgenticConfig, pathlib.Path], HttpServer]
PROGRAMS: dict[str, Program] = {ENGINE: _engine, GATEWAY: _gateway, HUB: _hub, TASK: _task}


def check(config: AgenticConfig) -> None:
    """ValueError for a checkpoint or tasks that are not there, or a schedule that cannot be, which programs would find one
    after the other."""
    try:
        make_schedule(config.schedule)
    except ValueError as error:
        raise ValueError(f"--experiment.schedule: {error}") from None
    checkpoint = config.served or config.checkpoint
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
    """The programs of a run; command: the flags that give launch/run.py its config and workdir."""
    layout, shared = config.layout, config.layout.grace

    def role(name: str, *words: str, program: str = "", **more) -> Role:
        argv = ["{python}", "-m", "launch.run", *command]
        argv += [f"--experiment.place.{word}" for word in (f"role={program or name}", *words)]
        return Role(name, argv, grace=2 * shared, **more)

    def server(name: str, *words: str, place: int, **more) -> Role:
        listens = ("host={host}", "port={port}", "ready_file={ready}", f"grace={shared}")
        listens = [f"listen.{word}" for word in listens]
        port = layout.port and layout.port + 1000 * place
        return role(name, *listens, *words, port=port, **more)

    devices = {"devices": layout.engine_devices, "tpu_topology": layout.engine_topology}
    devices |= {"count": layout.engines, "memory": layout.engine_memory}
    tasks = [
        server(
            f"{TASK}-{i}",
            f"number={i}",
            "hub={hub.url}",
            "url={self.url}",
            place=3 + i,
            program=TASK,
        )
        for i in range(len(config.tasks))
    ]
    own = {"devices": layout.devices, "tpu_topology": layout.topology, "memory": layout.memory}
    trains = role(
        TRAIN, "hub={hub.url}", "engines={engine.urls}", hosts=layout.hosts, main=True, **own
    )
    # Or there would be nothing to evaluate before the first step.
    trains = dataclasses.replace(trains, after=[task.name for task in tasks])
    if layout.hosts > 1:
        trains = dataclasses.replace(trains, argv=[*trains.argv, "--distributed={distributed}"])
    return [
        server(ENGINE, "number={index}", place=0, start_seconds=1800.0, **devices),
        server(GATEWAY, "engines={engine.urls}", place=1),
        server(HUB, "gateway={gateway.url}", place=2),
        *tasks,
        trains,
    ]


# -- variants -------------------------------------------------------------------------------------------------


def get_config(variant: str = "tiny") -> AgenticConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def tiny() -> AgenticConfig:
    """Rate, batch and lengths are ours, as those of rl_reasoning.py. Attempts come one by one, and an engine that meets
    them with few programs has little to compile."""
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
            max_batch=64,
            chunk=256,
            max_length=512,
            short_prompt=64,
        ),
        evaluation=EvaluationConfig(tasks=32),
        length=base.length,
        rows=64,
        max_staleness=2,
        # A step of Adam whose moments are new is one of signs alone, too coarse for as few steps as here.
        new_moments=False,
        max_running=24,
        agent_seconds=600.0,
        judge_seconds=60.0,
        batch_seconds=600.0,
        registry=RegistryConfig(lost_after=60.0),
        tasks=(
            Share(TaskConfig("products", size=4000, digits=2), 0.75),
            Share(TaskConfig("chain", size=4000, steps=4), 0.25),
        ),
        layout=LayoutConfig(warm=False),
    )


def small() -> AgenticConfig:
    """Two accelerators."""
    base = rl_reasoning.small()
    return AgenticConfig(
        name="rl_agentic:small",
        model=base.model,
        mesh=base.mesh,
        schedule=base.schedule,
        step=base.step,
        rollout=RolloutConfig(prompts=16, group=8, max_tokens=4096, max_turns=32),
        engine=EngineConfig(max_batch=128, chunk=8192, max_length=32_768),
        length=32_768,
        tasks=ALL,
        layout=LayoutConfig(engine_devices=1, devices=1),
    )


def glm5() -> AgenticConfig:
    """The trainer on the mesh of rl_reasoning.py, one pod slice of v5p; engines as W4A8 (--experiment.served=FOLDER of
    quantise.py), 8 chips each. How many there are is not disclosed."""
    base, served = rl_reasoning.glm5(), serving.glm5()
    return AgenticConfig(
        name="rl_agentic:glm5",
        model=base.model,
        mesh=base.mesh,
        step=base.step,
        rollout=RolloutConfig(prompts=32, group=8, max_turns=100),
        engine=served.engine,
        length=202_752,  # GLM-5 B.2
        rows=base.rows,
        max_running=256,  # 2,048 rollouts at most; GLM-5 4.1.1: more than 1,000
        tasks=ALL,
        layout=LayoutConfig(
            engines=64,
            ranks=8,
            engine_devices=8,
            engine_mesh=served.mesh,
            engine_topology="2x2x2",
            hosts=256,
            devices=4,
            topology="8x8x16",
            port=7000,
        ),
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
