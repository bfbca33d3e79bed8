"""Tests schemas of clients that would crash the compiler of grammars, or occupy it for long."""

import contextlib
import time

import pytest

from glm5_jax.inference.grammar_trial import MAX_CONCURRENT, GrammarBusy, shared_trial
from glm5_jax.inference.grammars import reply_source
from glm5_jax.inference.protocol import Reader
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer

READER = Reader(Tokenizer.default(), model="m")
USER = {"role": "user", "content": "Where?"}


def read_chat(**fields):
    return READER.chat({"messages": [USER], **fields}, 0)


def with_format(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def with_forced_tool(schema, *, is_strict):
    parameters = {"type": "object", "properties": {"a": schema}}
    function = {"name": "look", "parameters": parameters, "strict": is_strict}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


@pytest.mark.parametrize(
    "schema", [{"const": -(2**63)}, {"enum": [1 - 2**63, 0]}], ids=["const", "enum"]
)
def test_rejects_schema_that_crashes_compiler(schema):
    for fields in (
        with_format({"anyOf": [{"type": "null"}, schema]}),
        with_forced_tool({"type": "integer", **schema}, is_strict=True),
    ):
        with pytest.raises(ApiError, match="cannot be enforced .compiling it crashes") as raised:
            read_chat(**fields)
        assert raised.value.status == 400
    # The value of an argument that is not strict is any text.
    lenient = with_forced_tool({"type": "integer", **schema}, is_strict=False)
    assert read_chat(**lenient).requests[0].rules.grammar
    assert read_chat(**with_format({"type": "null"})).requests[0].rules.grammar


@pytest.mark.slow  # the limit of processor time
def test_rejects_schema_that_takes_long():
    with pytest.raises(ApiError, match="takes more than 2 s or 32 MB"):
        read_chat(**with_format({"type": "integer", "multipleOf": 1_000_003}))


def test_rejects_schema_that_cannot_begin():
    with pytest.raises(ApiError, match="cannot be enforced"):
        read_chat(**with_format({"type": "integer", "minimum": 1, "maximum": 0}))


def test_limits_grammars_that_are_compiled_at_once():
    known, new = with_format({"type": "boolean"}), with_format({"enum": ["busy"]})
    grammar = read_chat(**known).requests[0].rules.grammar
    with contextlib.ExitStack() as slots:
        for _ in range(MAX_CONCURRENT):
            slots.enter_context(shared_trial.slot())
        with pytest.raises(GrammarBusy, match="try again"):
            read_chat(**new)
        assert read_chat(**known).requests[0].rules.grammar is grammar
    assert read_chat(**new).requests[0].rules.grammar


def test_bounds_definitions_that_arguments_repeat():
    properties = {f"a{i}": {"$ref": "#/$defs/city", "not": {}} for i in range(200)}
    schema = {"type": "object", "properties": properties}
    schema["$defs"] = {"city": {"type": "integer"}, "text": {"description": "x" * 2000}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    with pytest.raises(ApiError, match="at most 262144 can be enforced"):
        read_chat(tools=tools, tool_choice="required")


def test_arguments_that_share_many_choices_take_little_time():
    properties = {f"a{i}": {"$ref": "#/properties/all"} for i in range(1000)}
    properties["all"] = {"anyOf": [{"type": "null"} for _ in range(20_000)]}
    tool = {"name": "look", "parameters": {"type": "object", "properties": properties}}
    start = time.thread_time()
    assert "TEXT?" in reply_source([tool])
    assert time.thread_time() - start < 2
