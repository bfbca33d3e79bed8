"""Bodies checked against a schema: numbers as the schema describes them, and errors that name the field."""

import math

import pytest
from hypothesis import given, strategies as st

from glm5_jax.runtime.http_server import ApiError
from glm5_jax.runtime.json_body import parse
from glm5_jax.runtime.json_schema import MAX_INTEGER, MIN_INTEGER, object_schema, validate

COUNT, NUMBER = {"type": "integer", "minimum": 1, "maximum": 9}, {"type": "number", "minimum": 0}
SCHEMA = object_schema(
    ("count",),
    count=COUNT,
    number=NUMBER,
    seed={"type": "integer"},
    ids={"type": "array", "items": {"type": "integer"}, "maxItems": 5000},
    inner=object_schema(count=COUNT),
    rows={"type": "array", "items": object_schema(count=COUNT), "maxItems": 3},
    anything={},
)


def test_makes_integers_of_whole_numbers_everywhere():
    body = {"count": 2.0, "seed": -3.0, "ids": [1.0, 2], "inner": {"count": 4.0}}
    found = validate(body | {"rows": [{"count": 5.0}], "number": 1.0}, SCHEMA)
    assert found == {**body, "rows": [{"count": 5}], "number": 1.0}
    numbers = [found["count"], found["seed"], *found["ids"], found["inner"]["count"]]
    assert {type(n) for n in [*numbers, found["rows"][0]["count"]]} == {int}
    assert type(found["number"]) is float


@given(st.one_of(st.integers(), st.floats(), st.sampled_from([1e300, 2**63, 10**400, 1e-30, True])))
def test_gives_integers_in_range_or_names_the_field(value):
    """Of a field without bounds the range is that of 64 bits."""
    fits = (
        not isinstance(value, bool) and math.isfinite(min(value, 10**300)) and value == value // 1
    )
    fits = fits and MIN_INTEGER <= value <= MAX_INTEGER
    try:
        found = validate({"count": 1, "seed": value}, SCHEMA)["seed"]
    except ApiError as error:
        assert not fits and error.param == "seed" and len(str(error)) < 400
    else:
        assert fits and type(found) is int and found == value


@pytest.mark.parametrize("value", [-1, 10**400, float("inf"), float("nan"), "1", True])
def test_refuses_numbers_that_are_none_or_out_of_range(value):
    with pytest.raises(ApiError) as caught:
        validate({"count": 1, "number": value}, SCHEMA)
    assert caught.value.param == "number" and len(str(caught.value)) < 400


def test_leaves_out_nulls():
    assert validate({"count": 1, "seed": None, "inner": {"count": None}}, SCHEMA) == {
        "count": 1,
        "inner": {},
    }


def test_names_unknown_fields_briefly():
    with pytest.raises(ApiError, match="^inner.colour: no such field is known$") as caught:
        validate({"count": 1, "inner": {"colour": 1}}, SCHEMA)
    assert caught.value.param == "inner.colour"
    with pytest.raises(ApiError, match="no such field is known") as caught:
        validate({"count": 1, "x" * 5_000_000: 1}, SCHEMA)
    assert len(str(caught.value)) + len(caught.value.param) < 400
    with pytest.raises(ApiError) as caught:
        validate({"count": ["x" * 5_000_000]}, SCHEMA)
    assert caught.value.param == "count" and len(str(caught.value)) < 400


def test_refuses_long_lists_before_looking_at_their_items():
    with pytest.raises(ApiError, match="rows: 4 items are too many; give at most 3"):
        validate({"count": 1, "rows": ["x"] * 4}, SCHEMA)
    body = parse(b'{"count": 1, "ids": [' + b"1," * 999_999 + b"1]}")
    with pytest.raises(ApiError, match="ids: 1000000 items are too many"):
        validate(body, SCHEMA)


def test_checks_items_of_lists_that_are_still_text():
    body = parse(b'{"ids": [' + b"1.0," * 2000 + b'7], "count": 1}', single_pass_bytes=0)
    assert validate(body, SCHEMA)["ids"] == [1] * 2000 + [7]
    for wrong in (b"1.5,", b"1,,", b"99999999999999999999,"):
        body = parse(b'{"ids": [' + wrong * 2000 + b'7], "count": 1}', single_pass_bytes=0)
        with pytest.raises(ApiError, match="^ids"):
            validate(body, SCHEMA)
