"""Tests that encoding in pieces gives the same JSON as encoding at once."""

import json

from hypothesis import given, settings, strategies as st

from glm5_jax.runtime.json_encoding import encode_in_pieces, json_bytes

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=30,
)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_encodes_in_pieces_as_at_once(value):
    assert encode_in_pieces(value) == json_bytes(value)


def test_encodes_long_lists_of_each_kind():
    tokens = [
        {"token": str(i), "logprob": -i / 3, "top": [[i, None]] * (i % 3)} for i in range(300)
    ]
    value = {"choices": [{"logprobs": {"content": tokens}, "ids": list(range(1000))}] * 2}
    assert json.loads(encode_in_pieces(value)) == value
    assert encode_in_pieces([]) == b"[]" and encode_in_pieces({}) == b"{}"
