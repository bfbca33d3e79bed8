"""Which messages an agent's next request sends, when calls and their results grow long (GLM-5 4.2.4).

A round is a reply that calls tools, and what they answer. By the two numbers of `ContextConfig` there are four ways, `CONTEXTS`:

  everything    all rounds. What was sent is the beginning of what is sent next, so a server has it cached.
  keep_recent   of all rounds but the last `keep` the results are replaced by `OMITTED`; reasoning and calls stay. What comes before
                the result that was omitted last is as it was.
  discard_all   once the prompt has more than `most_tokens`, all rounds are left out, and the next reply begins from the task
                alone. In between as everything.
  hierarchical  keep_recent, and discard_all when the prompt is too long nevertheless

The task's messages are always sent as they are, and a call never without a result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from glm5_jax.rl.types import Message, Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer

OMITTED = "Tool result is omitted to save tokens."  # GLM-5 4.2.4


@dataclasses.dataclass(frozen=True)
class ContextConfig:
    """keep: rounds whose results stay, None: all. most_tokens: of a prompt; past them the rounds are discarded, as
    often as it takes; None: never. Construction refuses what is not positive (ValueError)."""

    keep: int | None = 5  # GLM-5 4.2.4, where others did the same
    most_tokens: int | None = (
        32_768  # GLM-5 4.2.4 (32k), of hierarchical; what is left then is not disclosed
    )

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, or None")


CONTEXTS = {
    "everything": ContextConfig(None, None),
    "keep_recent": ContextConfig(most_tokens=None),
    # GLM-5 4.2.4: answers get worse past about 100K tokens. Where it discards without keep_recent is not disclosed.
    "discard_all": ContextConfig(None, 100_000),
    "hierarchical": ContextConfig(),
}


class Counter(Protocol):
    """Tokens of messages. What `added` says of each round adds up, and to what `prompt` says."""

    def prompt(self, task: Task) -> int:
        """Of a prompt for a task's first reply."""

    def added(self, task: Task, messages: Sequence[Message]) -> int:
        """Of a round behind a task's messages."""


@dataclasses.dataclass(frozen=True)
class TokenCounter:
    """As a server counts that lays chats out in `variant` for a model with this tokenizer. thinking: whether requests ask
    for it, where a task does not say."""

    tokenizer: Tokenizer
    variant: str = "glm5"
    thinking: bool = True

    def prompt(self, task: Task) -> int:
        """See `Counter`."""
        return self._count(task, task.messages, tools=task.tools or None)

    def added(self, task: Task, messages: Sequence[Message]) -> int:
        """See `Counter`."""
        # Behind any message, of which nothing is counted.
        behind = [{"role": "user", "content": ""}, *messages]
        return self._count(task, behind, first=1, add_generation_prompt=False)

    def _count(self, task: Task, messages: Sequence[Message], **options) -> int:
        thinks = self.thinking if task.thinking is None else task.thinking
        options |= {"variant": self.variant, "enable_thinking": thinks}
        return len(render_chat(messages, self.tokenizer, **options).ids)


class Context:
    """What an attempt at a task sends. ValueError if the task alone is too long to leave room for a round.

    total: tokens of the task and of all rounds with their results, discarded ones too. restarts: numbers of the rounds before
    which everything was discarded.
    """

    def __init__(self, config: ContextConfig, task: Task, counter: Counter):
        self._config, self._task, self._counter = config, task, counter
        self._own = self.total = counter.prompt(task)
        if config.most_tokens is not None and self._own > config.most_tokens:
            raise ValueError(
                f"task {task.id!r} has {self._own} tokens; with at most {config.most_tokens} in a prompt its rounds would be "
                "discarded for ever, raise most_tokens"
            )
        self._rounds: list[_Round] = []
        self._num_rounds = 0
        self.restarts: list[int] = []

    def add(self, messages: Sequence[Message]) -> None:
        """A round: a reply that calls, and the results."""
        full = tuple(messages)
        folded = tuple({**m, "content": OMITTED} if m["role"] == "tool" else m for m in full)
        count = self._counter.added(self._task, full)
        shorter = self._counter.added(self._task, folded)
        self._rounds.append(_Round(full, folded, count, shorter))
        self._num_rounds += 1
        self.total += count

    def messages(self) -> list[Message]:
        """What the next request sends."""
        most = self._config.most_tokens
        if most is not None and self.num_tokens > most:
            self._rounds.clear()
            self.restarts.append(self._num_rounds)
        older, recent = self._parted()
        sent = [message for own in older for message in own.folded]
        return [*self._task.messages, *sent, *(m for own in recent for m in own.full)]

    @property
    def num_tokens(self) -> int:
        """Of the prompt with all rounds that were not discarded."""
        older, recent = self._parted()
        return self._own + sum(r.folded_tokens for r in older) + sum(r.tokens for r in recent)

    def _parted(self) -> tuple[list["_Round"], list["_Round"]]:
        keep = self._config.keep
        first = 0 if keep is None else max(0, len(self._rounds) - keep)
        return self._rounds[:first], self._rounds[first:]


@dataclasses.dataclass(frozen=True)
class _Round:
    full: tuple[Message, ...]
    folded: tuple[Message, ...]
    tokens: int
    folded_tokens: int
