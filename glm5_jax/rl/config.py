"""`RlConfig`: a stage that learns from what it samples, as typed data."""

import dataclasses
from collections.abc import Mapping

from glm5_jax.data.record import STREAMS
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import BATCH_AXES, Region
from glm5_jax.rl.algorithm.credit import CreditConfig
from glm5_jax.rl.algorithm.losses import PolicyConfig, PolicyLoss
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.trainers.mismatch_monitor import AgreementConfig
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig, TwoPhaseConfig
from glm5_jax.training.step import StepConfig

LEARNS = ("rewards", "teachers")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """What held-out tasks are attempted with, at intervals.

    Attributes:
      tasks: of each kind; group: attempts at each; temperature: 0 is greedy.
    """

    tasks: int = 64
    group: int = 1
    temperature: float = 1.0  # GLM-5 6.1, of reasoning

    def __post_init__(self):
        if self.tasks < 0 or self.group < 1 or self.temperature < 0:
            raise ValueError(
                f"tasks is {self.tasks}, group {self.group} and temperature {self.temperature}; use at least 0, 1 and 0"
            )


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Whose log-probs tasks of an origin learn from; the origin "" is of all others. checkpoint: a workdir, one of its
    checkpoints/STEP or an HF folder."""

    checkpoint: str
    origin: str = ""


def adam() -> OptimizerConfig:
    """GLM-5's is not disclosed; slime's public recipes for it use Adam (0.9, 0.98) with decay 0.1. The indexer stays
    (GLM-5 3.2), and the MTP layer, which nothing trains here."""
    return OptimizerConfig(matrices="adamw", adam_b2=0.98, frozen=("indexer/", "^mtp/"))


def small_constant() -> ScheduleConfig:
    """Not disclosed; as slime's public recipes."""
    return ScheduleConfig(kind="constant", peak=1e-6, end=0.0, warmup_steps=0, total_steps=1000)


def policy_alone() -> StepConfig:
    """Neither the MTP layer nor the router's balance takes part: GLM-5 says nothing of either in RL."""
    return StepConfig(
        mtp_steps=0, balance_weight=0.0, bias_update_rate=TwoPhaseConfig(before=0.0, after=0.0)
    )


@dataclasses.dataclass(frozen=True)
class RlConfig(StageConfig):
    """A run that learns from what it samples. The defaults are those of Reasoning RL (GLM-5 3.2).

    Attributes:
      learns: from "rewards" or "teachers" (GLM-5 3.5), of which tasks have theirs by their origin.
      policy, credit, rollout, engine, evaluation, agreement: see their own.
      teachers: see `Teacher`. With rewards: the reference of `credit.pull`.
      length: tokens of a row, and at most of an attempt.
      rows: of a batch: a multiple of this, in powers of two.
      judged_at_once: attempts.
      texts: of `World.texts`, that are learnt in every batch, beside what was attempted.
    """

    optimizer: OptimizerConfig = dataclasses.field(default_factory=adam)
    schedule: ScheduleConfig = dataclasses.field(default_factory=small_constant)
    step: StepConfig = dataclasses.field(default_factory=policy_alone)
    requires_checkpoint: bool = True
    learns: str = "rewards"
    policy: PolicyConfig = PolicyConfig()
    credit: CreditConfig = CreditConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    agreement: AgreementConfig = AgreementConfig()
    teachers: tuple[Teacher, ...] = ()
    length: int = 65_536 + 4096  # a reply and its prompt; not disclosed
    rows: int = 8
    judged_at_once: int = 64
    texts: int = 0

    def __post_init__(self):
        if self.learns not in LEARNS:
            raise ValueError(f"learns is {self.learns!r}; use one of {', '.join(LEARNS)}")
        if self.rows < 1 or self.judged_at_once < 1 or self.texts < 0:
            raise ValueError(
                f"rows is {self.rows}, judged_at_once {self.judged_at_once} and texts {self.texts}; use at least 1, 1 "
                "and 0"
            )
        pulled = self.credit.pull == "reference"
        needs = self.learns == "teachers" or pulled
        if needs != bool(self.teachers):
            raise ValueError(
                f"learns is {self.learns!r}, credit.pull {self.credit.pull!r} and teachers {self.teachers}; what learns "
                "from teachers, or pays for leaving a reference, needs one, and nothing else"
            )
        origins = [teacher.origin for teacher in self.teachers]
        if len(set(origins)) < len(origins):
            raise ValueError(f"two teachers have one origin: {origins}; join them")
        if pulled and origins != [""]:
            raise ValueError(f'a reference has the origin "", not {origins}')

    def continue_from(self, folders: Mapping[str, str]):
        """A teacher whose checkpoint is the name of an earlier stage is that stage."""
        own = (
            dataclasses.replace(one, checkpoint=folders.get(one.checkpoint, one.checkpoint))
            for one in self.teachers
        )
        return dataclasses.replace(super().continue_from(folders), teachers=tuple(own))

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        return *super().changeable_on_resume, "agreement."

    @property
    def row_length(self) -> int:
        return self.length

    @property
    def first_batch_rows(self) -> int:
        return self.rows

    def check_rows(self, region: Region) -> None:
        if self.rows % (shards := region.size(BATCH_AXES)):
            raise ValueError(
                f"rows is {self.rows}; it must be a multiple of {shards}, devices that have rows of their own"
            )
        super().check_rows(region)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(name for name in STREAMS if name != "weight_version")

    @property
    def token_loss(self) -> PolicyLoss:
        return PolicyLoss(self.policy)

    @property
    def chat_variant(self) -> str:
        return self.rollout.variant
