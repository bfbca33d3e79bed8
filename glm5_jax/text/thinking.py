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

from glm5_jax.text.chat import RenderedChat, render_chat
from glm5_jax.text.messages import ChatError, read_messages
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


class SampleRenderer:
    """Renders the samples of one conversation; what a turn repeats of the turns before it is laid out once.

    Without it a chat of n turns, whose samples each hold all turns before, would be laid out n times.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping] | None = None,
        variant: str = "glm5",
    ):
        self._tokenizer, self._tools, self._variant = tokenizer, tools, variant
        # By enable_thinking: the first message that is not laid out, the text of those before it, and their ids.
        self._before: dict[bool, tuple[int, str, list[int]]] = {}

    def render(self, sample: Sample) -> RenderedChat:
        """Returns what `Sample.render` does; of a sample with cleared thinking it has the spans of the last turn alone."""
        users = [i for i, m in enumerate(sample.messages) if m["role"] == "user"]
        if not (sample.clear_thinking and users and users[-1]):
            return sample.render(self._tokenizer, self._tools, self._variant)
        text, ids = self._lay_out_cleared(sample, users[-1])
        turn = self._lay_out([_ANY, *sample.messages[users[-1] :]], sample, first=1, close=True)
        spans = tuple(
            span._replace(
                message=span.message + users[-1] - 1,
                start=span.start + len(text),
                end=span.end + len(text),
                first=span.first + len(ids),
                last=span.last + len(ids),
            )
            for span in turn.spans
        )
        mask = [False] * len(ids) + turn.loss_mask
        return RenderedChat(text + turn.text, ids + turn.ids, mask, spans)

    def _lay_out_cleared(self, sample: Sample, end: int) -> tuple[str, list[int]]:
        """Returns text and ids of the messages before a user's message, which keep no reasoning."""
        start, text, ids = self._before.get(sample.enable_thinking, (0, "", []))
        if start > end:
            start, text, ids = 0, "", []
        if start < end:
            before = [_ANY] if start else []
            middle = [*before, *sample.messages[start:end]]
            # A user behind them clears their reasoning; it opens with a marker, at which text is parted.
            more = self._lay_out([*middle, _ANY], sample, first=len(before))
            last = self._lay_out([_ANY, _ANY], sample, first=1)
            text += more.text[: len(more.text) - len(last.text)]
            ids = ids + more.ids[: len(more.ids) - len(last.ids)]
            self._before[sample.enable_thinking] = end, text, ids
        return text, ids

    def _lay_out(
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


_ANY = {"role": "user", "content": ""}  # a message that is laid out for its place alone


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
    messages = read_messages(messages)
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
            thinks = any(messages[i].get("reasoning_content") for i in own)
            found.append(Sample(messages[: own[-1] + 1], thinks, mode != "preserved"))
    return found


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; use one of {', '.join(MODES)}")
