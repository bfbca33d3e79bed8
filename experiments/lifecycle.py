"""Trains a model through all stages in order; each stage starts from the weights of the previous one.

    glm5 run lifecycle:tiny

The stages are the fields of `Lifecycle`, in their order. Each has a folder of its own in the workdir, and its own
flags: --pretrain.train.steps=50. Variants are those of pretrain.py. All stages of :small and :glm5 take your data:
--pretrain.data.sources=..., --rl_reasoning.tasks=.... With ",each" after the variant, every stage of reinforcement
learning is followed by a distillation that restores lost skills; without it there is one distillation, at the end. With
launch/local.py or on_ray.py each stage starts with programs and hosts of its own, one after the other; slurm.py and
gke.py write a job for each (--stage=NAME). The report in the workdir shows all stages, the input and result of each,
and, if all ran in one process, every skill after each stage that trains one.
"""

import dataclasses
import functools
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
from glm5_jax.rl.trainers.skill_matrix import evaluate_skills
from glm5_jax.runtime.files import replace_text
from glm5_jax.runtime.terminal import make_printable
from glm5_jax.training.experiment import choose
from glm5_jax.training.lifecycle_report import SKILLS
from glm5_jax.training.pretraining import ExperimentConfig

evaluator = pretrain.evaluator
# Module of each stage, with its roles and servers, for launchers that start stages one by one.
STAGE_MODULES = {
    "pretrain": pretrain,
    "pretrain_code": pretrain,
    **{f"midtrain_{kind}": midtrain for kind in midtrain.STAGES},
    "dsa_warmup": dsa_warmup,
    "dsa_sparse": dsa_sparse,
    "sft": sft,
    "rl_reasoning": rl_reasoning,
    "distill_reasoning": distill,
    "rl_agentic": rl_agentic,
    "distill_agentic": distill,
    "rl_general": rl_general,
    "distill": distill,
}
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
    """The stages of a run (GLM-5, Figure 5); None switches a stage off.

    Attributes:
      pretrain: pre-training (experiments/pretrain.py); of :glm5 on a general corpus.
      pretrain_code: second phase of pre-training, on code and reasoning; only :glm5 has it.
      midtrain_32k, midtrain_128k, midtrain_200k: the stages of mid-training (midtrain.py).
      dsa_warmup: warm-up of the indexers (dsa_warmup.py).
      dsa_sparse: sparse adaptation (dsa_sparse.py).
      sft: supervised fine-tuning (sft.py).
      rl_reasoning: reasoning RL (rl_reasoning.py).
      distill_reasoning: distillation after reasoning RL (distill.py).
      rl_agentic: agentic RL (rl_agentic.py).
      distill_agentic: distillation after agentic RL.
      rl_general: general RL (rl_general.py).
      distill: distillation after all stages.
    """

    pretrain: ExperimentConfig
    pretrain_code: ExperimentConfig | None
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
    return choose(
        variant,
        {
            "tiny": functools.partial(make_stages, "tiny"),
            "small": functools.partial(make_stages, "small"),
            "glm5": functools.partial(make_stages, "glm5"),
        },
        kinds=("", "each"),
    )


def make_stages(size: str, kind: str) -> Lifecycle:
    """Returns the stages of a size; kind: "each" distils after each stage of reinforcement learning."""
    last, has_phases = distill.get_config(size), size == "glm5"
    teachers = tuple(
        Teacher(checkpoint=ORIGINS[teacher.origin], origin=teacher.origin)
        for teacher in last.teachers
    )
    # None switches a stage off.
    distill_reasoning = distill_agentic = None
    if kind == "each":
        distill_reasoning = dataclasses.replace(
            last, agentic=(), general=(), teachers=teachers[:-2]
        )
        distill_agentic = dataclasses.replace(last, general=(), teachers=teachers[:-1])
    return Lifecycle(
        pretrain=pretrain.get_config(f"{size},{pretrain.GENERAL}" if has_phases else size),
        pretrain_code=pretrain.get_config(f"{size},{pretrain.CODE}") if has_phases else None,
        **{f"midtrain_{kind}": midtrain.get_config(f"{size},{kind}") for kind in midtrain.STAGES},
        dsa_warmup=dsa_warmup.get_config(size),
        dsa_sparse=dsa_sparse.get_config(size),
        sft=sft.get_config(f"{size},mixed"),
        rl_reasoning=rl_reasoning.get_config(size),
        distill_reasoning=distill_reasoning,
        rl_agentic=rl_agentic.get_config(size),
        distill_agentic=distill_agentic,
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
    suite = config.distill.make_suite()
    try:
        matrix = evaluate_skills(config.distill, suite, stages)
    finally:
        suite.close()
    replace_text(workdir / SKILLS, json.dumps(matrix._asdict(), indent=1) + "\n")
    for skill, sample in matrix.samples.items():
        rewards = " -> ".join(f"{reward:.2f}" for reward in matrix.rewards[skill].values())
        prompt, reply = make_printable(sample["prompt"]), make_printable(sample["distill"])
        print(f"\n{skill}: {rewards}\n  {prompt}\n  {reply}")


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
