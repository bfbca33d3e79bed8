"""Tests the mistakes that tool schemas detect in calls of SFT lines, in a bounded number of steps."""

import json
import time

import pytest

from glm5_jax.data.conversation import parse_line
from glm5_jax.text.messages import ChatError
from glm5_jax.text.schemas import MAX_STEPS, Schema, SchemaError

QUESTION = {"role": "user", "content": "Q"}


def mistakes(parameters, *arguments):
    """Returns the mistakes of a line that calls a tool with these parameters."""
    calls = [{"name": "f", "arguments": call_arguments} for call_arguments in arguments]
    messages = [QUESTION, {"role": "assistant", "tool_calls": calls}]
    return parse_line(
        {"messages": messages, "tools": [{"name": "f", "parameters": parameters}]}
    ).mistakes


def field_schema(**schema):
    """Returns the schema of an object whose field a has this one."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong", "expected_error"),
    [
        (field_schema(type="string"), {"a": "x"}, {}, "'a' is a required property"),
        (field_schema(type="string"), {"a": "x"}, {"a": 1}, "1 is not of type 'string'"),
        (field_schema(type=["integer", "null"]), {"a": 2.0}, {"a": True}, "True is not of type 'integer', 'null'"),
        (field_schema(enum=["x", 1]), {"a": 1}, {"a": "y"}, "'y' is not one of 'x', 1"),
        (field_schema(const=3), {"a": 3}, {"a": 4}, "4 is not 3"),
        (field_schema(minimum=0, maximum=9), {"a": 9}, {"a": -1}, "-1 is beyond the minimum of 0"),
        (field_schema(exclusiveMaximum=9), {"a": 8.5}, {"a": 9}, "9 is not within the exclusiveMaximum of 9"),
        (field_schema(minLength=2), {"a": "xy"}, {"a": "x"}, "1 characters are too few"),
        (field_schema(type="array", maxItems=1, items={"type": "number"}), {"a": [1]}, {"a": [1, 2]}, "2 items are too many"),
        (field_schema(items={"type": "number"}), {"a": [1]}, {"a": ["x"]}, "'x' is not of type 'number'"),
        (field_schema(anyOf=[{"type": "number"}, field_schema(type="null")]), {"a": {"a": None}}, {"a": "x"}, "any of the schemas of anyOf"),
        (field_schema() | {"additionalProperties": False}, {"a": 1}, {"a": 1, "b": 2}, "('b' was unexpected)"),
        (field_schema() | {"additionalProperties": {"type": "null"}}, {"a": 1, "b": None}, {"a": 1, "b": 2}, "2 is not of type"),
        (field_schema(**{"$ref": "#/$defs/N"}) | {"$defs": {"N": {"type": "number"}}}, {"a": 1}, {"a": "x"}, "not of type 'number'"),
        (field_schema(**{"$ref": "#/allOf/0"}) | {"allOf": [{"type": "object"}]}, {"a": {}}, {"a": 1}, "not of type 'object'"),
        # In a tree the references end with the value.
        (field_schema(type="array", items={"$ref": "#/properties/a"}), {"a": [[[]]]}, {"a": [[1]]}, "1 is not of type 'array'"),
        ({"allOf": [field_schema(type="string")]}, {"a": "x"}, {"a": None}, "None is not of type 'string'"),
    ],
    ids=range(17),
)  # fmt: skip
def test_detects_values_outside_schema(parameters, right, wrong, expected_error):
    assert mistakes(parameters, right) == {}
    assert expected_error in mistakes(parameters, wrong)[1]
    assert expected_error in mistakes(parameters, right, wrong)[1]


def doubling(levels, word="allOf"):
    """Returns definitions that refer to the next one twice each."""
    defs = {f"a{i}": {word: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    return {**defs, f"a{levels}": word == "allOf"}


@pytest.mark.parametrize("levels", [15, 40])
@pytest.mark.parametrize("word", ["allOf", "anyOf"])
def test_rejects_doubling_references(word, levels):
    began = time.process_time()
    parameters = field_schema(**{"$ref": "#/$defs/a0"}) | {"$defs": doubling(levels, word)}
    with pytest.raises(ChatError, match="arguments of 'f' cannot be validated by its parameters"):
        mistakes(parameters, {"a": 1})
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(a+)+$"},
        {"patternProperties": {"(a+)+$": {}}, "additionalProperties": False},
        {"propertyNames": {"pattern": "(a+)+$"}},
    ],
)
def test_ignores_patterns(schema):
    began = time.process_time()
    text = "a" * 40 + "!"
    for value in (text, {text: 1}):
        assert mistakes(field_schema(**schema), {"a": value}) == {}
    assert time.process_time() - began < 1


def test_allows_more_steps_for_long_arguments():
    parameters = field_schema(type="array", items={"allOf": [{"type": "integer"}, {"minimum": 0}]})
    assert mistakes(parameters, {"a": [1] * (4 * MAX_STEPS)}) == {}
    with pytest.raises(SchemaError, match="too many steps"):
        Schema(parameters).problem({"a": [1] * MAX_STEPS})


@pytest.mark.parametrize(
    ("parameters", "expected_error"),
    [
        (field_schema(enum=5), "enum is a list"),
        (field_schema(anyOf={}), "anyOf is a list"),
        (field_schema(minimum="1"), "minimum is a number"),
        (field_schema() | {"required": "a"}, "required is a list of names"),
        (field_schema() | {"properties": {"a": 5}}, "5 is not a schema"),
        (field_schema() | {"$defs": {"unused": {"type": "thing"}}}, "a type has one of the names"),
    ],
)
def test_rejects_invalid_schema(parameters, expected_error):
    with pytest.raises(ChatError, match=f"tool 0, 'f', has parameters that are not a JSON schema: .*{expected_error}"):  # fmt: skip
        mistakes(parameters)


def test_abbreviates_large_values_in_errors():
    values = ["x" * 10_000, [1] * 10_000, {str(i): 1 for i in range(1000)}]
    for value in values:
        assert len(mistakes(field_schema(type="null"), {"a": value})[1]) < 200
    assert len(json.dumps(mistakes(field_schema(enum=["y" * 10_000] * 50), {"a": 1}))) < 300
