"""Three ways to think in a conversation (GLM-5 3.1), as what a request asks for and what is trained.

- interleaved: before every reply and every call; kept within a user's turn, gone in the next;
- preserved: likewise, and kept for good: with the same options, tokens once laid out stay as they are
  and what follows goes behind them;
- turn_level: each turn with or without, as its request says.

Exceptions to preserved: in glm5.1 the `<think></think>` of a reply without reasoning (missing or "") becomes
`</think>` with the next user. And a reply is laid out as its prompt and what the model wrote behind it, but
for blanks around content and reasoning (of the latter glm5.2 keeps those that a message has), the spelling of
JSON, and thinking that was closed at once (reasoning missing or ""), which glm5 lays out as `</think>`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from glm5_jax.text.chat import ChatError, RenderedChat, check, render_chat, reply_of
from glm5_jax.text.tokenizer import Tokenizer

MODES = ("interleaved", "preserved", "turn_level")


class Sample(NamedTuple):
    """Messages that end with an assistant's, and how a model that had written them was asked."""

    messages: tuple[Mapping, ...]
    enable_thinking: bool
    clear_thinking: bool

    @property
    def learnt(self) -> tuple[int, ...]:
        """Numbers of the replies that are learnt: all, or with cleared thinking those of the last turn."""
        replies = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        users = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        first = users[-1] if users and self.clear_thinking else 0
        return tuple(i for i in replies if i >= first)

    def render(
        self, tokenizer: Tokenizer, tools: Sequence[Mapping] | None = None, variant: str = "glm5"
    ) -> RenderedChat:
        """The sample with what is learnt of it, up to the marker by which the model stops."""
        return render_chat(
            self.messages,
            tokenizer,
            tools=tools,
            enable_thinking=self.enable_thinking,
            clear_thinking=self.clear_thinking,
            close=True,
            variant=variant,
        )


def request(mode: str, think: bool = True) -> dict[str, bool]:
    """Options of `render_chat` for the next reply; think: of turn_level alone."""
    _check_mode(mode)
    if not think and mode != "turn_level":
        raise ValueError(f"think is false; {mode} always thinks, turn_level lets a request choose")
    return {"enable_thinking": think, "clear_thinking": mode != "preserved"}


def samples(messages: Sequence[Mapping], mode: str) -> list[Sample]:
    """What a conversation trains. Of preserved thinking it is one sample; otherwise one for every user's
    turn that is answered, as the model saw it then: with its own reasoning and none before. In every mode a
    sample is one with thinking if any reply that it learns shows reasoning, else one without, as if asked so:
    the prompt of the variant then begins it. Among replies that do, one without reasoning is laid out as the
    variant does it.

    ChatError for what `render_chat` refuses, or if nothing is answered.
    """
    _check_mode(mode)
    check(messages)
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise ChatError(
            "no message is an assistant's; a conversation without a reply trains nothing"
        )
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    bounds = [0, len(messages)] if mode == "preserved" else [0, *users, len(messages)]
    found = []
    for start, end in zip(bounds, bounds[1:]):
        own = [i for i in replies if start <= i < end]
        if own:
            thinks = any(reply_of(messages[i], i).reasoning for i in own)
            found.append(Sample(tuple(messages[: own[-1] + 1]), thinks, mode != "preserved"))
    return found


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; use one of {', '.join(MODES)}")
