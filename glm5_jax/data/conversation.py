"""Conversations for SFT: a line of a file becomes records that learn what the assistant did right (GLM-5 3.1).

A line is a JSON object:

    {"messages": [...], "tools": [...], "mode": "preserved"}

messages and tools are in OpenAI's form; mode (text/thinking.py) and tools may be missing. An assistant's
message may have `"weight": 0`, or `"error": "why"`: a verdict from outside, such as a step that was taken
back later.

Error masking: a message with a mistake stays in the context, so that its correction can be learnt, and none of its
own tokens is. Mistakes are verdicts, calls whose arguments are no JSON object, calls of tools that are
not there, and arguments that their schema does not allow. The paper does not print its rule.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping

import jsonschema
import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.text.chat import ChatError, check, reply_of
from glm5_jax.text.thinking import MODES, Sample, samples
from glm5_jax.text.tokenizer import Tokenizer

UNREAD = "arguments"  # the argument under which a call is shown whose arguments cannot be read
_SHOWN = 120  # characters of an error


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What `parse` made of a line.

    Attributes:
      messages: that `render_chat` lays out; arguments that were no object stand in them as text.
      tools: function definitions, None if there are none.
      mode: of thinking; None leaves it to the reader.
      mistakes: of assistant messages by number, why they are not to be learnt.
    """

    messages: tuple[Mapping, ...]
    tools: tuple[Mapping, ...] | None
    mode: str | None
    mistakes: Mapping[int, str]


def parse(line: str | bytes | Mapping) -> Conversation:
    """Reads a line. ChatError says what makes it useless: no JSON, not UTF-8, messages that no chat can
    hold, tools that are none."""
    value = line if isinstance(line, Mapping) else _json(line)
    if not isinstance(value, Mapping) or "messages" not in value:
        have = ", ".join(value) if isinstance(value, Mapping) else type(value).__name__
        raise ChatError(f"the line has no messages; it has {have or 'nothing'}")
    mode, tools = value.get("mode"), value.get("tools") or None
    if mode is not None and mode not in MODES:
        raise ChatError(f"mode is {mode!r}; use one of {', '.join(MODES)}")
    schemas = None if tools is None else _schemas(json.dumps(tools))
    messages, mistakes = value["messages"], {}
    if isinstance(messages, list):
        messages = [_readable(m, i, mistakes) for i, m in enumerate(messages)]
    check(messages)
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i not in mistakes:
            if mistake := _verdict(message, i) or _broken_rule(message, i, schemas):
                mistakes[i] = mistake
    return Conversation(tuple(messages), None if tools is None else tuple(tools), mode, mistakes)


def records(
    conversation: Conversation,
    tokenizer: Tokenizer,
    *,
    mode: str = "interleaved",
    variant: str = "glm5",
    mask_errors: bool = True,
) -> list[TokenRecord]:
    """A record of every sample that has something to learn.

    mode: of conversations that name none. mask_errors: whether mistakes are left out of the loss. Spans of kind
    "error" are the mistakes. ChatError as `thinking.samples`.
    """
    return [
        record(sample, conversation, tokenizer, variant=variant, mask_errors=mask_errors)
        for sample in trained(conversation, mode, mask_errors)
    ]


def trained(conversation: Conversation, mode: str, mask_errors: bool = True) -> list[Sample]:
    """The samples of `records`, not yet laid out."""
    unlearnt = conversation.mistakes if mask_errors else ()
    found = samples(conversation.messages, conversation.mode or mode)
    return [sample for sample in found if not all(i in unlearnt for i in sample.learnt)]


def record(
    sample: Sample,
    conversation: Conversation,
    tokenizer: Tokenizer,
    *,
    variant: str = "glm5",
    mask_errors: bool = True,
) -> TokenRecord:
    """The record of one sample of a conversation."""
    rendered = sample.render(tokenizer, conversation.tools, variant)
    mask, errors = np.array(rendered.loss_mask, np.float32), []
    for span in rendered.spans:
        if span.message in conversation.mistakes and mask[span.first : span.last].any():
            errors.append((span.first, span.last, "error"))
            if mask_errors:
                mask[span.first : span.last] = 0
    return TokenRecord(rendered.ids, mask, ce_weight=mask, spans=errors)


def _json(line: str | bytes):
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ChatError(f"the line is not JSON in UTF-8: {error}") from None


@functools.lru_cache(64)  # conversations share their tools, and schemas take a millisecond to check
def _schemas(tools: str) -> dict[str, jsonschema.protocols.Validator]:
    """A validator of each tool's arguments, by name."""
    found, tools = {}, json.loads(tools)
    for i, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ChatError(f"tool {i} has no name; give tools in OpenAI's form")
        schema = function.get("parameters") or {}
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ChatError(
                f"tool {i}, {name!r}, has parameters that are no JSON schema: {error.message}"
            ) from None
        found[name] = jsonschema.Draft202012Validator(schema)
    return found


def _readable(message, i: int, mistakes: dict[int, str]):
    """The message with arguments as objects; those that are none are noted, and stand as text."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    made = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            made.append(call)  # `check` says what is wrong with it
            continue
        arguments = function.get("arguments")
        try:
            [(name, arguments)] = reply_of({"tool_calls": [function]}, i).calls
        except ChatError as error:
            mistakes.setdefault(i, str(error))
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
            name, arguments = function["name"], {UNREAD: shown}
        made.append({"name": name, "arguments": arguments})
    return {**message, "tool_calls": made}


def _verdict(message: Mapping, i: int) -> str | None:
    weight, error = message.get("weight", 1), message.get("error")
    if weight not in (0, 1) or isinstance(weight, bool):
        raise ChatError(f"message {i} has weight {weight!r}; it must be 0 or 1")
    if error is not None and not isinstance(error, str):
        raise ChatError(f"message {i} has error {error!r}; say in words what is wrong")
    return error or (None if weight else "weight 0")


def _broken_rule(message: Mapping, i: int, schemas) -> str | None:
    """What is wrong with the message's calls, if the tools are known."""
    if schemas is None:
        return None
    for name, arguments in reply_of(message, i).calls:
        if name not in schemas:
            return f"no tool is named {name!r}; there are {', '.join(schemas)}"
        error = jsonschema.exceptions.best_match(schemas[name].iter_errors(arguments))
        if error is not None:
            return f"{name!r} does not allow its arguments: {error.message[:_SHOWN]}"
    return None
