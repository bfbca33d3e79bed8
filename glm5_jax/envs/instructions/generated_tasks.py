"""Generates tasks with constraints on a reply that a program can check, for small policies.

The prompt is a speech from a play (data/chat_tasks.py), and the reply must follow one constraint or more.
Each is an instruction that `envs.instructions.ifeval` checks, with a sentence that asks for it.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from glm5_jax.data import chat_tasks
from glm5_jax.data.sources import is_held_out
from glm5_jax.envs.instructions.ifeval import KIND
from glm5_jax.rl.types import Task

WORDS = ("the", "and", "you", "my", "is")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstraintTaskConfig:
    """Options of generated tasks. Raises ValueError for values out of range.

    Attributes:
      size: number of tasks on both sides of the split, at most the number of speeches.
      seed: random seed; a task depends only on the config and its number.
      max_constraints: maximum number of constraints of a task.
      max_characters: maximum length of a speech, in characters; longer ones are left out.
      held_out_fraction: share of speeches that are held out for evaluation.
    """

    size: int = 10_000
    seed: int = 0
    max_constraints: int = 2
    max_characters: int = 10_000
    held_out_fraction: float = (
        0.05  # as for SFT: a question must be on the same side of the split in all stages
    )

    def __post_init__(self):
        for name, minimum, maximum in (
            ("size", 1, 10**7),
            ("seed", 0, 2**63),
            ("max_constraints", 1, len(CONSTRAINTS)),
            ("max_characters", 1, 10**9),
            ("held_out_fraction", 0, 1),
        ):
            if not minimum <= getattr(self, name) <= maximum:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from {minimum} to {maximum}"
                )

    @property
    def name(self) -> str:
        """Returns the beginning of the ids of the tasks, with everything but the number that they depend on."""
        return f"demands{self.max_constraints}-seed{self.seed}"


def tasks(config: ConstraintTaskConfig, *, evaluation: bool = False) -> Iterator[Task]:
    """Yields the tasks of one side of the split, in the order of their numbers."""
    plays = chat_tasks.ChatTaskConfig(kind="plays", size=config.size)
    for number, line in enumerate(chat_tasks.make_lines(plays, "interleaved")):
        who, message = json.loads(line)["messages"][:2]
        speech = message["content"].strip()
        if len(speech) > config.max_characters:
            continue
        if is_held_out(speech, config.held_out_fraction) != evaluation:
            continue
        rng = np.random.default_rng([zlib.crc32(KIND.encode()), config.seed, number])
        count = 1 + int(rng.integers(config.max_constraints))
        chosen = [CONSTRAINTS[i](rng) for i in sorted(rng.permutation(len(CONSTRAINTS))[:count])]
        prompt = " ".join([speech, *(sentence for sentence, _, _ in chosen)])
        yield Task(
            id=f"{config.name}-{number}",
            kind=KIND,
            messages=(who, {"role": "user", "content": prompt}),
            data={
                "instruction_id_list": [kind for _, kind, _ in chosen],
                "kwargs": [arguments for _, _, arguments in chosen],
            },
            thinking=False,
        )


Constraint = tuple[str, str, dict[str, Any]]  # sentence, instruction, its arguments


def _no_comma(rng) -> Constraint:
    return "Use no commas.", "punctuation:no_comma", {}


def _length(rng) -> Constraint:
    count = 5 * int(rng.integers(1, 5))
    few = bool(rng.integers(2))
    arguments = {"relation": "less than" if few else "at least", "num_words": count}
    sentence = f"Use {'fewer than' if few else 'at least'} {count} words."
    return sentence, "length_constraints:number_words", arguments


def _word(rng) -> Constraint:
    word = WORDS[rng.integers(len(WORDS))]
    if rng.integers(2):
        return f'Say "{word}".', "keywords:existence", {"keywords": [word]}
    return f'Do not say "{word}".', "keywords:forbidden_words", {"forbidden_words": [word]}


CONSTRAINTS = (_no_comma, _length, _word)  # any of them can be followed together
