"""Configuration of on-policy RL stages: reasoning RL, general RL and distillation (GLM-5 3.2, 3.4, 3.5).

The engine of such a stage is in one of two places:

- "in_process": in the trainer's process, on the trainer's devices (`trainers.sync_trainer`). For one machine.
- "separate": in processes of its own, as in agentic RL, with the same gateway, orchestrator and task services
  (`programs.roles`). For pods. No group is sampled during an update, because `max_staleness` is 0.

The same seed gives the same weights in both places, bit by bit, if `engine.batch_invariant` is set and no group is
dropped. A group is dropped if its environment fails, and in process if `credit.drop_zero_variance_groups` leaves it out.
"""

import dataclasses
import os
from collections.abc import Sequence

from glm5_jax.data.conversation import Conversation
from glm5_jax.rl.programs.trainer import AgenticRlConfig
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer
from glm5_jax.training.stages import Stage

IN_PROCESS, SEPARATE = "in_process", "separate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyRlConfig(AgenticRlConfig):
    """Configuration of an on-policy RL stage. Subclasses implement `make_sync_trainer` and `make_task_service`.

    Attributes:
      engine_placement: "in_process" or "separate". The fields of several programs count for "separate" only.
    """

    engine_placement: str = IN_PROCESS
    max_staleness: int = 0
    reset_optimizer: bool = False
    mismatch: MismatchConfig = MismatchConfig()

    def __post_init__(self):
        if self.engine_placement not in (IN_PROCESS, SEPARATE):
            raise ValueError(
                f"engine_placement is {self.engine_placement!r}; use {IN_PROCESS} or {SEPARATE}"
            )
        super().__post_init__()

    @property
    def has_engine_processes(self) -> bool:
        return self.engine_placement == SEPARATE

    @property
    def max_attempt_tokens(self) -> int:
        """Returns the maximum tokens of an attempt, which must fit a row and the engine."""
        return min(self.length, self.engine.max_length or self.length)

    def conversations(self) -> Sequence[Conversation]:
        """Returns the conversations for supervised training, of which every batch has `sft_rows`."""
        return ()

    def make_sync_trainer(
        self, workdir: str | os.PathLike, previous_stage: Stage | None = None, **options
    ) -> SyncRlTrainer:
        """Returns the trainer with the engine in its process."""
        raise NotImplementedError

    def make_stage(
        self,
        workdir: str | os.PathLike,
        evaluator: object = None,
        previous_stage: Stage | None = None,
        **options,
    ) -> Stage:
        if self.has_engine_processes:
            options["conversations"] = self.conversations()
            return super().make_stage(workdir, evaluator, previous_stage, **options)
        return self.make_sync_trainer(workdir, previous_stage=previous_stage, **options)
