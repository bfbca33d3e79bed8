"""Translates OpenAI's Responses API (`/v1/responses`) to a chat, and the chat's reply to items of that API.

1. `to_chat` turns a body into one of `/v1/chat/completions`, which `Reader.chat` parses.
2. `Responses` builds the response or the events of a stream.

The server stores no responses, so a client sends the items of all turns in `input`. Reasoning is a `reasoning_text`. With
`reasoning.encrypted_content` in `include` it is also in `encrypted_content`, as base64 without encryption, because some
clients return only that field.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.replies import Chat, Origin, ReplyForm, usage_of
from glm5_jax.inference.reply_parts import BEGIN, CALL, CONTENT, END, REASONING, Part, PartStream
from glm5_jax.inference.request import DEADLINE, LENGTH, Handle
from glm5_jax.inference.request_bodies import Effort, Items, Temperature, Tools, TopP
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.runtime.json_structs import JsonStruct, PositiveInteger, decode
from glm5_jax.text.messages import describe
from glm5_jax.text.tokenizer import Tokenizer

_ENCRYPTED = "reasoning.encrypted_content"
# Fields that a response repeats, and the value of those that were left out.
_REPEATED = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
    "include": [],
}


# Responses repeat these, so each waiting request holds them. The sizes are those of OpenAI's API.
_ShortText = Annotated[str, Meta(max_length=512)]
_Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], _ShortText], Meta(max_length=16)]


class TextOptions(JsonStruct, kw_only=True, frozen=True):
    """Form of a reply's content."""

    fixed = {"verbosity": "medium"}
    format: dict[str, Any] | None = None


class Reasoning(JsonStruct, kw_only=True, frozen=True):
    """Thinking of a reply; there are no summaries of it."""

    effort: Effort | None = None
    summary: _ShortText | None = None
    generate_summary: _ShortText | None = None


class ObfuscationOptions(JsonStruct, kw_only=True, frozen=True):
    """Options of a stream; obfuscation is never added."""

    ignored = frozenset(("include_obfuscation",))


class ResponsesRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/v1/responses`."""

    # Fields that change nothing in this server.
    ignored = frozenset(
        (
            *("service_tier", "safety_identifier", "prompt_cache_key", "store"),
            *("prompt_cache_retention", "max_tool_calls", "client_metadata"),
        )
    )
    fixed = {"top_logprobs": 0, "truncation": "disabled", "background": False}
    input: str | Items
    instructions: str | None = None
    metadata: _Metadata | None = None
    user: _ShortText | None = None
    model: str | None = None
    max_output_tokens: PositiveInteger | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    stream: bool = False
    stream_options: ObfuscationOptions | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Meta(max_length=16)] = []


_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")


def to_chat(body: Any) -> tuple[dict, dict]:
    """Returns a body of `/v1/responses` as one of `/v1/chat/completions`, and the fields to repeat. Raises ApiError."""
    _check_stored(body)
    request = decode(body, ResponsesRequest, ignore_neutral=True)
    fields = request.non_default_fields()
    chat = {name: fields[name] for name in _SAME if name in fields}
    chat["messages"] = _messages(request)
    if request.max_output_tokens is not None:
        chat["max_tokens"] = request.max_output_tokens
    if request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.tools:
        chat["tools"] = [_tool(tool, i) for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text.format is not None:
        chat["response_format"] = _response_format(request.text.format)
    repeated = {name: fields[name] for name in _REPEATED if name in fields}
    return chat, _REPEATED | msgspec.to_builtins(repeated)


def _check_stored(body) -> None:
    """Raises ApiError for a body that refers to something that a server would have stored."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if isinstance(body, Mapping) and body.get(name):
            raise ApiError(
                f"{name} is {describe(body[name])}, and this server stores nothing; send all items in input",
                param=name,
            )


def _messages(request: ResponsesRequest) -> list[dict]:
    """Returns the messages of a chat. Adjacent items of an assistant are one message."""
    messages: list[dict] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    turn: dict = {}  # the assistant's message so far
    for i, item in enumerate(request.input):
        read = _item(item, f"input.{i}")
        if read["role"] != "assistant":
            messages += [turn, read] if turn else [read]
            turn = {}
        elif turn and _begins_message(turn, read):
            messages.append(turn)
            turn = read
        else:
            calls = [*turn.get("tool_calls", ()), *read.get("tool_calls", ())]
            turn = turn | read | ({"tool_calls": calls} if calls else {})
    return [*messages, turn] if turn else messages


def _begins_message(turn: Mapping, item: Mapping) -> bool:
    """Returns whether an assistant's item begins another message: the order is reasoning, content, calls."""
    if "reasoning_content" in item:
        return True
    return "content" in item and ("content" in turn or "tool_calls" in turn)


def _item(item, path: str) -> dict:
    """Returns an item as a message, or a part of an assistant's. Raises ApiError."""
    match item:
        case {"type": "function_call", "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            call = {"type": "function", "id": item.get("call_id"), "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case {"type": "function_call_output", "output": output}:
            text = _content(output, path)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
        case {"type": "reasoning"}:
            return {"role": "assistant", "reasoning_content": _reasoning(item, path)}
        case {"role": role, "content": content} if item.get("type", "message") == "message":
            return {"role": role, "content": _content(content, path)}
    kind = item.get("type") if isinstance(item, Mapping) else item
    raise _error(
        f"{path}: an item of type {describe(kind)} cannot be read here; use message, reasoning, function_call and "
        "function_call_output"
    )


def _content(content, path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise _error(
                    f"{path}: {describe(part)} is no text; this model reads parts of type 'input_text' or 'output_text'"
                )
    return "".join(texts)


def _reasoning(item: Mapping, path: str) -> str:
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise _error(f"{path}: content is {describe(parts)}; give a list of parts")
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and "text" in part]
    if texts and all(isinstance(text, str) for text in texts):
        return "".join(texts)
    try:
        data = base64.b64decode(item.get("encrypted_content") or "", validate=True)
        return data.decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, TypeError, ValueError):
        raise _error(
            f"{path}: the encrypted_content is not of this server; leave the item out"
        ) from None


def _error(message: str) -> ApiError:
    return ApiError(message, param="input")


def _tool(tool: Mapping, i: int) -> dict:
    if tool.get("type") != "function":
        raise ApiError(
            f"tools.{i} has type {describe(tool.get('type'))}, which this server cannot run; use 'function'",
            param="tools",
        )
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice):
    match choice:
        case {"type": "function", "name": name, **others} if not others:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools], **others} if not others:
            entries = [{"type": "function", "function": one} for one in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}
    return choice


def _response_format(text_format: Mapping) -> dict:
    if text_format.get("type") != "json_schema":
        return dict(text_format)
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


class Responses(ReplyForm):
    """Responses of `/v1/responses`; see `ReplyForm`."""

    has_named_events = True

    def __init__(
        self, parsed: ParsedRequest, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        self._parsed, [self._handle] = parsed, handles
        self._chat = Chat(parsed, self._handle, tokenizer)
        self._origin, self._stream = origin, PartStream()
        self._encrypts = _ENCRYPTED in parsed.repeated.get("include", ())
        self._num_events = 0

    def complete(self) -> dict:
        for _ in self._events():
            pass
        return self._response(self._status())

    def first(self) -> list[dict]:
        names = ("response.created", "response.in_progress")
        return self._numbered({"type": n, "response": self._response("in_progress")} for n in names)

    def piece(self, index: int) -> list[dict]:
        return [] if self._chat.ended else self._numbered(self._events())

    def last(self) -> list[dict]:
        status = self._status()
        return self._numbered([{"type": f"response.{status}", "response": self._response(status)}])

    def failed(self, error: ApiError) -> list[dict]:
        failure = {"code": error.code or "server_error", "message": str(error)}
        response = self._response("failed") | {"error": failure}
        return self._numbered([{"type": "response.failed", "response": response}])

    def _numbered(self, events) -> list[dict]:
        numbered = []
        for event in events:
            numbered.append(event | {"sequence_number": self._num_events})
            self._num_events += 1
        return numbered

    def _status(self) -> str:
        is_cut = self._handle.finish_reason in (LENGTH, DEADLINE)
        return "incomplete" if is_cut else "completed"

    def _response(self, status: str) -> dict:
        """Returns the response object with the parts so far."""
        is_ended = status in ("completed", "incomplete")
        parts = self._stream.parts
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        repeated = {
            name: value for name, value in self._parsed.repeated.items() if name != "include"
        }
        return repeated | {
            "id": f"resp_{self._origin.id}",
            "object": "response",
            "created_at": self._origin.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._origin.model,
            "output": [self._item(part, self._item_status(part)) for part in parts],
            "previous_response_id": None,
            "store": False,
            "usage": self._usage() if is_ended else None,
        }

    def _usage(self) -> dict:
        usage = usage_of(self._parsed, [self._handle], self._chat.num_reasoning)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _item_status(self, part: Part) -> str:
        """Returns the status of an item that has ended; the last one of a reply that was cut off is incomplete."""
        is_last = part is self._stream.parts[-1]
        return self._status() if is_last else "completed"

    def _item(self, part: Part, status: str, is_empty: bool = False) -> dict:
        """Returns the item of a part. is_empty: as it begins."""
        text = "" if is_empty else part.text
        item = {"id": self._id(part), "status": status}
        if part.kind == REASONING:
            item |= {"type": "reasoning", "summary": []}
            item["content"] = [] if is_empty else [_content_part(part.kind, text)]
            if self._encrypts and not is_empty:
                item["encrypted_content"] = base64.b64encode(text.encode()).decode()
            return item
        if part.kind == CONTENT:
            item |= {"type": "message", "role": "assistant"}
            return item | {"content": [] if is_empty else [_content_part(part.kind, text)]}
        item |= {"type": "function_call", "call_id": part.call["id"]}
        return item | {"name": part.call["function"]["name"], "arguments": text}

    def _id(self, part: Part) -> str:
        prefix = {REASONING: "rs", CONTENT: "msg", CALL: "fc"}[part.kind]
        return f"{prefix}_{self._origin.id}_{part.index}"

    def _events(self) -> Iterator[dict]:
        """Yields the events of the tokens since the last call, without numbers."""
        deltas, _ = self._chat.take()
        for kind, part, text in self._stream.feed(deltas):
            if kind == BEGIN:
                yield from self._begin(part)
            elif kind == END:
                yield from self._end(part, "completed")
            else:
                where = self._where(part)
                yield {"type": f"{_TEXTS[part.kind]}.delta", **where, "delta": text} | _none(part)
        if self._chat.ended:
            for _, part, _ in self._stream.close():
                yield from self._end(part, self._status())

    def _where(self, part: Part) -> dict:
        """Returns the fields that locate a part."""
        where = {"item_id": self._id(part), "output_index": part.index}
        return where if part.kind == CALL else where | {"content_index": 0}

    def _begin(self, part: Part) -> Iterator[dict]:
        item = self._item(part, "in_progress", is_empty=True)
        yield {"type": "response.output_item.added", "output_index": part.index, "item": item}
        if part.kind != CALL:
            empty = _content_part(part.kind, "")
            yield {"type": "response.content_part.added", **self._where(part), "part": empty}

    def _end(self, part: Part, status: str) -> Iterator[dict]:
        where, field = self._where(part), "arguments" if part.kind == CALL else "text"
        done = {"type": f"{_TEXTS[part.kind]}.done", **where, field: part.text} | _none(part)
        if part.kind == CALL:
            done["name"] = part.call["function"]["name"]
        yield done
        if part.kind != CALL:
            complete = _content_part(part.kind, part.text)
            yield {"type": "response.content_part.done", **where, "part": complete}
        item = self._item(part, status)
        yield {"type": "response.output_item.done", "output_index": part.index, "item": item}


_TEXTS = {
    REASONING: "response.reasoning_text",
    CONTENT: "response.output_text",
    CALL: "response.function_call_arguments",
}


def _content_part(kind: str, text: str) -> dict:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _none(part: Part) -> dict:
    """Returns the log-probs of a text's event: none are returned."""
    return {"logprobs": []} if part.kind == CONTENT else {}
