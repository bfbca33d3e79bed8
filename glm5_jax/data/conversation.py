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
from glm5_jax.text.chat import ChatError, check, lost_text, reply_of, tool_function
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.thinking import MODES, Sample, samples
from glm5_jax.text.tokenizer import Tokenizer

UNREAD = "arguments"  # the argument under which a call is shown whose arguments cannot be read
_SHOWN = 120  # characters of an error
# Fields under which other formats keep what would be lost here, and what to do with them.
_OTHERS = {
    "function_call": "give it as tool_calls",
    "reasoning": "call it reasoning_content",
    "thinking": "call it reasoning_content",
}
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


# What is read of a line, and of its messages; "answer" is the verifiers'.
LINE_FIELDS = frozenset(("messages", "tools", "functions", "mode", "answer"))
MESSAGE_FIELDS = frozenset(
    "role content reasoning_content tool_calls tool_call_id name function_call weight error".split()
)


def unread(line: str | bytes | Mapping) -> list[str]:
    """Names of a line's fields that nothing reads ("messages.N" for those of a message) of a line that `parse`
    takes."""
    value = line if isinstance(line, Mapping) else read_json(line)
    found = set(value) - LINE_FIELDS
    for message in value["messages"]:
        found |= {f"messages.{name}" for name in set(message) - MESSAGE_FIELDS}
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
    messages, mistakes = value["messages"], {}
    if isinstance(messages, list):
        messages = [_readable(m, i, mistakes) for i, m in enumerate(messages)]
    check(messages)
    _check_whole(messages)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" and message.get("content") is None:
            raise ChatError(f"message {i} of role {message['role']!r} has no content")
        if message["role"] == "assistant" and i not in mistakes:
            if mistake := _verdict(message, i) or _broken_rule(message, i, schemas):
                mistakes[i] = mistake
    messages = tuple(_plain(message, i) for i, message in enumerate(_in_order(messages)))
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
    return [
        record(sample, conversation, tokenizer, variant=variant, mask_errors=mask_errors)
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
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the field {twice!r} twice; remove one")
    return value


def _no_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")


@functools.lru_cache(64)  # conversations share their tools, and schemas take a millisecond to check
def _schemas(tools: str) -> dict[str, jsonschema.protocols.Validator]:
    """A validator of each tool's arguments, by name."""
    found = {}
    for i, tool in enumerate(json.loads(tools)):
        function = tool_function(tool, i)
        name = function["name"]
        if name in found:
            raise ChatError(f"two tools are named {name!r}; rename or remove one")
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
    """The message with arguments as objects; those that are none are noted, and stand as text."""
    if not isinstance(message, Mapping):
        return message  # `check` says what is wrong with it
    for name, instead in _OTHERS.items():
        if message.get(name):
            raise ChatError(f"message {i} has {name}, which would be lost; {instead}")
    _check_text(message, i)
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    made = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            made.append(call)
            continue
        arguments = function.get("arguments")
        try:
            [(name, arguments)] = reply_of({"tool_calls": [function]}, i).calls
        except (ChatError, RecursionError) as error:
            mistakes.setdefault(i, str(error))
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
            name, arguments = function["name"], {UNREAD: shown}
        made.append({"id": call.get("id"), "name": name, "arguments": arguments})
    return {**message, "tool_calls": made}


def _check_text(message: Mapping, i: int) -> None:
    """ChatError for content that is not text, or from which text would be lost."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, Mapping) else part
        typed = not isinstance(part, Mapping) or part.get("type") == "text"
        if not (typed and isinstance(text, str)):
            kind = part.get("type", "without a type") if isinstance(part, Mapping) else part
            raise ChatError(
                f"message {i} has a part that is no text ({kind!r}); write it as text or drop the line"
            )
    if message.get("role") == "assistant" and (lost := lost_text(message, i)):
        raise ChatError(
            f"message {i} would lose {lost[:_SHOWN]!r} of its content, which stands between marks of thinking; "
            "give the reasoning as reasoning_content"
        )


def _check_whole(messages: Sequence[Mapping]) -> None:
    """ChatError for replies that say nothing, and calls that another turn follows before their results."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        reply = reply_of(message, i)
        if not (reply.calls or reply.content.strip() or (reply.reasoning or "").strip()):
            raise ChatError(
                f"message {i}, an assistant's, says nothing; give it content or drop it"
            )
        results = itertools.takewhile(lambda m: m["role"] == "tool", messages[i + 1 :])
        count = sum(1 for _ in results)
        if count < len(reply.calls) and i + 1 + count < len(messages):
            raise ChatError(
                f"message {i} makes {len(reply.calls)} calls, {count} of which have a result before the next "
                "turn; add the others or drop the calls"
            )


def _in_order(messages: Sequence[Mapping]) -> list[Mapping]:
    """Results behind one another in the order of their calls, where all of both have ids."""
    ordered, results, ids = [], [], []
    for i, message in enumerate([*messages, None]):
        if message is not None and message["role"] == "tool":
            results.append((i, message))
            continue
        ordered += _by_call(results, ids)
        results = []
        if message is not None:
            ordered.append(message)
            ids = [call.get("id") for call in message.get("tool_calls") or ()]
    return ordered


def _by_call(results: list[tuple[int, Mapping]], ids: list) -> list[Mapping]:
    """Numbered results, sorted by which of the ids each answers."""
    given = [message.get("tool_call_id") for _, message in results]
    if None in (*ids, *given):
        return [message for _, message in results]
    for k, (i, _) in enumerate(results):
        if given[k] not in ids or given[k] in given[:k]:
            what = "a second result of" if given[k] in ids else "the result of no"
            raise ChatError(f"message {i} is {what} call {given[k]!r}; the calls before are {ids}")
    return [
        message for _, message in sorted(results, key=lambda r: ids.index(r[1]["tool_call_id"]))
    ]


def _plain(message: Mapping, i: int) -> Mapping:
    """The message with the fields that `render_chat` reads, content as text."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    if message["role"] != "assistant":
        return {"role": message["role"], "content": content or ""}
    reply = reply_of({**message, "content": content}, i)
    plain = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        plain["reasoning_content"] = reply.reasoning
    if reply.calls:
        plain["tool_calls"] = [{"name": n, "arguments": a} for n, a in reply.calls]
    return plain


def _verdict(message: Mapping, i: int) -> str | None:
    weight, error = message.get("weight", 1), message.get("error")
    if weight not in (0, 1) or isinstance(weight, bool):
        raise ChatError(f"message {i} has weight {weight!r}; it must be 0 or 1")
    if error is not None and not isinstance(error, str):
        raise ChatError(f"message {i} has error {error!r}; say in words what is wrong")
    return error or (None if weight else "weight 0")


def _broken_rule(message: Mapping, i: int, schemas) -> str | None:
    """What is wrong with the message's calls of the line's tools."""
    for name, arguments in reply_of(message, i).calls:
        if name not in schemas:
            return f"no tool is named {name!r}; there are {', '.join(schemas) or 'none'}"
        error = _broken_by(schemas[name], arguments, name)
        if error is not None:
            return f"{name!r} does not allow its arguments: {error.message[:_SHOWN]}"
    return None
