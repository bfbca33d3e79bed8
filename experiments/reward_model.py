"""Trains the outcome reward model of General RL: a scalar score of which reply people prefer (GLM-5 3.4).

    glm5 run reward_model:tiny --workdir=DIR

A scalar head on the backbone trains on pairs of replies (rl/reward_model/outcome_training.py). metrics.jsonl has
held_out/accuracy: the share of pairs of held-out conversations that the model ranks as people did.
`rl.reward_model.outcome_model.OutcomeModel.load(DIR)` scores replies.

:tiny   from random weights, on synthetic pairs: the same fact in a kind or an unkind tone. About a minute on two CPU
        cores, to an accuracy above 0.9.
:small  for one accelerator, from the weights of an SFT run (--checkpoint=WORKDIR). No preferences of people are shipped.
        Provide pairs:
        --files="('PAIRS.jsonl',)", with the lines of data/preferences.py.
"""

import dataclasses
import random

from experiments import sft
from glm5_jax import presets
from glm5_jax.data.preferences import Preference
from glm5_jax.rl.config import policy_step_config
from glm5_jax.rl.reward_model.outcome_training import OutcomeConfig
from glm5_jax.training.experiment import choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.schedule import ScheduleConfig

QUESTIONS = ("What is {} plus {}?", "Add {} and {} for me.", "{} and {}, how much is that?")
KIND = ("Happy to help: ", "Of course! ", "Good question. ", "With pleasure, ")
UNKIND = ("As if you could not count: ", "Not again! ", "What a question. ", "Leave me alone, ")


@dataclasses.dataclass(kw_only=True, frozen=True)
class SyntheticPairsConfig(OutcomeConfig):
    """Configuration of training on synthetic pairs.

    Attributes:
      num_synthetic: number of generated pairs, which replace `files`.
    """

    num_synthetic: int = 1000

    def preferences(self) -> list[Preference]:
        """Returns the generated pairs."""
        return preferences(self.num_synthetic, self.seed)


def preferences(count: int, seed: int = 0) -> list[Preference]:
    """Returns pairs of replies that differ only in tone, long before they end."""
    rng, pairs = random.Random(seed), []
    for _ in range(count):
        left, right = rng.randrange(100), rng.randrange(100)
        question = rng.choice(QUESTIONS).format(left, right)
        fact = f"{left} plus {right} is {left + right}."
        chosen, rejected = (
            {"role": "assistant", "content": rng.choice(tones) + fact} for tones in (KIND, UNKIND)
        )
        pairs.append(
            Preference(
                messages=({"role": "user", "content": question},), chosen=chosen, rejected=rejected
            )
        )
    return pairs


def get_config(variant: str = "tiny") -> OutcomeConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> SyntheticPairsConfig:
    """Uses a high learning rate, because the model starts from random weights."""
    return SyntheticPairsConfig(
        name="reward_model:tiny",
        model=dataclasses.replace(presets.tiny(), attention="dense"),
        schedule=ScheduleConfig(kind="linear", peak=1e-3, end=1e-4, warmup_steps=5, total_steps=60),
        step=dataclasses.replace(policy_step_config(), remat="none"),
        train=TrainConfig(eval_interval=20, save_interval=20),
        requires_checkpoint=False,
        pairs=16,
        length=128,
        rows=16,
        held_out_fraction=0.1,
        max_eval_pairs=64,
    )


def small() -> OutcomeConfig:
    """Trains SFT's sparse model with Llama 2's batch size and learning rate."""
    return OutcomeConfig(
        name="reward_model:small", model=sft.without_int4(sft.small("mixed").model)
    )


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
