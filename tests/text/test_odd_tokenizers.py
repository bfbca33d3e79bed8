"""Tokenizers that somebody else made: what would grow a text or a table beyond all memory is refused."""

import json
import time

import pytest

from glm5_jax.text import tokenizer
from glm5_jax.text.tokenizer import DEFAULT_PATH, Tokenizer

CONTENT = json.loads(DEFAULT_PATH.read_text("utf-8"))


def changed(**parts):
    return json.dumps({**CONTENT, **parts})


GROWS = {"type": "Replace", "pattern": {"String": "q"}, "content": "y" * 10**6}


@pytest.mark.parametrize(
    "normalizer",
    [
        GROWS,
        GROWS | {"pattern": {"String": "a"}},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [GROWS]}]},
    ],
)
def test_refuses_a_normalizer_that_grows_text(normalizer):
    began = time.process_time()
    with pytest.raises(ValueError, match="has a normalizer of type .*remove the normalizer"):
        Tokenizer(changed(normalizer=normalizer))
    assert time.process_time() - began < 2


def test_takes_a_sequence_of_no_normalizers():
    inner = {"type": "Sequence", "normalizers": []}
    read = Tokenizer(changed(normalizer={"type": "Sequence", "normalizers": [inner]}))
    assert read.encode("the cat") == Tokenizer.default().encode("the cat")


def test_refuses_an_id_beyond_all_tables():
    model = {**CONTENT["model"], "vocab": {**CONTENT["model"]["vocab"], "zzzz": 2**32 - 6}}
    with pytest.raises(ValueError, match="has the id 4294967290; ids can be at most 16777215"):
        Tokenizer(changed(model=model, added_tokens=[]))


def test_refuses_a_text_that_no_memory_holds(monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_TEXT", 1000)
    read = Tokenizer.default()
    assert read.encode("a" * 1000)
    with pytest.raises(ValueError, match="has 1,001 characters, and at most 1,000"):
        read.encode("a" * 1001)
