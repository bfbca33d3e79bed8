"""Trains a model through all stages in order; each stage starts from the weights of the previous one.

    python -m launch.run --experiment=experiments/lifecycle.py:tiny

The stages are the fields of `Lifecycle`, in their order. Each has a folder of its own in the workdir, and its own
flags: --experiment.pretrain.train.steps=50. Variants are those of pretrain.py. With ",each" after the variant, every
stage of reinforcement learning is followed by a distillation that restores lost skills; without it there is one
distillation, at the end. The report in the workdir shows all stages, the input and result of each, and every skill
after each stage that trains one.
"""

import dataclasses
import json
import pathlib

from experiments import (
    distill,
    dsa_sparse,
    dsa_warmup,
    midtrain,
    pretrain,
    rl_agentic,
    rl_general,
    rl_reasoning,
    sft,
)
from experiments.distill import ORIGINS, DistillConfig
from experiments.rl_agentic import AgenticConfig
from experiments.rl_general import GeneralRlConfig
from experiments.rl_reasoning import ReasoningConfig
from glm5_jax.rl.config import Teacher
from glm5_jax.rl.trainers.skill_matrix import skill_matrix
from glm5_jax.runtime.terminal import make_printable
from glm5_jax.training.experiment import ExperimentConfig
from glm5_jax.training.lifecycle_report import SKILLS

evaluator = pretrain.evaluator
TINY_MINUTES = {
    "pretrain": 2.75,
    "midtrain_32k": 1.5,
    "midtrain_128k": 1.5,
    "midtrain_200k": 1.75,
    "dsa_warmup": 1.25,
    "dsa_sparse": 2.0,
    "sft": 5.5,
    "rl_reasoning": 4.5,
    "distill_reasoning": 3.5,
    "rl_agentic": 11.0,
    "distill_agentic": 3.75,
    "rl_general": 2.5,
    "distill": 4.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """The stages of a run (GLM-5, Figure 5)."""

    pretrain: ExperimentConfig
    midtrain_32k: ExperimentConfig
    midtrain_128k: ExperimentConfig
    midtrain_200k: ExperimentConfig
    dsa_warmup: ExperimentConfig
    dsa_sparse: ExperimentConfig
    sft: ExperimentConfig
    rl_reasoning: ReasoningConfig
    distill_reasoning: DistillConfig | None
    rl_agentic: AgenticConfig
    distill_agentic: DistillConfig | None
    rl_general: GeneralRlConfig
    distill: DistillConfig


def get_config(variant: str = "tiny") -> Lifecycle:
    """Returns the stages of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    size, _, when = variant.partition(",")
    if when not in ("", "each"):
        raise ValueError(f"unknown variant {variant!r}; use {size} or {size},each")
    # None switches a stage off.
    distills, last = when or None, distill.get_config(size)
    teachers = tuple(Teacher(ORIGINS[teacher.origin], teacher.origin) for teacher in last.teachers)
    return Lifecycle(
        pretrain=pretrain.get_config(size),
        **{f"midtrain_{kind}": midtrain.get_config(f"{size},{kind}") for kind in midtrain.STAGES},
        dsa_warmup=dsa_warmup.get_config(size),
        dsa_sparse=dsa_sparse.get_config(size),
        sft=sft.get_config(f"{size},mixed"),
        rl_reasoning=rl_reasoning.get_config(size),
        distill_reasoning=distills
        and dataclasses.replace(last, agentic=(), general=(), teachers=teachers[:-2]),
        rl_agentic=rl_agentic.get_config(size),
        distill_agentic=distills and dataclasses.replace(last, general=(), teachers=teachers[:-1]),
        rl_general=rl_general.get_config(size),
        distill=dataclasses.replace(last, teachers=teachers),
    )


def minutes(config: Lifecycle) -> dict[str, float]:
    """Returns the minutes of each stage of :tiny on two idle CPU cores. Empty for other variants."""
    if not config.sft.name.startswith("sft:tiny"):
        return {}
    return {
        name: stage_minutes
        for name, stage_minutes in TINY_MINUTES.items()
        if getattr(config, name) is not None
    }


def finish(config: Lifecycle, workdir: pathlib.Path) -> None:
    """Measures every skill after each stage that trains one, for the report, and prints samples of the last stage."""
    skill_stages = [*ORIGINS.values(), "distill_reasoning", "distill_agentic", "distill"]
    stages = [f.name for f in dataclasses.fields(config) if f.name in skill_stages]
    stages = {name: str(workdir / name) for name in stages if getattr(config, name) is not None}
    world = config.distill.world()
    try:
        matrix = skill_matrix(config.distill, world, stages)
    finally:
        world.close()
    (workdir / SKILLS).write_text(json.dumps(matrix._asdict(), indent=1) + "\n")
    for skill, sample in matrix.samples.items():
        rewards = " -> ".join(f"{reward:.2f}" for reward in matrix.rewards[skill].values())
        prompt, reply = make_printable(sample["asked"]), make_printable(sample["distill"])
        print(f"\n{skill}: {rewards}\n  {prompt}\n  {reply}")


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
