"""Reads messages and tools in OpenAI's form, for servers, gateways, rollouts and training data.

`read_messages` normalises the messages of a client for `render_chat`: content as one text, roles of the layout, reasoning
under one name, and results in the order of their calls. It is idempotent. A message that no chat can show raises a
`ChatError` with its number; nothing is dropped silently.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
# Roles of OpenAI's API, with the equivalent role of the layouts.
OTHER_ROLES = {"developer": "system"}
# Fields that no layout of the family shows, and that do not change the meaning of a message.
IGNORED_FIELDS = frozenset(("name", "cache_control"))
# Fields in which other programs store text that a chat should show, and the fix.
MISPLACED_FIELDS = {
    "function_call": "give it as tool_calls",
    "thinking": "call it reasoning_content",
    "thinking_blocks": "give their text as reasoning_content",
    "reasoning_details": "give their text as reasoning_content",
    "audio": "this model reads text only",
    "images": "this model reads text only",
}
_FIELDS = {
    "system": frozenset(("role", "content")),
    "user": frozenset(("role", "content")),
    "tool": frozenset(("role", "content", "tool_call_id")),
    "assistant": frozenset(("role", "content", "reasoning_content", "reasoning", "tool_calls")),
}
MESSAGE_FIELDS = frozenset.union(IGNORED_FIELDS, *_FIELDS.values())
_PART_FIELDS = frozenset(("type", "text", "cache_control"))
_CALL_FIELDS = frozenset(("id", "type", "index", "function", "name", "arguments"))
_FUNCTION_FIELDS = frozenset(("name", "arguments"))
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_MAX_QUOTED_CHARS = 60


class ChatError(ValueError):
    """Raised for a message or a tool that no chat can hold; the message names it and the fix."""


def read_messages(messages: Sequence[Mapping]) -> tuple[dict, ...]:
    """Reads the messages of a chat.

    Returns messages with `role` (one of `ROLES`) and `content` (text). An assistant's message has `reasoning_content` if it
    has reasoning, and `tool_calls` if there are any: `{"name", "arguments"}`. The arguments are an object, or the text of a
    call that could not be parsed (`is_unparsed`). Results of tools are in the order of their calls.

    Raises ChatError for messages that no chat can hold.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatError("messages is empty or not a list; give at least one message")
    chat: list[dict] = []
    calls: list[dict] | None = None  # of the assistant's message before the results
    results: list[tuple[int, dict]] = []
    for i, message in enumerate(messages):
        read = _read_message(message, i)
        if read["role"] == "tool":
            if not calls or len(results) == len(calls):
                what = "more results than calls" if calls else "no assistant's call before it"
                raise ChatError(
                    f"message {i} is a tool's result with {what}; add the call or drop it"
                )
            results.append((i, read))
            continue
        chat += _sort_results(results, calls)
        chat.append(read)
        calls, results = read.get("tool_calls"), []
    chat += _sort_results(results, calls)
    return tuple(map(_without_ids, chat))


def read_message(message: Mapping, i: int = 0) -> dict:
    """Reads one message into the form of `read_messages`; i: its number in errors. Raises ChatError."""
    return _without_ids(_read_message(message, i))


def is_unparsed(arguments: Any) -> bool:
    """Returns True if the arguments are the text of a call that was cut off or could not be parsed.

    Servers send the original text of such a call, from `<tool_call>` on, so that no client parses it as JSON.
    """
    return isinstance(arguments, str) and arguments.startswith(CALL_START)


def lost_text(message: Mapping, i: int = 0) -> str:
    """Returns the text of an assistant's message that the published templates drop.

    If content includes reasoning, they drop the text before its `<think>` and that between its first and last `</think>`.
    A separate reasoning_content, which may be "", avoids that.
    """
    content = _content(message, i)
    if _reasoning(message, i) is not None or "</think>" not in content:
        return ""
    (before, _), (between, _) = _split(content)
    return before.strip() + between.strip()


def read_tools(tools: Sequence[Mapping]) -> tuple[Mapping, ...]:
    """Returns the function of each tool. Raises ChatError for an invalid tool or a duplicate name."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ChatError(f"tools is {describe(tools)}; it must be a list")
    functions = tuple(tool_function(tool, i) for i, tool in enumerate(tools))
    names: set[str] = set()
    for function in functions:
        if function["name"] in names:
            raise ChatError(f"two tools are named {function['name']!r}; rename or remove one")
        names.add(function["name"])
    return functions


def tool_function(tool: Mapping, i: int = 0) -> Mapping:
    """Returns the function of a tool in OpenAI's form, with or without its envelope.

    It has a name, and its `parameters` and their `properties` are objects or missing. Raises ChatError with tool i and
    the fix for any other tool.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if not isinstance(function, Mapping):
        raise ChatError(f"tool {i} is {describe(tool)}; it must be an object with a function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ChatError(
            f"tool {i} has no name; give functions in OpenAI's form, not {describe(tool)}"
        )
    schema = function.get("parameters") or {}
    if not isinstance(schema, Mapping):
        raise ChatError(
            f"tool {i}, {name!r}, has parameters {describe(schema)}; they must be the schema of an object"
        )
    if not isinstance(schema.get("properties") or {}, Mapping):
        raise ChatError(
            f"tool {i}, {name!r}, has properties {describe(schema['properties'])}; they must be an object"
        )
    return function


def argument_texts(name: str, arguments: Mapping, i: int) -> list[tuple[str, str]]:
    """Returns (name, text) of arguments: text unchanged, other values as JSON. Raises ChatError."""
    return [
        (key, value)
        if isinstance(value, str)
        else (key, to_json_text(value, f"message {i} calls {name!r} with {key!r}"))
        for key, value in arguments.items()
    ]


def to_json_text(value: Any, what: str) -> str:
    """Returns a value as JSON. Raises ChatError, whose text begins with `what`, if it cannot be encoded."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{what} that is not JSON: {error}") from None


def describe(value: Any) -> str:
    """Returns the repr of a value for an error, truncated."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[: _MAX_QUOTED_CHARS - 3]}..."


def _read_message(message: Mapping, i: int) -> dict:
    """Reads one message; results keep their `tool_call_id`, and calls their `id`, for `_sort_results`."""
    if not isinstance(message, Mapping):
        raise ChatError(f"message {i} is {describe(message)}; it must be an object with a role")
    role = message.get("role")
    if isinstance(role, str):
        role = OTHER_ROLES.get(role, role)
    if role not in ROLES:
        raise ChatError(f"message {i} has role {describe(role)}; use one of {', '.join(ROLES)}")
    _check_fields(message, role, i)
    read = {"role": role, "content": _content(message, i)}
    if role == "tool" and (id_ := _id(message, "tool_call_id", f"message {i}")):
        read["tool_call_id"] = id_
    return read | _reply(message, read["content"], i) if role == "assistant" else read


def _check_fields(message: Mapping, role: str, i: int) -> None:
    """Raises ChatError for a non-empty field that a message of this role does not show."""
    for name in sorted(message.keys() - _FIELDS[role] - IGNORED_FIELDS, key=str):
        if _is_empty(message[name]):
            continue
        if name == "tool_calls":
            raise ChatError(f"message {i} of role {role!r} has tool_calls; only an assistant calls")
        if name in MISPLACED_FIELDS:
            raise ChatError(
                f"message {i} has {name}, which would be lost; {MISPLACED_FIELDS[name]}"
            )
        raise ChatError(
            f"message {i} of role {role!r} has the field {describe(name)}, which no chat shows; leave it out"
        )


def _is_empty(value) -> bool:
    """Returns True if the value of a field is empty, as programs write unused fields."""
    values = value.values() if isinstance(value, Mapping) else (value,)
    return all(one is None or one == "" or one == [] for one in values)


def _content(message: Mapping, i: int) -> str:
    """Returns the text of a message's content: text, or a list of text parts and strings. Null is empty."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ChatError(
            f"message {i} has content {describe(content)}; it must be text or a list of parts"
        )
    return "".join(part if isinstance(part, str) else _part_text(part, i) for part in content)


def _part_text(part, i: int) -> str:
    if not isinstance(part, Mapping):
        raise ChatError(f"message {i} has the part {describe(part)}; it must be text or an object")
    if part.get("type") != "text":
        raise ChatError(
            f"message {i} has a part of type {describe(part.get('type'))}; this model reads text only, in parts of "
            "type 'text'"
        )
    if not isinstance(part.get("text"), str):
        raise ChatError(
            f"message {i} has a text part whose text is {describe(part.get('text'))}; give text"
        )
    for name in sorted(part.keys() - _PART_FIELDS, key=str):
        if not _is_empty(part[name]):
            raise ChatError(
                f"message {i} has a part with the field {describe(name)}, which no chat shows; leave it out"
            )
    return part["text"]


def _reply(message: Mapping, content: str, i: int) -> dict:
    """Returns content, reasoning and calls of an assistant's message."""
    reasoning = _reasoning(message, i)
    if reasoning is None and "</think>" in content:
        (_, reasoning), (_, content) = _split(content)
    reply: dict = {"content": content}
    if reasoning is not None:
        reply["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is not None and (isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence)):
        raise ChatError(f"message {i} has tool_calls {describe(calls)}; it must be a list")
    if calls:
        reply["tool_calls"] = [_call(call, i) for call in calls]
    return reply


def _reasoning(message: Mapping, i: int) -> str | None:
    """Returns the reasoning in a separate field, under either of its names; None: there is none."""
    values = {}
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise ChatError(f"message {i} has {name} {describe(value)}; it must be text")
        if value is not None:
            values[name] = value
    if len(set(values.values())) > 1:
        raise ChatError(
            f"message {i} has reasoning_content and reasoning that differ; give one of them"
        )
    return next(iter(values.values()), None)


def _split(content: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Splits content into (lost text, reasoning) and (lost text, content)."""
    head, _, tail = content.partition("</think>")
    before, _, reasoning = head.rstrip("\n").rpartition("<think>")
    between, _, content = tail.rpartition("</think>")
    return (before, reasoning.lstrip("\n")), (between, content.lstrip("\n"))


def _call(call, i: int) -> dict:
    """Reads a call: name, arguments and id if present."""
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError(f"message {i} has the tool call {describe(call)}; it must name a function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ChatError(
            f"message {i} calls a function named {describe(name)}; give its name as text"
        )
    if call.get("type") not in (None, "function"):
        raise ChatError(
            f"message {i} calls {name!r} with type {describe(call['type'])}; use 'function'"
        )
    inner = _CALL_FIELDS if function is call else _FUNCTION_FIELDS
    for holder, known in ((call, _CALL_FIELDS), (function, inner)):
        for field in sorted(holder.keys() - known, key=str):
            if not _is_empty(holder[field]):
                raise ChatError(
                    f"message {i} calls {name!r} with the field {describe(field)}, which no chat shows; leave it out"
                )
    read = {"name": name, "arguments": _arguments(function.get("arguments"), name, i)}
    id_ = _id(call, "id", f"a call of message {i}")
    return read | ({"id": id_} if id_ else {})


def _arguments(arguments, name: str, i: int) -> dict | str:
    """Reads the arguments of a call: an object, the JSON of one, or the text of a call that was not parsed."""
    if is_unparsed(arguments):
        return arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ChatError(
                f"message {i} calls {name!r} with arguments that are not JSON: {error}"
            ) from None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ChatError(
            f"message {i} calls {name!r} with {describe(arguments)}; it must be an object"
        )
    argument_texts(name, arguments, i)
    return dict(arguments)


def _id(value: Mapping, field: str, what: str) -> str | None:
    id_ = value.get(field)
    if id_ is not None and not isinstance(id_, str):
        raise ChatError(f"{what} has {field} {describe(id_)}; it must be text")
    return id_ or None


def _sort_results(
    results: Sequence[tuple[int, dict]], calls: Sequence[Mapping] | None
) -> list[dict]:
    """Sorts numbered results in the order of their calls.

    A layout assigns a result to its call by its position. A result with an id belongs to the call of that id; the other
    results belong to the remaining calls, in their order. Ids are ignored if no call has one.
    """
    if not results:
        return []
    ids = [call.get("id") for call in calls or ()]
    # Indices of the calls of each id that have no result yet, the last first.
    open_calls: dict[str | None, list[int]] = {}
    for k, id_ in reversed(list(enumerate(ids))):
        open_calls.setdefault(id_, []).append(k)
    sorted_results: list[dict | None] = [None] * len(ids)
    others, has_ids = [], any(ids)
    for i, result in results:
        id_ = result.get("tool_call_id") if has_ids else None
        if id_ is None:
            others.append(result)
        elif open_calls.get(id_):
            sorted_results[open_calls[id_].pop()] = result
        else:
            what = "a second result of" if id_ in open_calls else "the result of no"
            raise ChatError(
                f"message {i} is {what} call {describe(id_)}; the calls before are {describe(ids)}"
            )
    free = (k for k, result_or_none in enumerate(sorted_results) if result_or_none is None)
    for k, result in zip(list(free), others):
        sorted_results[k] = result
    first_results = sorted_results[: len(results)]
    if None in first_results:
        raise ChatError(
            f"message {results[0][0]} and those after it have no result of call {describe(ids[first_results.index(None)])}, but one "
            "of a later call; results are assigned by their position, so give one for each call"
        )
    return [result for result in first_results if result is not None]


def _without_ids(message: dict) -> dict:
    """Returns a message without ids, which layouts do not show; call it after the results are sorted."""
    message = {name: value for name, value in message.items() if name != "tool_call_id"}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {"name": call["name"], "arguments": call["arguments"]} for call in calls
        ]
    return message
