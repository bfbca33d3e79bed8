"""Bodies of requests, checked against a schema: what does not fit is an `ApiError` that names the field."""

from collections.abc import Mapping

import jsonschema

from glm5_jax.core.server import ApiError


def of_fields(required: tuple[str, ...] = (), **properties) -> dict:
    """The schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def checked(body, schema: Mapping):
    """The body without fields that are null, which say nothing; ApiError if it is not as the schema says."""
    body = _stripped(body, schema)
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(body)
    )
    if error is None:
        return body
    path = ".".join(map(str, error.absolute_path))
    if error.validator == "additionalProperties":
        unknown = sorted(set(error.instance) - set(error.schema["properties"]))
        path = ".".join(filter(None, (path, unknown[0])))
        raise ApiError(f"{path}: no such field is known", param=path)
    message = error.message if len(error.message) <= 300 else f"{error.message[:297]}..."
    raise ApiError(f"{path}: {message}" if path else message, param=path or None)


def _stripped(value, schema: Mapping):
    known = schema.get("properties")
    if known is None or not isinstance(value, dict):
        return value
    return {n: _stripped(v, known.get(n, {})) for n, v in value.items() if v is not None}
