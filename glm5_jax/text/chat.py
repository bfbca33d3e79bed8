"""Chats as GLM models read and write them: messages to text, ids, and what of them is learnt.

There is no end-of-turn token. A turn ends where the next role's marker stands, and that marker is what
the model writes to stop: `<|user|>` behind an answer, `<|observation|>` behind a tool call. Markers come
from the layout alone: text that spells one out stays text, whoever wrote it.

Layouts by name (`VARIANTS`): "glm5" (and GLM-4.7), "glm4.5", "glm5.1", "glm5.2"; from the published
templates of GLM-4.7 and 5.2 and the renderers of PrimeIntellect-ai/renderers.
"""

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.text.tokenizer import SPECIAL_TOKENS, Tokenizer

ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("high", "max")

_TEMPLATE = pathlib.Path(__file__).with_name("chat_template.jinja")
_MARKER = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
_TOOLS = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_CALLS = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""
_CALL = (
    "<tool_call>{function-name}",
    "<arg_key>{arg-key-1}</arg_key>",
    "<arg_value>{arg-value-1}</arg_value>",
    "<arg_key>{arg-key-2}</arg_key>",
    "<arg_value>{arg-value-2}</arg_value>",
    "...",
    "</tool_call>",
)


class ChatError(ValueError):
    """A message that no chat can hold; says which one and how to mend it."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What the layouts of the family differ in.

    Attributes:
      line: what stands behind a role marker and between parts: a line end in GLM-4.5, nothing since.
      keeps: whether the reasoning of earlier turns can be kept (`clear_thinking=False`).
      unwraps: whether a tool is shown as its inner `function`, without `strict` and `defer_loading`, and
        deferred ones not at all.
      empty: where a turn without reasoning has an empty `<think></think>`: "never", behind the last
        user ("last"), or "always"; elsewhere it has a lone `</think>`.
      strips: whether reasoning is stripped.
      effort: whether a line behind the prefix says the reasoning effort.
      off: what the prompt for an answer without thinking ends in.
      nothink: whether user messages then end in `/nothink`.
    """

    line: str = ""
    keeps: bool = True
    unwraps: bool = False
    empty: str = "never"
    strips: bool = True
    effort: bool = False
    off: str = "</think>"
    nothink: bool = False


VARIANTS = {
    "glm5": Variant(),
    "glm4.5": Variant(
        line="\n", keeps=False, empty="always", off="\n<think></think>", nothink=True
    ),
    "glm5.1": Variant(unwraps=True, empty="last"),
    "glm5.2": Variant(
        unwraps=True, empty="always", strips=False, effort=True, off="<think></think>"
    ),
}


class Span(NamedTuple):
    """A part of a message: "text" of system and user, "result" of a tool; of an assistant "reasoning"
    (with its closing marker, where the model writes that), "content", "call" (one each) and "stop" (the
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
) -> RenderedChat:
    """Lays out messages in OpenAI's form for a model of the family.

    messages: dicts with `role` and `content` (text, or a list of text parts); an assistant's may have
    `reasoning_content` and `tool_calls`, whose arguments are an object or the JSON of one. tools: function
    definitions in OpenAI's form. enable_thinking: whether the reply that is prompted for begins with
    thinking. clear_thinking: whether reasoning before the last user message is left out. close: ends, in
    place of a prompt, with the marker by which the last message, an assistant's, stops: a sample of training.
    reasoning_effort: "max" (default) or "high", of GLM-5.2 alone.

    What is learnt (loss_mask): of every assistant message that shows its own reasoning (behind the last user
    message; all of them if clear_thinking is false) what the model writes: reasoning and its end, content,
    calls, and the marker of the next turn. `<|assistant|>` and the `<think>` or `</think>` of the prompt are
    not written by the model.

    Raises ChatError (ValueError) naming the message.
    """
    layout = _layout(variant)
    if reasoning_effort is not None and not (layout.effort and reasoning_effort in EFFORTS):
        known = (
            " or ".join(map(repr, EFFORTS))
            if layout.effort
            else f"none, {variant} has no such line"
        )
        raise ValueError(f"reasoning_effort is {reasoning_effort!r}; use {known}")
    if not (clear_thinking or layout.keeps):
        raise ValueError(f"clear_thinking is false; {variant} cannot keep earlier reasoning")
    check(messages)
    if close and messages[-1]["role"] != "assistant":
        raise ChatError(
            f"message {len(messages) - 1} has role {messages[-1]['role']!r}; only a chat that ends with an "
            "assistant's message can be closed"
        )
    pieces = list(
        _pieces(messages, tools or (), layout, enable_thinking, clear_thinking, reasoning_effort)
    )
    if close:
        marker = "<|observation|>" if reply_of(messages[-1]).calls else "<|user|>"
        pieces += _template(marker, learnt=True, part=(len(messages) - 1, "stop", 0))
    elif add_generation_prompt:
        pieces += _template("<|assistant|>" + _prompt(layout, enable_thinking))
    return _rendered(pieces, tokenizer)


def template(variant: str = "glm5") -> str:
    """The layout as a Jinja template: chat_template.jinja of a checkpoint, with which transformers renders
    the same text. It checks nothing, and the arguments of calls must be objects."""
    layout = _layout(variant)
    values = dataclasses.asdict(layout) | {
        "on": _prompt(layout, enable_thinking=True),
        "before_tools": _TOOLS,
        "behind_tools": _CALLS + layout.line.join(_CALL),
    }
    head = (f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items())
    return "".join(head) + _TEMPLATE.read_text("utf-8")


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
            raise ChatError(f"message {i} has role {role!r}; use one of {', '.join(ROLES)}")
        _text_of(message, i)
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
            calls = len(reply_of(message, i).calls) or None
        elif message.get("tool_calls"):
            raise ChatError(f"message {i} of role {role!r} has tool_calls; only an assistant calls")


def reply_of(message: Mapping, i: int = 0) -> Parts:
    """The parts of an assistant's message. Reasoning stands in `reasoning_content`, or in the content
    before `</think>`. ChatError if a call has no name, or arguments that are no object."""
    content, reasoning = _text_of(message, i), message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ChatError(f"message {i} has reasoning_content {_shown(reasoning)}; it must be text")
    if reasoning is None and "</think>" in content:
        reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = content.split("</think>")[-1].lstrip("\n")
    calls = message.get("tool_calls") or ()
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise ChatError(f"message {i} has tool_calls {_shown(calls)}; it must be a list")
    return Parts(reasoning, content, tuple(_call(call, i) for call in calls))


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
        except ValueError as error:
            raise ChatError(
                f"message {i} calls {name!r} with arguments that are no JSON: {error}"
            ) from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ChatError(
            f"message {i} calls {name!r} with {_shown(arguments)}; it must be an object"
        )
    return name, dict(arguments)


def _text_of(message: Mapping, i: int) -> str:
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
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _layout(variant: str) -> Variant:
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; use one of {', '.join(VARIANTS)}")
    return VARIANTS[variant]


def _pieces(
    messages,
    tools,
    layout: Variant,
    enable_thinking: bool,
    clear_thinking: bool,
    effort: str | None,
) -> Iterator[_Piece]:
    """Everything but the prompt for the reply, in order."""
    yield from _template("[gMASK]<sop>")
    if layout.effort and enable_thinking:
        yield from _template(f"<|system|>Reasoning Effort: {(effort or 'max').capitalize()}")
    if tools:
        yield from _template("<|system|>" + _TOOLS)
        yield from (_text(f"{_tool(tool, layout)}\n") for tool in _offered(tools, layout))
        yield from _template(_CALLS + layout.line.join(_CALL))
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
        if role == "assistant":
            yield from _template("<|assistant|>")
            yield from _assistant(message, i, layout, own, i > last_user, enable_thinking)
        elif role == "tool":
            if after != "tool":
                yield from _template("<|observation|>", **stop)
            yield from _template(f"{line}<tool_response>{line}")
            yield _text(_text_of(message, i), part=(i, "result", 0))
            yield from _template(f"{line}</tool_response>")
        else:
            yield from _template(f"<|{role}|>", **(stop if role == "user" else {}))
            yield from _template(line)
            content = _text_of(message, i)
            yield _text(content, part=(i, "text", 0))
            if role == "user" and layout.nothink and not enable_thinking:
                if not content.endswith("/nothink"):
                    yield from _template("/nothink")


def _assistant(
    message, i: int, layout: Variant, own: bool, behind_last_user: bool, enable_thinking: bool
) -> Iterator[_Piece]:
    """A reply, behind its marker. own: whether it shows the reasoning that it was written with."""
    reply, line = reply_of(message, i), layout.line
    reasoning, thinks = (i, "reasoning", 0), {"learnt": own, "part": (i, "reasoning", 0)}
    if own and reply.reasoning:
        text = reply.reasoning.strip() if layout.strips else reply.reasoning
        yield from _template(f"{line}<think>")
        yield _text(text, own, reasoning)
        yield from _template("</think>", **thinks)
    elif layout.empty == "always" or (
        layout.empty == "last" and behind_last_user and enable_thinking
    ):
        yield from _template(f"{line}<think>")
        # Behind a prompt that opens the thinking the model closes it itself.
        yield from _template("</think>", **(thinks if enable_thinking else {}))
    else:
        yield from _template("</think>")
    if content := reply.content.strip():
        yield _text(line + content, own, (i, "content", 0))
    for number, (name, arguments) in enumerate(reply.calls):
        call = {"learnt": own, "part": (i, "call", number)}
        yield from _template(f"{line}<tool_call>", **call)
        yield _text(name + line, **call)
        for key, value in arguments.items():
            value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for marker, text in (("arg_key", key), ("arg_value", value)):
                yield from _template(f"<{marker}>", **call)
                yield _text(text, **call)
                yield from _template(f"</{marker}>{line}", **call)
        yield from _template("</tool_call>", **call)


def _prompt(layout: Variant, enable_thinking: bool) -> str:
    """What the layout writes behind `<|assistant|>` for the model to go on from."""
    if not enable_thinking:
        return layout.off
    return "" if layout.nothink else "<think>"


def _offered(tools, layout: Variant) -> list[Mapping]:
    """Tools that are shown; ValueError for what is no tool."""
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tool {i} is {_shown(tool)}; it must be an object")
    inner = [tool.get("function", tool) for tool in tools]
    return [t for t, f in zip(tools, inner) if not (layout.unwraps and f.get("defer_loading"))]


def _tool(tool: Mapping, layout: Variant) -> str:
    if layout.unwraps:
        function = tool.get("function", tool)
        tool = {k: v for k, v in function.items() if k not in ("defer_loading", "strict")}
    return json.dumps(tool, ensure_ascii=False)


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
