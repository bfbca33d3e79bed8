"""What a task asks, what a policy made of it, and what that is worth: where rewards and environments meet the learner."""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]  # in OpenAI's form: role, content, reasoning_content, tool_calls

FINISHED = ("stop", "length", "failed")
MAX_REWARD = 1e6  # ours: advantages and their squares stay finite in float32
MAX_NUMBER = 1e15  # ours, of parts and metrics, which are averaged for reports
_MAX_LEASE_AHEAD_MS = 24 * 3600 * 1000


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem. id: of its own among all; kind: of task, whose verifier judges it; messages: what the policy is
    given; data: what the verifier needs, a result or tests, which the policy never sees; tools: that it may
    call, as OpenAI describes functions; origin: the stage whose task it is, which has its teacher; thinking: whether
    replies begin with reasoning, None: as all others do."""

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


@dataclasses.dataclass(frozen=True)
class Attempt:
    """messages: behind those of the task, the policy's replies and what tools answered. finish_reason: "stop",
    "length" (it was cut off) or "failed" (the environment could not go on; `error` says why). error beside "stop": by what
    mistake the policy ended it, such as a call that cannot be read. sampled: tokens that the policy wrote, also those
    that are no text, 0 if nobody counted."""

    messages: tuple[Message, ...]
    finish_reason: str = "stop"
    error: str = ""
    sampled: int = 0

    def __post_init__(self):
        if self.finish_reason not in FINISHED:
            raise ValueError(
                f"finish_reason is {self.finish_reason!r}; use one of {', '.join(FINISHED)}"
            )

    @property
    def reply(self) -> str:
        """What the last message of the policy says, without its reasoning; "" if it never replied."""
        said = [m.get("content") or "" for m in self.messages if m["role"] == "assistant"]
        return said[-1] if said else ""


@dataclasses.dataclass(frozen=True)
class Reward:
    """value: None for a failure of the environment, which is not the policy's fault: the attempt is repaired or left
    out, and never counts as 0. What the policy itself broke (no answer, its code hangs) is 0, with `error` saying
    what. parts: what it is made of, by name."""

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
    if not -limit <= value <= limit:  # which compares integers of any size exactly, and NaN is not
        raise ValueError(
            f"{name} is {reprlib.repr(value)}; it must be finite and from {-limit:g} to {limit:g}, or left out"
        )


class Weights(NamedTuple):
    """What engines have that are sampled from. lease: of the trainer, later ones are of those that replaced it; version:
    the optimiser's steps; checksum: as engines tell it, None: they do not."""

    lease: int
    version: int
    checksum: str | None = None


def check_lease(lease: int, now: float) -> None:
    """Raises ValueError for a lease that no orchestrator can have given by now, in seconds since the epoch.

    A lease is the orchestrator's time in milliseconds. A later one could never be replaced by that of another trainer.
    """
    if is_ahead(lease, now):
        raise ValueError(
            f"lease is {lease}, which is more than a day ahead of this machine's clock ({1e3 * now:.0f}); give the lease "
            "of the orchestrator, and set the clocks of both machines"
        )


def is_ahead(lease: int, now: float) -> bool:
    """Returns whether a lease is of a clock more than a day ahead of now, in seconds since the epoch, as one that was set back
    since. Such a lease is replaced by that of the next trainer, although it is later."""
    return lease > 1e3 * now + _MAX_LEASE_AHEAD_MS


class Unreadable(ValueError):
    """What a policy wrote is none of what its judge can read: worth 0, as what fails by its text is its own doing."""


def settled(attempt: Attempt, parts: Mapping[str, float] | None = None) -> Reward | None:
    """What an attempt is worth whatever it says, None if that depends: nothing is known of one that the environment
    failed; 0, with these parts, if it was cut off or the policy ended it by a mistake."""
    if attempt.finish_reason == "failed":
        return Reward(None, error=attempt.error or "the environment failed")
    if attempt.finish_reason == "length":
        return Reward(0.0, parts or {}, "the attempt was cut off")
    return Reward(0.0, parts or {}, attempt.error) if attempt.error else None


class Verifier(Protocol):
    """Judges attempts at tasks of its kind. Never raises for what a policy wrote; whatever else fails is a `Reward`
    of None. That must be nothing which a policy can bring about: it would learn to, and its bad attempts be left out."""

    async def __call__(self, task: Task, attempt: Attempt) -> Reward: ...


def used_tools(messages: Sequence[Message]) -> bool:
    """Whether a reply follows what a tool answered."""
    roles = [message["role"] for message in messages]
    return "tool" in roles and "assistant" in roles[roles.index("tool") :]
