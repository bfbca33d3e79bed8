"""DSA, first stage: the indexers learn what dense attention looks at, and nothing else moves (GLM-5 2.1.1).

    python -m launch.run --experiment=experiments/dsa_warmup.py:tiny --experiment.checkpoint=WORKDIR

Attention is dense, the trunk is frozen bit by bit, and every indexer follows the divergence of its scores'
softmax from the attention's probabilities, summed over heads (the `indexer` loss; one number per layer in
the report). --experiment.step.index_target=served lets an indexer of IndexShare learn from all the
layers that it serves.

:tiny    for two CPU cores: 60 steps at 1024 tokens, about a minute
:small   for one accelerator: 1,000 steps at 32K tokens
:glm5    for 1,024 chips: 1,000 steps at 200K
"""

import dataclasses

from experiments import midtrain
from glm5_jax.training.experiment import ExperimentConfig, MeshConfig, choose
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig

evaluator = midtrain.evaluator
TRUNK = r"^(?!.*indexer/)"  # everything but the indexers


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def warm(base: ExperimentConfig, name: str, **changes) -> ExperimentConfig:
    """The last stage of mid-training, in which only the indexers learn."""
    step = dataclasses.replace(base.step, index_weight=1.0)
    optimizer = dataclasses.replace(base.optimizer, frozen=(TRUNK,))
    # A base model that knows nothing of DSA has no indexers yet.
    own = {"name": name, "step": step, "optimizer": optimizer, "unshared": ("indexer",)}
    return dataclasses.replace(base, **own | changes)


def falling(steps: int, peak: float = 5e-3, end: float = 2e-4) -> ScheduleConfig:
    """From 5e-3 to 2e-4 (GLM-5 2.1.1); the shape is not printed."""
    return ScheduleConfig(kind="cosine", peak=peak, end=end, warmup_steps=0, total_steps=steps)


def tiny() -> ExperimentConfig:
    """The paper's rates; 120 thousand tokens."""
    return warm(midtrain.tiny("200k"), "dsa_warmup:tiny", schedule=falling(60))


def small() -> ExperimentConfig:
    """The paper's number of steps, at 131,072 tokens each."""
    return warm(midtrain.small("200k"), "dsa_warmup:small", schedule=falling(1000))


def glm5() -> ExperimentConfig:
    """1,000 steps; 16 rows of 202,752 tokens instead of the paper's 14, which 16 groups of chips cannot
    share."""
    base, mesh = midtrain.glm5("200k"), MeshConfig(fsdp=2, expert=8, context=64)
    tokens = 16 * base.data.sequence_length
    return warm(
        base,
        "dsa_warmup:glm5",
        mesh=mesh,
        batch=BatchRampConfig(start=tokens, end=tokens, ramp_tokens=0, multiple=tokens),
        schedule=falling(1000),
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
