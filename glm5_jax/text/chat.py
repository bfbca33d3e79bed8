"""Chats as GLM models read and write them: messages to text, ids, and what of them is learnt.

There is no end-of-turn token. A turn ends where the next role's marker stands, and that marker is what
the model writes to stop: `<|user|>` behind an answer, `<|observation|>` behind a tool call. Markers come
from the layout alone: text that spells one out stays text, whoever wrote it. Layouts by name: text/layouts.py.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.text.layouts import BEFORE_TOOLS, VARIANTS, Variant, layout_of
from glm5_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("high", "max")

_MARKER = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


class ChatError(ValueError):
    """A message or a tool that no chat can hold; says which one and how to mend it."""


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


class Parts(NamedTuple):
    """The parts of an assistant's message: reasoning (None: there is none), content, tool calls."""

    reasoning: str | None
    content: str
    calls: tuple[tuple[str, dict], ...]


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
    `reasoning_content` and `tool_calls`, whose arguments are an object or the JSON of one. tools: function
    definitions in OpenAI's form. enable_thinking: whether the reply that is prompted for begins with
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
    check(messages)
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
        marker = "<|observation|>" if reply_of(messages[-1]).calls else "<|user|>"
        pieces += _template(marker, learnt=True, part=(len(messages) - 1, "stop", 0))
    elif add_generation_prompt:
        pieces += _template("<|assistant|>" + layout.prompt(enable_thinking))
    return _rendered(pieces, tokenizer)


def check(messages: Sequence[Mapping]) -> None:
    """ChatError unless `render_chat` can lay these messages out."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatError("messages is empty or no list; give at least one message")
    calls: int | None = None  # that the tools before this message may still answer
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(f"message {i} is {_shown(message)}; it must be an object with a role")
        role = message.get("role")
        if role not in ROLES:
            raise ChatError(f"message {i} has role {_shown(role)}; use one of {', '.join(ROLES)}")
        text_of(message, i)
        if role == "tool":
            if not calls:
                what = (
                    "no assistant's call before it" if calls is None else "more results than calls"
                )
                raise ChatError(
                    f"message {i} is a tool's result with {what}; add the call or drop it"
                )
            calls -= 1
            continue
        calls = None
        if role == "assistant":
            written = [_written(name, given, i) for name, given in reply_of(message, i).calls]
            calls = len(written) or None
        elif message.get("tool_calls"):
            raise ChatError(f"message {i} of role {role!r} has tool_calls; only an assistant calls")


def reply_of(message: Mapping, i: int = 0) -> Parts:
    """The parts of an assistant's message. Reasoning stands in `reasoning_content`, or in the content
    before `</think>`; `lost_text` is what of that is neither. ChatError if a call has no name, or arguments
    that are no object."""
    content, reasoning = text_of(message, i), message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ChatError(f"message {i} has reasoning_content {_shown(reasoning)}; it must be text")
    if reasoning is None and "</think>" in content:
        (_, reasoning), (_, content) = _split(content)
    calls = message.get("tool_calls") or ()
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise ChatError(f"message {i} has tool_calls {_shown(calls)}; it must be a list")
    return Parts(reasoning, content, tuple(_call(call, i) for call in calls))


def lost_text(message: Mapping, i: int = 0) -> str:
    """What no chat shows of an assistant's message, as in the published templates: of content that holds
    reasoning, the text before its `<think>` and between its first and last `</think>`. Such a message is
    whole with reasoning_content, which may be ""."""
    content = text_of(message, i)
    if message.get("reasoning_content") is not None or "</think>" not in content:
        return ""
    (before, _), (between, _) = _split(content)
    return before.strip() + between.strip()


def _split(content: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Lost text and reasoning, lost text and content."""
    head, _, tail = content.partition("</think>")
    before, _, reasoning = head.rstrip("\n").rpartition("<think>")
    between, _, content = tail.rpartition("</think>")
    return (before, reasoning.lstrip("\n")), (between, content.lstrip("\n"))


def tool_function(tool: Mapping, i: int = 0) -> Mapping:
    """The function of a tool in OpenAI's form, with its envelope or without: it has a name, and its
    `parameters` and their `properties` are objects or missing. ChatError naming tool i and the fix."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if not isinstance(function, Mapping):
        raise ChatError(f"tool {i} is {_shown(tool)}; it must be an object with a function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ChatError(
            f"tool {i} has no name; give functions in OpenAI's form, not {_shown(tool)}"
        )
    schema = function.get("parameters") or {}
    if not isinstance(schema, Mapping):
        raise ChatError(
            f"tool {i}, {name!r}, has parameters {_shown(schema)}; they must be the schema of an object"
        )
    if not isinstance(schema.get("properties") or {}, Mapping):
        raise ChatError(
            f"tool {i}, {name!r}, has properties {_shown(schema['properties'])}; they must be an object"
        )
    return function


def _call(call, i: int) -> tuple[str, dict]:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError(f"message {i} has the tool call {_shown(call)}; it must name a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ChatError(f"message {i} calls a function named {_shown(name)}; give its name as text")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ChatError(
                f"message {i} calls {name!r} with arguments that are no JSON: {error}"
            ) from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ChatError(
            f"message {i} calls {name!r} with {_shown(arguments)}; it must be an object"
        )
    return name, dict(arguments)


def _written(name: str, arguments: Mapping, i: int) -> list[tuple[str, str]]:
    """Arguments as a call shows them: text as it is, other values as JSON."""
    return [
        (key, value)
        if isinstance(value, str)
        else (key, _json(value, f"message {i} calls {name!r} with {key!r}"))
        for key, value in arguments.items()
    ]


def _json(value, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{what} that is no JSON: {error}") from None


def text_of(message: Mapping, i: int = 0) -> str:
    """Text content; of a list, its text parts and bare strings, joined. Null is empty."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ChatError(
            f"message {i} has content {_shown(content)}; it must be text or a list of parts"
        )
    parts = []
    for part in content:
        text = (
            part.get("text", "")
            if isinstance(part, Mapping) and part.get("type") == "text"
            else part
        )
        if isinstance(text, str):
            parts.append(text)
        elif not isinstance(text, Mapping):
            raise ChatError(
                f"message {i} has the part {_shown(part)}; it must be text or an object"
            )
    return "".join(parts)


def _shown(value) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


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
            yield _text(text_of(message, i), part=(i, "result", 0))
            yield from _template(f"{line}</tool_response>")
        else:
            yield from _template(f"<|{role}|>", **(stop if role == "user" else {}))
            yield from _template(line)
            content = text_of(message, i)
            yield _text(content, part=(i, "text", 0))
            if role == "user" and layout.nothink and not enable_thinking:
                if not content.endswith("/nothink"):
                    yield from _template("/nothink")


def _assistant(
    message, i: int, layout: Variant, own: bool, behind_last_user: bool, enable_thinking: bool
) -> Iterator[_Piece]:
    """A reply, behind its marker. own: whether it shows the reasoning that it was written with."""
    reply, line = reply_of(message, i), layout.line
    thinks = {"learnt": own, "part": (i, "reasoning", 0)}
    shown = own and reply.reasoning or ""
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
    if content := reply.content.strip():
        yield _text(line + content, own, (i, "content", 0))
    for number, (name, arguments) in enumerate(reply.calls):
        call = {"learnt": own, "part": (i, "call", number)}
        yield from _template(f"{line}<tool_call>", **call)
        yield _text(name + line, **call)
        for key, value in _written(name, arguments, i):
            for marker, text in (("arg_key", key), ("arg_value", value)):
                yield from _template(f"<{marker}>", **call)
                yield _text(text, **call)
                yield from _template(f"</{marker}>{line}", **call)
        yield from _template("</tool_call>", **call)


def _offered(tools, layout: Variant) -> Iterator[str]:
    """Tools as they are shown."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ChatError(f"tools is {_shown(tools)}; it must be a list")
    for i, tool in enumerate(tools):
        function = tool_function(tool, i)
        if layout.unwraps:
            if function.get("defer_loading"):
                continue
            tool = {k: v for k, v in function.items() if k not in ("defer_loading", "strict")}
        yield _json(tool, f"tool {i}, {function['name']!r}, has a definition")


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
