"""Tests JSON values as typed messages: numbers follow the types, and errors name the field."""

import math
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec import Meta

from glm5_jax.runtime import json_structs
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.runtime.json_body import NumberList, parse
from glm5_jax.runtime.json_encoding import json_bytes
from glm5_jax.runtime.json_structs import (
    MAX_INTEGER,
    MIN_INTEGER,
    Integer,
    JsonStruct,
    Numbers,
    Seconds,
    decode,
)

Digit = Annotated[int, Meta(ge=1, le=9)]
Name = Annotated[str, Meta(min_length=1, max_length=4, pattern="^[a-z]+$")]


class Row(JsonStruct, kw_only=True, frozen=True):
    count: Digit | None = None


class AnyBody(JsonStruct, kw_only=True, frozen=True):
    numbers: Numbers = None
    anything: Any = None


class Body(JsonStruct, kw_only=True, frozen=True):
    ignored = frozenset(("user",))
    fixed = {"penalty": 0, "strict": False}
    count: Digit
    number: Seconds | None = None
    seed: Integer | None = None
    ids: Annotated[tuple[Integer, ...], Meta(max_length=5000)] = ()
    inner: Row = Row()
    rows: Annotated[list[Row], Meta(max_length=3)] | None = None
    kind: Literal["a", "b"] = "a"
    name: Name | Annotated[list[Name], Meta(max_length=2)] | None = None
    weights: Annotated[dict[Name, Annotated[float, Meta(gt=0, le=1)]], Meta(max_length=3)] = (
        msgspec.field(default_factory=dict)
    )
    pair: tuple[str, Digit] | None = None
    anything: Any = None


def test_converts_integral_floats_to_integers():
    value = {"count": 2.0, "seed": -3.0, "ids": [1.0, 2], "inner": {"count": 4.0}}
    body = decode(value | {"rows": [{"count": 5.0}], "number": 1}, Body)
    assert (body.count, body.seed, body.ids, body.inner.count) == (2, -3, (1, 2), 4)
    numbers = [body.count, body.seed, *body.ids, body.inner.count, body.rows[0].count]
    assert {type(n) for n in numbers} == {int} and type(body.number) is float


@given(st.one_of(st.integers(), st.floats(), st.sampled_from([1e300, 2**63, 10**400, 1e-30, True])))
def test_accepts_integers_in_range(value):
    """A field without bounds has the range of 64 bits. Errors name the field."""
    fits = (
        not isinstance(value, bool) and math.isfinite(min(value, 10**300)) and value == value // 1
    )
    fits = fits and MIN_INTEGER <= value <= MAX_INTEGER
    try:
        seed = decode({"count": 1, "seed": value}, Body).seed
    except ApiError as error:
        assert not fits and error.param == "seed" and len(str(error)) < 400
    else:
        assert fits and type(seed) is int and seed == value


@pytest.mark.parametrize("value", [-1, 10**400, float("inf"), float("nan"), "1", True])
def test_rejects_invalid_numbers(value):
    with pytest.raises(ApiError) as caught:
        decode({"count": 1, "number": value}, Body)
    assert caught.value.param == "number" and len(str(caught.value)) < 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 11) | st.floats() | st.text("aB", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["count", "a", "B"]), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = sorted(Body.__struct_fields__)


@given(st.dictionaries(st.sampled_from([*FIELDS, "user", "penalty", "strict"]), JSON))
def test_names_field_of_any_invalid_value(fields):
    """Messages never contain those of msgspec, which name no value."""
    try:
        body = decode({"count": 1} | fields, Body)
    except ApiError as error:
        assert "Expected" not in str(error) and "Invalid" not in str(error)
        assert error.param is None or error.param.split(".")[0] in fields
    else:
        assert decode(msgspec.json.decode(json_bytes(body)), Body).count == body.count


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "count: 0 is less than the minimum of 1"),
        ({"count": 10}, "count: 10 is greater than the maximum of 9"),
        ({"count": "x"}, "count: 'x' is not of type 'integer'"),
        ({"count": None}, "'count' is a required property; add it"),
        ({"rows": [{}, {"count": 0}]}, "rows.1.count: 0 is less than the minimum of 1"),
        ({"kind": "c"}, "kind: 'c' is not one of ['a', 'b']"),
        ({"kind": 3}, "kind: 3 is not of type 'string'"),
        ({"name": ""}, "name: '' is too short; give at least 1"),
        ({"name": ["abcde"]}, "name.0: 'abcde' is too long; give at most 4"),
        ({"name": "A"}, "name: 'A' does not match '^[a-z]+$'"),
        ({"name": {}}, "name: {} is not of type 'string', 'array'"),
        ({"weights": {"a": 0}}, "weights.a: 0 is less than or equal to the minimum of 0"),
        ({"weights": {"A": 1}}, "weights: 'A' does not match '^[a-z]+$'"),
        ({"weights": dict.fromkeys("abcd", 1)}, "weights: 4 fields are too many; give at most 3"),
        ({"pair": ["x"]}, "pair: ['x'] has 1 items; give 2"),
        ({"pair": ["x", 0]}, "pair.1: 0 is less than the minimum of 1"),
        ({"penalty": 0.5}, "penalty: 0.5 is not supported, 0 was expected; leave it out"),
        ({"strict": 0}, "strict: 0 is not supported, False was expected; leave it out"),
    ],
)
def test_explains_invalid_value(fields, message):
    with pytest.raises(ApiError) as caught:
        decode({"count": 1} | fields, Body)
    assert str(caught.value) == message and caught.value.status == 400


def test_rejects_values_that_are_not_objects():
    for value in (None, [], 3, "x"):
        with pytest.raises(ApiError, match="is not of type 'object'") as caught:
            decode(value, Body)
        assert caught.value.param is None


def test_ignores_nulls_and_neutral_fields():
    value = {"count": 1, "seed": None, "inner": {"count": None}, "kind": None}
    more = {"user": ["x"], "penalty": 0.0, "strict": False}
    assert (
        decode(value | more, Body) == Body(count=1) == decode({"count": 1, "penalty": None}, Body)
    )
    assert Body(count=1, seed=2).non_default_fields() == {"count": 1, "seed": 2}


def test_names_unknown_fields_briefly():
    with pytest.raises(ApiError, match="^inner.colour: no such field is known$") as caught:
        decode({"count": 1, "inner": {"colour": 1}}, Body)
    assert caught.value.param == "inner.colour"
    with pytest.raises(ApiError, match="no such field is known") as caught:
        decode({"count": 1, "x" * 5_000_000: 1}, Body)
    assert len(str(caught.value)) + len(caught.value.param) < 400
    with pytest.raises(ApiError) as caught:
        decode({"count": ["x" * 5_000_000]}, Body)
    assert caught.value.param == "count" and len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_ignores_unknown_fields_with_neutral_value(value):
    assert decode({"count": 1, "x": value}, Body, ignore_neutral=True) == Body(count=1)
    with pytest.raises(ApiError, match="x: no such field"):
        decode({"count": 1, "x": value}, Body)
    with pytest.raises(ApiError, match="x: no such field"):
        decode({"count": 1, "x": 0}, Body, ignore_neutral=True)


def test_rejects_long_lists_before_reading_items():
    with pytest.raises(ApiError, match="rows: 4 items are too many; give at most 3"):
        decode({"count": 1, "rows": ["x"] * 4}, Body)
    body = parse(b'{"count": 1, "ids": [' + b"1," * 999_999 + b"1]}")
    with pytest.raises(ApiError, match="ids: 1000000 items are too many"):
        decode(body, Body)


def test_checks_items_of_unparsed_lists():
    body = parse(b'{"ids": [' + b"1.0," * 2000 + b'7], "count": 1}', single_pass_bytes=0)
    assert decode(body, Body).ids == (*[1] * 2000, 7)
    for wrong in (b"1.5,", b"1,,", b"99999999999999999999,"):
        body = parse(b'{"ids": [' + wrong * 2000 + b'7], "count": 1}', single_pass_bytes=0)
        with pytest.raises(ApiError, match="^ids"):
            decode(body, Body)


def test_does_not_copy_values_of_type_any():
    body = parse(b'{"anything": [' + b"1," * 2000 + b'7], "count": 1}', single_pass_bytes=0)
    assert decode(body, Body).anything == [1] * 2000 + [7]
    value = {"count": 1, "anything": {"a": [1]}}
    assert decode(value, Body).anything is value["anything"]


def test_encodes_only_non_default_fields():
    body = Body(count=1, inner=Row(count=2), anything=["\ud800", math.nan])
    text = b'{"count":1,"inner":{"count":2},"anything":["?",null]}'
    assert json_bytes(body) == text and json_bytes({"body": [body]}) == b'{"body":[' + text + b"]}"


def test_passes_number_lists_only_to_fields_that_read_them():
    text = b"[" + b"1," * 2000 + b"7]"
    body = parse(
        b'{"numbers": ' + text + b', "anything": {"a": [' + text + b"]}}", single_pass_bytes=0
    )
    fields = decode(body, AnyBody)
    assert isinstance(fields.numbers, NumberList)
    assert fields.anything == {"a": [[1] * 2000 + [7]]}
    body = parse(b'{"anything": [' + text.replace(b"1,", b"1,,") + b"]}", single_pass_bytes=0)
    with pytest.raises(ApiError, match="^anything"):
        decode(body, AnyBody)


def test_reads_deeply_nested_values():
    value = []
    for _ in range(5000):
        value = [value]
    assert decode({"anything": value}, AnyBody).anything is value


@pytest.mark.parametrize(
    "value", ["\ud800", {"count": 1, "kind": "\ud800"}, {"count": 1, "name": "\udfff"}]
)
def test_rejects_lone_surrogates(value):
    with pytest.raises(ApiError, match="is not|does not match"):
        decode(value, Body)


def test_logs_few_ignored_fields(caplog, monkeypatch):
    monkeypatch.setattr(json_structs, "ignored_paths", set())
    for first in range(0, 3000, 1000):
        names = {f"x{first + i}": None for i in range(1000)}
        assert decode({"count": 1, **names}, Body, ignore_neutral=True) == Body(count=1)
    assert len(caplog.records) == json_structs.MAX_IGNORED_LOGGED
