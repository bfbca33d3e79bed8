"""The outcome reward model of General RL (GLM-5 3.4): which of two replies people prefer, as a number for each.

    python -m launch.run --experiment=experiments/reward_model.py:tiny --workdir=DIR

A scalar head on the backbone learns from pairs (rl/outcome_training.py). metrics.jsonl has held_out/accuracy, the share
of pairs of other conversations that are ranked as people ranked them; `rl.outcome_model.OutcomeModel.load(DIR)` scores.

:tiny   from nothing, on pairs that are made: the same fact, told kindly or not. On two CPU cores about a minute, to
        an accuracy above 0.9.
:small  for one accelerator, from the weights of an SFT run (--experiment.checkpoint=WORKDIR), on pairs of your own:
        --experiment.files="('PAIRS.jsonl',)", with the lines of data/preferences.py.
"""

import dataclasses
import random

from experiments import sft
from glm5_jax import presets
from glm5_jax.data.preferences import Preference
from glm5_jax.rl.experiment import policy_alone
from glm5_jax.rl.outcome_training import OutcomeConfig
from glm5_jax.training.experiment import choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.schedule import ScheduleConfig

ASKED = ("What is {} plus {}?", "Add {} and {} for me.", "{} and {}, how much is that?")
KIND = ("Happy to help: ", "Of course! ", "Good question. ", "With pleasure, ")
UNKIND = ("As if you could not count: ", "Not again! ", "What a question. ", "Leave me alone, ")


@dataclasses.dataclass(frozen=True)
class MadeConfig(OutcomeConfig):
    """made: so many pairs, in place of files."""

    made: int = 1000

    def preferences(self) -> list[Preference]:
        return preferences(self.made, self.seed)


def preferences(count: int, seed: int = 0) -> list[Preference]:
    """Pairs that differ in tone alone, and that long before they end."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        one, other = draw.randrange(100), draw.randrange(100)
        question = draw.choice(ASKED).format(one, other)
        fact = f"{one} plus {other} is {one + other}."
        chosen, rejected = (
            {"role": "assistant", "content": draw.choice(tones) + fact} for tones in (KIND, UNKIND)
        )
        found.append(Preference(({"role": "user", "content": question},), chosen, rejected))
    return found


def get_config(variant: str = "tiny") -> OutcomeConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> MadeConfig:
    """All of it is new to the model, so at a high rate."""
    return MadeConfig(
        name="reward_model:tiny",
        model=dataclasses.replace(presets.tiny(), attention="dense"),
        schedule=ScheduleConfig("linear", peak=1e-3, end=1e-4, warmup_steps=5, total_steps=60),
        step=dataclasses.replace(policy_alone(), remat="none"),
        train=TrainConfig(eval_interval=20, save_interval=20),
        goes_on=False,
        pairs=16,
        length=128,
        rows=16,
        held_out_fraction=0.1,
        examined=64,
    )


def small() -> OutcomeConfig:
    """Sparse, as SFT leaves it; Llama 2's batch and rate."""
    return OutcomeConfig(
        name="reward_model:small", model=sft.without_int4(sft.small("mixed").model)
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
