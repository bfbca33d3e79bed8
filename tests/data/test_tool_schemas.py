"""Schemas of tools in lines of SFT data: what they find wrong with a call, in few steps whatever they hold."""

import json
import time

import pytest

from glm5_jax.data.conversation import parse_line
from glm5_jax.text.messages import ChatError
from glm5_jax.text.schemas import MAX_STEPS, Schema, SchemaError

QUESTION = {"role": "user", "content": "Q"}


def mistakes(parameters, *arguments):
    """Returns the mistakes of a line that calls a tool with these parameters."""
    calls = [{"name": "f", "arguments": one} for one in arguments]
    messages = [QUESTION, {"role": "assistant", "tool_calls": calls}]
    return parse_line(
        {"messages": messages, "tools": [{"name": "f", "parameters": parameters}]}
    ).mistakes


def of(**schema):
    """Returns the schema of an object whose field a has this one."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong", "words"),
    [
        (of(type="string"), {"a": "x"}, {}, "'a' is a required property"),
        (of(type="string"), {"a": "x"}, {"a": 1}, "1 is not of type 'string'"),
        (of(type=["integer", "null"]), {"a": 2.0}, {"a": True}, "True is not of type 'integer', 'null'"),
        (of(enum=["x", 1]), {"a": 1}, {"a": "y"}, "'y' is not one of 'x', 1"),
        (of(const=3), {"a": 3}, {"a": 4}, "4 is not 3"),
        (of(minimum=0, maximum=9), {"a": 9}, {"a": -1}, "-1 is beyond the minimum of 0"),
        (of(exclusiveMaximum=9), {"a": 8.5}, {"a": 9}, "9 is not within the exclusiveMaximum of 9"),
        (of(minLength=2), {"a": "xy"}, {"a": "x"}, "1 characters are too few"),
        (of(type="array", maxItems=1, items={"type": "number"}), {"a": [1]}, {"a": [1, 2]}, "2 items are too many"),
        (of(items={"type": "number"}), {"a": [1]}, {"a": ["x"]}, "'x' is not of type 'number'"),
        (of(anyOf=[{"type": "number"}, of(type="null")]), {"a": {"a": None}}, {"a": "x"}, "any of the schemas of anyOf"),
        (of() | {"additionalProperties": False}, {"a": 1}, {"a": 1, "b": 2}, "('b' was unexpected)"),
        (of() | {"additionalProperties": {"type": "null"}}, {"a": 1, "b": None}, {"a": 1, "b": 2}, "2 is not of type"),
        (of(**{"$ref": "#/$defs/N"}) | {"$defs": {"N": {"type": "number"}}}, {"a": 1}, {"a": "x"}, "not of type 'number'"),
        (of(**{"$ref": "#/allOf/0"}) | {"allOf": [{"type": "object"}]}, {"a": {}}, {"a": 1}, "not of type 'object'"),
        # A tree, whose references end where the value does.
        (of(type="array", items={"$ref": "#/properties/a"}), {"a": [[[]]]}, {"a": [[1]]}, "1 is not of type 'array'"),
        ({"allOf": [of(type="string")]}, {"a": "x"}, {"a": None}, "None is not of type 'string'"),
    ],
    ids=range(17),
)  # fmt: skip
def test_finds_what_a_schema_does_not_allow(parameters, right, wrong, words):
    assert mistakes(parameters, right) == {}
    assert words in mistakes(parameters, wrong)[1]
    assert words in mistakes(parameters, right, wrong)[1]


def doubling(levels, word="allOf"):
    """Returns definitions that refer to the next one twice each."""
    defs = {f"a{i}": {word: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    return {**defs, f"a{levels}": word == "allOf"}


@pytest.mark.parametrize("levels", [15, 40])
@pytest.mark.parametrize("word", ["allOf", "anyOf"])
def test_refuses_references_that_multiply(word, levels):
    began = time.process_time()
    parameters = of(**{"$ref": "#/$defs/a0"}) | {"$defs": doubling(levels, word)}
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
def test_runs_no_pattern(schema):
    began = time.process_time()
    text = "a" * 40 + "!"
    for value in (text, {text: 1}):
        assert mistakes(of(**schema), {"a": value}) == {}
    assert time.process_time() - began < 1


def test_gives_long_arguments_more_steps():
    parameters = of(type="array", items={"allOf": [{"type": "integer"}, {"minimum": 0}]})
    assert mistakes(parameters, {"a": [1] * (4 * MAX_STEPS)}) == {}
    with pytest.raises(SchemaError, match="too many steps"):
        Schema(parameters).problem({"a": [1] * MAX_STEPS})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (of(enum=5), "enum is a list"),
        (of(anyOf={}), "anyOf is a list"),
        (of(minimum="1"), "minimum is a number"),
        (of() | {"required": "a"}, "required is a list of names"),
        (of() | {"properties": {"a": 5}}, "5 is not a schema"),
        (of() | {"$defs": {"unused": {"type": "thing"}}}, "a type has one of the names"),
    ],
)
def test_names_what_is_no_schema(parameters, words):
    with pytest.raises(ChatError, match=f"tool 0, 'f', has parameters that are not a JSON schema: .*{words}"):  # fmt: skip
        mistakes(parameters)


def test_shows_little_of_a_large_value():
    values = ["x" * 10_000, [1] * 10_000, {str(i): 1 for i in range(1000)}]
    for value in values:
        assert len(mistakes(of(type="null"), {"a": value})[1]) < 200
    assert len(json.dumps(mistakes(of(enum=["y" * 10_000] * 50), {"a": 1}))) < 300
