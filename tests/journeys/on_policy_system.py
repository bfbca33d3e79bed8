"""A small stage of reasoning RL, with its engine in the trainer's process or in a process of its own.

    python -m launch.local --experiment=tests/journeys/on_policy_system.py:small --experiment.checkpoint=DIR
        --experiment.tasks="[{'file': 'TASKS.py'}]" --experiment.engine_placement=separate --workdir=OUT

`agentic_system.save` makes the checkpoint.
"""

import dataclasses

from experiments import rl_reasoning
from experiments.rl_reasoning import ReasoningConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.rl.config import EvaluationConfig, policy_step_config
from glm5_jax.rl.programs.cluster import ClusterConfig
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig
from tests.journeys.agentic_system import MODEL

STEPS = 20
serve, roles, check = rl_reasoning.serve, rl_reasoning.roles, rl_reasoning.check


def get_config(variant: str = "small") -> ReasoningConfig:
    if variant != "small":
        raise ValueError(f"unknown variant {variant!r}; use small")
    return ReasoningConfig(
        name="on_policy_system:small",
        model=MODEL,
        tokenizer="bytes",
        optimizer=OptimizerConfig(weight_decay=0.0),
        schedule=ScheduleConfig(
            kind="constant", peak=1e-3, end=0.0, warmup_steps=0, total_steps=STEPS
        ),
        step=dataclasses.replace(policy_step_config(), remat="none"),
        train=TrainConfig(eval_interval=0, sample_interval=0, save_interval=10),
        rollout=RolloutConfig(prompts=3, group=4, max_tokens=4, max_turns=1, thinking=False),
        engine=EngineConfig(
            page_size=128,
            max_num_seqs=8,
            prefill_chunk=128,
            max_length=128,
            min_prefill_bucket=128,
            batch_invariant=True,
        ),
        evaluation=EvaluationConfig(tasks=0),
        mismatch=MismatchConfig(attempts=0),
        length=128,
        rows=8,
        agent_timeout_s=60.0,
        judge_timeout_s=10.0,
        batch_timeout_s=300.0,
        cluster=ClusterConfig(warm=False, grace_s=5.0),
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
