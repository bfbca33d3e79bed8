"""Selects the messages of an agent's next request, when calls and their results grow long (GLM-5 4.2.4).

A round is a reply with tool calls, and their results. The two numbers of `ContextConfig` give four strategies, `CONTEXTS`:

  everything    Sends all rounds. Each request extends the previous one, so the server's prefix cache holds it.
  keep_recent   Replaces the results of all rounds except the last `keep_rounds` by `OMITTED`; reasoning and calls stay.
                The prompt changes only from the newly omitted result on.
  discard_all   Drops all rounds when the prompt has more than `max_prompt_tokens`; the next reply starts from the task
                only. Otherwise like everything.
  hierarchical  keep_recent, and discard_all when the prompt is too long nevertheless.

The task's messages are always sent unchanged, and a call is never sent without a result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from glm5_jax.rl.types import Message, Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer

OMITTED = "Tool result is omitted to save tokens."  # GLM-5 4.2.4


@dataclasses.dataclass(kw_only=True, frozen=True)
class ContextConfig:
    """Options of the selection. Raises ValueError if a value is not positive.

    Attributes:
      keep_rounds: number of the last rounds whose results stay; None: all rounds.
      max_prompt_tokens: prompt length above which all rounds are dropped, each time; None: no limit.
    """

    keep_rounds: int | None = 5  # GLM-5 4.2.4, as in other work cited there
    # GLM-5 4.2.4 (32k), for hierarchical; it does not disclose what remains after a reset.
    max_prompt_tokens: int | None = 32_768

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or None")


CONTEXTS = {
    "everything": ContextConfig(keep_rounds=None, max_prompt_tokens=None),
    "keep_recent": ContextConfig(max_prompt_tokens=None),
    # GLM-5 4.2.4: answers get worse above about 100K tokens. The limit without keep_recent is not disclosed.
    "discard_all": ContextConfig(keep_rounds=None, max_prompt_tokens=100_000),
    "hierarchical": ContextConfig(),
}


class Counter(Protocol):
    """Token counter; the counts of the prompt and of all rounds add up to that of the full prompt."""

    def prompt(self, task: Task) -> int:
        """Returns the tokens of the prompt for a task's first reply."""
        ...

    def added(self, task: Task, messages: Sequence[Message]) -> int:
        """Returns the tokens of a round that follows a task's messages."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenCounter:
    """Counter that agrees with a server of a model with this tokenizer.

    Attributes:
      tokenizer: tokenizer of the model.
      variant: chat layout of the server.
      thinking: whether requests enable thinking, for tasks that do not set it.
    """

    tokenizer: Tokenizer
    variant: str = "glm5"
    thinking: bool = True

    def prompt(self, task: Task) -> int:
        """See `Counter`."""
        return self._count(task, task.messages, tools=task.tools or None)

    def added(self, task: Task, messages: Sequence[Message]) -> int:
        """See `Counter`."""
        # The first message stands for any predecessor and is not counted.
        rounds = [{"role": "user", "content": ""}, *messages]
        return self._count(task, rounds, first=1, add_generation_prompt=False)

    def _count(self, task: Task, messages: Sequence[Message], **options) -> int:
        thinks = self.thinking if task.thinking is None else task.thinking
        options |= {"variant": self.variant, "enable_thinking": thinks}
        return len(render_chat(messages, self.tokenizer, **options).ids)


class Context:
    """Message history of an attempt. Raises ValueError if the task leaves no room for a round.

    Attributes:
      total: tokens of the task and of all rounds with their results, dropped ones included.
      restarts: numbers of the rounds before which all rounds were dropped.
    """

    def __init__(self, config: ContextConfig, task: Task, counter: Counter):
        self._config, self._task, self._counter = config, task, counter
        self._task_tokens = self.total = counter.prompt(task)
        if config.max_prompt_tokens is not None and self._task_tokens > config.max_prompt_tokens:
            raise ValueError(
                f"task {task.id!r} has {self._task_tokens} tokens; with at most {config.max_prompt_tokens} in a prompt its rounds would be "
                "dropped forever; raise max_prompt_tokens"
            )
        self._rounds: list[_Round] = []
        self._num_rounds = 0
        self.restarts: list[int] = []

    def add(self, messages: Sequence[Message]) -> None:
        """Adds a round: a reply with calls, and their results."""
        full = tuple(messages)
        folded = tuple({**m, "content": OMITTED} if m["role"] == "tool" else m for m in full)
        count = self._counter.added(self._task, full)
        shorter = self._counter.added(self._task, folded)
        self._rounds.append(_Round(full=full, folded=folded, tokens=count, folded_tokens=shorter))
        self._num_rounds += 1
        self.total += count

    def messages(self) -> list[Message]:
        """Returns the messages of the next request, and drops the rounds first if they are too long."""
        limit = self._config.max_prompt_tokens
        if limit is not None and self.num_tokens > limit:
            self._rounds.clear()
            self.restarts.append(self._num_rounds)
        older, recent = self._split()
        folded = [message for one in older for message in one.folded]
        return [*self._task.messages, *folded, *(m for one in recent for m in one.full)]

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt with all rounds that were not dropped."""
        older, recent = self._split()
        return (
            self._task_tokens + sum(r.folded_tokens for r in older) + sum(r.tokens for r in recent)
        )

    def _split(self) -> tuple[list["_Round"], list["_Round"]]:
        keep = self._config.keep_rounds
        first = 0 if keep is None else max(0, len(self._rounds) - keep)
        return self._rounds[:first], self._rounds[first:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Round:
    full: tuple[Message, ...]
    folded: tuple[Message, ...]
    tokens: int
    folded_tokens: int
