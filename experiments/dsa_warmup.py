"""Trains the indexers on dense attention, the first stage of DSA; all other weights are frozen (GLM-5 2.1.1).

    glm5 run dsa_warmup:tiny --checkpoint=WORKDIR

Attention is dense and the trunk does not change by a single bit. Each indexer minimises the divergence between the
softmax of its scores and the attention probabilities, summed over heads (the `indexer` loss; one number per layer in
the report). With --step.index_target=shared_layers, an indexer of IndexShare trains on all layers that
share it.

:tiny    for two CPU cores: 60 steps at 1024 tokens, about a minute
:small   for one accelerator: 1,000 steps at 32K tokens of your texts:
         glm5 run dsa_warmup:small --checkpoint=WORKDIR --tokenizer=FOLDER
             --data.sources="[{'kind': 'books', 'path': 'books/*.txt'}]"
:glm5    for 1,024 chips: 1,000 steps at 200K. On Slurm:
         glm5 slurm dsa_warmup:glm5 --hosts=256 --devices=4 --chip=v5p --workdir=DIR --checkpoint=WORKDIR
             --tokenizer=FOLDER --data.sources="[{'kind': 'books', 'path': 'books/*.txt'}]" >run.sbatch
"""

import dataclasses

from experiments import midtrain
from glm5_jax.training.experiment import MeshConfig, choose
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig

evaluator = midtrain.evaluator
TRUNK = r"^(?!.*indexer/)"  # everything but the indexers


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def freeze_trunk(base: ExperimentConfig, name: str, **changes) -> ExperimentConfig:
    """Returns mid-training's last stage with only the indexers trainable."""
    step = dataclasses.replace(base.step, index_weight=1.0)
    optimizer = dataclasses.replace(base.optimizer, frozen=(TRUNK,))
    # A base model without DSA has no indexers yet.
    stage_changes = {"name": name, "step": step, "optimizer": optimizer, "may_differ": ("indexer",)}
    return dataclasses.replace(base, **stage_changes | changes)


def make_warmup_schedule(steps: int, peak: float = 5e-3, end: float = 2e-4) -> ScheduleConfig:
    """Returns a cosine decay from 5e-3 to 2e-4 (GLM-5 2.1.1). The paper does not print the shape."""
    return ScheduleConfig(kind="cosine", peak=peak, end=end, warmup_steps=0, total_steps=steps)


def tiny() -> ExperimentConfig:
    """Uses the paper's learning rates on 120 thousand tokens."""
    return freeze_trunk(midtrain.tiny("200k"), "dsa_warmup:tiny", schedule=make_warmup_schedule(60))


def small() -> ExperimentConfig:
    """Uses the paper's number of steps, with 131,072 tokens each."""
    return freeze_trunk(
        midtrain.small("200k"), "dsa_warmup:small", schedule=make_warmup_schedule(1000)
    )


def glm5() -> ExperimentConfig:
    """Trains 1,000 steps on 16 rows of 202,752 tokens, where the paper has 14, which 16 groups of chips cannot share."""
    base, mesh = midtrain.glm5("200k"), MeshConfig(fsdp=2, expert=8, context=64)
    # Each rank has one row, so that all wait for the costliest in any order.
    base = dataclasses.replace(base, step=dataclasses.replace(base.step, balance_rows=False))
    tokens = 16 * base.data.sequence_length
    return freeze_trunk(
        base,
        "dsa_warmup:glm5",
        mesh=mesh,
        batch=BatchRampConfig(start=tokens, end=tokens, ramp_tokens=0, multiple=tokens),
        schedule=make_warmup_schedule(1000),
    )


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
