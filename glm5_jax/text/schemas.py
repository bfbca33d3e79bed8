"""Decides which JSON values a tool's schema allows, as far as the type of an argument depends on it.

Schemas come from clients, and a general validator can be kept busy for ever by one: references multiply, and a pattern
can backtrack. So only the words that tell types apart are read (`type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf`,
`items`, `$ref` within the schema), every schema that is looked at costs a step, and no pattern runs.
"""

from collections.abc import Mapping
from typing import Any

MAX_STEPS = 10_000
MAX_DEPTH = 50  # of schemas within each other

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
    """A schema that cannot be followed: a word of the wrong form, a reference to nothing, or too many steps."""


class Schema:
    """Checks values against schemas that stand within `root`, within `max_steps` of them all together."""

    def __init__(self, root: Mapping, max_steps: int = MAX_STEPS):
        self._root, self._steps_left = root, max_steps

    def allows(self, schema: Any, value: Any, depth: int = 0) -> bool:
        """Whether a schema allows a value. Raises SchemaError if that cannot be decided."""
        self._spend(1)
        if depth > MAX_DEPTH:
            raise SchemaError(f"more than {MAX_DEPTH} schemas stand within each other")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise SchemaError("a schema is an object, true or false")
        if "$ref" in schema and not self.allows(self._target(schema["$ref"]), value, depth + 1):
            return False
        if "type" in schema and not any(_is_of(value, name) for name in _names(schema["type"])):
            return False
        if "enum" in schema and not any(_equal(value, one) for one in self._list(schema, "enum")):
            return False
        if "const" in schema and not _equal(value, schema["const"]):
            return False
        return self._parts_allow(schema, value, depth + 1)

    def _parts_allow(self, schema: Mapping, value: Any, depth: int) -> bool:
        """Whether the schemas within a schema allow a value."""
        if "allOf" in schema:
            if not all(self.allows(one, value, depth) for one in self._list(schema, "allOf")):
                return False
        for word in ("anyOf", "oneOf"):  # which of them it is does not matter for a type
            if word in schema:
                if not any(self.allows(one, value, depth) for one in self._list(schema, word)):
                    return False
        if "items" in schema and isinstance(value, list):
            return all(self.allows(schema["items"], item, depth) for item in value)
        return True

    def _list(self, schema: Mapping, word: str) -> list:
        if not isinstance(schema[word], list):
            raise SchemaError(f"{word} is a list")
        self._spend(len(schema[word]))
        return schema[word]

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise SchemaError("the schema takes too many steps")

    def _target(self, reference: Any) -> Any:
        """Returns what a reference such as "#/$defs/City" names; nothing is fetched."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError("a reference names a place within the schema")
        found: Any = self._root
        for name in reference.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise SchemaError("a reference names nothing")
            found = found[name]
        return found


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
    """Whether two values are the same JSON; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
