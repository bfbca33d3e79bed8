"""The life of a model, stage after stage; each starts from the weights of the one before.

    python -m launch.run --experiment=experiments/lifecycle.py:tiny

The stages are the fields of `Lifecycle`, in their order. Each has its own folder in the workdir, and its
own flags: --experiment.pretrain.train.steps=50. Variants as in pretrain.py. The report in the workdir
shows all of them, and what each made of what it was given.
"""

import dataclasses

from experiments import dsa_sparse, dsa_warmup, midtrain, pretrain, sft
from glm5_jax.training.experiment import ExperimentConfig

evaluator = pretrain.evaluator


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


def get_config(variant: str = "tiny") -> Lifecycle:
    """The variant's stages; ValueError lists the variants."""
    return Lifecycle(
        pretrain=pretrain.get_config(variant),
        **{
            f"midtrain_{kind}": midtrain.get_config(f"{variant},{kind}") for kind in midtrain.STAGES
        },
        dsa_warmup=dsa_warmup.get_config(variant),
        dsa_sparse=dsa_sparse.get_config(variant),
        sft=sft.get_config(f"{variant},mixed"),
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
