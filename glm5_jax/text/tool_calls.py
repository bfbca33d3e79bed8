"""What a model wrote, taken apart: reasoning, content and tool calls; whole, or piece by piece as it comes.

However the stream is cut, the parts are the same. As ids, markers are what the tokenizer says; as text,
whatever spells one.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jsonschema

from glm5_jax.text.chat import tool_function
from glm5_jax.text.tokenizer import STOP_TOKENS, Detokenizer, Tokenizer

MOST_NESTED = 100  # lists and objects of an argument within each other; deeper ones stay text
_CALL_MARKERS = ("tool_call", "arg_key", "arg_value")
MARKERS = ("<think>", "</think>", *(f"<{e}{m}>" for m in _CALL_MARKERS for e in ("", "/")))
_KNOWN = re.compile("|".join(map(re.escape, (*MARKERS, *STOP_TOKENS))))
# A pattern can take for ever on what a model wrote, and no text depends on one. The registry is that of
# the schemas' own drafts: what else a `$ref` names is not fetched.
_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": None})
_REGISTRY = jsonschema.validators.SPECIFICATIONS


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

    @property
    def message(self) -> dict:
        """The reply as a message that `render_chat` lays out again. A call that names no function is content."""
        calls, content = [], [self.content]
        for call in self.tool_calls:
            if call.name:
                calls.append({"name": call.name, "arguments": call.arguments})
            else:
                content.append(f"<tool_call>{call.text}</tool_call>")
        # Reasoning is always said: without, content that holds `</think>` would be read as some.
        reasoning = self.reasoning_content or ""
        message = {"role": "assistant", "content": "".join(content), "reasoning_content": reasoning}
        return message | ({"tool_calls": calls} if calls else {})


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

    tools: function definitions in OpenAI's form. A value is text if its schema says string, or allows one and
    not what the text is as JSON; otherwise JSON, and what is no JSON stays text. With tools, a call of another
    name has a problem. thinking: whether the prompt opened the thinking. An id without a token is U+FFFD.
    ChatError for what is no tool.
    """

    def __init__(
        self,
        tools: Sequence[Mapping] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        thinking: bool = True,
    ):
        functions = [tool_function(tool, i) for i, tool in enumerate(tools or ())]
        self._schemas = {f["name"]: f.get("parameters") or {} for f in functions}
        self._any_name = tools is None
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
        if self._call is not None:
            self._call.fail("the call has no </tool_call>")
            self._end_call()
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
        kept = text.rstrip()
        if not kept:
            self._blank[part].append(text)
            return
        shown = "".join((*self._blank[part], kept))
        self._blank[part] = [text[len(kept) :]]
        self._text[part].append(shown)
        self._deltas.append(Delta(part, shown))

    def _end_call(self) -> None:
        call = self._call.read(self._schemas, self._any_name)
        self._call = None
        self._calls.append(call)
        self._deltas.append(Delta("call", call=call))


@dataclasses.dataclass
class _Call:
    """A call that is being written. place: "name", "key", "value", or behind one of the latter."""

    place: str = "name"
    written: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: {"name": [], "key": [], "value": []}
    )
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    text: list[str] = dataclasses.field(default_factory=list)

    def fail(self, problem: str) -> None:
        self.problem = self.problem or problem

    def marker(self, name: str) -> None:
        self.text.append(name)
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
                self.written[self.place].append(name)
            else:
                self.fail(f"{name} stands {_where(self.place)}")
            return
        if to in self.written:
            self.written[to] = []
        elif to == "behind a value":
            key = self._of("key").strip()
            if key in self.values:
                self.fail(f"the argument {key!r} is given twice")
            self.values[key] = self._of("value")
        self.place = to

    def plain(self, text: str) -> None:
        self.text.append(text)
        if self.place in self.written:
            self.written[self.place].append(text)
        elif text.strip():
            self.fail(f"text stands {_where(self.place)}")

    def _of(self, place: str) -> str:
        return "".join(self.written[place])

    def read(self, schemas: Mapping[str, Mapping], any_name: bool) -> ToolCall:
        name = self._of("name").strip()
        if not name:
            self.fail("the call names no function")
        if self.place not in ("name", "behind a value"):
            self.fail(f"the call ends {_where(self.place)}")
        if name and not (any_name or name in schemas):
            self.fail(f"no tool is named {name!r}; there are {', '.join(schemas) or 'none'}")
        schema = schemas.get(name, {})
        arguments = {key: _value(text, key, schema) for key, text in self.values.items()}
        return ToolCall(name, arguments, self.problem, "".join(self.text))


def _where(place: str) -> str:
    return place if place.startswith("behind") else f"inside the {place}"


def _value(text: str, key: str, parameters: Mapping):
    """What was written as an argument of a function with these parameters."""
    schema = (parameters.get("properties") or {}).get(key)
    named = schema.get("type") if isinstance(schema, Mapping) else None
    if named == "string":
        return text
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text
    if _is_deep(value):
        return text
    if schema is None:
        return value
    try:
        allows = _Validator(parameters, registry=_REGISTRY).evolve(schema=schema).is_valid
        # A string is written as it is, so JSON of one is its text where that may stand.
        if allows(value) and not (isinstance(value, str) and allows(text)):
            return value
        return text if isinstance(named, list) and "string" in named or allows(text) else value
    except Exception:  # a schema can be broken in as many ways as it has words
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
