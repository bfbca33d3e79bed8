"""Grammars of replies, as masks of the tokens that may come next: JSON by a schema, and forced tool calls.

1. `reply_source` writes the grammar of a reply in llguidance's form of Lark.
2. `compile_grammar` compiles it once for all choices of a request, outside the engine's thread. A child process compiles
   it first (grammar_trial.py).
3. `Grammar.matcher` returns a copy for one reply, which consumes tokens and computes masks.

Tool calls are written in GLM's form: markers are special tokens, and strings have no quotes.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from glm5_jax.inference.grammar_trial import matcher_problem, shared_trial
from glm5_jax.text.messages import tool_function
from glm5_jax.text.schemas import Schema, SchemaError
from glm5_jax.text.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 2**18
_MAX_CHOICES = 200  # schemas that are visited for the types of a value
_MAX_REFERENCES = 20  # that are followed to the type of a value
_MAX_MESSAGE = 300
# Blanks between two parts of JSON. Without a limit, a reply could consist of blanks.
_WHITESPACE = r"[ \n\r\t]{0,40}"
_TABLES = ("$defs", "definitions")  # keywords that hold schemas by name
_STRING, _NO_STRING = (
    "string",
    frozenset(("integer", "number", "boolean", "array", "object", "null")),
)
# A text of any length, and the name of an argument.
_COMMON_RULES = """
TEXT: /(.|\\n)+/
NAME: /[^<>\\s]+/
any_argument: <arg_key> NAME </arg_key> <arg_value> TEXT? </arg_value>
"""


class GrammarError(ValueError):
    """Raised for a schema that cannot be compiled."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Compiled grammar of a reply.

    Attributes:
      source: text of the grammar.
      prototype: matcher at the start of a reply.
    """

    source: str
    prototype: LLMatcher = dataclasses.field(repr=False, compare=False)

    def matcher(self) -> LLMatcher:
        """Returns a matcher at the start of a reply."""
        return self.prototype.deep_copy()


def compile_grammar(source: str, tokenizer: Tokenizer) -> Grammar:
    """Compiles a grammar in llguidance's form of Lark, unless it is one of the last ones.

    Raises GrammarError if it is too large or invalid, GrammarBusy if too many others are being compiled.
    """
    _check_size(len(source))
    return _compile(source, tokenizer)


@functools.lru_cache(maxsize=32)
def _compile(source: str, tokenizer: Tokenizer) -> Grammar:
    try:
        grammar = LLMatcher.grammar_from_lark(source)
    except UnicodeEncodeError:
        raise GrammarError("it has a lone surrogate") from None
    problem = shared_trial.problem(grammar)
    if not problem:
        matcher_tokenizer = _matcher_tokenizer(tokenizer)
        with shared_trial.slot():
            matcher = LLMatcher(matcher_tokenizer, grammar, log_level=0)
            # Of a copy, because a mask may change the state.
            problem = matcher_problem(matcher.deep_copy())
    if problem:
        raise GrammarError(_first_line(problem))
    return Grammar(source, matcher)


def reply_source(
    tools: Sequence[Mapping] = (), schema: Mapping | None = None, *, is_single: bool = False
) -> str:
    """Returns the grammar of a reply that is calls of these tools, or JSON of this schema, or either.

    is_single: whether only one call is allowed. Raises GrammarError for a strict tool whose schema cannot be enforced.
    """
    choices, rules = [], [_COMMON_RULES]
    if schema is not None:
        choices.append("json")
        rules.append(f"json: {_json_rule(schema)}")
    if tools:
        choices.append("call" if is_single else "call+")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        rules += [_call_rule(i, tool_function(tool, i)) for i, tool in enumerate(tools)]
    return "\n".join([f"start: {' | '.join(choices)}", *rules])


def _check_size(num_characters: int) -> None:
    if num_characters > MAX_SOURCE_CHARACTERS:
        raise GrammarError(
            f"the schemas have {num_characters} characters or more; at most {MAX_SOURCE_CHARACTERS} can be enforced"
        )


def _call_rule(i: int, function: Mapping) -> str:
    """Returns the rule of calls of one tool. Arguments come in the order of its schema."""
    parameters = function.get("parameters") or {}
    try:
        Schema(parameters).check()
    except SchemaError as error:
        raise GrammarError(f"tool {function['name']!r}: {error}") from None
    properties = parameters.get("properties") or {}
    required = frozenset(parameters.get("required") or ())
    tables = {name: parameters[name] for name in _TABLES if name in parameters}
    num_repeats = sum(map(_has_reference, properties.values()))
    _check_size(num_repeats * len(json.dumps(tables)))
    arguments, size = [], 0
    for name in properties:
        argument = _argument(name, parameters, bool(function.get("strict")))
        arguments.append(argument if name in required else f"{argument}?")
        size += len(argument)
        _check_size(size)
    if not properties and parameters.get("additionalProperties") is not False:
        arguments = ["any_argument*"]
    return f"call_{i}: <tool_call> {_literal(function['name'])} {' '.join(arguments)} </tool_call>"


def _argument(name: str, parameters: Mapping, is_strict: bool) -> str:
    value = _value(parameters["properties"][name], parameters, is_strict)
    return f"(<arg_key> {_literal(name)} </arg_key> <arg_value> {value} </arg_value>)"


def _value(schema: Any, root: Mapping, is_strict: bool) -> str:
    """Returns the rule of an argument's value: text where its schema allows a string, otherwise JSON."""
    kinds = _kinds(schema, root)
    if not kinds <= _NO_STRING:
        resolved = _resolve(schema, root)
        values = resolved.get("enum", [resolved["const"]] if "const" in resolved else [])
        if values and all(isinstance(value, str) and value for value in values):
            return f"({' | '.join(map(_literal, values))})"
        return "TEXT?"
    if isinstance(schema, Mapping) and _has_reference(schema):
        schema = {**{name: root[name] for name in _TABLES if name in root}, **schema}
    problem = _schema_problem(json.dumps(schema))
    if problem and is_strict:
        raise GrammarError(problem)
    return "TEXT?" if problem else _json_rule(schema)


def _has_reference(schema: Any) -> bool:
    """Returns whether the rule of a value repeats the definitions of its root."""
    return '"$ref"' in json.dumps(schema)


def _kinds(schema: Any, root: Mapping) -> set[str]:
    """Returns the types that a schema allows; "string" if they are unknown, or those of too many schemas."""
    kinds: set[str] = set()
    waiting = [schema]
    visited: set[int] = set()  # schemas by identity, because they may be cyclic
    # Many arguments may refer to the same choices.
    for _ in range(_MAX_CHOICES):
        if not waiting or _STRING in kinds:
            return kinds or {_STRING}
        resolved = _resolve(waiting.pop(), root)
        if id(resolved) in visited:
            continue
        visited.add(id(resolved))
        names = resolved.get("type")
        choices = resolved.get("anyOf") or resolved.get("oneOf")
        if names is not None:
            kinds |= {names} if isinstance(names, str) else set(names)
        elif choices:
            waiting += choices
        else:
            kinds.add(_STRING)
    return {_STRING}


def _resolve(schema: Any, root: Mapping) -> Mapping:
    """Returns the schema that local references lead to; empty if they lead nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#/").split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return {}


def _json_rule(schema: Any) -> str:
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {json.dumps(schema)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema_problem(schema: str) -> str | None:
    """Returns why a JSON schema cannot be enforced, or None."""
    _check_size(len(schema))
    problem = shared_trial.problem(LLMatcher.grammar_from_json_schema(schema))
    return _first_line(problem) if problem else None


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0][:_MAX_MESSAGE]


@functools.lru_cache(maxsize=4)
def _matcher_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """Returns llguidance's form of a tokenizer. It takes about a second for a vocabulary of 155,000 tokens."""
    return LLTokenizer(
        TokenizerWrapper(_TokenTable(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=list(tokenizer.eos_ids),
    )


class _TokenTable:
    """Tokenizer with the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.tokens = [tokenizer.bytes_of(i, errors="replace") for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids.values())

    def __call__(self, data: bytes) -> list[int]:
        return self._tokenizer.encode(data.decode("utf-8", "replace"))
