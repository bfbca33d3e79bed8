"""Tasks with demands on a reply that a program can check, made up for policies that are small.

Somebody in a play says something (data/chat_tasks.py), and the reply is to keep one demand or more: instructions as
`envs.instructions` judges them, each with the sentence that asks for it.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from glm5_jax.data import chat_tasks
from glm5_jax.data.sources import held_out
from glm5_jax.envs.instructions import KIND
from glm5_jax.rl.types import Task

WORDS = ("the", "and", "you", "my", "is")


@dataclasses.dataclass(frozen=True)
class DemandConfig:
    """Tasks of one kind. Construction refuses values out of range (ValueError).

    Attributes:
      size: how many tasks there are on both sides of the split, at most as many as there are speeches.
      seed: with a number, all that a task depends on.
      most: demands of a task.
      characters: of a speech at most; longer ones are left out.
      held_out_fraction: share of speeches that are for evaluation.
    """

    size: int = 10_000
    seed: int = 0
    most: int = 2
    characters: int = 10_000
    held_out_fraction: float = (
        0.05  # of SFT too: what is asked must stand on one side in all stages
    )

    def __post_init__(self):
        for name, least, most in (
            ("size", 1, 10**7),
            ("seed", 0, 2**63),
            ("most", 1, len(DEMANDS)),
            ("characters", 1, 10**9),
            ("held_out_fraction", 0, 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from {least} to {most}"
                )

    @property
    def name(self) -> str:
        """What the ids of its tasks begin with: all that they depend on but their number."""
        return f"demands{self.most}-seed{self.seed}"


def tasks(config: DemandConfig, *, evaluation: bool = False) -> Iterator[Task]:
    """The tasks of one side of the split, in the order of their numbers."""
    plays = chat_tasks.ChatTaskConfig("plays", config.size)
    for number, line in enumerate(chat_tasks.lines(plays, "interleaved")):
        who, said = json.loads(line)["messages"][:2]
        speech = said["content"].strip()
        if len(speech) > config.characters:
            continue
        if held_out(speech, config.held_out_fraction) != evaluation:
            continue
        rng = np.random.default_rng([zlib.crc32(KIND.encode()), config.seed, number])
        count = 1 + int(rng.integers(config.most))
        chosen = [DEMANDS[i](rng) for i in sorted(rng.permutation(len(DEMANDS))[:count])]
        asked = " ".join([speech, *(sentence for sentence, _, _ in chosen)])
        yield Task(
            f"{config.name}-{number}",
            KIND,
            (who, {"role": "user", "content": asked}),
            {
                "instruction_id_list": [kind for _, kind, _ in chosen],
                "kwargs": [arguments for _, _, arguments in chosen],
            },
            thinking=False,
        )


Demand = tuple[str, str, dict[str, Any]]  # sentence, instruction, its arguments


def _no_comma(rng) -> Demand:
    return "Use no commas.", "punctuation:no_comma", {}


def _length(rng) -> Demand:
    count = 5 * int(rng.integers(1, 5))
    few = bool(rng.integers(2))
    arguments = {"relation": "less than" if few else "at least", "num_words": count}
    sentence = f"Use {'fewer than' if few else 'at least'} {count} words."
    return sentence, "length_constraints:number_words", arguments


def _word(rng) -> Demand:
    word = WORDS[rng.integers(len(WORDS))]
    if rng.integers(2):
        return f'Say "{word}".', "keywords:existence", {"keywords": [word]}
    return f'Do not say "{word}".', "keywords:forbidden_words", {"forbidden_words": [word]}


DEMANDS = (_no_comma, _length, _word)  # any of which can be kept together
