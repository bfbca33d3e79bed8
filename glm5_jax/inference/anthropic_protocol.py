"""Translates Anthropic's Messages API (`/v1/messages`) to a chat, and the chat's reply to a message of that API.

1. `to_chat` turns a body into one of `/v1/chat/completions`, which `Reader.chat` parses.
2. `AnthropicMessages` builds the response or the events of a stream.

Differences to a chat: thinking is off unless `thinking` enables it, an assistant's message at the end is continued, and
a call that is cut off or cannot be parsed is text, because the input of a call must be an object. The `signature` of
thinking is empty. The layouts of the family do not show `is_error` of a tool's result.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.replies import Chat, Origin, ReplyForm
from glm5_jax.inference.reply_parts import BEGIN, CALL, CONTENT, END, REASONING, Part, PartStream
from glm5_jax.inference.request import DEADLINE, LENGTH, Handle
from glm5_jax.inference.request_bodies import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_TEXTS,
    Items,
    Temperature,
    Tools,
    TopP,
)
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.runtime.json_structs import Count, JsonStruct, PositiveInteger, decode
from glm5_jax.text.messages import describe, is_unparsed
from glm5_jax.text.tokenizer import Tokenizer

_THINKING = {"enabled": "enabled", "adaptive": "enabled", "disabled": "disabled"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(JsonStruct, kw_only=True, frozen=True):
    """Thinking of a reply."""

    fixed = {"display": "summarized"}
    type: Literal["enabled", "adaptive", "disabled"] = "disabled"
    budget_tokens: Count | None = None


class ToolChoice(JsonStruct, kw_only=True, frozen=True):
    """Tools that a reply may or must call."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(JsonStruct, kw_only=True, frozen=True):
    """JSON schema of a reply's content."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(JsonStruct, kw_only=True, frozen=True):
    """Effort and format of a reply."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(JsonStruct, kw_only=True, frozen=True):
    """Edit of the context, as agents send it: the thinking of earlier turns is left out, or kept."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(JsonStruct, kw_only=True, frozen=True):
    """Edits of the context."""

    edits: Annotated[tuple[ContextEdit, ...], Meta(max_length=16)] = ()


class MessagesRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/v1/messages`."""

    # Fields that change nothing in this server.
    ignored = frozenset(("metadata", "service_tier", "cache_control", "inference_geo", "betas"))
    messages: Items
    system: str | Items | None = None
    model: str | None = None
    max_tokens: PositiveInteger | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Count | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Meta(max_length=MAX_STOP_TEXTS),
        ]
        | None
    ) = None
    stream: bool = False
    thinking: Thinking = Thinking()
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement = ContextManagement()


_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")


def to_chat(body: Any) -> dict:
    """Returns a body of `/v1/messages` as one of `/v1/chat/completions`. Raises ApiError."""
    request = decode(body, MessagesRequest, ignore_neutral=True)
    fields = request.non_default_fields()
    chat = {name: fields[name] for name in _SAME if name in fields}
    messages = [one for i, message in enumerate(request.messages) for one in _messages(message, i)]
    if request.system is not None:
        messages.insert(0, {"role": "system", "content": _text_of(request.system, "system")})
    chat["messages"] = messages
    chat["continue_final_message"] = bool(messages) and messages[-1]["role"] == "assistant"
    if request.stop_sequences is not None:
        chat["stop"] = request.stop_sequences
    thinking: dict[str, Any] = {"type": _THINKING[request.thinking.type]}
    if request.thinking.budget_tokens is not None:
        thinking["budget_tokens"] = request.thinking.budget_tokens
    for edit in request.context_management.edits:
        thinking["clear_thinking"] = edit.keep != "all"
    chat["thinking"] = thinking
    if request.tools:
        chat["tools"] = [_tool(tool, i) for i, tool in enumerate(request.tools)]
    return chat | _tool_choice(request.tool_choice) | _output(request.output_config)


def _messages(message, i: int) -> Iterator[dict]:
    """Yields a message in OpenAI's form; a tool's result is a message of its own."""
    match message:
        case {"role": "assistant", "content": content}:
            yield _assistant(content, f"messages.{i}")
        case {"role": "user" | "system" as role, "content": content}:
            yield from _user(role, content, f"messages.{i}")
        case _:
            raise _error(
                f"messages.{i}: {describe(message)} is no message; give role 'user' or 'assistant' and content"
            )


def _user(role: str, content, path: str) -> Iterator[dict]:
    texts = []
    for block in _blocks(content, path):
        if block.get("type") != "tool_result":
            texts.append(_block_text(block, path))
            continue
        if texts:
            raise _error(f"{path}: text stands before a tool_result; put all results first")
        id_ = block.get("tool_use_id")
        result = _text_of(block.get("content") or "", path)
        yield {"role": "tool", "tool_call_id": id_, "content": result}
    if texts or not content:
        yield {"role": role, "content": "".join(texts)}


def _assistant(content, path: str) -> dict:
    texts, thinking, calls = [], [], []
    for block in _blocks(content, path):
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                thinking.append(text)
            case {"type": "tool_use", "name": name, "input": arguments}:
                function = {"name": name, "arguments": arguments}
                calls.append({"type": "function", "id": block.get("id"), "function": function})
            case _:
                texts.append(_block_text(block, path))
    message = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    return message | ({"tool_calls": calls} if calls else {})


def _blocks(content, path: str) -> list[Mapping]:
    """Returns the blocks of a content. Raises ApiError."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(one, Mapping) for one in content):
        raise _error(f"{path}: content is {describe(content)}; give text or a list of blocks")
    return content


def _text_of(content, path: str) -> str:
    return "".join(_block_text(block, path) for block in _blocks(content, path))


def _block_text(block: Mapping, path: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    raise _error(
        f"{path}: a block of type {describe(block.get('type'))} cannot be read here; this model reads text, thinking, "
        "tool_use and tool_result"
    )


def _error(message: str) -> ApiError:
    return ApiError(message, param="messages")


def _tool(tool: Mapping, i: int) -> dict:
    """Returns a tool in OpenAI's form. Raises ApiError for a tool that the server would have to run."""
    if tool.get("type", "custom") not in ("custom", None):
        raise ApiError(
            f"tools.{i} has type {describe(tool['type'])}, which this server cannot run; define it with input_schema",
            param="tools",
        )
    function = {"name": tool.get("name"), "description": tool.get("description")}
    function |= {"parameters": tool.get("input_schema"), "strict": tool.get("strict")}
    known = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": known}


def _tool_choice(choice: ToolChoice | None) -> dict:
    if choice is None:
        return {}
    name = {"type": "function", "function": {"name": choice.name}}
    chosen = name if choice.type == "tool" else _CHOICES[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _output(config: OutputConfig) -> dict:
    fields = {}
    if config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config.format is not None:
        schema = {"schema": config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def error_body(error: ApiError) -> dict:
    """Returns the JSON of an error in Anthropic's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kinds |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = kinds.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


class AnthropicMessages(ReplyForm):
    """Responses of `/v1/messages`; see `ReplyForm`."""

    has_named_events = True

    def __init__(
        self, parsed: ParsedRequest, handles: Sequence[Handle], origin: Origin, tokenizer: Tokenizer
    ):
        [self._handle] = handles
        self._chat = Chat(parsed, self._handle, tokenizer)
        self._origin, self._stream = origin, PartStream()

    def complete(self) -> dict:
        for _ in self._events():
            pass
        content = [_full_block(part) for part in self._stream.parts]
        return self._message(content) | self._end() | {"usage": self._usage()}

    def first(self) -> list[dict]:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message | {"usage": self._usage()}}]

    def piece(self, index: int) -> list[dict]:
        return [] if self._chat.ended else list(self._events())

    def last(self) -> list[dict]:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> list[dict]:
        return [error_body(error)]

    def _events(self) -> Iterator[dict]:
        """Yields the events of the tokens since the last call."""
        deltas, _ = self._chat.take()
        for kind, part, text in self._stream.feed(_broken_calls_as_text(deltas)):
            if kind == BEGIN:
                block = _empty_block(part)
                yield {"type": "content_block_start", "index": part.index, "content_block": block}
            elif kind == END:
                yield from _block_end(part)
            else:
                yield _block_delta(part, _DELTAS[part.kind], text)
        if self._chat.ended:
            for _, part, _ in self._stream.close():
                yield from _block_end(part)

    def _message(self, content: list[dict]) -> dict:
        return {
            "id": f"msg_{self._origin.id}",
            "type": "message",
            "role": "assistant",
            "model": self._origin.model,
            "content": content,
        }

    def _end(self) -> dict:
        reason, stopped_by = self._handle.finish_reason, self._handle.stopped_by
        if self._chat.finish_reason == "tool_calls":
            name = "tool_use"
        elif isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        else:
            name = "max_tokens" if reason in (LENGTH, DEADLINE) else "end_turn"
        return {"stop_reason": name, "stop_sequence": None}

    def _usage(self) -> dict:
        """Returns the token counts; `input_tokens` excludes those that were read from the cache."""
        num_cached = self._handle.cached_tokens or 0
        return {
            "input_tokens": len(self._handle.request.ids) - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._handle.num_tokens,
        }


_DELTAS = {
    REASONING: ("thinking_delta", "thinking"),
    CONTENT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}


def _broken_calls_as_text(deltas: Iterable[Mapping]) -> Iterator[Mapping]:
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if is_unparsed(call["function"]["arguments"]):
                yield {"content": call["function"]["arguments"]}
            else:
                yield {"tool_calls": [call]}
        if "tool_calls" not in delta:
            yield delta


def _empty_block(part: Part) -> dict:
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.kind == CONTENT:
        return {"type": "text", "text": ""}
    call = part.call
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _full_block(part: Part) -> dict:
    block = _empty_block(part)
    if part.kind == CALL:
        return block | {"input": json.loads(part.text)}
    return block | {block["type"]: part.text}


def _block_delta(part: Part, names: tuple[str, str], text: str) -> dict:
    kind, field = names
    return {
        "type": "content_block_delta",
        "index": part.index,
        "delta": {"type": kind, field: text},
    }


def _block_end(part: Part) -> Iterator[dict]:
    if part.kind == REASONING:
        yield _block_delta(part, ("signature_delta", "signature"), "")
    yield {"type": "content_block_stop", "index": part.index}
