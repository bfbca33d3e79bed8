"""Parses a model's reply into reasoning, content and tool calls, at once or as a stream.

- The result does not depend on how the stream is split.
- In ids, markers are special tokens; in text, every spelled-out marker counts.
- Within the value of an argument markers are text. `</arg_value>` ends the value only before `<arg_key>` or
  `</tool_call>`, and a marker that ends a turn counts only at the end of the reply.
- A call that is cut off or cannot be parsed has a problem, and clients receive its original text (`ToolCall.function`). Its
  arguments are then not JSON, so that no client runs a part of it.
- A call without a name is content.
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

MAX_NESTING = 100  # of lists and objects in an argument; deeper ones stay text
_CALL_MARKERS = ("tool_call", "arg_key", "arg_value")
MARKERS = ("<think>", "</think>", *(f"<{e}{m}>" for m in _CALL_MARKERS for e in ("", "/")))
_KNOWN = re.compile("|".join(map(re.escape, (*MARKERS, *STOP_TOKENS))))


class ToolCall(NamedTuple):
    """Tool call of a model.

    Attributes:
      name: name of the function.
      arguments: arguments by name; if there is a problem, those that could be parsed.
      problem: error message; None: the call is valid.
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
        """The original text of the call, with its markers."""
        return CALL_START + self.text + CALL_END * self.is_closed

    @property
    def function(self) -> dict[str, str]:
        """The name and arguments in the form of OpenAI's API: JSON, or `raw_text` if the call has a problem."""
        if self.problem is not None:
            return {"name": self.name, "arguments": self.raw_text}
        return {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}


class Reply(NamedTuple):
    """Parsed reply.

    Attributes:
      reasoning_content: reasoning without blanks around it; None: there is none.
      content: content without blanks around it.
      tool_calls: calls.
      stopped_by: marker that ended the turn; None: the reply was cut off.
    """

    reasoning_content: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]
    stopped_by: str | None

    @property
    def message(self) -> dict:
        """The reply as a message for `render_chat`; a call with a problem has its text as arguments."""
        # Reasoning is always present. Otherwise content with `</think>` would be parsed as reasoning.
        reasoning = self.reasoning_content or ""
        message = {"role": "assistant", "content": self.content, "reasoning_content": reasoning}
        calls = [
            {"name": call.name, "arguments": call.raw_text if call.problem else call.arguments}
            for call in self.tool_calls
        ]
        return message | ({"tool_calls": calls} if calls else {})

    @property
    def problem(self) -> str | None:
        """The problem of the first invalid call; None: all calls are valid."""
        return next((call.problem for call in self.tool_calls if call.problem), None)


class Delta(NamedTuple):
    """Increment of a streamed reply.

    Attributes:
      part: "reasoning" or "content", whose text is appended, or "call".
      text: text to append.
      call: complete call; None: the part is not "call".
    """

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
    """Parses a complete reply, which is text or ids of the tokenizer; see `ReplyParser`."""
    parser = ReplyParser(tools, tokenizer=tokenizer, thinking=thinking)
    parser.feed(reply)
    return parser.close()


class ReplyParser:
    """Streaming parser of a reply: `feed` new text or ids, and `finish` or `close` at the end.

    - tools: function definitions in OpenAI's form. Without tools, calls are content. A call of an unknown name has a
      problem.
    - tokenizer: tokenizer of the ids; None: the reply is text. An id without a token becomes U+FFFD.
    - thinking: whether the prompt opened the thinking.

    The value of an argument is text if its schema is a string, or allows a string and rejects the parsed JSON. Otherwise it
    is parsed as JSON. Text that is not JSON stays text, including Python's literals (`True`, `{'a': 1}`).

    Raises ChatError for an invalid tool.
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
        self._pending = ""  # text that may be the beginning of a marker
        self._state = "reasoning" if thinking else "content"
        self._text = {"reasoning": [], "content": []}
        self._blank = {
            "reasoning": [],
            "content": [],
        }  # blanks after the text, added if more text follows
        self._calls: list[ToolCall] = []
        self._call: _Call | None = None
        self._stopped_by: str | None = None
        self._maybe_stopped_by: str | None = (
            None  # marker within a value, which is text if more follows
        )
        self._deltas: list[Delta] = []

    def feed(self, new: str | Iterable[int]) -> list[Delta]:
        """Parses new text or ids, and returns the increments. Everything after the end of the turn is ignored."""
        if isinstance(new, str):
            self._feed_text(new)
        else:
            self._feed_ids(new)
        return self._take()

    def finish(self) -> list[Delta]:
        """Ends the reply, and returns the last increments. A call without an end has a problem."""
        if self._stopped_by is None:
            if self._tokenizer is not None:
                self._plain(self._bytes.close())
            pending, self._pending = self._pending, ""
            self._plain(pending)
        self._stopped_by = self._stopped_by or self._maybe_stopped_by
        if self._call is not None:
            self._call.fail("the call has no </tool_call>")
            self._end_call(self._call, is_closed=False)
        return self._take()

    def close(self) -> Reply:
        """Ends the reply, and returns all of it."""
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
        text, self._pending, at = self._pending + text, "", 0
        for match in _KNOWN.finditer(text):
            self._plain(text[at : match.start()])
            self._marker(match.group())
            at = match.end()
            if self._stopped_by is not None:
                return
        # Only the last "<" can begin an incomplete marker.
        last = text.rfind("<", at)
        if last >= 0 and any(m.startswith(text[last:]) for m in (*MARKERS, *STOP_TOKENS)):
            self._pending = text[last:]
        self._plain(text[at : len(text) - len(self._pending)])

    def _marker(self, name: str) -> None:
        self._resume()
        in_value = self._call is not None and self._call.is_in_value
        if name in STOP_TOKENS:
            if in_value:
                self._maybe_stopped_by = name
            else:
                self._stopped_by = name
        elif self._call is not None:
            if name == CALL_END and self._call.can_end:
                self._end_call(self._call, is_closed=True)
            else:
                self._call.marker(name)
        elif self._state == "reasoning" and name == "</think>":
            self._state = "content"
        elif self._state == "content" and name == CALL_START and self._schemas:
            self._call = _Call()
        elif name == "<think>" and not (self._text["reasoning"] or self._text["content"]):
            self._state = "reasoning"  # a layout in which the model opens its thinking
        else:
            self._plain(name)

    def _resume(self) -> None:
        """Turns a marker that might have ended the turn into text of its value, because more text follows."""
        name, self._maybe_stopped_by = self._maybe_stopped_by, None
        if name is not None:
            assert self._call is not None, "the marker was within a value"
            self._call.marker(name)

    def _plain(self, text: str) -> None:
        if not text:
            return
        self._resume()
        if self._call is not None:
            self._call.plain(text)
            return
        part = self._state
        if not self._text[part]:
            text = text.lstrip()
        stripped = text.rstrip()
        if not stripped:
            self._blank[part].append(text)
            return
        new_text = "".join((*self._blank[part], stripped))
        self._blank[part] = [text[len(stripped) :]]
        self._text[part].append(new_text)
        self._deltas.append(Delta(part, new_text))

    def _end_call(self, open_call: "_Call", is_closed: bool) -> None:
        call = open_call.read(self._schemas, is_closed)
        self._call = None
        if not call.name:
            self._plain(call.raw_text)
            return
        self._calls.append(call)
        self._deltas.append(Delta("call", call=call))


_MOVES = {
    ("name", "<arg_key>"): "key",
    ("key", "</arg_key>"): "after a key",
    ("after a key", "<arg_value>"): "value",
    ("value", "</arg_value>"): "after a value",
    ("after a value", "<arg_key>"): "key",
}


@dataclasses.dataclass(kw_only=True)
class _Call:
    """Parser state of an unfinished call.

    Attributes:
      state: "name", "key", "value", "after a key", "after a value", or "broken" after a syntax error.
      name, key, value: parts of the text of the name, and of the current key and value.
      tail: marker and blanks after a value, which belong to it unless the next argument or the end follows.
      values: texts of the complete arguments.
      problem: first error; None: no error.
      text: parts of the original text.
    """

    state: str = "name"
    name: list[str] = dataclasses.field(default_factory=list)
    key: list[str] = dataclasses.field(default_factory=list)
    value: list[str] = dataclasses.field(default_factory=list)
    tail: list[str] = dataclasses.field(default_factory=list)
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    text: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_in_value(self) -> bool:
        """Whether the next text may belong to a value."""
        return self.state in ("value", "after a value")

    @property
    def can_end(self) -> bool:
        """Whether `</tool_call>` would end the call in this state."""
        return self.state != "value"

    def fail(self, problem: str) -> None:
        """Stores a problem, unless there is one already."""
        self.problem = self.problem or problem

    def marker(self, name: str) -> None:
        """Reads a marker that does not end the call."""
        self.text.append(name)
        if self.state == "after a value" and name != "<arg_key>":
            self._resume_value()
        state = _MOVES.get((self.state, name))
        if state is not None:
            self._move(state, name)
        elif self.state in ("key", "value"):
            getattr(self, self.state).append(name)
        elif self.state != "broken":
            self.fail(f"{name} stands {_describe_state(self.state)}")
            self.state = "broken"

    def plain(self, text: str) -> None:
        """Reads text between markers."""
        self.text.append(text)
        if self.state == "after a value":
            if not text.strip():
                self.tail.append(text)
                return
            self._resume_value()
        if self.state in ("name", "key", "value"):
            getattr(self, self.state).append(text)
        elif self.state == "after a key" and text.strip():
            self.fail(f"text stands {_describe_state(self.state)}")
            self.state = "broken"

    def _resume_value(self) -> None:
        """Turns the marker that seemed to end a value, and the blanks after it, into text of the value."""
        self.value += self.tail
        self.state, self.tail = "value", []

    def _move(self, state: str, name: str) -> None:
        if self.state == "after a value":
            self._store_argument()
        if state == "key":
            self.key = []
        elif state == "value":
            self.value = []
        elif state == "after a value":
            self.tail = [name]
        self.state = state

    def _store_argument(self) -> None:
        key = "".join(self.key).strip()
        if key in self.values:
            self.fail(f"the argument {key!r} is given twice")
        self.values[key] = "".join(self.value)

    def read(self, schemas: Mapping[str, Mapping], is_closed: bool) -> ToolCall:
        """Returns the call; its name is empty if it is missing or may be cut off."""
        if self.state == "after a value":
            self._store_argument()
        elif self.state not in ("name", "broken"):
            self.fail(f"the call ends {_describe_state(self.state)}")
        name = "".join(self.name).strip() if is_closed or self.state != "name" else ""
        if name not in schemas:
            self.fail(f"no tool is named {name!r}; there are {', '.join(schemas)}")
        parameters = schemas.get(name, {})
        schema = Schema(parameters)
        arguments = {
            key: _value(text, key, parameters, schema) for key, text in self.values.items()
        }
        return ToolCall(name, arguments, self.problem, "".join(self.text), is_closed)


def _describe_state(state: str) -> str:
    return state if state.startswith("after") else f"inside the {state}"


def _value(text: str, key: str, parameters: Mapping, schema: Schema):
    """Parses the text of an argument of a function; schema: validator of its parameters."""
    value_schema = (parameters.get("properties") or {}).get(key)
    named = value_schema.get("type") if isinstance(value_schema, Mapping) else None
    if named == "string":
        return text
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\u" in text:  # raises for an unpaired surrogate, which cannot be sent as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    if _is_deep(value):
        return text
    if value_schema is None:
        return value
    try:
        # Strings are written without quotes, so quoted text is literal where the schema allows a string.
        if schema.allows(value_schema, value) and not (
            isinstance(value, str) and schema.allows(value_schema, text)
        ):
            return value
        has_text = isinstance(named, list) and "string" in named
        return text if has_text or schema.allows(value_schema, text) else value
    except SchemaError:
        return value


def _is_deep(value) -> bool:
    """Returns True if a value is nested too deeply for some JSON encoders."""
    level = [value]
    for _ in range(MAX_NESTING):
        inner = (
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        )
        level = [item for items in inner for item in items]
    return bool(level)


def _finite(text: str) -> float:
    """Returns a JSON number. Raises ValueError for NaN and infinity, which JSON lacks."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not JSON")
    return value
