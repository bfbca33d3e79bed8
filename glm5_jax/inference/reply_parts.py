"""Splits the deltas of a chat's reply into consecutive parts, for APIs whose replies are lists of typed items."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

REASONING, CONTENT, CALL = "reasoning", "content", "call"
BEGIN, TEXT, END = "begin", "text", "end"
_PARTS = {"reasoning_content": REASONING, "content": CONTENT}


@dataclasses.dataclass(kw_only=True)
class Part:
    """Part of a reply.

    Attributes:
      kind: REASONING, CONTENT or CALL.
      index: number of the part in the reply.
      text: text so far; of a call, its arguments.
      call: call in OpenAI's form; empty: the part is no call.
    """

    kind: str
    index: int
    text: str = ""
    call: Mapping = dataclasses.field(default_factory=dict)


class PartEvent(NamedTuple):
    """Change of a part: BEGIN, TEXT (more text) or END.

    Attributes:
      kind: kind of the change.
      part: part after the change.
      text: text that was added.
    """

    kind: str
    part: Part
    text: str = ""


class PartStream:
    """Splits deltas in OpenAI's form into parts.

    Attributes:
      parts: parts so far.
    """

    def __init__(self):
        self.parts: list[Part] = []
        self._is_open = False

    def feed(self, deltas: Iterable[Mapping]) -> Iterator[PartEvent]:
        """Yields the changes that deltas cause."""
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                yield from self._begin(CALL, call)
                yield self._append(call["function"]["arguments"])
            for name, kind in _PARTS.items():
                if text := delta.get(name):
                    if not (self._is_open and self.parts[-1].kind == kind):
                        yield from self._begin(kind)
                    yield self._append(text)

    def close(self) -> Iterator[PartEvent]:
        """Yields the end of the last part."""
        if self._is_open:
            self._is_open = False
            yield PartEvent(END, self.parts[-1])

    def _begin(self, kind: str, call: Mapping = {}) -> Iterator[PartEvent]:
        yield from self.close()
        self.parts.append(Part(kind=kind, index=len(self.parts), call=call))
        self._is_open = True
        yield PartEvent(BEGIN, self.parts[-1])

    def _append(self, text: str) -> PartEvent:
        part = self.parts[-1]
        part.text += text
        return PartEvent(TEXT, part, text)
