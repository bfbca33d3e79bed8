"""The life of a model, stage after stage; each starts from the weights of the one before.

    python -m launch.run --experiment=experiments/lifecycle.py:tiny

The stages are the fields of `Lifecycle`, in their order: pretrain. Each has its own folder in the
workdir, and its own flags: --experiment.pretrain.train.steps=50. Variants as in pretrain.py.
"""

import dataclasses

from experiments import pretrain
from glm5_jax.training.experiment import ExperimentConfig

evaluator = pretrain.evaluator


@dataclasses.dataclass(frozen=True)
class Lifecycle:
    """The stages of a run."""

    pretrain: ExperimentConfig


def get_config(variant: str = "tiny") -> Lifecycle:
    """The variant's stages; ValueError lists the variants."""
    return Lifecycle(pretrain=pretrain.get_config(variant))


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
