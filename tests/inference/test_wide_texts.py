"""Tests texts with characters beyond Latin-1, which take up to four bytes each: large ones are rejected before
decoding.
"""

import json

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.inference.protocol import Reader
from glm5_jax.runtime import json_body
from glm5_jax.runtime.http_server import ApiError, read_json
from glm5_jax.runtime.json_body import JsonLimits, WideText, parse
from glm5_jax.text.tokenizer import Tokenizer
from tests.traced_memory import traced_memory

READER = Reader(Tokenizer.default(), model="m", max_length=20_000, max_requests=1024)
WORDS = "word and " * 222_000  # 2 MB
CHAT = [{"role": "user", "content": "😀" + WORDS[:100_000]}] * 20
BODIES = {
    "prompt with an emoji": ("completion", {"prompt": "😀" + WORDS}),
    "emoji at the end": ("completion", {"prompt": WORDS + "😀"}),
    "one of several prompts": ("completion", {"prompt": ["a", "中" + WORDS, "b"]}),
    "message": ("chat", {"messages": [{"role": "user", "content": WORDS + "中"}]}),
    "messages together": ("chat", {"messages": CHAT}),
    "parts": ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "😀" + WORDS}]}]}),
    "unknown field": ("chat", {"messages": [{"role": "user", "content": "a"}], "x": "😀" + WORDS}),
    "unknown field within": ("chat", {"messages": [], "thinking": {"x": ["😀" + WORDS]}}),
    "generate": ("generate", {"text": WORDS + "😀"}),
}  # fmt: skip


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("case", BODIES)
def test_rejects_wide_text_in_twice_memory_of_body(case, ascii_only):
    name, value = BODIES[case]
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with traced_memory() as memory, pytest.raises(ApiError) as caught:
        getattr(READER, name)(read_json(body, READER.limits), 0)
    assert caught.value.code == "context_length_exceeded" and caught.value.status == 400
    assert memory.peak < 2.1 * len(body), f"{memory.peak / len(body):.1f} times the body"


def test_accepts_many_wide_prompts_that_fit():
    prompts = ["😀" + "word and " * 1000] * 60
    body = json.dumps({"prompt": prompts}).encode()
    assert len(body) > 2 * json_body.MAX_WIDE_BYTES
    result = READER.completion(read_json(body, READER.limits), 0)
    tokenizer = Tokenizer.default()
    assert tokenizer.decode(result.requests[-1].ids) == prompts[-1] and len(result.requests) == 60


@given(
    st.recursive(
        st.text(st.characters(), max_size=20) | st.integers(0, 9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=20,
    )
)
@settings(max_examples=100, deadline=None)
def test_decodes_all_wide_texts_of_accepted_value(value):
    seen = []
    for ascii_only in (False, True):
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_body, "MAX_WIDE_BYTES", 0)
            assert parse(body, JsonLimits(check=seen.append), single_pass_bytes=0) == value
    is_wide = any(ord(letter) > 255 for letter in json.dumps(value, ensure_ascii=False))
    assert not seen or is_wide


def test_reads_half_surrogate_pair_as_json_module():
    body = b'{"a": "' + b"x" * 300_000 + rb'\ud83d", "b": "\ude00"}'
    assert parse(body) == json.loads(body)


def test_check_sees_texts_before_decoding():
    seen = []
    body = json.dumps({"a": ["中" * 200_000, "b"]}, ensure_ascii=False).encode()
    value = parse(body, JsonLimits(check=lambda value: seen.append(type(value["a"][0]))))
    assert seen == [WideText] and value == {"a": ["中" * 200_000, "b"]}
