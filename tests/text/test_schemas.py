"""Tests which values a client's JSON schema allows by type, in a bounded number of steps."""

import time

import pytest

from glm5_jax.text.schemas import MAX_STEPS, Schema, SchemaError
from glm5_jax.text.tool_calls import parse_reply


def argument(text, schema, **parameters):
    """Reads a text as the argument of a tool with this schema."""
    tools = [{"name": "f", "parameters": {"properties": {"a": schema}, **parameters}}]
    written = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    [call] = parse_reply(written, tools, thinking=False).tool_calls
    return call.arguments["a"]


@pytest.mark.parametrize(
    ("schema", "allowed", "rejected"),
    [
        ({"type": "integer"}, [1, 2.0], [1.5, True, "1"]),
        ({"type": ["string", "null"]}, ["x", None], [1]),
        ({"enum": [1, "a"]}, [1, "a"], [True, "b"]),
        ({"const": None}, [None], [0]),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]}, [None, [1]], [["x"]]),
        ({"allOf": [{"type": "number"}, {"enum": [1, "x"]}]}, [1], ["x", 2]),
        ({"$ref": "#/$defs/a~1b"}, ["x"], [1]),
        ({}, [1, None], []),
        (True, [1], []),
        (False, [], [1]),
    ],
)  # fmt: skip
def test_checks_values_by_type(schema, allowed, rejected):
    root = {"$defs": {"a/b": {"type": "string"}}}
    assert all(Schema(root).allows(schema, value) for value in allowed)
    assert not any(Schema(root).allows(schema, value) for value in rejected)


def doubling(levels):
    """Returns definitions that refer to the next one twice each."""
    defs = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    return {**defs, f"a{levels}": {}}


@pytest.mark.parametrize("word", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("levels", [14, 40])
def test_rejects_doubling_references_quickly(word, levels):
    defs = {
        name: {word: entry["allOf"]} if entry else False for name, entry in doubling(levels).items()
    }
    began = time.process_time()
    with pytest.raises(SchemaError):
        Schema({"$defs": defs | {f"a{levels}": word == "allOf"}}).allows({"$ref": "#/$defs/a0"}, 1)
    assert argument("1", {"$ref": "#/$defs/a0"}, **{"$defs": defs}) == 1
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"(a+)+$": {}}, "additionalProperties": False},
        {"propertyNames": {"pattern": "(a+)+$"}},
        {"anyOf": [{"patternProperties": {"(a+)+$": {}}}], "unevaluatedProperties": False},
    ],
)
def test_ignores_patterns_of_schema(schema):
    value = '{"' + "a" * 40 + '!": 1}'
    began = time.process_time()
    assert argument(value, {"type": "object"} | schema) == {"a" * 40 + "!": 1}
    assert time.process_time() - began < 1


def test_limits_steps_over_all_arguments_of_call():
    enum = {"enum": list(range(MAX_STEPS + 1))}
    with pytest.raises(SchemaError, match="too many steps"):
        Schema({}).allows(enum, -1)
    count = 2000
    properties = {f"k{i}": {"$ref": "#/$defs/a0"} for i in range(count)}
    tools = [{"name": "f", "parameters": {"properties": properties, "$defs": doubling(12)}}]
    arguments = "".join(f"<arg_key>k{i}</arg_key><arg_value>1</arg_value>" for i in range(count))
    began = time.process_time()
    [call] = parse_reply(f"<tool_call>f{arguments}</tool_call>", tools, thinking=False).tool_calls
    assert call.arguments == {f"k{i}": 1 for i in range(count)}
    assert time.process_time() - began < 2


def test_reads_value_as_json_without_usable_schema():
    for schema in ({"$ref": "#/$defs/none"}, {"type": "thing"}, {"anyOf": 7}, 5):
        assert argument("5", schema) == 5 and argument("five", schema) == "five"
