"""Provides tasks and rewards for instructions that a program can check, from IFEval's prompts (Zhou et al. 2023).

    for task in tasks(): ...
    reward = await Instructions()(task, attempt)      # 1.0 if the reply follows all instructions of the prompt

A row of such data is {"key": ..., "prompt": "...", "instruction_id_list": [...], "kwargs": [...]}, as in
the benchmark: an identifier of `instruction_kinds.KINDS` and its arguments for each instruction.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from glm5_jax.data.conversation import read_json
from glm5_jax.data.sources import ASSETS
from glm5_jax.envs.instructions.constraints import CHECKS, KINDS
from glm5_jax.rl.types import Attempt, Reward, Task, reward_without_verifier
from glm5_jax.runtime.files import read_lines

KIND = "instructions"
SHIPPED = ASSETS / "ifeval.jsonl"  # every second prompt of the benchmark
REWARDS = ("all", "share")


@dataclasses.dataclass(frozen=True)
class VerifiableInstruction:
    """Instruction that a program can check.

    Arguments that are None are removed, because tables write them so. Raises ValueError for an unknown
    kind, and for arguments that the kind does not take.

    Attributes:
      kind: key of `KINDS`.
      arguments: arguments of the kind by name.
    """

    kind: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"instruction is {self.kind!r}; use one of {', '.join(KINDS)}")
        if not isinstance(self.arguments, Mapping):
            raise ValueError(f"the arguments of {self.kind} are {self.arguments!r}; give an object")
        arguments = {name: value for name, value in self.arguments.items() if value is not None}
        takes = KINDS[self.kind].arguments
        if set(arguments) != set(takes):
            raise ValueError(
                f"{self.kind} has arguments {sorted(arguments)}; it takes {sorted(takes) or 'none'}"
            )
        for name, check in takes.items():
            words, fits = CHECKS[check]
            if not fits(arguments[name]):
                raise ValueError(
                    f"{name} of {self.kind} is {arguments[name]!r}; it must be {words}"
                )
        if arguments.get("nth_paragraph", 1) > arguments.get("num_paragraphs", 1):
            raise ValueError(
                f"nth_paragraph of {self.kind} is {arguments['nth_paragraph']}; it may be at most num_paragraphs, "
                f"{arguments['num_paragraphs']}"
            )
        object.__setattr__(self, "arguments", arguments)

    def is_followed(self, reply: str, *, loose: bool = False) -> bool:
        """Returns whether a reply follows the instruction; an empty reply follows none.

        Args:
          reply: text of the reply.
          loose: accept the reply if one of its `readings` follows the instruction.
        """
        return any(
            bool(text.strip()) and KINDS[self.kind].keeps(text, **self.arguments)
            for text in (readings(reply) if loose else (reply,))
        )


def readings(reply: str) -> list[str]:
    """Returns the eight texts that the loose criterion tries.

    They are the reply unchanged, without its first line, without its last, and without both (an
    introduction, an offer of more), and each of these without stars (Markdown).
    """
    lines = reply.split("\n")
    cut = [reply, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [text.replace("*", "") for text in cut]


def instructions(data: Mapping[str, Any]) -> tuple[VerifiableInstruction, ...]:
    """Returns the instructions of a row. Raises ValueError that says what is wrong with it."""
    kinds, arguments = _entries(data, "instruction_id_list"), _entries(data, "kwargs")
    if len(kinds) != len(arguments):
        raise ValueError(
            f"there are {len(kinds)} entries of instruction_id_list and {len(arguments)} of kwargs; give one "
            "of each per instruction"
        )
    return tuple(map(VerifiableInstruction, kinds, arguments))


def _entries(data: Mapping[str, Any], name: str) -> list | tuple:
    value = data.get(name)
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{name} is {value!r}; pass a list with an entry for each instruction")
    return value


def task(row: Mapping[str, Any]) -> Task:
    """Returns the task of a row. Raises ValueError if `instructions` does, and for a row without a prompt."""
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
        raise ValueError("the row has no prompt; give its text")
    instructions(row)
    data = {name: row[name] for name in ("instruction_id_list", "kwargs")}
    messages = ({"role": "user", "content": row["prompt"]},)
    return Task(id=f"ifeval-{row.get('key')}", kind=KIND, messages=messages, data=data)


def tasks(path: str | os.PathLike = SHIPPED) -> Iterator[Task]:
    """Yields the tasks of a jsonl file. Raises ValueError that names an invalid line."""
    for line in read_lines(path):
        try:
            yield task(read_json(line.content))
        except ValueError as error:
            raise ValueError(f"{path}, line {line.number}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Instructions:
    """Verifier of tasks of kind "instructions".

    The reward's parts are named by instruction, with a number if one occurs twice. A truncated attempt
    follows no instruction, because a reply that never ends would satisfy minimum lengths.

    Attributes:
      reward: "all", 1 if all instructions are followed and else 0, or "share", the share of them that are
          followed.
      loose: accept any of `readings`. A policy trained so gets no signal about its introductions.
    """

    reward: str = "all"
    loose: bool = False

    def __post_init__(self):
        if self.reward not in REWARDS:
            raise ValueError(f"reward is {self.reward!r}; use one of {', '.join(REWARDS)}")

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        """Returns the reward of an attempt, as `rl.types.Verifier` does."""
        if reward := reward_without_verifier(attempt):
            return reward
        try:
            entries = instructions(task.data)
        except ValueError as error:
            return Reward(None, error=str(error))
        parts = {}
        for number, one in enumerate(entries):
            name = f"{one.kind}.{number}" if one.kind in parts else one.kind
            parts[name] = float(one.is_followed(attempt.reply, loose=self.loose))
        combined = min(parts.values()) if self.reward == "all" else sum(parts.values()) / len(parts)
        return Reward(combined, parts)


class Accuracy(NamedTuple):
    """Shares of prompts with all instructions followed, and of followed instructions, by the strict and the
    loose criterion.
    """

    prompt_strict: float
    instruction_strict: float
    prompt_loose: float
    instruction_loose: float


def accuracy(replies: Iterable[tuple[Task, str]]) -> Accuracy:
    """Returns the four measures of the paper. Raises ValueError if there is no reply."""
    outcomes = [
        [
            (one.is_followed(reply), one.is_followed(reply, loose=True))
            for one in instructions(task.data)
        ]
        for task, reply in replies
    ]
    if not outcomes:
        raise ValueError("accuracy of no replies; give at least one")
    shares = []
    for criterion in range(2):
        outcomes_by_prompt = [[outcome[criterion] for outcome in prompt] for prompt in outcomes]
        shares += [
            _mean(map(all, outcomes_by_prompt)),
            _mean(x for prompt in outcomes_by_prompt for x in prompt),
        ]
    return Accuracy(*shares)


def _mean(values: Iterable[bool]) -> float:
    values = list(values)
    return sum(values) / len(values)
