"""Checks bodies of requests against a JSON schema, for every program that answers HTTP.

`checked` walks a body next to its schema before the validator sees it:

- fields that are null are left out, as they say nothing;
- unknown fields and lists that are too long are refused before anything else reads them;
- numbers become what the schema says. 2.0 is an integer of JSON schema, so it becomes 2, and every integer has a range
  (64 bits with a sign, unless the schema is narrower), so that no handler meets a float or a number that overflows.

What does not fit raises an `ApiError` that names the field and the value.
"""

import math
from collections.abc import Mapping

import jsonschema

from glm5_jax.core.json_body import NumberList
from glm5_jax.core.server import ApiError, shortened

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
_MAX_NAME, _MAX_VALUE, _MAX_MESSAGE = 100, 60, 300
_Draft = jsonschema.Draft202012Validator
_Validator = jsonschema.validators.extend(
    _Draft,
    type_checker=_Draft.TYPE_CHECKER.redefine(
        "array", lambda checker, value: isinstance(value, list | NumberList)
    ),
)


def of_fields(required: tuple[str, ...] = (), **properties) -> dict:
    """Returns the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def checked(body, schema: Mapping):
    """Returns the body as the schema describes it: without nulls, integers as int. Raises ApiError if it does not fit."""
    body = _normalised(body, schema, "")
    error = jsonschema.exceptions.best_match(_Validator(schema).iter_errors(body))
    if error is None:
        return body
    path = ".".join(map(str, error.absolute_path))
    raise _refusal(path, shortened(error.message, _MAX_MESSAGE))


def _normalised(value, schema: Mapping, path: str):
    """Returns a value with nulls left out and numbers converted, and refuses what is too large to validate."""
    if isinstance(value, dict):
        return _normalised_fields(value, schema, path)
    if isinstance(value, list | NumberList):
        return _normalised_items(value, schema, path)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value, schema, path)
    return value


def _normalised_fields(value: dict, schema: Mapping, path: str) -> dict:
    _check_count(value, schema.get("maxProperties"), "fields", path)
    known = schema.get("properties")
    if known is None:
        return value
    if schema.get("additionalProperties") is False:
        for name in value:
            if name not in known:
                raise _refusal(_joined(path, name), "no such field is known")
    return {
        name: _normalised(own, known.get(name, {}), _joined(path, name))
        for name, own in value.items()
        if own is not None
    }


def _normalised_items(value, schema: Mapping, path: str):
    _check_count(value, schema.get("maxItems"), "items", path)
    if (items := schema.get("items")) is None:
        return value
    try:
        return [_normalised(own, items, f"{path}.{i}") for i, own in enumerate(value)]
    except ValueError as error:  # of numbers that have not been read before
        raise _refusal(path, str(error)) from None


def _number(value: int | float, schema: Mapping, path: str) -> int | float:
    kind = schema.get("type")
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        # Narrower bounds are the validator's; beyond these a number overflows where it becomes an array or a float.
        if kind in ("integer", "number") and not MIN_INTEGER <= value <= MAX_INTEGER:
            limits = f"from {MIN_INTEGER} to {MAX_INTEGER}"
            raise _refusal(path, f"{_shown(value)} is out of range; give a number {limits}")
    elif kind in ("integer", "number") and not math.isfinite(value):
        raise _refusal(path, f"{value} is no number of JSON; give a finite one")
    return value


def _check_count(value, most: int | None, what: str, path: str) -> None:
    if most is not None and len(value) > most:
        raise _refusal(path, f"{len(value)} {what} are too many; give at most {most}")


def _refusal(path: str, message: str) -> ApiError:
    return ApiError(f"{path}: {message}" if path else message, param=path or None)


def _joined(path: str, name: str) -> str:
    name = shortened(name, _MAX_NAME)
    return f"{path}.{name}" if path else name


def _shown(value: int) -> str:
    """Returns an integer as text; a very long one by its number of bits, as its digits take quadratic time."""
    bits = value.bit_length()
    return str(value) if bits <= 3 * _MAX_VALUE else f"an integer of {bits} bits"
