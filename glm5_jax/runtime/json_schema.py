"""Validates bodies of requests against a JSON schema, for every HTTP server.

`validate` walks a body together with its schema before the validator runs:

- It leaves out null fields, because they mean the default.
- It rejects unknown fields and lists that are too long before any other code reads them.
- It converts numbers to the type in the schema. 2.0 is an integer of JSON schema, so it becomes 2. Every integer has a
  range (64 bits with a sign, unless the schema is narrower), so that no handler gets a float or a number that overflows.

An invalid body raises an `ApiError` that names the field and the value.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jsonschema

from glm5_jax.runtime.http_server import ApiError, truncate_text
from glm5_jax.runtime.json_body import NumberList

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
_MAX_NAME, _MAX_VALUE, _MAX_MESSAGE = 100, 60, 300
_MAX_ERRORS = 50  # of which the best one is reported; a long list can have one for each item
_Draft = jsonschema.Draft202012Validator
_Validator = jsonschema.validators.extend(
    _Draft,
    type_checker=_Draft.TYPE_CHECKER.redefine(
        "array", lambda checker, value: isinstance(value, list | NumberList)
    ),
)


def object_schema(required: tuple[str, ...] = (), **properties) -> dict:
    """Returns the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def validate(body: Any, schema: Mapping) -> Any:
    """Returns the body without nulls and with integers as int. Raises ApiError if it does not fit the schema."""
    body = _normalise(body, schema, "")
    errors = itertools.islice(_Validator(schema).iter_errors(body), _MAX_ERRORS)
    error = jsonschema.exceptions.best_match(errors)
    if error is None:
        return body
    path = ".".join(map(str, error.absolute_path))
    # A message begins with the value and ends with what is wrong with it.
    message = truncate_text(error.message, _MAX_MESSAGE)
    if message != error.message:
        message = f"{message[: _MAX_MESSAGE // 2]}...{error.message[-_MAX_MESSAGE // 2 :]}"
    raise _api_error(path, message)


def _normalise(value, schema: Mapping, path: str):
    """Returns a value without nulls and with numbers converted. Raises ApiError if it is too large to validate."""
    if isinstance(value, dict):
        return _normalise_fields(value, schema, path)
    if isinstance(value, list | NumberList):
        return _normalise_items(value, schema, path)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _convert_number(value, schema, path)
    return value


def _normalise_fields(value: dict, schema: Mapping, path: str) -> dict:
    _check_count(value, schema.get("maxProperties"), "fields", path)
    known = schema.get("properties")
    if known is None:
        return value
    if schema.get("additionalProperties") is False:
        for name in value:
            if name not in known:
                raise _api_error(_join(path, name), "no such field is known")
    return {
        name: _normalise(item, known.get(name, {}), _join(path, name))
        for name, item in value.items()
        if item is not None
    }


def _normalise_items(value, schema: Mapping, path: str):
    _check_count(value, schema.get("maxItems"), "items", path)
    if (items := schema.get("items")) is None:
        return value
    try:
        return [_normalise(item, items, f"{path}.{i}") for i, item in enumerate(value)]
    except ValueError as error:  # from a NumberList, whose text is parsed only now
        raise _api_error(path, str(error)) from None


def _convert_number(value: int | float, schema: Mapping, path: str) -> int | float:
    kind = schema.get("type")
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        # The validator checks narrower bounds. Beyond these, conversion to an array or a float overflows.
        if kind in ("integer", "number") and not MIN_INTEGER <= value <= MAX_INTEGER:
            limits = f"from {MIN_INTEGER} to {MAX_INTEGER}"
            raise _api_error(path, f"{_shorten(value)} is out of range; give a number {limits}")
    elif kind in ("integer", "number") and not math.isfinite(value):
        raise _api_error(path, f"{value} is not a JSON number; give a finite one")
    return value


def _check_count(value, max_count: int | None, noun: str, path: str) -> None:
    if max_count is not None and len(value) > max_count:
        raise _api_error(path, f"{len(value)} {noun} are too many; give at most {max_count}")


def _api_error(path: str, message: str) -> ApiError:
    return ApiError(f"{path}: {message}" if path else message, param=path or None)


def _join(path: str, name: str) -> str:
    name = truncate_text(name, _MAX_NAME)
    return f"{path}.{name}" if path else name


def _shorten(value: int) -> str:
    """Returns an integer as text; a very long one by its number of bits, because its digits take quadratic time."""
    bits = value.bit_length()
    return str(value) if bits <= 3 * _MAX_VALUE else f"an integer of {bits} bits"
