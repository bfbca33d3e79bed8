"""Computes the hybrid reward of General RL (GLM-5 3.4): rules first, then two models' judgements, minus guard
penalties.

    R = gate * (M core - S),    core = a orm_z + b grm,    orm_z = (orm - mean) / std
    M = product of 1 - w (1 - g) over the guards that multiply,    S = sum of w (1 - g) over those that subtract

- gate: 1 if the task's rules are kept, else 0, and then no model is called.
- orm: scalar of a reward model, which also provides mean and std.
- grm: mean criterion of a judge, or the result of a comparison with a human's answer if the task has one.
- g: value of a guard, 1 without a fault.

If neither model has weight, core is the value of the rules, and they are no gate. A core below 0 is
multiplied by 2 - M instead of M, because otherwise a fault would raise it.

The paper prints neither weights nor scales, only that correctness comes first. `squash` maps orm_z to 1 /
(1 + exp(-orm_z)). With it and guards that multiply, no reply that keeps the rules is worth less than one
that breaks them. Without it a poor reply may be.
"""

import asyncio
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from glm5_jax.agents.judge import Rubric, rubrics
from glm5_jax.data.preferences import read_anchors, read_prompts
from glm5_jax.envs.instructions.guards import language_mixing, length, repetition
from glm5_jax.rl.types import (
    Attempt,
    Message,
    Reward,
    Task,
    UnreadableReply,
    Verifier,
    reward_without_verifier,
)

KIND = "general"
MODES = ("multiply", "subtract")
GUARDS = ("length", "repetition", "mixing")


class Outcomes(Protocol):
    """Reward model (rl.reward_model.outcome_model), with mean and standard deviation of its scalars on similar replies."""

    mean: float
    std: float

    async def __call__(self, task: Task, attempt: Attempt) -> float | None: ...


class Judges(Protocol):
    """Judge of replies (agents.judge.Judge)."""

    async def score(
        self, rubric: Rubric, messages: Sequence[Message], reply: str, guidance: str
    ) -> Reward: ...

    async def compare(
        self, rubric: Rubric, messages: Sequence[Message], reply: str, other: str, guidance: str
    ) -> Reward: ...


@dataclasses.dataclass(kw_only=True, frozen=True)
class GuardConfig:
    """Effect of a guard on the reward. Raises ValueError for other modes and weights out of range.

    Attributes:
      mode: how the guard is combined with the others, one of `MODES`.
      weight: weight of the fault; at most 1 for guards that multiply.
    """

    mode: str = "multiply"
    weight: float = 1.0

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; use one of {', '.join(MODES)}")
        max_weight = 1.0 if self.mode == "multiply" else math.inf
        if not 0 <= self.weight <= max_weight:
            raise ValueError(
                f"weight is {self.weight}; use 0 to {max_weight} for mode {self.mode!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneralConfig:
    """Options of `HybridReward`. The defaults are placeholders, because the paper prints none. Raises
    ValueError for values out of range.

    Attributes:
      gate: minimum value of the rules.
      orm, grm: weights a and b; a model of weight 0 is not called.
      squash: whether orm_z is mapped to 0..1.
      budget: maximum length of a reply without a penalty, in characters; a task's "budget" overrides it.
      length, repetition, mixing: options of the guards; None disables one.
      timeout_s: time limit of each model, in seconds.
    """

    gate: float = 1.0
    orm: float = 0.5
    grm: float = 0.5
    squash: bool = True
    budget: int = 12_000
    length: GuardConfig | None = GuardConfig()
    repetition: GuardConfig | None = GuardConfig()
    mixing: GuardConfig | None = GuardConfig()
    timeout_s: float = 600.0

    def __post_init__(self):
        if not (self.orm >= 0 and self.grm >= 0):
            raise ValueError(f"orm is {self.orm} and grm {self.grm}; make neither negative")
        for name in ("budget", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; make it positive")

    @property
    def has_models(self) -> bool:
        """Returns whether a model has weight; otherwise only the rules count."""
        return self.orm + self.grm > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridReward:
    """Verifier of tasks of kind "general".

    A task's data may have a "rubric" (of `rubrics()`; default "general"), an "anchor" (text of a human's
    answer), "guidance" for the judge, a "budget", and "languages" by code that replies may use.

    The reward's parts are "rules", "gate", "orm", "orm_z", "grm", each guard, "rules.PART" and
    "grm.CRITERION". If a model gives no result, the value is None, unless the gate is closed. A reply that
    a model cannot read because of its text is worth 0, as is a truncated one.

    Attributes:
      config: weights and guards.
      rules: verifier of the task's rules; None opens the gate.
      orm: reward model; None if its weight is 0.
      judge: judge; None if its weight is 0.
    """

    config: GeneralConfig = GeneralConfig()
    rules: Verifier | None = None
    orm: Outcomes | None = None
    judge: Judges | None = None

    def __post_init__(self):
        for name, model in (("orm", self.orm), ("grm", self.judge)):
            if getattr(self.config, name) and model is None:
                raise ValueError(
                    f"{name} has weight {getattr(self.config, name)} but is not passed in; pass it, or make "
                    "the weight 0"
                )
        if not self.config.has_models and (self.rules is None or self.orm or self.judge):
            raise ValueError(
                "orm and grm have weight 0; make the weight of a model that is passed in positive, or pass only rules"
            )

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        """Returns the reward of an attempt, as `rl.types.Verifier` does."""
        if reward := reward_without_verifier(attempt, {"gate": 0.0}):
            return reward
        if not attempt.reply.strip():
            return Reward(0.0, {"gate": 0.0}, "there is no reply")
        parts, error = {}, ""
        if self.rules is not None:
            ruled = await self.rules(task, attempt)
            rule_parts = {f"rules.{name}": value for name, value in ruled.parts.items()}
            parts, error = {"rules": ruled.value, **rule_parts}, ruled.error
            if ruled.value is None:
                return Reward(None, {**parts, "gate": None}, ruled.error)
            if self.config.has_models and ruled.value < self.config.gate:
                return Reward(0.0, {**parts, "gate": 0.0}, ruled.error)
        rewards = await asyncio.gather(
            *(
                self._score(name, task, attempt)
                for name in ("orm", "grm")
                if getattr(self.config, name)
            )
        )
        for reward in rewards:
            parts |= reward.parts
        parts |= {"gate": 1.0, **self._guards(task, attempt.reply)}
        # An unreadable reply is worth 0, even if another model failed.
        for value in (0.0, None):
            if errors := [r.error for r in rewards if r.error and r.value == value]:
                return Reward(value, parts, "; ".join(errors))
        complete = {name: value for name, value in parts.items() if value is not None}
        return Reward(combine(complete, self.config), parts, error)

    async def _score(self, name: str, task: Task, attempt: Attempt) -> Reward:
        """Returns a model's reward, its value under the model's name in `parts`; both are None if it failed."""
        try:
            async with asyncio.timeout(self.config.timeout_s):
                reward = await (self._outcome if name == "orm" else self._judged)(task, attempt)
                if reward.value is None:
                    return Reward(None, {name: None}, f"{name}: {reward.error or 'it gave none'}")
                return Reward(
                    reward.value, reward.parts, reward.error and f"{name}: {reward.error}"
                )
        except UnreadableReply as failure:
            return Reward(0.0, {name: None}, f"{name}: {failure}")
        except TimeoutError:
            error = f"no answer within {self.config.timeout_s} s"
        except Exception as failure:  # a model's failure is not the policy's fault
            error = f"{type(failure).__name__}: {failure}"
        return Reward(None, {name: None}, f"{name}: {error}")

    async def _outcome(self, task: Task, attempt: Attempt) -> Reward:
        assert self.orm is not None, "a reward model of weight 0 is not called"
        value = await self.orm(task, attempt)
        z = standardize(value, self.orm.mean, self.orm.std, self.config.squash)
        return Reward(value, {"orm": value, "orm_z": z})

    async def _judged(self, task: Task, attempt: Attempt) -> Reward:
        assert self.judge is not None, "a judge of weight 0 is not called"
        data = task.data
        arguments = (rubrics()[data.get("rubric", "general")], task.messages, attempt.reply)
        guidance = data.get("guidance", "")
        if data.get("anchor"):
            judged = await self.judge.compare(*arguments, data["anchor"], guidance)
        else:
            judged = await self.judge.score(*arguments, guidance)
        criteria = {f"grm.{name}": value for name, value in judged.parts.items()}
        return Reward(judged.value, {"grm": judged.value, **criteria}, judged.error)

    def _guards(self, task: Task, reply: str) -> dict[str, float]:
        prompt = "\n".join(m["content"] for m in task.messages if isinstance(m.get("content"), str))
        guards = {
            "length": lambda: length(reply, task.data.get("budget", self.config.budget)),
            "repetition": lambda: repetition(reply),
            "mixing": lambda: language_mixing(reply, prompt, task.data.get("languages", ())),
        }
        return {name: guards[name]() for name in GUARDS if getattr(self.config, name) is not None}


def standardize(value: float | None, mean: float, std: float, squash: bool) -> float | None:
    """Returns orm_z, the standardized scalar of a reward model; None for None."""
    if value is None:
        return None
    z = (value - mean) / std
    # The same as 1 / (1 + exp(-z)), without its overflow.
    return (1 + math.tanh(z / 2)) / 2 if squash else z


def combine(parts: Mapping[str, float], config: GeneralConfig) -> float:
    """Returns R of complete parts."""
    weights = {"orm_z": config.orm, "grm": config.grm} if config.has_models else {"rules": 1.0}
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
    """Returns a task for each prompt of a file (data/preferences.py).

    Raises ValueError if `read_prompts` does, and for a rubric that is not in `rubrics()`.
    """
    prompts = read_prompts(path)
    for name in {prompt.rubric for prompt in prompts}:
        _check_rubric(name, path)
    return [
        Task(
            id=one.id,
            kind=KIND,
            messages=one.messages,
            data={"rubric": one.rubric, "guidance": one.guidance},
        )
        for one in prompts
    ]


def anchor_tasks(path: str | os.PathLike, rubric: str = "general") -> list[Task]:
    """Returns a task for each anchor of a file, which replies are compared with.

    Raises ValueError if `read_anchors` does, and for a rubric that is not in `rubrics()`.
    """
    _check_rubric(rubric, path)
    return [
        Task(
            id=f"{os.fspath(path)}:{number}",
            kind=KIND,
            messages=one.messages,
            data={"rubric": rubric, "anchor": one.anchor["content"]},
            tools=one.tools,
        )
        for number, one in enumerate(read_anchors(path), 1)
    ]


def _check_rubric(name: str, path: str | os.PathLike) -> None:
    if name not in rubrics():
        raise ValueError(f"{path} asks for rubric {name!r}; use one of {', '.join(rubrics())}")
