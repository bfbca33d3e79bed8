"""The life of a model, stage after stage; each starts from the weights of the one before.

    python -m launch.run --experiment=experiments/lifecycle.py:tiny

The stages are the fields of `Lifecycle`, in their order. Each has its own folder in the workdir, and its
own flags: --experiment.pretrain.train.steps=50. Variants as in pretrain.py; with ",each" behind them, what a stage of
reinforcement learning forgot is learnt again right after it, before the next, not in the end alone. The report in the workdir shows all
stages, what each made of what it was given, and every skill after each of those that teach some.
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
from glm5_jax.rl.experiment import Teacher
from glm5_jax.rl.skills import skill_matrix
from glm5_jax.training.experiment import ExperimentConfig
from glm5_jax.training.handovers import SKILLS

evaluator = pretrain.evaluator
TINY = {
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


@dataclasses.dataclass(frozen=True)
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
    """The variant's stages; ValueError lists the variants."""
    size, _, when = variant.partition(",")
    if when not in ("", "each"):
        raise ValueError(f"unknown variant {variant!r}; use {size} or {size},each")
    each, last = when or None, distill.get_config(size)
    taught = tuple(Teacher(ORIGINS[old.origin], old.origin) for old in last.teachers)
    return Lifecycle(
        pretrain=pretrain.get_config(size),
        **{f"midtrain_{kind}": midtrain.get_config(f"{size},{kind}") for kind in midtrain.STAGES},
        dsa_warmup=dsa_warmup.get_config(size),
        dsa_sparse=dsa_sparse.get_config(size),
        sft=sft.get_config(f"{size},mixed"),
        rl_reasoning=rl_reasoning.get_config(size),
        distill_reasoning=each
        and dataclasses.replace(last, agentic=(), general=(), teachers=taught[:-2]),
        rl_agentic=rl_agentic.get_config(size),
        distill_agentic=each and dataclasses.replace(last, general=(), teachers=taught[:-1]),
        rl_general=rl_general.get_config(size),
        distill=dataclasses.replace(last, teachers=taught),
    )


def minutes(config: Lifecycle) -> dict[str, float]:
    """What the stages of :tiny take on two CPU cores with nothing else to do; nothing is known of others."""
    if not config.sft.name.startswith("sft:tiny"):
        return {}
    return {name: own for name, own in TINY.items() if getattr(config, name) is not None}


def finish(config: Lifecycle, workdir: pathlib.Path) -> None:
    """Measures every skill after every stage that teaches some, for the report, and shows what the last one replies."""
    taught = [*ORIGINS.values(), "distill_reasoning", "distill_agentic", "distill"]
    stages = [f.name for f in dataclasses.fields(config) if f.name in taught]
    stages = {name: str(workdir / name) for name in stages if getattr(config, name) is not None}
    world = config.distill.world()
    try:
        found = skill_matrix(config.distill, world, stages)
    finally:
        world.close()
    (workdir / SKILLS).write_text(json.dumps(found._asdict(), indent=1) + "\n")
    for skill, own in found.samples.items():
        rewards = " -> ".join(f"{reward:.2f}" for reward in found.rewards[skill].values())
        print(f"\n{skill}: {rewards}\n  {own['asked']}\n  {own['distill']}")


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
