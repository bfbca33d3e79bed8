"""Defines `RlConfig`, the configuration of a reinforcement-learning stage, with its parts and default values."""

import dataclasses
from collections.abc import Mapping

from glm5_jax.data.record import STREAMS
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import BATCH_AXES, Region
from glm5_jax.rl.algorithm.credit import CreditConfig
from glm5_jax.rl.algorithm.losses import PolicyConfig, PolicyLoss
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig, TwoPhaseConfig
from glm5_jax.training.step_config import StepConfig

OBJECTIVES = ("rewards", "teachers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out tasks during training.

    Attributes:
      tasks: number of tasks of each kind; 0: no evaluation.
      group: attempts at each task.
      temperature: sampling temperature; 0 is greedy.
      top_p: probability mass of the tokens that are sampled. Samples to train on have 1.
    """

    tasks: int = 64
    group: int = 1
    temperature: float = 1.0  # GLM-5 6.1, for reasoning
    top_p: float = 0.95  # GLM-5 6.1

    def __post_init__(self):
        if self.tasks < 0 or self.group < 1 or self.temperature < 0:
            raise ValueError(
                f"tasks is {self.tasks}, group {self.group} and temperature {self.temperature}; use at least 0, 1 and 0"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Model whose log-probs supervise the tasks of one origin. It has a checkpoint or a server.

    Attributes:
      checkpoint: path of a workdir, one of its checkpoints/STEP or an HF folder; "": the teacher has a server.
      origin: origin of the tasks; "" is any origin without a teacher of its own.
      url: URL of a server with OpenAI's completions API (`trainers.teacher_client`); None: the teacher has a checkpoint.
      key_file: file with the server's API key; None: it needs none.
    """

    checkpoint: str = ""
    origin: str = ""
    url: str | None = None
    key_file: str | None = None

    def __post_init__(self):
        if bool(self.checkpoint) == (self.url is not None):
            raise ValueError(
                f"the teacher of {self.origin!r} has the checkpoint {self.checkpoint!r} and the url {self.url!r}; give one "
                "of them"
            )


def adam_optimizer_config() -> OptimizerConfig:
    """Returns Adam (0.9, 0.98) with decay 0.1, as in slime's public recipes for GLM-5; its own is not disclosed.

    The indexer is frozen (GLM-5 3.2). The MTP layer is frozen because RL does not train it here.
    """
    return OptimizerConfig(matrices="adamw", adam_b2=0.98, frozen=("indexer/", "^mtp/"))


def constant_schedule_config() -> ScheduleConfig:
    """Returns a constant learning rate of 1e-6, as in slime's public recipes; GLM-5's is not disclosed."""
    return ScheduleConfig(kind="constant", peak=1e-6, end=0.0, warmup_steps=0, total_steps=1000)


def policy_step_config() -> StepConfig:
    """Returns a step without MTP loss and router balancing, because GLM-5 mentions neither for RL."""
    return StepConfig(
        mtp_steps=0, balance_weight=0.0, bias_update_rate=TwoPhaseConfig(before=0.0, after=0.0)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlConfig(StageConfig):
    """Configuration of a run that trains on sampled attempts. The defaults are those of Reasoning RL (GLM-5 3.2).

    Attributes:
      objective: "rewards", or "teachers" for distillation (GLM-5 3.5). The origin of a task selects its teacher.
      policy: loss of sampled tokens.
      credit: credit assignment.
      rollout: sampling of attempts.
      engine: inference engine of the rollouts.
      evaluation: evaluation on held-out tasks.
      mismatch: comparison of engine and learner before each update, with its limits.
      teachers: teachers by origin. With objective="rewards", the reference of `credit.kl_target`.
      max_loaded_teachers: maximum number of teachers whose weights are on the learner's devices at once. The weights of
        the others are read from their checkpoints in each step.
      length: tokens of a row, and maximum tokens of an attempt.
      rows: divisor of a batch's rows; the quotient is a power of two.
      reward_concurrency: maximum attempts that are judged at once.
      sft_rows: records of `TaskSuite.conversations` that every batch trains on, in addition to the attempts.
    """

    optimizer: OptimizerConfig = dataclasses.field(default_factory=adam_optimizer_config)
    schedule: ScheduleConfig = dataclasses.field(default_factory=constant_schedule_config)
    step: StepConfig = dataclasses.field(default_factory=policy_step_config)
    requires_checkpoint: bool = True
    objective: str = "rewards"
    policy: PolicyConfig = PolicyConfig()
    credit: CreditConfig = CreditConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    mismatch: MismatchConfig = MismatchConfig()
    teachers: tuple[Teacher, ...] = ()
    max_loaded_teachers: int = 8
    length: int = 65_536 + 4096  # a reply and its prompt; not disclosed
    rows: int = 8
    reward_concurrency: int = 64
    sft_rows: int = 0

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}; use one of {', '.join(OBJECTIVES)}")
        for name, minimum in (
            ("length", 1),
            ("rows", 1),
            ("reward_concurrency", 1),
            ("max_loaded_teachers", 1),
            ("sft_rows", 0),
        ):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least {minimum}")
        has_reference = self.credit.kl_target == "reference"
        needs_teachers = self.objective == "teachers" or has_reference
        if needs_teachers != bool(self.teachers):
            raise ValueError(
                f"objective is {self.objective!r}, credit.kl_target {self.credit.kl_target!r} and teachers "
                f"{self.teachers}; give teachers for the objective 'teachers' or the kl_target 'reference', and else none"
            )
        origins = [teacher.origin for teacher in self.teachers]
        if len(set(origins)) < len(origins):
            raise ValueError(f"two teachers have one origin: {origins}; join them")
        is_served = any(teacher.url is not None for teacher in self.teachers)
        if is_served and self.policy.temperature != 1:
            raise ValueError(
                f"policy.temperature is {self.policy.temperature}, and servers score tokens at temperature 1; use 1, or "
                "give the teachers' checkpoints"
            )
        if has_reference and origins != [""]:
            raise ValueError(f'a reference has the origin "", not {origins}')

    def continue_from(self, folders: Mapping[str, str]):
        """Returns the config with each teacher that names an earlier stage set to that stage's folder."""
        teachers = tuple(
            dataclasses.replace(
                teacher, checkpoint=folders.get(teacher.checkpoint, teacher.checkpoint)
            )
            for teacher in self.teachers
        )
        return dataclasses.replace(super().continue_from(folders), teachers=teachers)

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        return *super().changeable_on_resume, "mismatch.", "max_loaded_teachers"

    @property
    def row_length(self) -> int:
        return self.length

    @property
    def first_batch_rows(self) -> int:
        return self.rows

    def check_rows(self, region: Region) -> None:
        if self.rows % (shards := region.size(BATCH_AXES)):
            raise ValueError(
                f"rows is {self.rows}; it must be a multiple of {shards}, the devices that hold different rows"
            )
        super().check_rows(region)

    @property
    def has_engine_processes(self) -> bool:
        """Returns whether engines run in processes of their own, and not in the trainer's."""
        return False

    @property
    def max_processes(self) -> int | None:
        return None if self.has_engine_processes else 1

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(name for name in STREAMS if name != "weight_version")

    @property
    def token_loss(self) -> PolicyLoss:
        return PolicyLoss(self.policy)

    @property
    def chat_variant(self) -> str:
        return self.rollout.variant
