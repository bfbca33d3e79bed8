"""What a model wrote, taken apart: reasoning, content and tool calls; whole, or piece by piece as it comes.

However the stream is cut, the parts are the same. As ids, markers are what the tokenizer says; as text,
whatever spells one.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from glm5_jax.text.tokenizer import STOP_TOKENS, Detokenizer, Tokenizer

_CALL_MARKERS = ("tool_call", "arg_key", "arg_value")
MARKERS = ("<think>", "</think>", *(f"<{e}{m}>" for m in _CALL_MARKERS for e in ("", "/")))
_KNOWN = re.compile("|".join(map(re.escape, (*MARKERS, *STOP_TOKENS))))


class ToolCall(NamedTuple):
    """A call as it was written. problem: what is wrong with it, or None; arguments are then those that
    could be read. text: between its markers."""

    name: str
    arguments: dict
    problem: str | None
    text: str


class Reply(NamedTuple):
    """reasoning_content (None: nothing was thought), content, both without blanks around them, and
    calls. stopped_by: the marker that ended the turn, None if it was cut off."""

    reasoning_content: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    stopped_by: str | None


class Delta(NamedTuple):
    """What has come: part "reasoning" or "content" with text to append, or "call" with a whole call."""

    part: str
    text: str = ""
    call: ToolCall | None = None


def parse_reply(
    reply: str | Iterable[int],
    tools: Sequence[Mapping] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    thinking: bool = True,
) -> Reply:
    """Takes a whole reply apart, text or ids (of the tokenizer); see `ReplyParser`."""
    parser = ReplyParser(tools, tokenizer=tokenizer, thinking=thinking)
    parser.feed(reply)
    return parser.close()


class ReplyParser:
    """Takes a reply apart while it comes: `feed` what is new, `close` at the end.

    tools: function definitions in OpenAI's form. A value is JSON unless its schema says string; what is no
    JSON stays text. With tools, a call of another name has a problem. thinking: whether the prompt opened
    the thinking.
    """

    def __init__(
        self,
        tools: Sequence[Mapping] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        thinking: bool = True,
    ):
        self._schemas = None if tools is None else dict(map(_schema_of, tools))
        self._tokenizer = tokenizer
        self._names = {}
        if tokenizer is not None:
            known = {*MARKERS, *STOP_TOKENS}
            self._names = {i: name for name, i in tokenizer.special_ids.items() if name in known}
            self._bytes = Detokenizer(tokenizer)
        self._held = ""  # text that may be the beginning of a marker
        self._state = "reasoning" if thinking else "content"
        self._text = {"reasoning": [], "content": []}
        self._blank = {"reasoning": "", "content": ""}  # behind it, if more follows
        self._calls: list[ToolCall] = []
        self._call: _Call | None = None
        self._stopped_by: str | None = None
        self._deltas: list[Delta] = []

    def feed(self, new: str | Iterable[int]) -> list[Delta]:
        """What can be told from what is new. Behind the end of the turn nothing is read."""
        if isinstance(new, str):
            self._feed_text(new)
        else:
            self._feed_ids(new)
        return self._take()

    def close(self) -> Reply:
        """The whole reply. A call that has no end has a problem."""
        if self._stopped_by is None:
            if self._tokenizer is not None:
                self._plain(self._bytes.close())
            held, self._held = self._held, ""
            self._plain(held)
        if self._call is not None:
            self._call.fail("the call has no </tool_call>")
            self._end_call()
        reasoning, content = ("".join(self._text[part]) for part in ("reasoning", "content"))
        return Reply(reasoning or None, content, tuple(self._calls), self._stopped_by)

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _feed_ids(self, ids: Iterable[int]) -> None:
        if self._tokenizer is None:
            raise ValueError("a reply of ids needs the tokenizer; pass tokenizer=")
        for token in ids:
            if self._stopped_by is not None:
                return
            name = self._names.get(token)
            if name is None:
                self._plain(self._bytes.feed([token]))
            else:
                self._plain(self._bytes.close())
                self._marker(name)

    def _feed_text(self, text: str) -> None:
        if self._stopped_by is not None:
            return
        text, self._held, at = self._held + text, "", 0
        for found in _KNOWN.finditer(text):
            self._plain(text[at : found.start()])
            self._marker(found.group())
            at = found.end()
            if self._stopped_by is not None:
                return
        # Only the last "<" can begin a marker whose rest is still to come.
        last = text.rfind("<", at)
        if last >= 0 and any(m.startswith(text[last:]) for m in (*MARKERS, *STOP_TOKENS)):
            self._held = text[last:]
        self._plain(text[at : len(text) - len(self._held)])

    def _marker(self, name: str) -> None:
        if name in STOP_TOKENS:
            self._stopped_by = name
        elif self._call is not None:
            if name == "</tool_call>":
                self._end_call()
            else:
                self._call.marker(name)
        elif self._state == "reasoning" and name == "</think>":
            self._state = "content"
        elif self._state == "content" and name == "<tool_call>":
            self._call = _Call()
        elif name == "<think>" and not (self._text["reasoning"] or self._text["content"]):
            self._state = "reasoning"  # a layout whose prompt leaves it to the model
        else:
            self._plain(name)

    def _plain(self, text: str) -> None:
        if not text:
            return
        if self._call is not None:
            self._call.plain(text)
            return
        part = self._state
        if not self._text[part]:
            text = text.lstrip()
        text = self._blank[part] + text
        kept = text.rstrip()
        self._blank[part] = text[len(kept) :]
        if kept:
            self._text[part].append(kept)
            self._deltas.append(Delta(part, kept))

    def _end_call(self) -> None:
        call = self._call.read(self._schemas)
        self._call = None
        self._calls.append(call)
        self._deltas.append(Delta("call", call=call))


@dataclasses.dataclass
class _Call:
    """A call that is being written. place: "name", "key", "value", or behind one of the latter."""

    place: str = "name"
    name: str = ""
    key: str = ""
    value: str = ""
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    text: str = ""

    def fail(self, problem: str) -> None:
        self.problem = self.problem or problem

    def marker(self, name: str) -> None:
        self.text += name
        moves = {
            ("name", "<arg_key>"): "key",
            ("behind a value", "<arg_key>"): "key",
            ("key", "</arg_key>"): "behind a key",
            ("behind a key", "<arg_value>"): "value",
            ("value", "</arg_value>"): "behind a value",
        }
        to = moves.get((self.place, name))
        if to is None:
            if self.place in ("key", "value"):
                self._add(name)
            else:
                self.fail(f"{name} stands {_where(self.place)}")
            return
        if to == "key":
            self.key = ""
        elif to == "value":
            self.value = ""
        elif to == "behind a value":
            key = self.key.strip()
            if key in self.values:
                self.fail(f"the argument {key!r} is given twice")
            self.values[key] = self.value
        self.place = to

    def plain(self, text: str) -> None:
        self.text += text
        if self.place == "name":
            self.name += text
        elif self.place in ("key", "value"):
            self._add(text)
        elif text.strip():
            self.fail(f"text stands {_where(self.place)}")

    def _add(self, text: str) -> None:
        setattr(self, self.place, getattr(self, self.place) + text)

    def read(self, schemas: Mapping[str, Mapping] | None) -> ToolCall:
        name = self.name.strip()
        if not name:
            self.fail("the call names no function")
        if self.place not in ("name", "behind a value"):
            self.fail(f"the call ends {_where(self.place)}")
        if schemas is not None and name and name not in schemas:
            self.fail(f"no tool is named {name!r}; there are {', '.join(schemas) or 'none'}")
        properties = ((schemas or {}).get(name) or {}).get("properties") or {}
        arguments = {k: _value(text, properties.get(k)) for k, text in self.values.items()}
        return ToolCall(name, arguments, self.problem, self.text)


def _where(place: str) -> str:
    return place if place.startswith("behind") else f"inside the {place}"


def _schema_of(tool: Mapping) -> tuple[str, Mapping]:
    function = tool.get("function", tool)
    return function["name"], function.get("parameters") or {}


def _value(text: str, schema: Mapping | None):
    """What was written: text if the schema says so, otherwise JSON if it is any."""
    if schema is not None and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
