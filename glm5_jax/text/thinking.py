"""Implements three modes of thinking in a conversation (GLM-5 3.1), for requests and for training samples.

- interleaved: thinking before every reply and every call. It stays within a user's turn, and is dropped in the next.
- preserved: likewise, but it stays in all later turns. With the same options, rendered tokens never change, and later
  messages are appended.
- turn_level: each turn with or without thinking, as its request states.

Exceptions to preserved:

- In glm5.1 the `<think></think>` of a reply without reasoning (missing or "") becomes `</think>` with the next user message.
- A rendered reply equals its prompt plus the generated text, except for blanks around content and reasoning (glm5.2 keeps
  those of the reasoning), the formatting of JSON, and thinking that was closed immediately (reasoning missing or ""), which
  glm5 renders as `</think>`.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, TypedDict

from glm5_jax.text.chat import RenderedChat, render_chat
from glm5_jax.text.messages import ChatError, read_messages
from glm5_jax.text.tokenizer import Tokenizer

MODES = ("interleaved", "preserved", "turn_level")


class Sample(NamedTuple):
    """Training sample of a chat: messages up to an assistant's, and the options of its request.

    Attributes:
      chat: all messages of the conversation, which its samples share.
      start: index of the first message of the turn whose replies are trained on; 0: all replies are.
      end: index of the first message after the sample.
      enable_thinking, clear_thinking: options of `render_chat`.
    """

    chat: tuple[Mapping, ...]
    start: int
    end: int
    enable_thinking: bool
    clear_thinking: bool

    @property
    def messages(self) -> tuple[Mapping, ...]:
        """The messages of the sample."""
        return self.chat[: self.end]

    @property
    def trained_replies(self) -> tuple[int, ...]:
        """The indices of the replies that are trained on: all, or with cleared thinking those of the last turn."""
        turn = range(self.start, self.end)
        return tuple(i for i in turn if self.chat[i]["role"] == "assistant")

    def render(
        self, tokenizer: Tokenizer, tools: Sequence[Mapping] | None = None, variant: str = "glm5"
    ) -> RenderedChat:
        """Renders the sample with its loss mask, up to the marker by which the model stops."""
        return render_chat(
            self.messages,
            tokenizer,
            tools=tools,
            enable_thinking=self.enable_thinking,
            clear_thinking=self.clear_thinking,
            close=True,
            variant=variant,
        )


class SampleRenderer:
    """Renders the samples of one conversation, and each message that samples share only once.

    The samples of a chat of n turns each contain all previous turns, so separate rendering would take n times as long.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping] | None = None,
        variant: str = "glm5",
    ):
        self._tokenizer, self._tools, self._variant = tokenizer, tools, variant
        self._prefixes: dict[bool, _Prefix] = {}  # by enable_thinking

    def render(self, sample: Sample) -> RenderedChat:
        """Returns the result of `Sample.render`, but with cleared thinking only the spans of the last turn."""
        prefix, turn = self._parts(sample)
        if prefix is None:
            return turn
        text, ids = "".join(prefix.texts), prefix.ids
        spans = tuple(
            span._replace(
                message=span.message + sample.start - 1,
                start=span.start + len(text),
                end=span.end + len(text),
                first=span.first + len(ids),
                last=span.last + len(ids),
            )
            for span in turn.spans
        )
        mask = [False] * len(ids) + turn.loss_mask
        return RenderedChat(text + turn.text, ids + turn.ids, mask, spans)

    def count(self, sample: Sample, skipped: Container[int] = ()) -> tuple[int, int]:
        """Returns (tokens of `render`, tokens that are trained on without the skipped messages).

        It takes time proportional to the sample's last turn; `render` takes that of all turns.
        """
        prefix, turn = self._parts(sample)
        shift, size = (0, 0) if prefix is None else (sample.start - 1, len(prefix.ids))
        num_trained = sum(turn.loss_mask)
        for span in turn.spans:
            if span.message + shift in skipped:
                num_trained -= sum(turn.loss_mask[span.first : span.last])
        return size + len(turn.ids), num_trained

    def _parts(self, sample: Sample) -> tuple["_Prefix | None", RenderedChat]:
        """Returns (turns before the last one, last turn), or (None, full sample) if thinking is not cleared."""
        if not (sample.clear_thinking and sample.start):
            return None, sample.render(self._tokenizer, self._tools, self._variant)
        prefix = self._render_cleared(sample)
        turn = [_ANY, *sample.chat[sample.start : sample.end]]
        return prefix, self._render(turn, sample, first=1, close=True)

    def _render_cleared(self, sample: Sample) -> "_Prefix":
        """Renders the messages before a sample's last turn, without reasoning."""
        prefix = self._prefixes.get(sample.enable_thinking)
        if prefix is None or prefix.end > sample.start:
            prefix = self._prefixes[sample.enable_thinking] = _Prefix()
        if prefix.end < sample.start:
            before = [_ANY] if prefix.end else []
            middle = [*before, *sample.chat[prefix.end : sample.start]]
            # A user message after them clears their reasoning. It begins with a marker, so it can be split off.
            more = self._render([*middle, _ANY], sample, first=len(before))
            last = self._render([_ANY, _ANY], sample, first=1)
            prefix.texts.append(more.text[: len(more.text) - len(last.text)])
            prefix.ids += more.ids[: len(more.ids) - len(last.ids)]
            prefix.end = sample.start
        return prefix

    def _render(
        self, messages: Sequence[Mapping], sample: Sample, first: int, close: bool = False
    ) -> RenderedChat:
        return render_chat(
            messages,
            self._tokenizer,
            tools=self._tools,
            enable_thinking=sample.enable_thinking,
            add_generation_prompt=False,
            close=close,
            variant=self._variant,
            first=first,
        )


@dataclasses.dataclass
class _Prefix:
    """The first `end` messages of a chat, rendered without reasoning."""

    end: int = 0
    texts: list[str] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)


_ANY = {"role": "user", "content": ""}  # a message that stands for any neighbour


class ThinkingOptions(TypedDict):
    """Options of `render_chat` that set the mode of thinking."""

    enable_thinking: bool
    clear_thinking: bool


def request_options(mode: str, think: bool = True) -> ThinkingOptions:
    """Returns the options of `render_chat` for the next reply. think: whether to think; only for turn_level."""
    _check_mode(mode)
    if not think and mode != "turn_level":
        raise ValueError(f"think is false; {mode} always thinks, turn_level lets a request choose")
    return {"enable_thinking": think, "clear_thinking": mode != "preserved"}


def split_samples(messages: Sequence[Mapping], mode: str) -> list[Sample]:
    """Splits a conversation into training samples.

    - Preserved thinking gives one sample.
    - The other modes give a sample per user turn with a reply. It is rendered as the model saw it then: with the
      reasoning of this turn and without earlier reasoning.
    - A sample has enable_thinking if any of its trained replies has reasoning. Its prompt is then that of the variant for
      thinking, and replies without reasoning are rendered as the variant does it.

    Raises ChatError for messages that `render_chat` rejects, and if there is no reply.
    """
    _check_mode(mode)
    messages = read_messages(messages)
    if all(message["role"] != "assistant" for message in messages):
        raise ChatError("no message is an assistant's; add a reply, or drop the conversation")
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    bounds = [0, len(messages)] if mode == "preserved" else [0, *users, len(messages)]
    parts = []
    for start, end in zip(bounds, bounds[1:]):
        replies = [i for i in range(start, end) if messages[i]["role"] == "assistant"]
        if replies:
            thinks = any(messages[i].get("reasoning_content") for i in replies)
            parts.append(Sample(messages, start, replies[-1] + 1, thinks, mode != "preserved"))
    return parts


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; use one of {', '.join(MODES)}")
