"""Configuration and trainer of a run of several programs: engines, a gateway, an orchestrator, task services and a trainer.

`AgenticRlConfig` configures all of them, so that they agree. A recipe subclasses it with its tasks and its task services.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from glm5_jax.model.lora import without_adapters
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig
from glm5_jax.rl.orchestrator.task_service import ServiceConfig, TaskService
from glm5_jax.rl.programs.cluster import ROLES, ClusterConfig
from glm5_jax.rl.programs.program import ProgramConfig
from glm5_jax.rl.rollouts.router import RouterConfig
from glm5_jax.rl.trainers.async_trainer import AsyncRlConfig, AsyncRlTrainer, GroupSource
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.rl.weights.pusher import Pusher, SyncConfig
from glm5_jax.rl.weights.weight_sync import NetworkPusher, SharedStoragePusher
from glm5_jax.runtime.config_flags import flags_between
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.stages import Stage

NETWORK, STORAGE = "network", "storage"


class TaskShare(Protocol):
    """Set of tasks that one task service serves.

    Attributes:
      name: name of the task service.
      weight: weight of the set among all sets.
    """

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgenticRlConfig(AsyncRlConfig):
    """Configuration of asynchronous RL in several programs. Subclasses implement `make_task_service`.

    Attributes:
      tasks: task services, each with its weight in the training data.
      agent_timeout_s: time limit of an attempt, in seconds.
      judge_timeout_s: further time in which its service must have judged it, in seconds.
      max_inflight: concurrent attempts of a service.
      served_checkpoint: checkpoint that engines load, such as a folder of quantise.py; None: `checkpoint`.
      transport: way of weights to engines: "network", or "storage" (a folder in the workdir that all programs see).
      sync, registry, dispatcher, router: see their classes.
      cluster: devices and processes of the programs.
      program: role of this process in the run.
    """

    mismatch: MismatchConfig = MismatchConfig(attempts=0)
    tasks: tuple[TaskShare, ...] = ()
    agent_timeout_s: float = 7200.0  # GLM-5 B.2: of Terminal-Bench 2.0
    judge_timeout_s: float = 600.0  # ours
    # Ours: batches wait for slow groups, and an attempt whose service hangs takes `dispatcher.max_tries` times its time.
    batch_timeout_s: float = 16_200.0
    max_inflight: int = 512  # ours
    served_checkpoint: str | None = None
    transport: str = NETWORK
    sync: SyncConfig = SyncConfig()
    registry: RegistryConfig = RegistryConfig()
    dispatcher: DispatcherConfig = DispatcherConfig()
    router: RouterConfig = RouterConfig()
    cluster: ClusterConfig = ClusterConfig()
    program: ProgramConfig = ProgramConfig()

    def __post_init__(self):
        super().__post_init__()
        if not self.tasks:
            raise ValueError("tasks is empty; name at least one kind")
        names = [share.name for share in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the tasks have one name: {sorted(names)}; join them into one")
        if self.transport not in (NETWORK, STORAGE):
            raise ValueError(f"transport is {self.transport!r}; use {NETWORK} or {STORAGE}")
        if self.program.role not in ("", *ROLES):
            raise ValueError(
                f"program.role is {self.program.role!r}; use one of {', '.join(ROLES)}"
            )
        if self.mismatch.attempts:
            raise ValueError(
                f"mismatch.attempts is {self.mismatch.attempts}; remote engines return only log-probs, so give 0"
            )

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        """Fields that may differ when a run is resumed."""
        prefixes = ("cluster.", "program.", "registry.", "dispatcher.", "router.", "sync.")
        return (
            *super().changeable_on_resume,
            *prefixes,
            "transport",
            "agent_timeout_s",
            "judge_timeout_s",
            "max_inflight",
            "served_checkpoint",
        )

    def make_task_service(self, service: ServiceConfig, tokenizer: Tokenizer) -> TaskService:
        """Returns the server of the tasks with number `program.number`. service: its options."""
        raise NotImplementedError

    def make_stage(
        self,
        workdir: str | os.PathLike,
        evaluator: object = None,
        previous_stage: Stage | None = None,
        **options,
    ) -> "AgenticRlTrainer":
        del evaluator
        return AgenticRlTrainer(self, workdir, previous_stage=previous_stage, **options)

    def start_flags(
        self, file: str, get_config: Callable[[str], "AgenticRlConfig"]
    ) -> tuple[str, ...]:
        """Returns the flags of launch/local.py that start this run; empty for a process that is one of its programs.

        file, get_config: experiment file, and its function of the variants.
        """
        if self.program.role:
            return ()
        variant = self.name.partition(":")[2]
        changes = flags_between(get_config(variant), self)
        return (
            f"--experiment={pathlib.Path(file).resolve()}:{variant}",
            *(f"--experiment.{path}={text}" for path, text in changes),
        )


class AgenticRlTrainer(AsyncRlTrainer):
    """Trainer of the run. Without `program.role` it can be validated, but not run."""

    def __init__(
        self, config: AgenticRlConfig, workdir, previous_stage: Stage | None = None, **options
    ):
        orchestrator, sync = None, config.sync
        if config.program.role:
            key = config.program.run_key(pathlib.Path(workdir))
            orchestrator = OrchestratorClient(config.program.orchestrator, key)
            if sync.api_key is None and sync.api_key_file is None:
                sync = dataclasses.replace(sync, api_key=key)
        self._client = orchestrator
        # A trainer that is only validated has no orchestrator. The pusher needs the stage's model and tokenizer.
        super().__init__(
            config,
            workdir,
            cast(GroupSource, orchestrator),
            cast(Pusher, None),
            previous_stage=previous_stage,
            **options,
        )
        engines: Sequence[str] = config.program.engine_urls
        pushed = without_adapters(self.config.model)  # adapters are merged before a push
        if config.transport == NETWORK:
            self._pusher = NetworkPusher(pushed, engines, sync)
        else:
            folder = self.workdir / "weights"
            self._pusher = SharedStoragePusher(pushed, folder, engines, sync, self.tokenizer)

    def _train(self, stop: PreemptionGuard) -> None:
        if self._client is not None:
            # The orchestrator may have stopped too.
            self._client.should_stop = lambda: bool(stop)
        super()._train(stop)
