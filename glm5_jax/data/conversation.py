"""Conversations for SFT: a line of a file becomes records that learn what the assistant did right (GLM-5 3.1).

A line is a JSON object:

    {"messages": [...], "tools": [...], "mode": "preserved"}

messages and tools are in OpenAI's form; mode (text/thinking.py) may be missing, and tools that nothing calls. An assistant's
message may have `"weight": 0`, or `"error": "why"`: a verdict from outside, such as a step that was taken
back later. What a chat of text cannot hold (images, calls in an older form) is refused, not left out.

Error masking: a message with a mistake stays in the context, so that its correction can be learnt, and none of its
own tokens is. Mistakes are verdicts, calls whose arguments are no JSON object, calls of tools that are
not there, and arguments that their schema does not allow. The paper does not print its rule.
"""

import collections
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence

import jsonschema
import numpy as np
import referencing.exceptions

from glm5_jax.data.record import TokenRecord
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
from glm5_jax.text.thinking import MODES, Sample, SampleRenderer, samples
from glm5_jax.text.tokenizer import Tokenizer

UNREAD = "arguments"  # the argument under which a call is shown whose arguments cannot be read
_SHOWN = 120  # characters of an error
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair, as JSON escapes it


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What `parse` made of a line.

    Attributes:
      messages: that `render_chat` lays out, with no other fields than it reads, content as text and results in
        the order of their calls; arguments that were no object stand in them as text.
      tools: function definitions, None if there are none.
      mode: of thinking; None leaves it to the reader.
      mistakes: of assistant messages by number, why they are not to be learnt.
    """

    messages: tuple[Mapping, ...]
    tools: tuple[Mapping, ...] | None
    mode: str | None
    mistakes: Mapping[int, str]

    @property
    def key(self) -> str:
        """Equal for conversations that teach the same."""
        messages = [
            {name: x.strip() if isinstance(x, str) else x for name, x in message.items()}
            for message in self.messages
        ]
        mistakes = sorted(self.mistakes)
        return json.dumps([messages, self.tools, self.mode, mistakes], sort_keys=True)


# What is read of a line; "answer" is the verifiers'.
LINE_FIELDS = frozenset(("messages", "tools", "functions", "mode", "answer"))
VERDICT_FIELDS = frozenset(("weight", "error"))  # of a message, which no chat shows


def unread(line: str | bytes | Mapping) -> list[str]:
    """Names of a line's fields that nothing reads ("messages.N" for those of a message) of a line that `parse`
    takes."""
    value = line if isinstance(line, Mapping) else read_json(line)
    found = set(value) - LINE_FIELDS
    for message in value["messages"]:
        unknown = set(message) - MESSAGE_FIELDS - VERDICT_FIELDS - MISPLACED_FIELDS.keys()
        found |= {f"messages.{name}" for name in unknown}
    return sorted(found)


def parse(line: str | bytes | Mapping) -> Conversation:
    """Reads a line. ChatError says what makes it useless: no JSON, not UTF-8, messages that no chat can
    hold, tools that are none."""
    value = line if isinstance(line, Mapping) else read_json(line)
    if not isinstance(value, Mapping) or "messages" not in value:
        have = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise ChatError(f"the line has no messages; it has {have or 'nothing'}")
    if value.get("functions"):
        raise ChatError("the line has functions, an older form; give them as tools")
    mode, tools = value.get("mode"), value.get("tools") or None
    if mode is not None and mode not in MODES:
        raise ChatError(f"mode is {mode!r}; use one of {', '.join(MODES)}")
    if tools is not None and not isinstance(tools, list):
        raise ChatError(f"tools is of type {type(tools).__name__}; give a list of definitions")
    schemas = _schemas(json.dumps(tools or []))
    given, mistakes = value["messages"], {}
    readable = given
    if isinstance(given, list):
        readable = [_readable(message, i, mistakes) for i, message in enumerate(given)]
    messages = read_messages(readable)
    _check_whole(messages)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            if given[i].get("content") is None:
                raise ChatError(f"message {i} of role {message['role']!r} has no content")
        elif i not in mistakes:
            if mistake := _verdict(given[i], i) or _broken_rule(message, schemas):
                mistakes[i] = mistake
    return Conversation(messages, None if tools is None else tuple(tools), mode, mistakes)


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
    renderer = SampleRenderer(tokenizer, conversation.tools, variant)
    return [
        record(sample, conversation, renderer, mask_errors=mask_errors)
        for sample in trained(conversation, mode, mask_errors, variant)
    ]


def trained(
    conversation: Conversation, mode: str, mask_errors: bool = True, variant: str = "glm5"
) -> list[Sample]:
    """The samples of `records`, not yet laid out. ChatError if the variant has no such mode."""
    mode = conversation.mode or mode
    if mode == "preserved" and not VARIANTS[variant].keeps:
        raise ChatError(f"mode is 'preserved'; {variant} cannot keep earlier reasoning")
    unlearnt = conversation.mistakes if mask_errors else ()
    found = samples(conversation.messages, mode)
    return [sample for sample in found if not all(i in unlearnt for i in sample.learnt)]


def unlearnt(conversation: Conversation) -> str:
    """Why `trained` has no sample of a conversation."""
    (i, why), *more = sorted(conversation.mistakes.items())
    others = f" (and {len(more)} more)" * bool(more)
    return (
        f"no token of it is learnt, as all its replies are left out: message {i}, {why}{others}; remove it, or "
        "correct a reply"
    )


def record(
    sample: Sample,
    conversation: Conversation,
    renderer: SampleRenderer,
    *,
    mask_errors: bool = True,
) -> TokenRecord:
    """Returns the record of one sample of a conversation; renderer: of that conversation."""
    rendered = renderer.render(sample)
    mask, errors = np.array(rendered.loss_mask, np.float32), []
    for span in rendered.spans:
        if span.message in conversation.mistakes and mask[span.first : span.last].any():
            errors.append((span.first, span.last, "error"))
            if mask_errors:
                mask[span.first : span.last] = 0
    return TokenRecord(rendered.ids, mask, ce_weight=mask, spans=errors)


def read_json(line: str | bytes):
    """What a line of JSON holds. ChatError if it is none, or has a field twice, a number that is none, or half of a
    surrogate pair."""
    try:
        text = line if isinstance(line, str) else line.decode("utf-8")  # json would pass surrogates
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        if _HALF.search(text):
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
    raise ValueError(f"{name} is no number of JSON")


@functools.lru_cache(64)  # conversations share their tools, and schemas take a millisecond to check
def _schemas(tools: str) -> dict[str, jsonschema.protocols.Validator]:
    """A validator of each tool's arguments, by name."""
    found = {}
    for i, function in enumerate(read_tools(json.loads(tools))):
        name = function["name"]
        schema = function.get("parameters") or {}
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
            # Nothing is fetched: what a schema refers to must stand in it.
            validator = kind(schema, registry=jsonschema.validators.SPECIFICATIONS)
            _broken_by(validator, {}, name)
        except jsonschema.SchemaError as error:
            raise ChatError(
                f"tool {i}, {name!r}, has parameters that are no JSON schema: {error.message}"
            ) from None
        found[name] = validator
    return found


def _broken_by(validator, arguments: Mapping, name: str) -> jsonschema.ValidationError | None:
    """What the schema of tool `name` finds wrong with arguments, or None."""
    try:
        return jsonschema.exceptions.best_match(validator.iter_errors(arguments))
    except (referencing.exceptions.Unresolvable, RecursionError) as error:
        raise ChatError(
            f"the parameters of tool {name!r} refer to what is not in them, or to themselves without end: "
            f"{str(error)[:_SHOWN]}; write them out"
        ) from None


def _readable(message, i: int, mistakes: dict[int, str]):
    """Returns the message without the fields that are for this reader or nobody, and with arguments that are objects;
    others are noted as a mistake, and stand as text."""
    if not isinstance(message, Mapping):
        return message  # `read_messages` says what is wrong with it
    known = MESSAGE_FIELDS | MISPLACED_FIELDS.keys()
    message = {name: value for name, value in message.items() if name in known}
    if message.get("role") == "assistant" and (lost := lost_text(message, i)):
        raise ChatError(
            f"message {i} would lose {lost[:_SHOWN]!r} of its content, which stands between marks of thinking; "
            "give the reasoning as reasoning_content"
        )
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_readable_call(call, i, mistakes) for call in calls]
    return message


def _readable_call(call, i: int, mistakes: dict[int, str]):
    """Returns a call of message i with arguments that are an object."""
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
    return {"id": call.get("id"), "name": name, "arguments": {UNREAD: text}}


def _check_whole(messages: Sequence[Mapping]) -> None:
    """ChatError for replies that say nothing, and calls that another turn follows before their results."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        num_calls = len(message.get("tool_calls", ()))
        texts = message["content"], message.get("reasoning_content", "")
        if not (num_calls or any(text.strip() for text in texts)):
            raise ChatError(
                f"message {i}, an assistant's, says nothing; give it content or drop it"
            )
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
        raise ChatError(f"message {i} has error {error!r}; say in words what is wrong")
    return error or (None if weight else "weight 0")


def _broken_rule(message: Mapping, schemas) -> str | None:
    """What is wrong with the message's calls of the line's tools."""
    for call in message.get("tool_calls", ()):
        name = call["name"]
        if name not in schemas:
            return f"no tool is named {name!r}; there are {', '.join(schemas) or 'none'}"
        error = _broken_by(schemas[name], call["arguments"], name)
        if error is not None:
            return f"{name!r} does not allow its arguments: {error.message[:_SHOWN]}"
    return None
