"""Reads preference data: pairs of replies, anchor replies that set the style, and prompts with a rubric.

Each is a file of jsonl. A line is an object with the messages of a conversation up to the reply (conversation.py):

    {"messages": [...], "chosen": "..." or a message, "rejected": "..." or a message}
    {"messages": [...], "anchor": "..." or a message}
    {"id": "...", "messages": [...], "rubric": "...", "guidance": "..."}

guidance, which only the judge receives, and tools may be missing. Other fields are ignored.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from glm5_jax.data.conversation import parse_line, read_json
from glm5_jax.data.sources import ASSETS
from glm5_jax.runtime.files import read_lines
from glm5_jax.text.messages import ChatError

PROMPTS = {name: ASSETS / f"{name}_prompts.jsonl" for name in ("creativity", "safety")}

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preference:
    """Two replies to a conversation, as messages; people preferred `chosen`."""

    messages: tuple[Mapping, ...]
    chosen: Mapping
    rejected: Mapping
    tools: tuple[Mapping, ...] = ()


@dataclasses.dataclass(frozen=True)
class Anchor:
    """Reply by a person, as a message: an example of good style."""

    messages: tuple[Mapping, ...]
    anchor: Mapping
    tools: tuple[Mapping, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Conversation to reply to, and the name of the rubric for its replies."""

    id: str
    messages: tuple[Mapping, ...]
    rubric: str
    guidance: str = ""


def read_preferences(path: str | os.PathLike) -> list[Preference]:
    """Reads the pairs of a file. Raises ValueError with file, line and reason if a line is invalid."""
    return _lines(path, _preference)


def read_anchors(path: str | os.PathLike) -> list[Anchor]:
    """Reads the anchors of a file. Raises ValueError like `read_preferences`."""
    return _lines(path, _anchor)


def read_prompts(path: str | os.PathLike) -> list[Prompt]:
    """Reads the prompts of a file, such as one of `PROMPTS`.

    Raises ValueError like `read_preferences`, and for duplicate ids.
    """
    prompts, seen = _lines(path, _prompt), set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"{path}: two prompts have the id {prompt.id!r}; rename one")
        seen.add(prompt.id)
    return prompts


def _lines(path: str | os.PathLike, read: Callable[[Mapping], T]) -> list[T]:
    values = []
    for line in read_lines(path):
        try:
            value = read_json(line.content)
            if not isinstance(value, Mapping):
                raise ChatError(f"the line is a {type(value).__name__}; give an object")
            values.append(read(value))
        except ChatError as error:
            raise ValueError(f"{path}, line {line.number}: {error}") from None
    if not values:
        raise ValueError(f"{path} has no lines; give at least one")
    return values


def _preference(value: Mapping) -> Preference:
    messages, chosen, tools = _split_reply(value, "chosen")
    _, rejected, _ = _split_reply(value, "rejected")
    if chosen == rejected:
        raise ChatError("chosen and rejected are the same reply; drop the line")
    return Preference(messages=messages, chosen=chosen, rejected=rejected, tools=tools)


def _anchor(value: Mapping) -> Anchor:
    messages, anchor, tools = _split_reply(value, "anchor")
    return Anchor(messages=messages, anchor=anchor, tools=tools)


def _prompt(value: Mapping) -> Prompt:
    for name, default in (("id", None), ("rubric", None), ("guidance", "")):
        if not isinstance(value.get(name, default), str):
            raise ChatError(f"{name} is {value.get(name)!r}; give a text")
    # With a placeholder reply, because the checks are those of a full conversation.
    messages, _, _ = _split_reply({**value, "reply": "."}, "reply")
    return Prompt(
        id=value["id"],
        messages=messages,
        rubric=value["rubric"],
        guidance=value.get("guidance", ""),
    )


def _split_reply(
    value: Mapping, name: str
) -> tuple[tuple[Mapping, ...], Mapping, tuple[Mapping, ...]]:
    """Returns the messages, the reply in field `name`, and the tools, in the form of `parse_line`."""
    reply, messages = value.get(name), value.get("messages")
    if isinstance(reply, str):
        reply = {"role": "assistant", "content": reply}
    if not isinstance(reply, Mapping) or reply.get("role") != "assistant":
        raise ChatError(f"{name} is {reply!r}; give a text, or an assistant's message")
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"messages is {messages!r}; give a list of them")
    last = messages[-1]
    if isinstance(last, Mapping) and last.get("role") not in ("user", "tool"):
        raise ChatError(
            f"the last message is of role {last.get('role')!r}; end with what {name} replies to"
        )
    parsed = parse_line({"messages": [*messages, reply], "tools": value.get("tools")})
    *before, parsed_reply = parsed.messages
    return tuple(before), parsed_reply, parsed.tools or ()
