"""What people prefer: pairs of replies, answers that set the style, and prompts with the rubric to judge them by.

Lines of jsonl, each an object with the messages of a conversation up to the reply (conversation.py) and

    {"messages": [...], "chosen": "..." or a message, "rejected": "..." or a message}
    {"messages": [...], "anchor": "..." or a message}
    {"id": "...", "messages": [...], "rubric": "...", "guidance": "..."}

guidance, which a judge is told and the policy is not, and tools may be missing. Other fields are not read.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from glm5_jax.data.conversation import parse, read_json
from glm5_jax.data.sources import ASSETS
from glm5_jax.text.messages import ChatError

PROMPTS = {name: ASSETS / f"{name}_prompts.jsonl" for name in ("creativity", "safety")}

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Preference:
    """Two replies to one conversation, of which people preferred the first; both as messages."""

    messages: tuple[Mapping, ...]
    chosen: Mapping
    rejected: Mapping
    tools: tuple[Mapping, ...] = ()


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A reply that a person wrote, as a message: what good style is."""

    messages: tuple[Mapping, ...]
    anchor: Mapping
    tools: tuple[Mapping, ...] = ()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation to reply to, and the name of the rubric that replies are judged by."""

    id: str
    messages: tuple[Mapping, ...]
    rubric: str
    guidance: str = ""


def read_preferences(path: str | os.PathLike) -> list[Preference]:
    """The pairs of a file. ValueError names the file and the line, and says what is wrong with it."""
    return _lines(path, _preference)


def read_anchors(path: str | os.PathLike) -> list[Anchor]:
    """The anchors of a file. ValueError as `read_preferences`."""
    return _lines(path, _anchor)


def read_prompts(path: str | os.PathLike) -> list[Prompt]:
    """The prompts of a file, such as one of `PROMPTS`. ValueError as `read_preferences`, and for two of one id."""
    prompts, seen = _lines(path, _prompt), set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"{path}: two prompts have the id {prompt.id!r}; rename one")
        seen.add(prompt.id)
    return prompts


def _lines(path: str | os.PathLike, read: Callable[[Mapping], T]) -> list[T]:
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = read_json(line)
                if not isinstance(value, Mapping):
                    raise ChatError(f"the line is a {type(value).__name__}; give an object")
                found.append(read(value))
            except ChatError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no lines; give at least one")
    return found


def _preference(value: Mapping) -> Preference:
    messages, chosen, tools = _replied(value, "chosen")
    _, rejected, _ = _replied(value, "rejected")
    if chosen == rejected:
        raise ChatError("chosen and rejected are the same reply; drop the line")
    return Preference(messages, chosen, rejected, tools)


def _anchor(value: Mapping) -> Anchor:
    return Anchor(*_replied(value, "anchor"))


def _prompt(value: Mapping) -> Prompt:
    for name, default in (("id", None), ("rubric", None), ("guidance", "")):
        if not isinstance(value.get(name, default), str):
            raise ChatError(f"{name} is {value.get(name)!r}; give a text")
    # Whatever is said in reply: the checks are those of a whole conversation.
    messages, _, _ = _replied({**value, "reply": "."}, "reply")
    return Prompt(value["id"], messages, value["rubric"], value.get("guidance", ""))


def _replied(value: Mapping, name: str) -> tuple[tuple[Mapping, ...], Mapping, tuple[Mapping, ...]]:
    """The messages, the reply that is called `name`, and the tools, all as `parse` leaves them."""
    reply, messages = value.get(name), value.get("messages")
    if isinstance(reply, str):
        reply = {"role": "assistant", "content": reply}
    if not isinstance(reply, Mapping) or reply.get("role") != "assistant":
        raise ChatError(f"{name} is {reply!r}; give a text, or a message of the assistant's")
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"messages is {messages!r}; give a list of them")
    last = messages[-1]
    if isinstance(last, Mapping) and last.get("role") not in ("user", "tool"):
        raise ChatError(
            f"the last message is of role {last.get('role')!r}; end with what {name} replies to"
        )
    parsed = parse({"messages": [*messages, reply], "tools": value.get("tools")})
    *before, said = parsed.messages
    return tuple(before), said, parsed.tools or ()
