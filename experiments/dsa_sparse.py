"""Trains sparse attention, the second stage of DSA: queries attend to the selected keys, and all weights adapt.

    glm5 run dsa_sparse:tiny --checkpoint=WORKDIR

Source: GLM-5 2.1.1. The trunk's gradient comes only from the language-model loss. The indexers' gradient comes only
from their divergence from the attention over the selected keys. Data and batches are those of mid-training's last
stage, and the learning rate is constant.

:tiny    for two CPU cores: 60 steps at 1024 tokens, 40 selected keys, a minute or two
:small   for one accelerator: 512 selected keys of 32K, on your texts:
         glm5 run dsa_sparse:small --checkpoint=WORKDIR --tokenizer=FOLDER
             --data.sources="[{'kind': 'books', 'path': 'books/*.txt'}]"
:glm5    for 1,024 chips: 20B tokens at 200K, 2,048 selected keys. On Slurm:
         glm5 slurm dsa_sparse:glm5 --hosts=256 --devices=4 --chip=v5p --workdir=DIR --checkpoint=WORKDIR
             --tokenizer=FOLDER --data.sources="[{'kind': 'books', 'path': 'books/*.txt'}]" >run.sbatch
"""

import dataclasses

from experiments import midtrain
from glm5_jax.training.experiment import choose
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import ScheduleConfig

evaluator = midtrain.evaluator
TOKENS = 20e9  # GLM-5 2.1.1


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def sparsify_stage(
    base: ExperimentConfig, name: str, learning_rate: float, steps: int
) -> ExperimentConfig:
    """Returns mid-training's last stage with sparse attention and trainable indexers."""
    return dataclasses.replace(
        base,
        name=name,
        model=dataclasses.replace(base.model, attention="sparse"),
        optimizer=dataclasses.replace(base.optimizer, frozen=()),
        schedule=ScheduleConfig(
            kind="constant", peak=learning_rate, warmup_steps=0, total_steps=steps
        ),
        step=dataclasses.replace(base.step, index_weight=1.0),
    )


def tiny() -> ExperimentConfig:
    """Uses the final rate of mid-training here, a quarter of its peak, as the paper's 1e-5 is the final rate of its own."""
    return sparsify_stage(midtrain.tiny("200k"), "dsa_sparse:tiny", 2.5e-4, 60)


def small() -> ExperimentConfig:
    """Trains on 0.1B tokens."""
    return sparsify_stage(midtrain.small("200k"), "dsa_sparse:small", 1e-5, 1000)


def glm5() -> ExperimentConfig:
    """Uses a constant learning rate of 1e-5."""
    base = midtrain.glm5("200k")
    return sparsify_stage(base, "dsa_sparse:glm5", 1e-5, -(-int(TOKENS) // base.batch.end))


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
