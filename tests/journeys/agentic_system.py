"""The programs of agentic RL with a random policy of one layer, on tasks of addition.

    python -m launch.local --experiment=tests/journeys/agentic_system.py:small --experiment.checkpoint=DIR --workdir=OUT

`save` makes the checkpoint.
"""

import dataclasses

import jax

from experiments import rl_agentic
from experiments.rl_agentic import AgenticConfig
from experiments.rl_reasoning import TaskWeight
from glm5_jax.agents.context import ContextConfig
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.model import glm5
from glm5_jax.rl.config import EvaluationConfig, policy_step_config
from glm5_jax.rl.programs.cluster import ClusterConfig
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig
from tests.model.small import one_layer

MODEL = one_layer(vocab_size=292, max_position_embeddings=128, model_type="glm4_moe_lite")
PROGRAMS = ("engine-0", "gateway-0", "orchestrator-0", "task-0-0", "task-1-0", "train-0")
serve, roles = rl_agentic.serve, rl_agentic.roles


def get_config(variant: str = "small") -> AgenticConfig:
    if variant != "small":
        raise ValueError(f"unknown variant {variant!r}; use small")
    return AgenticConfig(
        name="agentic_system:small",
        model=MODEL,
        tokenizer="bytes",
        optimizer=OptimizerConfig(weight_decay=0.0),
        schedule=ScheduleConfig(
            kind="constant", peak=1e-3, end=0.0, warmup_steps=0, total_steps=12
        ),
        step=dataclasses.replace(policy_step_config(), remat="none"),
        train=TrainConfig(eval_interval=0, sample_interval=0, save_interval=2),
        rollout=RolloutConfig(prompts=2, group=4, max_tokens=4, max_turns=2, thinking=False),
        engine=EngineConfig(
            page_size=128, max_num_seqs=8, prefill_chunk=128, max_length=128, min_prefill_bucket=128
        ),
        evaluation=EvaluationConfig(tasks=0),
        context=ContextConfig(keep_rounds=None, max_prompt_tokens=None),
        length=128,
        rows=8,
        max_staleness=2,
        max_running=6,
        agent_timeout_s=60.0,
        judge_timeout_s=10.0,
        batch_timeout_s=300.0,
        tasks=(
            TaskWeight(TaskConfig(kind="addition", size=500, digits=1)),
            TaskWeight(TaskConfig(kind="addition", size=500, digits=2)),
        ),
        cluster=ClusterConfig(warm=False, grace_s=5.0),
    )


def save(folder) -> None:
    """Writes a checkpoint of random weights, and its tokenizer."""
    params = glm5.init_params(MODEL, jax.random.key(0))
    save_hf(params, folder, cfg=MODEL, tokenizer=Tokenizer.load("bytes"))


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
