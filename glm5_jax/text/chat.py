"""Chats as GLM models read and write them: messages to text, ids, and what of them is learnt.

There is no end-of-turn token. A turn ends where the next role's marker stands, and that marker is what
the model writes to stop: `<|user|>` behind an answer, `<|observation|>` behind a tool call. Markers come
from the layout alone: text that spells one out stays text, whoever wrote it. Layouts by name: text/layouts.py.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.text.layouts import BEFORE_TOOLS, VARIANTS, Variant, layout_of
from glm5_jax.text.messages import (
    CALL_END,
    CALL_START,
    ChatError,
    argument_texts,
    as_json,
    read_messages,
    read_tools,
)
from glm5_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer

EFFORTS = ("high", "max")

_MARKER = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


class Span(NamedTuple):
    """A part of a message: "text" of system and user, "result" of a tool; of an assistant "reasoning"
    (with the markers around it that the model writes), "content", "call" (one each) and "stop" (the
    marker that opens the next turn). Characters start..end of the text, tokens first..last of the ids, both
    ends exclusive; without a tokenizer the latter are -1."""

    message: int
    part: str
    start: int
    end: int
    first: int
    last: int


class RenderedChat(NamedTuple):
    """A chat's text, ids, whether each id is learnt, and the parts of its messages; ids and loss_mask are
    None without a tokenizer."""

    text: str
    ids: list[int] | None
    loss_mask: list[bool] | None
    spans: tuple[Span, ...]


class _Piece(NamedTuple):
    """A marker or a stretch of text; learnt: whether the model is to write it; part: its message and
    part, None for what belongs to the layout."""

    text: str
    marker: bool
    learnt: bool
    part: tuple[int, str, int] | None


def render_chat(
    messages: Sequence[Mapping],
    tokenizer: Tokenizer | None = None,
    *,
    tools: Sequence[Mapping] | None = None,
    enable_thinking: bool = True,
    clear_thinking: bool = True,
    add_generation_prompt: bool = True,
    close: bool = False,
    variant: str = "glm5",
    reasoning_effort: str | None = None,
    first: int = 0,
) -> RenderedChat:
    """Lays out messages in OpenAI's form for a model of the family.

    messages: dicts with `role` and `content` (text, or a list of text parts); an assistant's may have
    `reasoning_content` and `tool_calls`, whose arguments are an object or the JSON of one, and results of tools are
    sorted by the ids of their calls (text/messages.py). tools: function definitions in OpenAI's form. enable_thinking: whether the reply that is prompted for begins with
    thinking. clear_thinking: whether reasoning before the last user message is left out. close: ends, in
    place of a prompt, with the marker by which the last message, an assistant's, stops: a sample of training.
    reasoning_effort: "max" (default) or "high", of GLM-5.2 alone. first: messages before this one, and what stands in
    front of all, are left out: what remains goes behind them, where reasoning is kept (clear_thinking false).

    What is learnt (loss_mask): of every assistant message that shows its own reasoning (behind the last user
    message; all of them if clear_thinking is false) what the model writes: reasoning and its end, content,
    calls, and the marker of the next turn. `<|assistant|>` and what the prompt with this enable_thinking has
    behind it, such as `<think>`, are not written by the model.

    Raises ChatError (ValueError) naming the message or the tool.
    """
    layout = layout_of(variant)
    if reasoning_effort is not None and not (layout.effort and reasoning_effort in EFFORTS):
        known = " or ".join(map(repr, EFFORTS))
        known = f"use {known}" if layout.effort else f"leave it out, {variant} has no such line"
        raise ValueError(f"reasoning_effort is {reasoning_effort!r}; {known}")
    if not (clear_thinking or layout.keeps):
        others = ", ".join(name for name, other in VARIANTS.items() if other.keeps)
        raise ValueError(
            f"clear_thinking is false; {variant} cannot keep earlier reasoning, {others} can"
        )
    messages = read_messages(messages)
    if close and messages[-1]["role"] != "assistant":
        raise ChatError(
            f"message {len(messages) - 1} has role {messages[-1]['role']!r}; only a chat that ends with an "
            "assistant's message can be closed"
        )
    pieces = list(
        _pieces(
            messages, tools or (), layout, enable_thinking, clear_thinking, reasoning_effort, first
        )
    )
    if close:
        marker = "<|observation|>" if "tool_calls" in messages[-1] else "<|user|>"
        pieces += _template(marker, learnt=True, part=(len(messages) - 1, "stop", 0))
    elif add_generation_prompt:
        pieces += _template("<|assistant|>" + layout.prompt(enable_thinking))
    return _rendered(pieces, tokenizer)


def _pieces(
    messages,
    tools,
    layout: Variant,
    enable_thinking: bool,
    clear_thinking: bool,
    effort: str | None,
    first: int,
) -> Iterator[_Piece]:
    """Everything from a message on but the prompt for the reply, in order."""
    if not first:
        yield from _template("[gMASK]<sop>")
        if layout.effort and enable_thinking:
            yield from _template(f"<|system|>Reasoning Effort: {(effort or 'max').capitalize()}")
        if tools:
            yield from _template("<|system|>" + BEFORE_TOOLS)
            yield from (_text(f"{shown}\n") for shown in _offered(tools, layout))
            yield from _template(layout.behind_tools)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last_user = users[-1] if users else -1
    learnt = False  # whether the message before is
    for i, message in enumerate(messages):
        role, line = message["role"], layout.line
        after = messages[i - 1]["role"] if i else None
        # The model's own sign that its turn is over.
        stop = {"learnt": learnt, "part": (i - 1, "stop", 0)} if after == "assistant" else {}
        own = not clear_thinking or i > last_user
        learnt = role == "assistant" and own
        if i < first:
            continue
        if role == "assistant":
            yield from _template("<|assistant|>")
            yield from _assistant(message, i, layout, own, i > last_user, enable_thinking)
        elif role == "tool":
            if after != "tool":
                yield from _template("<|observation|>", **stop)
            yield from _template(f"{line}<tool_response>{line}")
            yield _text(message["content"], part=(i, "result", 0))
            yield from _template(f"{line}</tool_response>")
        else:
            yield from _template(f"<|{role}|>", **(stop if role == "user" else {}))
            yield from _template(line)
            yield _text(message["content"], part=(i, "text", 0))
            if role == "user" and layout.nothink and not enable_thinking:
                if not message["content"].endswith("/nothink"):
                    yield from _template("/nothink")


def _assistant(
    message, i: int, layout: Variant, own: bool, behind_last_user: bool, enable_thinking: bool
) -> Iterator[_Piece]:
    """A reply, behind its marker. own: whether it shows the reasoning that it was written with."""
    line = layout.line
    thinks = {"learnt": own, "part": (i, "reasoning", 0)}
    shown = own and message.get("reasoning_content") or ""
    text = shown.strip() if layout.strips else shown
    empty = layout.empty == "last" and behind_last_user and enable_thinking
    if shown or empty or layout.empty == "always":
        # Behind a bare prompt the model opens its thinking itself, and a prompt without thinking closes it.
        bare = not layout.prompt(enable_thinking)
        yield from _template(f"{line}<think>", **(thinks if bare else {}))
        if text:
            yield _text(text, **thinks)
        yield from _template("</think>", **(thinks if text or enable_thinking else {}))
    else:
        yield from _template("</think>")
    if content := message["content"].strip():
        yield _text(line + content, own, (i, "content", 0))
    for number, call in enumerate(message.get("tool_calls", ())):
        yield from _call(call, i, line, {"learnt": own, "part": (i, "call", number)})


def _call(call: Mapping, i: int, line: str, part: Mapping) -> Iterator[_Piece]:
    """A call of message i; part: whether it is learnt, and of which part it is."""
    name, arguments = call["name"], call["arguments"]
    yield from _template(line + CALL_START, **part)
    if isinstance(arguments, str):  # as it was written, as it could not be parsed
        written = arguments.removeprefix(CALL_START)
        yield _text(written.removesuffix(CALL_END), **part)
        if written.endswith(CALL_END):
            yield from _template(CALL_END, **part)
        return
    yield _text(name + line, **part)
    for key, value in argument_texts(name, arguments, i):
        for marker, text in (("arg_key", key), ("arg_value", value)):
            yield from _template(f"<{marker}>", **part)
            yield _text(text, **part)
            yield from _template(f"</{marker}>{line}", **part)
    yield from _template(CALL_END, **part)


def _offered(tools, layout: Variant) -> Iterator[str]:
    """Tools as they are shown."""
    for i, (tool, function) in enumerate(zip(tools, read_tools(tools))):
        if layout.unwraps:
            if function.get("defer_loading"):
                continue
            tool = {k: v for k, v in function.items() if k not in ("defer_loading", "strict")}
        yield as_json(tool, f"tool {i}, {function['name']!r}, has a definition")


def _template(text: str, learnt: bool = False, part=None) -> Iterator[_Piece]:
    """Text of the layout, in which markers are markers."""
    at = 0
    for found in _MARKER.finditer(text):
        if found.start() > at:
            yield _Piece(text[at : found.start()], False, learnt, part)
        yield _Piece(found.group(), True, learnt, part)
        at = found.end()
    if text[at:]:
        yield _Piece(text[at:], False, learnt, part)


def _text(text: str, learnt: bool = False, part=None) -> _Piece:
    """Text of a message, in which nothing is a marker."""
    return _Piece(text, False, learnt, part)


def _rendered(pieces: Sequence[_Piece], tokenizer: Tokenizer | None) -> RenderedChat:
    ends = list(itertools.accumulate(len(piece.text) for piece in pieces))
    ids = owners = mask = None
    if tokenizer is not None:
        ids, owners = _encoded(pieces, tokenizer)
        mask = [pieces[owner].learnt for owner in owners]
    spans, first = [], 0
    for part, group in itertools.groupby(enumerate(pieces), key=lambda found: found[1].part):
        places = [place for place, _ in group]
        last = first
        if owners is None:
            first = last = -1
        else:
            while last < len(owners) and owners[last] <= places[-1]:
                last += 1
        if part is not None:
            start = ends[places[0]] - len(pieces[places[0]].text)
            spans.append(Span(*part[:2], start, ends[places[-1]], first, last))
        first = last
    return RenderedChat("".join(piece.text for piece in pieces), ids, mask, tuple(spans))


def _encoded(pieces: Sequence[_Piece], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids, and the piece in which each begins. Text between two markers is encoded as one."""
    ids, owners = [], []
    for marker, group in itertools.groupby(enumerate(pieces), key=lambda found: found[1].marker):
        group = list(group)
        if marker:
            for place, piece in group:
                if piece.text not in tokenizer.special_ids:
                    raise ValueError(
                        f"the tokenizer has no token {piece.text!r}; chats need one of the GLM family"
                    )
                ids.append(tokenizer.special_ids[piece.text])
                owners.append(place)
            continue
        found = tokenizer.encode("".join(piece.text for _, piece in group))
        # Not `token_bytes`, which is as long as the vocabulary.
        sizes = [len(tokenizer.bytes_of(token)) for token in found]
        ends = np.cumsum([len(piece.text.encode()) for _, piece in group])
        begins = np.cumsum(sizes) - sizes
        ids += found
        owners += [group[i][0] for i in np.searchsorted(ends, begins, side="right")]
    return ids, owners
