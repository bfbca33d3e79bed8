"""Types that environments and the learner share: tasks, attempts at them, rewards, verifiers.

An environment offers a `Task`, a policy makes an `Attempt` at it, and a `Verifier` judges the attempt with a `Reward`.
"""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]  # in OpenAI's form: role, content, reasoning_content, tool_calls

FINISH_REASONS = ("stop", "length", "failed")
MAX_REWARD = 1e6  # our choice: advantages and their squares stay finite in float32
MAX_NUMBER = 1e15  # our choice, for parts and metrics, which reports average
_MAX_LEASE_AHEAD_MS = 24 * 3600 * 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Problem for a policy.

    Attributes:
      id: unique id among all tasks.
      kind: kind of task; selects the verifier.
      messages: messages that the policy is prompted with.
      data: data for the verifier, such as a result or tests. The policy never sees it.
      tools: tools that the policy may call, in OpenAI's form of functions.
      origin: name of the training stage that the task belongs to; selects the teacher in distillation.
      thinking: True if replies begin with reasoning; None: the default of the rollouts.
    """

    id: str
    kind: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    origin: str = ""
    thinking: bool | None = None

    def __post_init__(self):
        if not self.messages:
            raise ValueError(f"task {self.id!r} has no message; give at least the user's")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """Attempt of a policy at a task.

    Attributes:
      messages: messages after those of the task: the policy's replies and the tools' results.
      finish_reason: "stop", "length" if the attempt was truncated, or "failed" if the environment could not go on.
      error: reason of "failed". With "stop": the mistake by which the policy ended the attempt, such as a tool call
        that cannot be parsed.
      num_sampled_tokens: tokens that the policy sampled, including those that are no text; 0 if not counted.
    """

    messages: tuple[Message, ...]
    finish_reason: str = "stop"
    error: str = ""
    num_sampled_tokens: int = 0

    def __post_init__(self):
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"finish_reason is {self.finish_reason!r}; use one of {', '.join(FINISH_REASONS)}"
            )

    @property
    def reply(self) -> str:
        """Returns the content of the policy's last message, without its reasoning; "" without a reply."""
        replies = [m.get("content") or "" for m in self.messages if m["role"] == "assistant"]
        return replies[-1] if replies else ""


@dataclasses.dataclass(frozen=True)
class Reward:
    """Reward of an attempt.

    Attributes:
      value: the reward. None if the environment failed, which is not the policy's fault: the attempt is then repaired
        or left out, and never counts as 0. The policy's own failures (no answer, code that hangs) are 0, with `error`.
      parts: components of the reward, by name.
      error: reason of a missing value, or of a 0 by the policy's fault; "" for none.
    """

    value: float | None
    parts: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    error: str = ""

    def __post_init__(self):
        if self.value is not None:
            check_number("a reward's value", self.value, MAX_REWARD)
        for name, value in self.parts.items():
            if value is not None:
                check_number(f"a reward's {name}", value)


def check_number(name: str, value: float, limit: float = MAX_NUMBER) -> None:
    """Raises ValueError unless a number is finite and within plus or minus a limit."""
    # The comparison is exact for integers of any size, and False for NaN.
    if not -limit <= value <= limit:
        raise ValueError(
            f"{name} is {reprlib.repr(value)}; it must be finite and from {-limit:g} to {limit:g}, or left out"
        )


class WeightVersion(NamedTuple):
    """Version of the weights that engines sample with.

    Attributes:
      lease: lease of the trainer that pushed them. A later lease belongs to a trainer that replaced it.
      version: the optimiser's steps.
      checksum: checksum that engines report; None if they report none.
    """

    lease: int
    version: int
    checksum: str | None = None


def check_lease(lease: int, now: float) -> None:
    """Raises ValueError if an orchestrator cannot have issued a lease by now, in seconds since the epoch.

    A lease is the orchestrator's time in milliseconds. Another trainer's lease could never replace a later one.
    """
    if is_lease_ahead(lease, now):
        raise ValueError(
            f"lease is {lease}, which is more than a day ahead of this machine's clock ({1e3 * now:.0f}); give the lease "
            "of the orchestrator, and set the clocks of both machines"
        )


def is_lease_ahead(lease: int, now: float) -> bool:
    """Returns True if a lease is more than a day ahead of now, in seconds since the epoch.

    That happens if the orchestrator's clock has been set back. The next trainer's lease replaces such a lease,
    although its number is smaller.
    """
    return lease > 1e3 * now + _MAX_LEASE_AHEAD_MS


class UnreadableReply(ValueError):
    """Raised if a judge cannot read a policy's reply. The reward is 0, because the policy wrote that text."""


def reward_without_verifier(
    attempt: Attempt, parts: Mapping[str, float] | None = None
) -> Reward | None:
    """Returns the reward of an attempt whose text need not be judged; None if a verifier must judge it.

    A failure of the environment has no value. An attempt that was truncated, or that the policy ended by a mistake, is
    worth 0, with these parts.
    """
    if attempt.finish_reason == "failed":
        return Reward(None, error=attempt.error or "the environment failed")
    if attempt.finish_reason == "length":
        return Reward(0.0, parts or {}, "the attempt was cut off")
    return Reward(0.0, parts or {}, attempt.error) if attempt.error else None


class Verifier(Protocol):
    """Judge of attempts at tasks of one kind.

    Never raises for anything that a policy wrote. Any other failure is a `Reward` of None. A policy must not be able to
    cause such a failure. Otherwise it would learn to, because an attempt without a value is left out of training.
    """

    async def __call__(self, task: Task, attempt: Attempt) -> Reward: ...


def has_used_tools(messages: Sequence[Message]) -> bool:
    """Returns True if a reply of the policy follows a tool's result."""
    roles = [message["role"] for message in messages]
    return "tool" in roles and "assistant" in roles[roles.index("tool") :]
