"""Tests reading JSON in pieces: values equal those of `json.loads`, and large bodies are rejected before copying."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.runtime import json_body
from glm5_jax.runtime.http_server import ApiError, read_json
from glm5_jax.runtime.json_body import JsonLimits, NumberList, TooLarge, parse
from tests.traced_memory import traced_memory

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


def parse_in_pieces(body, limits=JsonLimits()):
    return parse(body, limits, single_pass_bytes=0)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=150, deadline=None)
def test_reads_values_of_json_in_pieces(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    body = text.encode("utf-8", "surrogatepass" if ascii_only else "replace")
    expected = json.loads(body.decode())
    assert parse_in_pieces(body) == expected == parse(body)


def test_reads_long_texts_with_escapes():
    text = 'a"\\\n\ud7ff😀é' * 20_000
    for ascii_only in (True, False):
        body = json.dumps({"text": [text, "x" * 200_000]}, ensure_ascii=ascii_only).encode()
        assert parse_in_pieces(body) == {"text": [text, "x" * 200_000]}


def test_keeps_long_lists_of_numbers_as_text():
    numbers = [*range(100_000), -1, 2.5, 1e9]
    body = parse_in_pieces(json.dumps({"ids": numbers, "more": [[1, 2], numbers]}).encode())
    assert isinstance(body["ids"], NumberList) and len(body["ids"]) == len(numbers)
    assert list(body["ids"]) == numbers == list(body["more"][1]) and body["more"][0] == [1, 2]
    broken = parse_in_pieces(b"[" + b"1," * 1000 + b",2]")
    with pytest.raises(ValueError, match="no valid numbers"):
        list(broken)


INVALID = [
    b"",
    b"{",
    b"[1,]",
    b'{"a":}',
    b'{"a" 1}',
    b"{1: 2}",
    b"[1 2]",
    b"[] []",
    b'"\n"',
    b'"\\x"',
    b'"no end',
    b"nul",
    b"NaN",
    b"[Infinity]",
    b"01",
    b"1e400",
    b"-",
    b'{"a": 1e999}',
    b"-1" + b"0" * 400,
    b'{"a": [2' + b"0" * 309 + b"]}",
    b'"\xff"',
    b'"\xc3\\n"',
]


@pytest.mark.parametrize("body", INVALID, ids=repr)
def test_rejects_invalid_json(body):
    for single_pass_bytes in (0, len(body)):
        with pytest.raises(ValueError):
            parse(body, single_pass_bytes=single_pass_bytes)
    with pytest.raises(ApiError) as caught:
        read_json(body)
    assert caught.value.status == 400


def test_reads_texts_of_many_digits():
    """Digits in a text are not a number, and do not affect the numbers next to it."""
    body = b'{"text": "' + b"7" * 5000 + b'", "n": 12, "x": -1.5e300}'
    assert parse(body) == parse_in_pieces(body) == {"text": "7" * 5000, "n": 12, "x": -1.5e300}


def test_rejects_deep_nesting():
    for body in (b"[" * 100_000, b'{"a":' * 20_000):
        with pytest.raises(ApiError, match="nested too deeply"):
            read_json(body)


@pytest.mark.parametrize(
    "body, limits, expected_error",
    [
        (
            b'{"a": "' + b"x" * 10_000_000 + b'"}',
            JsonLimits(text_bytes=1000),
            "a text of more than 1000",
        ),
        (b'"' + b"\\n" * 5_000_000 + b'"', JsonLimits(text_bytes=1000), "a text of more than 1000"),
        (
            b"[" + b"1," * 5_000_000 + b"1]",
            JsonLimits(num_numbers=1000),
            "a list of 5000001 numbers",
        ),
        (b"[" + b"[]," * 3_000_000 + b"[]]", JsonLimits(num_values=1000), "more than 1000 values"),
        (
            b"[" + b'{"a":1},' * 1_000_000 + b"1]",
            JsonLimits(num_values=1000),
            "more than 1000 values",
        ),
    ],
    ids=["text", "escapes", "numbers", "lists", "objects"],
)
def test_rejects_large_bodies_before_copying(body, limits, expected_error):
    with traced_memory() as memory, pytest.raises(TooLarge, match=expected_error):
        parse(body, limits)
    assert memory.peak < 1_000_000


def test_keeps_lists_of_numbers_in_little_memory():
    body = b'{"input_ids": [' + b"1," * 5_000_000 + b"1]}"
    with traced_memory() as memory:
        value = parse(body, JsonLimits())
    assert len(value["input_ids"]) == 5_000_001 and memory.peak < 1_000_000
    assert json_body.MAX_SINGLE_PASS_BYTES < len(body)
