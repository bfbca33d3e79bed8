"""A lifecycle of three small stages, each of which trains in two processes: pre-training, reasoning RL, distillation.

python -m launch.local --experiment=tests/journeys/small_lifecycle.py:small --hosts=2 --devices=1 --workdir=OUT
"""

import dataclasses

from experiments import distill, pretrain, rl_general, rl_reasoning
from experiments.distill import DistillConfig
from experiments.rl_reasoning import ReasoningConfig, TaskWeight
from glm5_jax.data.mixture import DataConfig, SourceConfig
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.rl.config import Teacher
from glm5_jax.rl.programs.on_policy import SEPARATE
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import ScheduleConfig
from glm5_jax.training.step_config import StepConfig
from tests.journeys import on_policy_system
from tests.journeys.agentic_system import MODEL

STEPS = 2
STAGE_MODULES = {"pretrain": pretrain, "rl_reasoning": rl_reasoning, "distill": distill}
TASKS = (TaskWeight(TaskConfig(kind="addition", size=100, digits=1)),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallLifecycle:
    """The stages, in their order."""

    pretrain: ExperimentConfig
    rl_reasoning: ReasoningConfig
    distill: DistillConfig


def get_config(variant: str = "small") -> SmallLifecycle:
    if variant != "small":
        raise ValueError(f"unknown variant {variant!r}; use small")
    schedule = ScheduleConfig(kind="constant", peak=1e-3, warmup_steps=0, total_steps=STEPS)
    train = TrainConfig(eval_interval=0, sample_interval=0)
    text = ExperimentConfig(
        name="pretrain",
        model=MODEL,
        tokenizer="bytes",
        data=DataConfig(
            sources=(SourceConfig(kind="shakespeare"),),
            sequence_length=64,
            shuffle_window=64,
            num_threads=0,
        ),
        batch=pretrain.constant_batch(512),
        optimizer=OptimizerConfig(matrices="adamw"),
        schedule=schedule,
        step=StepConfig(remat="none", mtp_steps=0),
        train=train,
    )
    base = on_policy_system.get_config()
    reasoning = dataclasses.replace(
        base,
        name="rl_reasoning",
        schedule=schedule,
        train=train,
        tasks=TASKS,
        engine_placement=SEPARATE,
        cluster=dataclasses.replace(base.cluster, hosts=2),
    )
    last = DistillConfig(
        **rl_general.shared_fields(
            reasoning,
            name="distill",
            objective="teachers",
            teachers=(Teacher(checkpoint="pretrain", origin="reasoning"),),
            rollout=dataclasses.replace(base.rollout, prompts=8, group=1),
        ),
        reasoning=TASKS,
    )
    return SmallLifecycle(pretrain=text, rl_reasoning=reasoning, distill=last)


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
