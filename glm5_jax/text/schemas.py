"""Validates JSON values against a tool's schema, for calls of models and calls in data.

Schemas come from clients and files, and some take a general validator forever: references multiply, and patterns
backtrack. So each visited schema costs a step of a budget, and patterns are not run.

- `Schema.allows` checks the keywords that distinguish types: `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf`, `items` and
  `$ref` within the schema.
- `Schema.problem` also checks those of objects (`properties`, `required`, `additionalProperties`) and sizes (`minimum`,
  `maxLength`, `minItems` and the like).

Other keywords allow every value.
"""

import re
from collections.abc import Mapping
from typing import Any

MAX_STEPS = 10_000
MAX_DEPTH = 50  # of nested schemas

_BYTE = re.compile(rb"%([0-9a-fA-F]{2})")
_MAX_QUOTED, _MAX_NAMED = 60, 10  # characters of a value, and values of an enum, in a message
# Type of a value, keywords of its minimum and maximum size, and the unit of the size.
_SIZES: tuple[tuple[type[str] | type[list] | type[dict], str, str, str], ...] = (
    (str, "minLength", "maxLength", "characters"),
    (list, "minItems", "maxItems", "items"),
    (dict, "minProperties", "maxProperties", "properties"),
)
_SCHEMAS = ("items", "additionalProperties")  # keywords that hold a schema
_LISTS = ("allOf", "anyOf", "oneOf")  # keywords that hold a list of schemas
_TABLES = ("properties", "$defs", "definitions")  # keywords that hold schemas by name

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


class SchemaError(ValueError):
    """Raised for a schema in which a keyword has an invalid value."""


class UnfollowableError(SchemaError):
    """Raised for a schema with a dangling reference, or one that needs too many steps."""


class Schema:
    """Validator of values against schemas within `root`, with a budget of `max_steps` for all calls together."""

    def __init__(self, root: Mapping, max_steps: int = MAX_STEPS):
        self._root, self._steps_left = root, max_steps

    def allows(self, schema: Any, value: Any) -> bool:
        """Returns True if the type keywords of a schema allow a value. Raises SchemaError if that cannot be decided."""
        return self._problem(schema, value, full=False) is None

    def problem(self, value: Any) -> str | None:
        """Returns an error message if the schema rejects a value, else None. Raises SchemaError like `allows`."""
        return self._problem(self._root, value, full=True)

    def check(self) -> None:
        """Raises SchemaError if any part of the schema is invalid, even one that no value needs."""
        waiting: list[Any] = [self._root]
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, bool):
                continue
            _check_words(schema)
            if "$ref" in schema:
                self._target(schema["$ref"])
            for word in _SCHEMAS:
                inner = schema.get(word, True)
                waiting += inner if isinstance(inner, list) else [inner]
            waiting += [one for word in _LISTS for one in schema.get(word, ())]
            waiting += [one for word in _TABLES for one in schema.get(word, {}).values()]

    def _problem(self, schema: Any, value: Any, full: bool, depth: int = 0) -> str | None:
        """Returns why a schema rejects a value, or None; full: check all keywords, not only those of types."""
        self._spend(1)
        if depth > MAX_DEPTH:
            raise UnfollowableError(f"more than {MAX_DEPTH} schemas are nested")
        if isinstance(schema, bool):
            return None if schema else f"{_quote(value)} is not allowed"
        if full:
            _check_words(schema)
        elif not isinstance(schema, Mapping):
            raise SchemaError("a schema is an object, true or false")
        depth += 1
        result = None
        if "$ref" in schema:
            result = self._problem(self._target(schema["$ref"]), value, full, depth)
        return (
            result
            or self._type_problem(schema, value)
            or (full and _size_problem(schema, value))
            or self._choice_problem(schema, value, full, depth)
            or self._inner_problem(schema, value, full, depth)
            or None
        )

    def _type_problem(self, schema: Mapping, value: Any) -> str | None:
        """Returns why `type`, `enum` or `const` reject a value, or None."""
        if "type" in schema:
            names = _names(schema["type"])
            if not any(_is_of(value, name) for name in names):
                return f"{_quote(value)} is not of type {', '.join(map(repr, names))}"
        if "enum" in schema:
            known = self._list(schema, "enum")
            if not any(_equal(value, one) for one in known):
                return f"{_quote(value)} is not one of {', '.join(map(_quote, known[:_MAX_NAMED]))}"
        if "const" in schema and not _equal(value, schema["const"]):
            return f"{_quote(value)} is not {_quote(schema['const'])}"
        return None

    def _choice_problem(self, schema: Mapping, value: Any, full: bool, depth: int) -> str | None:
        """Returns why `allOf`, `anyOf` or `oneOf` reject a value, or None; `oneOf` counts as `anyOf`."""
        if "allOf" in schema:
            for one in self._list(schema, "allOf"):
                if result := self._problem(one, value, full, depth):
                    return result
        for word in ("anyOf", "oneOf"):
            if word in schema:
                choices = self._list(schema, word)
                if all(self._problem(one, value, full, depth) for one in choices):
                    return f"{_quote(value)} is not valid under any of the schemas of {word}"
        return None

    def _inner_problem(self, schema: Mapping, value: Any, full: bool, depth: int) -> str | None:
        """Returns why items of a list or, if full, fields of an object are rejected, or None."""
        if isinstance(value, list):
            items = schema.get("items", True)
            if isinstance(items, list):  # a schema for each position, in older drafts
                return None
            problems = (self._problem(items, item, full, depth) for item in value)
            return next(filter(None, problems), None)
        if not (full and isinstance(value, dict)):
            return None
        required = schema.get("required", [])
        self._spend(len(required))
        for name in required:
            if name not in value:
                return f"{name!r} is a required property"
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        if "patternProperties" in schema:
            other = True  # patterns are not run, so they allow every field
        for name, item in value.items():
            if name not in known and other is False:
                return f"Additional properties are not allowed ({_quote(name)} was unexpected)"
            if result := self._problem(known.get(name, other), item, full, depth):
                return result
        return None

    def _list(self, schema: Mapping, word: str) -> list:
        if not isinstance(schema[word], list):
            raise SchemaError(f"{word} is a list")
        self._spend(len(schema[word]))
        return schema[word]

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise UnfollowableError("the schema takes too many steps")

    def _target(self, reference: Any) -> Any:
        """Returns the schema that a reference such as "#/$defs/City" names; only local references are supported."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise UnfollowableError("a reference must name a part of the schema")
        result: Any = self._root
        for name in reference.split("/")[1:]:
            name = _unquote(name)
            if isinstance(result, Mapping) and name in result:
                result = result[name]
            elif isinstance(result, list) and name.isdecimal() and int(name[:9]) < len(result):
                result = result[int(name[:9])]
            else:
                raise UnfollowableError("a reference names no part of the schema")
        return result


def _unquote(name: str) -> str:
    """Decodes a part of a reference: `~1` is a slash, `~0` a tilde, and `%20` a blank."""
    data = _BYTE.sub(lambda match: bytes([int(match[1], 16)]), name.encode("utf-8", "replace"))
    return data.decode("utf-8", "replace").replace("~1", "/").replace("~0", "~")


def _check_words(schema: Any) -> None:
    """Raises SchemaError for a value that is not a schema, and for keywords with invalid values."""
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{_quote(schema)} is not a schema; that is an object, true or false")
    if "type" in schema:
        _names(schema["type"])
    for word in _LISTS:
        if word in schema and not isinstance(schema[word], list):
            raise SchemaError(f"{word} is a list")
    for word in _TABLES:
        if word in schema and not isinstance(schema[word], Mapping):
            raise SchemaError(f"{word} is an object")
    if not isinstance(schema.get("enum", []), list):
        raise SchemaError("enum is a list")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError("required is a list of names")
    for word in ("minimum", "maximum", *(word for _, *words, _ in _SIZES for word in words)):
        if word in schema and not _is_of(schema[word], "number"):
            raise SchemaError(f"{word} is a number")


def _size_problem(schema: Mapping, value: Any) -> str | None:
    """Returns why the size of a number, a text, a list or an object is rejected, or None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _bound_problem(schema, value)
    for kind, minimum, maximum, unit in _SIZES:
        if isinstance(value, kind):
            size = len(value)
            if size < schema.get(minimum, 0):
                return f"{size} {unit} are too few; at least {schema[minimum]} are allowed"
            if size > schema.get(maximum, size):
                return f"{size} {unit} are too many; at most {schema[maximum]} are allowed"
    return None


def _bound_problem(schema: Mapping, value: int | float) -> str | None:
    for word, exclusive, sign in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        bound, strict = schema.get(word), schema.get(exclusive)
        if strict is True:  # the form of drafts up to 4
            bound, strict = None, bound
        if bound is not None and sign * value < sign * bound:
            return f"{value} is beyond the {word} of {bound}"
        if strict is not None and _is_of(strict, "number") and sign * value <= sign * strict:
            return f"{value} is not within the {exclusive} of {strict}"
    return None


def _quote(value: Any) -> str:
    """Returns a value for an error message, in constant time."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value[:_MAX_QUOTED] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."


def _names(types: Any) -> list[str]:
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not all(isinstance(n, str) and n in _TYPES for n in names):
        raise SchemaError("a type has one of the names of JSON schema, or several")
    return names


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _equal(value: Any, other: Any) -> bool:
    """Returns True if two values are the same JSON; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
