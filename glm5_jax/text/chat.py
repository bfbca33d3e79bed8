"""Renders chats in the form of GLM models: messages to text, token ids and a loss mask.

There is no end-of-turn token. A turn ends at the marker of the next role, and the model writes that marker to stop:
`<|user|>` after an answer, `<|observation|>` after a tool call. Only the layout (text/layouts.py) produces markers: a marker
that is spelled out in any message stays text.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict, Unpack, overload

import numpy as np

from glm5_jax.text.layouts import BEFORE_TOOLS, VARIANTS, ChatLayout, layout_of
from glm5_jax.text.messages import (
    CALL_END,
    CALL_START,
    ChatError,
    argument_texts,
    read_message,
    read_messages,
    read_tools,
    to_json_text,
)
from glm5_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer

EFFORTS = ("high", "max")

_MARKER = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


class Span(NamedTuple):
    """Part of a message in a rendered chat.

    Attributes:
      message: index of the message.
      part: "text" of system and user, "result" of a tool; for an assistant "reasoning" (with the markers that the model
        writes around it), "content", "call" (one for each) and "stop" (the marker that opens the next turn).
      start, end: range in the text, in characters, end exclusive.
      first, last: range in the ids, in tokens, last exclusive; -1 without a tokenizer.
    """

    message: int
    part: str
    start: int
    end: int
    first: int
    last: int


class RenderedText(NamedTuple):
    """Chat rendered without a tokenizer.

    Attributes:
      text: text with markers.
      spans: parts of the messages.
    """

    text: str
    spans: tuple[Span, ...]


class RenderedChat(NamedTuple):
    """Chat rendered with a tokenizer.

    Attributes:
      text: text with markers.
      ids: token ids.
      loss_mask: whether each id is trained on.
      spans: parts of the messages.
    """

    text: str
    ids: list[int]
    loss_mask: list[bool]
    spans: tuple[Span, ...]


class RenderOptions(TypedDict, total=False):
    """Options of `render_chat`."""

    tools: Sequence[Mapping] | None
    enable_thinking: bool
    clear_thinking: bool
    add_generation_prompt: bool
    close: bool
    continue_final: bool
    variant: str
    reasoning_effort: str | None
    first: int


class _Piece(NamedTuple):
    """Marker or text of a rendered chat.

    Attributes:
      text: its text.
      is_marker: whether it is a marker.
      is_trained: whether the model is trained to write it.
      part: (message, part, number) that it belongs to; None: the layout.
    """

    text: str
    is_marker: bool
    is_trained: bool
    part: tuple[int, str, int] | None


@overload
def render_chat(
    messages: Sequence[Mapping], tokenizer: Tokenizer, **options: Unpack[RenderOptions]
) -> RenderedChat: ...


@overload
def render_chat(
    messages: Sequence[Mapping], tokenizer: None = None, **options: Unpack[RenderOptions]
) -> RenderedText: ...


def render_chat(
    messages: Sequence[Mapping],
    tokenizer: Tokenizer | None = None,
    *,
    tools: Sequence[Mapping] | None = None,
    enable_thinking: bool = True,
    clear_thinking: bool = True,
    add_generation_prompt: bool = True,
    close: bool = False,
    continue_final: bool = False,
    variant: str = "glm5",
    reasoning_effort: str | None = None,
    first: int = 0,
) -> RenderedChat | RenderedText:
    """Renders messages in OpenAI's form for a model of the family.

    - messages: dicts with `role` and `content` (text, or a list of text parts). An assistant's may have
      `reasoning_content` and `tool_calls`, whose arguments are an object or its JSON. Results of tools are sorted by the
      ids of their calls (text/messages.py).
    - tokenizer: tokenizer of the ids; None: text only.
    - tools: function definitions in OpenAI's form.
    - enable_thinking: whether the next reply begins with thinking.
    - clear_thinking: whether reasoning before the last user message is left out.
    - add_generation_prompt: whether the text ends with the prompt of the next reply.
    - close: end with the stop marker of the last message, an assistant's, in place of a prompt, as training samples do.
    - continue_final: end within the last message, an assistant's, in place of a prompt, so that the model continues it.
      It continues the content; if there is none, the reasoning.
    - variant: name of the layout.
    - reasoning_effort: "max" or "high", for GLM-5.2 only; None: "max".
    - first: index of the first rendered message. The prefix and the messages before it are left out, so that the result
      can be appended to them if clear_thinking is false.

    loss_mask covers the text that the model writes in every assistant message whose reasoning is shown: those after the
    last user message, or all if clear_thinking is false. That text is the reasoning and its end, content, calls, and the
    marker of the next turn. It excludes `<|assistant|>` and the rest of the prompt for this enable_thinking, such as
    `<think>`.

    Raises ChatError (a ValueError) with the message or the tool, and ValueError for options that the variant lacks.
    """
    # Options.
    layout = layout_of(variant)
    if reasoning_effort is not None and not (
        layout.has_effort_line and reasoning_effort in EFFORTS
    ):
        known = " or ".join(map(repr, EFFORTS))
        known = (
            f"use {known}"
            if layout.has_effort_line
            else f"leave it out, {variant} has no such line"
        )
        raise ValueError(f"reasoning_effort is {reasoning_effort!r}; {known}")
    if not (clear_thinking or layout.keeps_reasoning):
        others = ", ".join(name for name, other in VARIANTS.items() if other.keeps_reasoning)
        raise ValueError(
            f"clear_thinking is false; {variant} cannot keep earlier reasoning, {others} can"
        )
    # Pieces of the messages, then the end.
    messages = read_messages(messages)
    if close and messages[-1]["role"] != "assistant":
        raise ChatError(
            f"message {len(messages) - 1} has role {messages[-1]['role']!r}; only a chat that ends with an "
            "assistant's message can be closed"
        )
    if continue_final:
        _check_continued(messages[-1], len(messages) - 1)
    pieces = list(
        _pieces(
            messages[:-1] if continue_final else messages,
            tools or (),
            layout,
            enable_thinking,
            clear_thinking,
            reasoning_effort,
            first,
        )
    )
    if continue_final:
        pieces += _open_reply(messages[-1], len(messages) - 1, layout, enable_thinking)
    elif close:
        is_marker = "<|observation|>" if "tool_calls" in messages[-1] else "<|user|>"
        pieces += _template(is_marker, is_trained=True, part=(len(messages) - 1, "stop", 0))
    elif add_generation_prompt:
        pieces += _template("<|assistant|>" + layout.prompt(enable_thinking))
    return _assemble(pieces, tokenizer)


def _pieces(
    messages,
    tools,
    layout: ChatLayout,
    enable_thinking: bool,
    clear_thinking: bool,
    effort: str | None,
    first: int,
) -> Iterator[_Piece]:
    """Yields all pieces from a message on, in order, without the prompt of the next reply."""
    # Prefix and tools.
    if not first:
        yield from _template("[gMASK]<sop>")
        if layout.has_effort_line and enable_thinking:
            yield from _template(f"<|system|>Reasoning Effort: {(effort or 'max').capitalize()}")
        if tools:
            yield from _template("<|system|>" + BEFORE_TOOLS)
            yield from (_text(f"{shown}\n") for shown in _tool_texts(tools, layout))
            yield from _template(layout.after_tools)
    # Messages.
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last_user = users[-1] if users else -1
    is_trained = False  # of the previous message
    for i, message in enumerate(messages):
        role, line = message["role"], layout.line_break
        after = messages[i - 1]["role"] if i else None
        # This marker ends the turn of the model, which writes it.
        is_stop = after == "assistant"
        stop = {"is_trained": is_trained, "part": (i - 1, "stop", 0)} if is_stop else {}
        shows_reasoning = not clear_thinking or i > last_user
        is_trained = role == "assistant" and shows_reasoning
        if i < first:
            continue
        if role == "assistant":
            yield from _template("<|assistant|>")
            yield from _assistant(
                message, i, layout, shows_reasoning, i > last_user, enable_thinking
            )
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
            if role == "user" and layout.adds_nothink and not enable_thinking:
                if not message["content"].endswith("/nothink"):
                    yield from _template("/nothink")


def _assistant(
    message,
    i: int,
    layout: ChatLayout,
    shows_reasoning: bool,
    is_after_last_user: bool,
    enable_thinking: bool,
) -> Iterator[_Piece]:
    """Yields the pieces of a reply after its marker. shows_reasoning: whether its reasoning is rendered."""
    line = layout.line_break
    thinks = {"is_trained": shows_reasoning, "part": (i, "reasoning", 0)}
    shown = shows_reasoning and message.get("reasoning_content") or ""
    text = shown.strip() if layout.strips_reasoning else shown
    empty = layout.empty_thinking == "last" and is_after_last_user and enable_thinking
    if shown or empty or layout.empty_thinking == "always":
        # After a bare prompt the model opens its thinking itself. A prompt without thinking closes it.
        bare = not layout.prompt(enable_thinking)
        yield from _template(f"{line}<think>", **(thinks if bare else {}))
        if text:
            yield _text(text, **thinks)
        yield from _template("</think>", **(thinks if text or enable_thinking else {}))
    else:
        yield from _template("</think>")
    if content := message["content"].strip():
        yield _text(line + content, shows_reasoning, (i, "content", 0))
    for number, call in enumerate(message.get("tool_calls", ())):
        yield from _call(
            call, i, line, {"is_trained": shows_reasoning, "part": (i, "call", number)}
        )


def begins_in_thinking(message: Mapping, enable_thinking: bool) -> bool:
    """Returns whether the continuation of a message (`continue_final`) begins in its thinking."""
    message = read_message(message)
    if message["content"]:
        return False
    return bool(message.get("reasoning_content")) or enable_thinking


def _check_continued(message: Mapping, i: int) -> None:
    """Raises ChatError if a model cannot continue message i."""
    if message["role"] != "assistant":
        raise ChatError(
            f"message {i} has role {message['role']!r}; only an assistant's message can be continued"
        )
    if "tool_calls" in message:
        raise ChatError(f"message {i} has tool_calls; only content or reasoning can be continued")


def _open_reply(
    message: Mapping, i: int, layout: ChatLayout, enable_thinking: bool
) -> Iterator[_Piece]:
    """Yields the pieces of a reply that the model continues, without the end of its last part."""
    line, content = layout.line_break, message["content"].lstrip()
    yield from _template("<|assistant|>")
    if message["content"]:
        closed = {**message, "content": ""}
        yield from _assistant(closed, i, layout, True, True, enable_thinking)
        if content:
            yield _text(line + content, True, (i, "content", 0))
    elif reasoning := (message.get("reasoning_content") or "").lstrip():
        yield from _template(f"{line}<think>")
        yield _text(reasoning, True, (i, "reasoning", 0))
    else:
        yield from _template(layout.prompt(enable_thinking))


def _call(call: Mapping, i: int, line: str, part: Mapping) -> Iterator[_Piece]:
    """Yields the pieces of a call of message i; part: is_trained and part of each piece."""
    name, arguments = call["name"], call["arguments"]
    yield from _template(line + CALL_START, **part)
    if isinstance(arguments, str):  # a call that could not be parsed, with its original text
        written = arguments.removeprefix(CALL_START)
        yield _text(written.removesuffix(CALL_END), **part)
        if written.endswith(CALL_END):
            yield from _template(CALL_END, **part)
        return
    yield _text(name + line, **part)
    for key, value in argument_texts(name, arguments, i):
        for is_marker, text in (("arg_key", key), ("arg_value", value)):
            yield from _template(f"<{is_marker}>", **part)
            yield _text(text, **part)
            yield from _template(f"</{is_marker}>{line}", **part)
    yield from _template(CALL_END, **part)


def _tool_texts(tools, layout: ChatLayout) -> Iterator[str]:
    """Yields the text of each tool."""
    for i, (tool, function) in enumerate(zip(tools, read_tools(tools))):
        if layout.unwraps_tools:
            if function.get("defer_loading"):
                continue
            tool = {k: v for k, v in function.items() if k not in ("defer_loading", "strict")}
        yield to_json_text(tool, f"tool {i}, {function['name']!r}, has a definition")


def _template(text: str, is_trained: bool = False, part=None) -> Iterator[_Piece]:
    """Yields the pieces of text of the layout, in which markers are markers."""
    at = 0
    for match in _MARKER.finditer(text):
        if match.start() > at:
            yield _Piece(text[at : match.start()], False, is_trained, part)
        yield _Piece(match.group(), True, is_trained, part)
        at = match.end()
    if text[at:]:
        yield _Piece(text[at:], False, is_trained, part)


def _text(text: str, is_trained: bool = False, part=None) -> _Piece:
    """Returns a piece of text of a message, in which markers are text."""
    return _Piece(text, False, is_trained, part)


def _assemble(pieces: Sequence[_Piece], tokenizer: Tokenizer | None) -> RenderedChat | RenderedText:
    """Joins the pieces to a rendered chat."""
    text = "".join(piece.text for piece in pieces)
    if tokenizer is None:
        return RenderedText(text, _spans(pieces, None))
    ids, owners = _encode(pieces, tokenizer)
    mask = [pieces[owner].is_trained for owner in owners]
    return RenderedChat(text, ids, mask, _spans(pieces, owners))


def _spans(pieces: Sequence[_Piece], owners: Sequence[int] | None) -> tuple[Span, ...]:
    """Returns the parts of the messages; owners: index of the piece of each id, None without a tokenizer."""
    ends = list(itertools.accumulate(len(piece.text) for piece in pieces))
    spans, first = [], 0
    for part, group in itertools.groupby(enumerate(pieces), key=lambda item: item[1].part):
        indices = [index for index, _ in group]
        last = first
        if owners is None:
            first = last = -1
        else:
            while last < len(owners) and owners[last] <= indices[-1]:
                last += 1
        if part is not None:
            start = ends[indices[0]] - len(pieces[indices[0]].text)
            message, name, _ = part
            end = ends[indices[-1]]
            span = Span(message=message, part=name, start=start, end=end, first=first, last=last)
            spans.append(span)
        first = last
    return tuple(spans)


def _encode(pieces: Sequence[_Piece], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns (ids, index of the piece in which each begins). Text between two markers is encoded in one piece."""
    ids, owners = [], []
    for is_marker, group in itertools.groupby(
        enumerate(pieces), key=lambda item: item[1].is_marker
    ):
        group = list(group)
        if is_marker:
            for index, piece in group:
                if piece.text not in tokenizer.special_ids:
                    raise ValueError(
                        f"the tokenizer has no token {piece.text!r}; chats need one of the GLM family"
                    )
                ids.append(tokenizer.special_ids[piece.text])
                owners.append(index)
            continue
        text_ids = tokenizer.encode("".join(piece.text for _, piece in group))
        # Not `token_bytes`, which is as long as the vocabulary.
        sizes = [len(tokenizer.bytes_of(token)) for token in text_ids]
        ends = np.cumsum([len(piece.text.encode()) for _, piece in group])
        begins = np.cumsum(sizes) - sizes
        ids += text_ids
        owners += [group[i][0] for i in np.searchsorted(ends, begins, side="right")]
    return ids, owners
