"""What a reply is worth in General RL (GLM-5 3.4): rules first, then two models' judgements, less what guards find.

    R = gate * (M core - S),    core = a orm_z + b grm,    orm_z = (orm - mean) / std
    M = product of 1 - w (1 - g) over the guards that multiply,    S = sum of w (1 - g) over those that subtract

gate: 1 if the task's rules are kept, else 0, and then nothing else is asked. orm: a reward model's scalar, mean and std
those that it brings along; grm: a judge's mean criterion, or how the reply fares against a human's answer where the
task has one. Where neither has weight, core is what the rules say, and they are no gate. g: of a guard, 1 where nothing
is wrong. A core below 0 takes 2 - M in place of M, or a fault would raise it.

The paper prints neither weights nor scales, but that what is correct comes first: `squash` maps orm_z to
1 / (1 + exp(-orm_z)), so that, with guards that multiply, no reply that keeps the rules is worth less than one that
breaks them. Without it a poor one may be.
"""

import asyncio
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from glm5_jax.agents.judge import Rubric, rubrics
from glm5_jax.data.preferences import read_anchors, read_prompts
from glm5_jax.envs.guards import language_mixing, length, repetition
from glm5_jax.rl.types import Attempt, Message, Reward, Task, Unreadable, Verifier, settled

KIND = "general"
MODES = ("multiply", "subtract")
GUARDS = ("length", "repetition", "mixing")


class Outcomes(Protocol):
    """Who gives a reward model's scalars (rl.outcome_model.Asked), of mean and std on replies like these."""

    mean: float
    std: float

    async def __call__(self, task: Task, attempt: Attempt) -> float | None: ...


class Judges(Protocol):
    """What is asked for a judgement (agents.judge.Judge)."""

    async def score(
        self, rubric: Rubric, messages: Sequence[Message], reply: str, guidance: str
    ) -> Reward: ...

    async def compare(
        self, rubric: Rubric, messages: Sequence[Message], reply: str, other: str, guidance: str
    ) -> Reward: ...


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """How a guard counts: mode, one of `MODES`, and its weight, of those that multiply at most 1."""

    mode: str = "multiply"
    weight: float = 1.0

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; use one of {', '.join(MODES)}")
        most = 1.0 if self.mode == "multiply" else math.inf
        if not 0 <= self.weight <= most:
            raise ValueError(f"weight is {self.weight}; use 0 to {most} for mode {self.mode!r}")


@dataclasses.dataclass(frozen=True)
class GeneralConfig:
    """Placeholders, as the paper prints none of it.

    Attributes:
      gate: what the rules' value must be at least.
      orm, grm: the weights a and b; what has weight 0 is not asked.
      squash: whether orm_z is brought between 0 and 1.
      budget: characters of a reply, before its length counts against it; a task's "budget" goes before.
      length, repetition, mixing: the guards; None leaves one out.
      seconds: that either model may take.
    """

    gate: float = 1.0
    orm: float = 0.5
    grm: float = 0.5
    squash: bool = True
    budget: int = 12_000
    length: GuardConfig | None = GuardConfig()
    repetition: GuardConfig | None = GuardConfig()
    mixing: GuardConfig | None = GuardConfig()
    seconds: float = 600.0

    def __post_init__(self):
        if not (self.orm >= 0 and self.grm >= 0):
            raise ValueError(f"orm is {self.orm} and grm {self.grm}; make neither negative")
        for name in ("budget", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; make it positive")

    @property
    def asks(self) -> bool:
        """Whether a model has weight; else the rules are all there is."""
        return self.orm + self.grm > 0


@dataclasses.dataclass(frozen=True)
class General:
    """The verifier of tasks of kind "general", whose data may name a "rubric" (of `rubrics()`, "general" if it is
    missing) and hold an "anchor" (a text), "guidance" for the judge, a "budget", and "languages" by code that replies
    may be in. rules: a verifier of the task, None for a gate that is open.

    parts: "rules", "gate", "orm", "orm_z", "grm", each guard, "rules.PART" and "grm.CRITERION". A part that was asked
    for and is missing makes the value None, unless the gate is shut. What a model cannot read for its text is worth 0,
    as is what was cut off.
    """

    config: GeneralConfig = GeneralConfig()
    rules: Verifier | None = None
    orm: Outcomes | None = None
    judge: Judges | None = None

    def __post_init__(self):
        for name, given in (("orm", self.orm), ("grm", self.judge)):
            if getattr(self.config, name) and given is None:
                raise ValueError(
                    f"{name} has weight {getattr(self.config, name)} and nothing that gives it; hand it in, or make "
                    "the weight 0"
                )
        if not self.config.asks and (self.rules is None or self.orm or self.judge):
            raise ValueError(
                "orm and grm have weight 0; make that of a model that is there positive, or hand in rules alone"
            )

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        """As `rl.types.Verifier`."""
        if reward := settled(attempt, {"gate": 0.0}):
            return reward
        if not attempt.reply.strip():
            return Reward(0.0, {"gate": 0.0}, "there is no reply")
        parts, said = {}, ""
        if self.rules is not None:
            ruled = await self.rules(task, attempt)
            kept = {f"rules.{name}": value for name, value in ruled.parts.items()}
            parts, said = {"rules": ruled.value, **kept}, ruled.error
            if ruled.value is None:
                return Reward(None, {**parts, "gate": None}, ruled.error)
            if self.config.asks and ruled.value < self.config.gate:
                return Reward(0.0, {**parts, "gate": 0.0}, ruled.error)
        asked = await asyncio.gather(
            *(
                self._asked(name, task, attempt)
                for name in ("orm", "grm")
                if getattr(self.config, name)
            )
        )
        for reward in asked:
            parts |= reward.parts
        parts |= {"gate": 1.0, **self._guards(task, attempt.reply)}
        # One that nobody can read is worth nothing, whatever else failed.
        for value in (0.0, None):
            if errors := [r.error for r in asked if r.error and r.value == value]:
                return Reward(value, parts, "; ".join(errors))
        return Reward(combine(parts, self.config), parts, said)

    async def _asked(self, name: str, task: Task, attempt: Attempt) -> Reward:
        """A model's part under its name and what it is made of; its value is None, and so is the part, if it failed."""
        try:
            async with asyncio.timeout(self.config.seconds):
                reward = await (self._outcome if name == "orm" else self._judged)(task, attempt)
                if reward.value is None:
                    return Reward(None, {name: None}, f"{name}: {reward.error or 'it gave none'}")
                return Reward(
                    reward.value, reward.parts, reward.error and f"{name}: {reward.error}"
                )
        except Unreadable as failure:
            return Reward(0.0, {name: None}, f"{name}: {failure}")
        except TimeoutError:
            error = f"no answer within {self.config.seconds} s"
        except (
            Exception
        ) as failure:  # whatever a model handed in may raise is no fault of the policy's
            error = f"{type(failure).__name__}: {failure}"
        return Reward(None, {name: None}, f"{name}: {error}")

    async def _outcome(self, task: Task, attempt: Attempt) -> Reward:
        value = await self.orm(task, attempt)
        z = standardised(value, self.orm.mean, self.orm.std, self.config.squash)
        return Reward(value, {"orm": value, "orm_z": z})

    async def _judged(self, task: Task, attempt: Attempt) -> Reward:
        data = task.data
        given = (rubrics()[data.get("rubric", "general")], task.messages, attempt.reply)
        guidance = data.get("guidance", "")
        if data.get("anchor"):
            judged = await self.judge.compare(*given, data["anchor"], guidance)
        else:
            judged = await self.judge.score(*given, guidance)
        criteria = {f"grm.{name}": value for name, value in judged.parts.items()}
        return Reward(judged.value, {"grm": judged.value, **criteria}, judged.error)

    def _guards(self, task: Task, reply: str) -> dict[str, float]:
        asked = "\n".join(m["content"] for m in task.messages if isinstance(m.get("content"), str))
        found = {
            "length": lambda: length(reply, task.data.get("budget", self.config.budget)),
            "repetition": lambda: repetition(reply),
            "mixing": lambda: language_mixing(reply, asked, task.data.get("languages", ())),
        }
        return {name: found[name]() for name in GUARDS if getattr(self.config, name) is not None}


def standardised(value: float | None, mean: float, std: float, squash: bool) -> float | None:
    """orm_z of a reward model's scalar."""
    if value is None:
        return None
    z = (value - mean) / std
    # The same as 1 / (1 + exp(-z)), without its overflow.
    return (1 + math.tanh(z / 2)) / 2 if squash else z


def combine(parts: Mapping[str, float | None], config: GeneralConfig) -> float:
    """R of parts none of which is missing."""
    weights = {"orm_z": config.orm, "grm": config.grm} if config.asks else {"rules": 1.0}
    core = sum(weight * parts[name] for name, weight in weights.items() if weight)
    factor, subtracted = 1.0, 0.0
    for name in GUARDS:
        guard = getattr(config, name)
        if guard is None:
            continue
        fault = guard.weight * (1 - parts[name])
        if guard.mode == "multiply":
            factor *= 1 - fault
        else:
            subtracted += fault
    return parts["gate"] * (core * (factor if core >= 0 else 2 - factor) - subtracted)


def prompt_tasks(path: str | os.PathLike) -> list[Task]:
    """A task of each prompt of a file (data/preferences.py). ValueError as `read_prompts`, and for a rubric that is
    not among `rubrics()`."""
    prompts = read_prompts(path)
    for name in {prompt.rubric for prompt in prompts}:
        _check_rubric(name, path)
    return [
        Task(one.id, KIND, one.messages, {"rubric": one.rubric, "guidance": one.guidance})
        for one in prompts
    ]


def anchor_tasks(path: str | os.PathLike, rubric: str = "general") -> list[Task]:
    """A task of each anchor of a file, against which replies are judged. ValueError as `read_anchors`, and for a
    rubric that is not among `rubrics()`."""
    _check_rubric(rubric, path)
    return [
        Task(
            f"{os.fspath(path)}:{number}",
            KIND,
            one.messages,
            {"rubric": rubric, "anchor": one.anchor["content"]},
            one.tools,
        )
        for number, one in enumerate(read_anchors(path), 1)
    ]


def _check_rubric(name: str, path: str | os.PathLike) -> None:
    if name not in rubrics():
        raise ValueError(f"{path} asks for rubric {name!r}; use one of {', '.join(rubrics())}")
