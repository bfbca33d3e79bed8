"""Tests that untrusted tokenizers that would exhaust memory are rejected."""

import json
import time

import pytest

from glm5_jax.text import tokenizer
from glm5_jax.text.tokenizer import DEFAULT_PATH, Tokenizer

CONTENT = json.loads(DEFAULT_PATH.read_text("utf-8"))


def changed_definition(**parts):
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
def test_rejects_normalizer_that_grows_text(normalizer):
    began = time.process_time()
    with pytest.raises(ValueError, match="has a normalizer of type .*remove the normalizer"):
        Tokenizer(changed_definition(normalizer=normalizer))
    assert time.process_time() - began < 2


def test_accepts_empty_sequence_of_normalizers():
    inner = {"type": "Sequence", "normalizers": []}
    loaded = Tokenizer(changed_definition(normalizer={"type": "Sequence", "normalizers": [inner]}))
    assert loaded.encode("the cat") == Tokenizer.default().encode("the cat")


def test_rejects_token_id_beyond_limit():
    model = {**CONTENT["model"], "vocab": {**CONTENT["model"]["vocab"], "zzzz": 2**32 - 6}}
    with pytest.raises(ValueError, match="has the id 4294967290; ids can be at most 16777215"):
        Tokenizer(changed_definition(model=model, added_tokens=[]))


def test_rejects_text_beyond_length_limit(monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_TEXT", 1000)
    loaded = Tokenizer.default()
    assert loaded.encode("a" * 1000)
    with pytest.raises(ValueError, match="has 1,001 characters, and at most 1,000"):
        loaded.encode("a" * 1001)


@pytest.mark.parametrize("name", ["continuing_subword_prefix", "end_of_word_suffix"])
@pytest.mark.parametrize("value", ["x", "ĠĠĠ"])
def test_rejects_affixes_of_tokens(name, value):
    """Some of these definitions end the process in native code."""
    model = json.loads(changed_definition())["model"] | {name: value}
    with pytest.raises(ValueError, match=f"model.{name} is '{value}'; byte-level BPE has none"):
        Tokenizer(changed_definition(model=model))


def test_reads_definition_without_added_tokens():
    definition = json.loads(changed_definition())
    del definition["added_tokens"]
    tokenizer = Tokenizer(json.dumps(definition))
    assert tokenizer.special_ids == {} and tokenizer.decode(tokenizer.encode("é 1")) == "é 1"
