"""Following instructions that a program can check: tasks and rewards from IFEval's prompts (Zhou et al. 2023).

    for task in tasks(): ...
    reward = await Instructions()(task, attempt)      # 1.0 if every instruction of the prompt is kept

A row of such data is {"key": ..., "prompt": "...", "instruction_id_list": [...], "kwargs": [...]}, as the benchmark
writes it: an identifier of `instruction_kinds.KINDS` and its arguments for each instruction.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from glm5_jax.data.sources import ASSETS
from glm5_jax.envs.instruction_kinds import CHECKS, KINDS
from glm5_jax.rl.types import Attempt, Reward, Task, settled

KIND = "instructions"
SHIPPED = ASSETS / "ifeval.jsonl"  # every second prompt of the benchmark
REWARDS = ("all", "share")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: a key of `KINDS` and its arguments. Construction refuses others than it takes (ValueError);
    arguments that are None are left out, as tables write them."""

    kind: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"instruction is {self.kind!r}; use one of {', '.join(KINDS)}")
        if not isinstance(self.arguments, Mapping):
            raise ValueError(f"the arguments of {self.kind} are {self.arguments!r}; give an object")
        given = {name: value for name, value in self.arguments.items() if value is not None}
        takes = KINDS[self.kind].arguments
        if set(given) != set(takes):
            raise ValueError(
                f"{self.kind} has arguments {sorted(given)}; it takes {sorted(takes) or 'none'}"
            )
        for name, check in takes.items():
            words, fits = CHECKS[check]
            if not fits(given[name]):
                raise ValueError(f"{name} of {self.kind} is {given[name]!r}; it must be {words}")
        if given.get("nth_paragraph", 1) > given.get("num_paragraphs", 1):
            raise ValueError(
                f"nth_paragraph of {self.kind} is {given['nth_paragraph']}; there are to be only "
                f"{given['num_paragraphs']} paragraphs"
            )
        object.__setattr__(self, "arguments", given)

    def kept(self, reply: str, *, loose: bool = False) -> bool:
        """Whether a reply keeps it; one without anything in it keeps none. loose: whether one of `readings` does."""
        return any(
            bool(text.strip()) and KINDS[self.kind].keeps(text, **self.arguments)
            for text in (readings(reply) if loose else (reply,))
        )


def readings(reply: str) -> list[str]:
    """The eight texts that the loose criterion tries: a reply as it is, without its first line, its last, and both (an
    introduction, an offer of more), and each of these without stars (markdown)."""
    lines = reply.split("\n")
    cut = [reply, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [text.replace("*", "") for text in cut]


def instructions(data: Mapping[str, Any]) -> tuple[Instruction, ...]:
    """What a row asks for. ValueError says what is wrong with it."""
    kinds, arguments = data.get("instruction_id_list"), data.get("kwargs")
    for name, value in (("instruction_id_list", kinds), ("kwargs", arguments)):
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"{name} is {value!r}; give a list with an entry for each instruction")
    if len(kinds) != len(arguments):
        raise ValueError(
            f"there are {len(kinds)} entries of instruction_id_list and {len(arguments)} of kwargs; give as many"
        )
    return tuple(map(Instruction, kinds, arguments))


def task(row: Mapping[str, Any]) -> Task:
    """The task of a row. ValueError as `instructions`, and for a row without a prompt."""
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
        raise ValueError("the row has no prompt; give its text")
    instructions(row)
    data = {name: row[name] for name in ("instruction_id_list", "kwargs")}
    messages = ({"role": "user", "content": row["prompt"]},)
    return Task(f"ifeval-{row.get('key')}", KIND, messages, data)


def tasks(path: str | os.PathLike = SHIPPED) -> Iterator[Task]:
    """The tasks of a jsonl file. ValueError names the line that holds none."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield task(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Instructions:
    """The verifier of tasks of kind "instructions".

    reward: "all", 1 if every instruction is kept and else 0, or "share", how many of them are. loose: as `readings`;
    a policy that learns from it learns nothing about its introductions. Parts of the reward are named by
    instruction, and numbered where one comes twice. An attempt that was cut off keeps none: who never ends has many
    words.
    """

    reward: str = "all"
    loose: bool = False

    def __post_init__(self):
        if self.reward not in REWARDS:
            raise ValueError(f"reward is {self.reward!r}; use one of {', '.join(REWARDS)}")

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        """As `rl.types.Verifier`."""
        if reward := settled(attempt):
            return reward
        try:
            asked = instructions(task.data)
        except ValueError as error:
            return Reward(None, error=str(error))
        parts = {}
        for number, one in enumerate(asked):
            name = f"{one.kind}.{number}" if one.kind in parts else one.kind
            parts[name] = float(one.kept(attempt.reply, loose=self.loose))
        combined = min(parts.values()) if self.reward == "all" else sum(parts.values()) / len(parts)
        return Reward(combined, parts)


class Accuracy(NamedTuple):
    """Shares of prompts whose instructions are all kept, and of instructions that are kept, by both criteria."""

    prompt_strict: float
    instruction_strict: float
    prompt_loose: float
    instruction_loose: float


def accuracy(replies: Iterable[tuple[Task, str]]) -> Accuracy:
    """The four measures of the paper. ValueError if there is no reply."""
    outcomes = [
        [(one.kept(reply), one.kept(reply, loose=True)) for one in instructions(task.data)]
        for task, reply in replies
    ]
    if not outcomes:
        raise ValueError("accuracy of no replies; give at least one")
    shares = []
    for criterion in range(2):
        kept = [[outcome[criterion] for outcome in prompt] for prompt in outcomes]
        shares += [_mean(map(all, kept)), _mean(x for prompt in kept for x in prompt)]
    return Accuracy(*shares)


def _mean(values: Iterable[bool]) -> float:
    values = list(values)
    return sum(values) / len(values)
