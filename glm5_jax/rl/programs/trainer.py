"""Configuration and trainer of a run of several programs: engines, a gateway, an orchestrator, task services and a trainer.

`AgenticRlConfig` configures all of them, so that they agree. A recipe subclasses it with its tasks and its task services.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.model.lora import without_adapters
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig, check_name
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
from pallas_kernels.fp8_blocks import BLOCK

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
    """Configuration of RL in several programs. Subclasses implement `task_shares` and `make_task_service`.

    Attributes:
      agent_timeout_s: time limit of an attempt, in seconds.
      judge_timeout_s: further time in which its service must have judged it, in seconds.
      max_inflight: concurrent attempts of a service.
      rates: maximum number of groups per second of each task service, in their order, which sets the generation speed of a
        task (GLM-5 4.1.1); None: unlimited. Empty: all are unlimited.
      served_checkpoint: checkpoint that engines load, such as a folder of quantise.py; None: `checkpoint`.
      transport: way of weights to engines: "network", or "storage" (a folder in the workdir that all programs see).
      sync, registry, dispatcher, router: see their classes.
      cluster: devices and processes of the programs.
      program: role of this process in the run.
    """

    mismatch: MismatchConfig = MismatchConfig(attempts=0)
    agent_timeout_s: float = 7200.0  # GLM-5 B.2: of Terminal-Bench 2.0
    judge_timeout_s: float = 600.0  # ours
    # Ours: batches wait for slow groups, and an attempt whose service hangs takes `dispatcher.max_tries` times its time.
    batch_timeout_s: float = 16_200.0
    max_inflight: int = 512  # ours
    rates: tuple[float | None, ...] = ()
    served_checkpoint: str | None = None
    transport: str = NETWORK
    sync: SyncConfig = SyncConfig()
    registry: RegistryConfig = RegistryConfig()
    dispatcher: DispatcherConfig = DispatcherConfig()
    router: RouterConfig = RouterConfig()
    cluster: ClusterConfig = ClusterConfig()
    program: ProgramConfig = ProgramConfig()

    def __post_init__(self):
        for name in ("agent_timeout_s", "judge_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        super().__post_init__()
        if not self.task_shares:
            raise ValueError("tasks is empty; name at least one kind")
        names = [share.name for share in self.task_shares]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the tasks have one name: {sorted(names)}; join them into one")
        for name in names if self.has_engine_processes else ():
            check_name(name)  # of a service
        if self.rates and len(self.rates) != len(names):
            raise ValueError(
                f"rates is {self.rates}; give one for each of {', '.join(names)}, or none"
            )
        if self.transport not in (NETWORK, STORAGE):
            raise ValueError(f"transport is {self.transport!r}; use {NETWORK} or {STORAGE}")
        if self.program.role not in ("", *ROLES):
            raise ValueError(
                f"program.role is {self.program.role!r}; use one of {', '.join(ROLES)}"
            )
        if self.has_engine_processes and self.mismatch.attempts:
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
            "rates",
            "served_checkpoint",
        )

    @property
    def task_shares(self) -> Sequence[TaskShare]:
        """Returns the sets of tasks, each with its weight in the training data. Each has a task service."""
        raise NotImplementedError

    def make_task_service(self, service: ServiceConfig, tokenizer: Tokenizer) -> TaskService:
        """Returns the server of the tasks with number `program.number`. service: its options."""
        raise NotImplementedError

    def make_stage(
        self,
        workdir: str | os.PathLike,
        evaluator: object = None,
        previous_stage: Stage | None = None,
        **options,
    ) -> Stage:
        del evaluator
        return AgenticRlTrainer(self, workdir, previous_stage=previous_stage, **options)

    def start_flags(
        self, file: str, get_config: Callable[[str], "AgenticRlConfig"]
    ) -> tuple[str, ...]:
        """Returns the flags of launch/local.py that start this run.

        Empty for a process that is one of its programs, and for a run with its engine in the trainer's process.

        file, get_config: experiment file, and its function of the variants.
        """
        if self.program.role or not self.has_engine_processes:
            return ()
        variant = self.name.partition(":")[2]
        changes = dict(flags_between(get_config(variant), self))
        # Without it, a command line with a checkpoint sets it.
        changes["model_of_checkpoint"] = str(self.model_of_checkpoint)
        return (
            f"--experiment={pathlib.Path(file).resolve()}:{variant}",
            *(f"--experiment.{path}={text}" for path, text in changes.items()),
        )


def converter_of(
    served_checkpoint: str | None, cfg: ModelConfig, quantization: str | None = None
) -> WeightConverter | None:
    """Returns the converter of pushed weights to those of the engines; None: they stay plain.

    quantization: that of the engines (`EngineConfig`); None: they hold the weights of their checkpoint.

    Raises ValueError if the checkpoint's recipe does not fit a model of cfg.
    """
    if quantization is not None:
        return WeightConverter(cfg, QuantizationRecipe(group=BLOCK, scheme=quantization))
    recipe = None if served_checkpoint is None else QuantizationRecipe.read(served_checkpoint)
    return None if recipe is None else WeightConverter(cfg, recipe)


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
        self._pushed_model = pushed = without_adapters(self.config.model)
        if config.transport == NETWORK:
            converter = converter_of(config.served_checkpoint, pushed, config.engine.quantization)
            if converter is None:  # engines merge the adapters
                self._pushed_model = pushed = self.config.model
            self._pusher = NetworkPusher(pushed, engines, sync, converter)
        else:
            folder = self.workdir / "weights"
            self._pusher = SharedStoragePusher(pushed, folder, engines, sync, self.tokenizer)

    def _pushed_params(self, params: PyTree) -> PyTree:
        return params if self._pushed_model.lora.rank else super()._pushed_params(params)

    def _train(self, stop: PreemptionGuard) -> None:
        if self._client is not None:
            # The orchestrator may have stopped too.
            self._client.should_stop = lambda: bool(stop)
        super()._train(stop)
