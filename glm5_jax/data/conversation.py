"""Converts lines of SFT data to records that train on the assistant's correct replies (GLM-5 3.1).

A line is a JSON object:

    {"messages": [...], "tools": [...], "mode": "preserved"}

messages and tools are in OpenAI's form; chat_forms.py converts others. mode (text/thinking.py) and unused tools may be
missing. An assistant's message may have `"weight": 0`, or `"error": "why"`, as an external verdict, for example on a
step that was reverted later. Content that a text chat cannot hold (images, calls in an older form) is rejected, not
dropped.

Error masking: a message with a mistake stays in the context, so that the model is trained on its correction, but not on
the message. Mistakes are:

- verdicts,
- calls whose arguments are not a JSON object,
- calls of unknown tools,
- arguments that their schema does not allow.

The paper does not print its rule.
"""

import collections
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm5_jax.data.chat_forms import to_openai_form
from glm5_jax.data.record import TokenRecord
from glm5_jax.runtime.files import check_line
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.messages import (
    MESSAGE_FIELDS,
    MISPLACED_FIELDS,
    ChatError,
    is_unparsed,
    lost_text,
    read_message,
    read_messages,
    read_tools,
)
from glm5_jax.text.schemas import MAX_STEPS, Schema, SchemaError, UnfollowableError
from glm5_jax.text.thinking import MODES, Sample, SampleRenderer, split_samples
from glm5_jax.text.tokenizer import Tokenizer

UNREAD_ARGUMENT = "arguments"  # name of the argument that holds the text of invalid arguments
_MAX_QUOTED = 120  # characters of an error
_STEPS_PER_CHARACTER = 2  # of arguments, which their schema may take
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair, as JSON escapes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Parsed line.

    Attributes:
      messages: messages for `render_chat`, with the fields that it reads, content as text and results in the order of
        their calls; arguments that were not an object are text.
      tools: function definitions; None: there are none.
      mode: mode of thinking; None: that of the source.
      mistakes: {index of an assistant message: why it is masked}.
    """

    messages: tuple[Mapping, ...]
    tools: tuple[Mapping, ...] | None
    mode: str | None
    mistakes: Mapping[int, str]

    @property
    def key(self) -> str:
        """The key, equal for conversations with the same training data."""
        messages = [
            {name: x.strip() if isinstance(x, str) else x for name, x in message.items()}
            for message in self.messages
        ]
        mistakes = sorted(self.mistakes)
        return json.dumps([messages, self.tools, self.mode, mistakes], sort_keys=True)


# Fields of a line that are read; "answer" is for the verifiers.
LINE_FIELDS = frozenset(("messages", "tools", "functions", "mode", "answer"))
VERDICT_FIELDS = frozenset(("weight", "error"))  # fields of a message that no chat shows


def unread_fields(line: str | bytes | Mapping) -> list[str]:
    """Returns the names of ignored fields ("messages.NAME" for those of a message) of a line that `parse_line` accepts."""
    value = to_openai_form(line if isinstance(line, Mapping) else read_json(line))
    names = set(value) - LINE_FIELDS
    for message in value["messages"]:
        unknown = set(message) - MESSAGE_FIELDS - VERDICT_FIELDS - MISPLACED_FIELDS.keys()
        names |= {f"messages.{name}" for name in unknown}
    return sorted(names)


def parse_line(line: str | bytes | Mapping) -> Conversation:
    """Parses a line. Raises ChatError if it is not JSON in UTF-8, or has invalid messages or tools."""
    # Fields of the line.
    value = line if isinstance(line, Mapping) else read_json(line)
    if not isinstance(value, Mapping):
        raise ChatError(f"the line has no messages; it is of type {type(value).__name__}")
    value = to_openai_form(value)
    if value.get("functions"):
        raise ChatError("the line has functions, an older form; give them as tools")
    mode, tools = value.get("mode"), value.get("tools") or None
    if mode is not None and mode not in MODES:
        raise ChatError(f"mode is {mode!r}; use one of {', '.join(MODES)}")
    if tools is not None and not isinstance(tools, list):
        raise ChatError(f"tools is of type {type(tools).__name__}; give a list of definitions")
    schemas = _schemas(json.dumps(tools or []))
    # Messages, and their mistakes.
    originals, mistakes = value["messages"], {}
    readable = originals
    if isinstance(originals, list):
        readable = [_readable(message, i, mistakes) for i, message in enumerate(originals)]
    messages = read_messages(readable)
    _check_complete(messages)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            if originals[i].get("content") is None:
                raise ChatError(f"message {i} of role {message['role']!r} has no content")
        elif i not in mistakes:
            if mistake := _verdict(originals[i], i) or _call_mistake(message, schemas):
                mistakes[i] = mistake
    return Conversation(
        messages=messages,
        tools=None if tools is None else tuple(tools),
        mode=mode,
        mistakes=mistakes,
    )


def make_records(
    conversation: Conversation,
    tokenizer: Tokenizer,
    *,
    mode: str = "interleaved",
    variant: str = "glm5",
    mask_errors: bool = True,
) -> list[TokenRecord]:
    """Returns a record of every sample with tokens to train on.

    mode: mode of conversations without one. mask_errors: whether mistakes are masked in the loss. Spans of kind "error"
    mark the mistakes. Raises the ChatErrors of `thinking.split_samples`.
    """
    renderer = SampleRenderer(tokenizer, conversation.tools, variant)
    return [
        make_record(sample, conversation, renderer, mask_errors=mask_errors)
        for sample in trained_samples(conversation, mode, mask_errors, variant)
    ]


def trained_samples(
    conversation: Conversation, mode: str, mask_errors: bool = True, variant: str = "glm5"
) -> list[Sample]:
    """Returns the samples of `make_records`, not rendered yet. Raises ChatError if the variant lacks the mode."""
    mode = conversation.mode or mode
    if mode == "preserved" and not VARIANTS[variant].keeps_reasoning:
        raise ChatError(f"mode is 'preserved'; {variant} cannot keep earlier reasoning")
    masked_mistakes = conversation.mistakes if mask_errors else ()
    samples = split_samples(conversation.messages, mode)
    return [
        sample
        for sample in samples
        if not all(i in masked_mistakes for i in sample.trained_replies)
    ]


def untrainable_reason(conversation: Conversation) -> str:
    """Returns why `trained_samples` returns no sample of a conversation."""
    (i, why), *more = sorted(conversation.mistakes.items())
    others = f" (and {len(more)} more)" * bool(more)
    return (
        f"it has no token to train on, because all its replies are masked: message {i}, {why}{others}; remove it, "
        "or correct a reply"
    )


def make_record(
    sample: Sample,
    conversation: Conversation,
    renderer: SampleRenderer,
    *,
    mask_errors: bool = True,
) -> TokenRecord:
    """Returns the record of one sample of a conversation; renderer: renderer of that conversation."""
    rendered = renderer.render(sample)
    mask, errors = np.array(rendered.loss_mask, np.float32), []
    for span in rendered.spans:
        if span.message in conversation.mistakes and mask[span.first : span.last].any():
            errors.append((span.first, span.last, "error"))
            if mask_errors:
                mask[span.first : span.last] = 0
    token_ids = np.asarray(rendered.ids)
    return TokenRecord(token_ids=token_ids, loss_mask=mask, ce_weight=mask, spans=errors)


def read_json(line: str | bytes) -> Any:
    """Returns the value of a line of JSON.

    Raises ChatError if it is not JSON, or has a duplicate field, NaN or infinity, or half of a surrogate pair.
    """
    try:
        check_line(line)
    except ValueError as error:
        raise ChatError(str(error)) from None
    try:
        text = line if isinstance(line, str) else line.decode("utf-8")  # json would pass surrogates
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ChatError("the line holds half of a surrogate pair; correct or remove it") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ChatError(f"the line is not JSON in UTF-8: {error}") from None
    return value


def _object(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the field {twice!r} twice; remove one")
    return value


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


@functools.lru_cache(64)  # conversations share their tools
def _schemas(tools: str) -> dict[str, Mapping]:
    """Returns the schema of each tool's arguments by name. Raises ChatError for an invalid schema."""
    schemas = {}
    for i, function in enumerate(read_tools(json.loads(tools))):
        name, schema = function["name"], function.get("parameters") or {}
        try:
            Schema(schema).check()
            _argument_problem(schema, {})
        except UnfollowableError as error:
            raise ChatError(
                f"the parameters of tool {name!r} have a dangling or endless reference: {error}; write them out"
            ) from None
        except SchemaError as error:
            raise ChatError(
                f"tool {i}, {name!r}, has parameters that are not a JSON schema: {error}"
            ) from None
        schemas[name] = schema
    return schemas


def _argument_problem(schema: Mapping, arguments: Mapping) -> str | None:
    """Returns why a schema rejects arguments, or None; long ones may take more steps. Raises SchemaError."""
    max_steps = MAX_STEPS + _STEPS_PER_CHARACTER * len(json.dumps(arguments))
    return Schema(schema, max_steps).problem(arguments)


def _readable(message, i: int, mistakes: dict[int, str]):
    """Returns a message without the fields that no chat shows, and with objects as arguments.

    Other arguments become text, and are added to the mistakes. Raises ChatError for content that would be lost.
    """
    if not isinstance(message, Mapping):
        return message  # `read_messages` raises the error
    known = MESSAGE_FIELDS | MISPLACED_FIELDS.keys()
    message = {name: value for name, value in message.items() if name in known}
    if message.get("role") == "assistant" and (lost := lost_text(message, i)):
        raise ChatError(
            f"message {i} would lose {lost[:_MAX_QUOTED]!r} of its content, which is between thinking markers; "
            "give the reasoning as reasoning_content"
        )
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_readable_call(call, i, mistakes) for call in calls]
    return message


def _readable_call(call, i: int, mistakes: dict[int, str]):
    """Returns a call of message i with an object as arguments."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return call
    name, arguments = function["name"], function.get("arguments")
    try:
        if is_unparsed(arguments):
            raise ChatError(f"message {i} calls {name!r} in a form that cannot be parsed")
        read_message(
            {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]}, i
        )
        return call
    except ChatError as error:
        mistakes.setdefault(i, str(error))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call.get("id"), "name": name, "arguments": {UNREAD_ARGUMENT: text}}


def _check_complete(messages: Sequence[Mapping]) -> None:
    """Raises ChatError for empty replies, and for calls without results before the next turn."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        num_calls = len(message.get("tool_calls", ()))
        texts = message["content"], message.get("reasoning_content", "")
        if not (num_calls or any(text.strip() for text in texts)):
            raise ChatError(f"message {i}, an assistant's, is empty; give it content or drop it")
        later = range(i + 1, len(messages))
        count = sum(1 for _ in itertools.takewhile(lambda k: messages[k]["role"] == "tool", later))
        if count < num_calls and i + 1 + count < len(messages):
            raise ChatError(
                f"message {i} makes {num_calls} calls, {count} of which have a result before the next "
                "turn; add the others or drop the calls"
            )


def _verdict(message: Mapping, i: int) -> str | None:
    weight, error = message.get("weight", 1), message.get("error")
    if weight not in (0, 1) or isinstance(weight, bool):
        raise ChatError(f"message {i} has weight {weight!r}; it must be 0 or 1")
    if error is not None and not isinstance(error, str):
        raise ChatError(f"message {i} has error {error!r}; give a text that describes the mistake")
    return error or (None if weight else "weight 0")


def _call_mistake(message: Mapping, schemas) -> str | None:
    """Returns the first mistake in the message's calls of the line's tools, or None."""
    for call in message.get("tool_calls", ()):
        name = call["name"]
        if name not in schemas:
            return f"no tool is named {name!r}; there are {', '.join(schemas) or 'none'}"
        try:
            problem = _argument_problem(schemas[name], call["arguments"])
        except SchemaError as error:
            raise ChatError(
                f"arguments of {name!r} cannot be validated by its parameters: {error}; write these out"
            ) from None
        if problem is not None:
            return f"{name!r} does not allow its arguments: {problem[:_MAX_QUOTED]}"
    return None
