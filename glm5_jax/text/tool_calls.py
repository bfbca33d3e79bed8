"""What a model wrote, taken apart: reasoning, content and tool calls; whole, or piece by piece as it comes.

However the stream is cut, the parts are the same. As ids, markers are what the tokenizer says; as text,
whatever spells one. Within the value of an argument markers are text: `</arg_value>` ends it only in front of
`<arg_key>` or `</tool_call>`, and a marker that would end the turn only as the last of the reply.

A call that is cut off or cannot be parsed has a problem, and goes to clients as it was written (`ToolCall.function`):
its arguments are then no JSON, so that nobody carries out a part of it. What names no tool at all is content.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from glm5_jax.text.messages import CALL_END, CALL_START, read_tools
from glm5_jax.text.schemas import Schema, SchemaError
from glm5_jax.text.tokenizer import STOP_TOKENS, Detokenizer, Tokenizer

MOST_NESTED = 100  # lists and objects of an argument within each other; deeper ones stay text
_CALL_MARKERS = ("tool_call", "arg_key", "arg_value")
MARKERS = ("<think>", "</think>", *(f"<{e}{m}>" for m in _CALL_MARKERS for e in ("", "/")))
_KNOWN = re.compile("|".join(map(re.escape, (*MARKERS, *STOP_TOKENS))))


class ToolCall(NamedTuple):
    """A call as it was written.

    Attributes:
      name: name of the function.
      arguments: arguments by name; those that could be read if there is a problem.
      problem: what is wrong with the call, or None.
      text: text between its markers.
      is_closed: whether it has an end, `</tool_call>`.
    """

    name: str
    arguments: dict
    problem: str | None
    text: str
    is_closed: bool = True

    @property
    def raw_text(self) -> str:
        """The call with its markers, as it was written."""
        return CALL_START + self.text + CALL_END * self.is_closed

    @property
    def function(self) -> dict[str, str]:
        """Name and arguments as OpenAI's API has them: JSON, or `raw_text` if the call has a problem."""
        if self.problem is not None:
            return {"name": self.name, "arguments": self.raw_text}
        return {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}


class Reply(NamedTuple):
    """reasoning_content (None: nothing was thought), content, both without blanks around them, and
    calls. stopped_by: the marker that ended the turn, None if it was cut off."""

    reasoning_content: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    stopped_by: str | None

    @property
    def message(self) -> dict:
        """The reply as a message that `render_chat` lays out again; a call with a problem has its text as arguments."""
        # Reasoning is always given: without, content that holds `</think>` would be read as some.
        reasoning = self.reasoning_content or ""
        message = {"role": "assistant", "content": self.content, "reasoning_content": reasoning}
        calls = [
            {"name": call.name, "arguments": call.raw_text if call.problem else call.arguments}
            for call in self.tool_calls
        ]
        return message | ({"tool_calls": calls} if calls else {})

    @property
    def problem(self) -> str | None:
        """What is wrong with the first call that is cut off or cannot be parsed; None if all are whole."""
        return next((call.problem for call in self.tool_calls if call.problem), None)


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
    """Takes a reply apart while it comes: `feed` what is new, `finish` or `close` at the end.

    tools: function definitions in OpenAI's form; without any, nothing is a call, and what looks like one is content.
    A value is text if its schema says string, or allows one and not what the text is as JSON; otherwise JSON, and
    what is no JSON stays text, Python's literals (`True`, `{'a': 1}`) too. A call of another name has a problem.
    thinking: whether the prompt opened the thinking. An id without a token is U+FFFD. Raises ChatError for what is
    no tool.
    """

    def __init__(
        self,
        tools: Sequence[Mapping] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        thinking: bool = True,
    ):
        self._schemas = {f["name"]: f.get("parameters") or {} for f in read_tools(tools or ())}
        self._tokenizer = tokenizer
        self._names = {}
        if tokenizer is not None:
            known = {*MARKERS, *STOP_TOKENS}
            self._names = {i: name for name, i in tokenizer.special_ids.items() if name in known}
            self._bytes = Detokenizer(tokenizer, errors="replace")
        self._held = ""  # text that may be the beginning of a marker
        self._state = "reasoning" if thinking else "content"
        self._text = {"reasoning": [], "content": []}
        self._blank = {"reasoning": [], "content": []}  # behind it, if more follows
        self._calls: list[ToolCall] = []
        self._call: _Call | None = None
        self._stopped_by: str | None = None
        self._maybe_stopped_by: str | None = None  # within a value, where more text makes it text
        self._deltas: list[Delta] = []

    def feed(self, new: str | Iterable[int]) -> list[Delta]:
        """What can be told from what is new. Behind the end of the turn nothing is read."""
        if isinstance(new, str):
            self._feed_text(new)
        else:
            self._feed_ids(new)
        return self._take()

    def finish(self) -> list[Delta]:
        """What can be told once nothing more comes. A call that has no end has a problem."""
        if self._stopped_by is None:
            if self._tokenizer is not None:
                self._plain(self._bytes.close())
            held, self._held = self._held, ""
            self._plain(held)
        self._stopped_by = self._stopped_by or self._maybe_stopped_by
        if self._call is not None:
            self._call.fail("the call has no </tool_call>")
            self._end_call(is_closed=False)
        return self._take()

    def close(self) -> Reply:
        """Finishes; the whole reply."""
        self.finish()
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
        self._go_on()
        in_value = self._call is not None and self._call.is_in_value
        if name in STOP_TOKENS:
            if in_value:
                self._maybe_stopped_by = name
            else:
                self._stopped_by = name
        elif self._call is not None:
            if name == CALL_END and self._call.can_end:
                self._end_call(is_closed=True)
            else:
                self._call.marker(name)
        elif self._state == "reasoning" and name == "</think>":
            self._state = "content"
        elif self._state == "content" and name == CALL_START and self._schemas:
            self._call = _Call()
        elif name == "<think>" and not (self._text["reasoning"] or self._text["content"]):
            self._state = "reasoning"  # a layout whose prompt leaves it to the model
        else:
            self._plain(name)

    def _go_on(self) -> None:
        """Makes a marker that might have ended the turn text of the value that it stands in, as more follows."""
        name, self._maybe_stopped_by = self._maybe_stopped_by, None
        if name is not None:
            self._call.marker(name)

    def _plain(self, text: str) -> None:
        if not text:
            return
        self._go_on()
        if self._call is not None:
            self._call.plain(text)
            return
        part = self._state
        if not self._text[part]:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            self._blank[part].append(text)
            return
        shown = "".join((*self._blank[part], kept))
        self._blank[part] = [text[len(kept) :]]
        self._text[part].append(shown)
        self._deltas.append(Delta(part, shown))

    def _end_call(self, is_closed: bool) -> None:
        call = self._call.read(self._schemas, is_closed)
        self._call = None
        if not call.name:
            self._plain(call.raw_text)
            return
        self._calls.append(call)
        self._deltas.append(Delta("call", call=call))


_MOVES = {
    ("name", "<arg_key>"): "key",
    ("key", "</arg_key>"): "behind a key",
    ("behind a key", "<arg_value>"): "value",
    ("value", "</arg_value>"): "behind a value",
    ("behind a value", "<arg_key>"): "key",
}


@dataclasses.dataclass
class _Call:
    """A call that is being written.

    Attributes:
      place: "name", "key" or "value", "behind" one of the latter, or "broken" once something stood in a wrong place.
      tail: marker and blanks behind a value, which belong to it unless the next argument or the end follows.
      problem: what is wrong first.
    """

    place: str = "name"
    name: list[str] = dataclasses.field(default_factory=list)
    key: list[str] = dataclasses.field(default_factory=list)
    value: list[str] = dataclasses.field(default_factory=list)
    tail: list[str] = dataclasses.field(default_factory=list)
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    text: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_in_value(self) -> bool:
        """Whether what comes next may be text of a value."""
        return self.place in ("value", "behind a value")

    @property
    def can_end(self) -> bool:
        """Whether `</tool_call>` would end the call here."""
        return self.place != "value"

    def fail(self, problem: str) -> None:
        """Notes a problem, unless there is one."""
        self.problem = self.problem or problem

    def marker(self, name: str) -> None:
        """Reads a marker that does not end the call."""
        self.text.append(name)
        if self.place == "behind a value" and name != "<arg_key>":
            self._resume_value()
        place = _MOVES.get((self.place, name))
        if place is not None:
            self._move(place, name)
        elif self.place in ("key", "value"):
            getattr(self, self.place).append(name)
        elif self.place != "broken":
            self.fail(f"{name} stands {_where(self.place)}")
            self.place = "broken"

    def plain(self, text: str) -> None:
        """Reads text between markers."""
        self.text.append(text)
        if self.place == "behind a value":
            if not text.strip():
                self.tail.append(text)
                return
            self._resume_value()
        if self.place in ("name", "key", "value"):
            getattr(self, self.place).append(text)
        elif self.place == "behind a key" and text.strip():
            self.fail(f"text stands {_where(self.place)}")
            self.place = "broken"

    def _resume_value(self) -> None:
        """Makes the marker that seemed to end a value, and the blanks behind it, text of the value."""
        self.value += self.tail
        self.place, self.tail = "value", []

    def _move(self, place: str, name: str) -> None:
        if self.place == "behind a value":
            self._keep_argument()
        if place == "key":
            self.key = []
        elif place == "value":
            self.value = []
        elif place == "behind a value":
            self.tail = [name]
        self.place = place

    def _keep_argument(self) -> None:
        key = "".join(self.key).strip()
        if key in self.values:
            self.fail(f"the argument {key!r} is given twice")
        self.values[key] = "".join(self.value)

    def read(self, schemas: Mapping[str, Mapping], is_closed: bool) -> ToolCall:
        """Returns the call; without a name if that is missing, or may be cut off."""
        if self.place == "behind a value":
            self._keep_argument()
        elif self.place not in ("name", "broken"):
            self.fail(f"the call ends {_where(self.place)}")
        name = "".join(self.name).strip() if is_closed or self.place != "name" else ""
        if name not in schemas:
            self.fail(f"no tool is named {name!r}; there are {', '.join(schemas)}")
        parameters = schemas.get(name, {})
        schema = Schema(parameters)
        arguments = {
            key: _value(text, key, parameters, schema) for key, text in self.values.items()
        }
        return ToolCall(name, arguments, self.problem, "".join(self.text), is_closed)


def _where(place: str) -> str:
    return place if place.startswith("behind") else f"inside the {place}"


def _value(text: str, key: str, parameters: Mapping, schema: Schema):
    """Reads what was written as an argument of a function with these parameters; schema: of them."""
    value_schema = (parameters.get("properties") or {}).get(key)
    named = value_schema.get("type") if isinstance(value_schema, Mapping) else None
    if named == "string":
        return text
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text
    if _is_deep(value):
        return text
    if value_schema is None:
        return value
    try:
        # A string is written as it is, so JSON of one is its text where that may stand.
        if schema.allows(value_schema, value) and not (
            isinstance(value, str) and schema.allows(value_schema, text)
        ):
            return value
        has_text = isinstance(named, list) and "string" in named
        return text if has_text or schema.allows(value_schema, text) else value
    except SchemaError:
        return value


def _is_deep(value) -> bool:
    """Whether a value is nested deeper than all who write it again are sure to come."""
    level = [value]
    for _ in range(MOST_NESTED):
        inner = (
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        )
        level = [item for items in inner for item in items]
    return bool(level)


def _finite(text: str) -> float:
    """A number of JSON, which has no NaN and no infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON")
    return value
