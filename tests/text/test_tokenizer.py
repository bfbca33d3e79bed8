"""Tests that the tokenizer is lossless and deterministic, and reads spelled-out special tokens as text."""

import json

import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import decoders, models, pre_tokenizers

from glm5_jax.text.tokenizer import CONFIG, DEFAULT_PATH, SPECIAL_TOKENS, Tokenizer

DEFAULT = Tokenizer.default()
TEXTS = ["the cat sat on the mat", "the dog and the cat", "mit der Katze, ä 你好"] * 3


def test_shipped_tokenizer_ends_with_glm_special_tokens():
    assert DEFAULT.vocab_size == 2048
    assert [DEFAULT.special_ids[name] for name in SPECIAL_TOKENS] == list(range(2012, 2048))
    assert DEFAULT.eos_ids == (2012, 2019, 2021)
    assert DEFAULT.eos_id == DEFAULT.pad_id == 2012


def test_special_tokens_have_released_offsets():
    released = {"<|endoftext|>": 154820, "<|user|>": 154827, "<|observation|>": 154829}
    released |= {"<tool_call>": 154843, "<|video|>": 154855}
    for name, token_id in released.items():
        assert SPECIAL_TOKENS.index(name) == token_id - 154820
    assert len(set(SPECIAL_TOKENS)) == 36


@given(st.lists(st.one_of(st.text(), st.sampled_from([*SPECIAL_TOKENS, "  \n", "\r\n\t", "\0"]))))
def test_decodes_any_encoded_text(pieces):
    text = "".join(pieces)
    assert DEFAULT.decode(DEFAULT.encode(text)) == text
    assert DEFAULT.decode(DEFAULT.encode(text, parse_special=True)) == text


@given(st.text())
def test_token_bytes_sum_to_text_bytes(text):
    assert DEFAULT.token_bytes()[DEFAULT.encode(text)].sum() == len(text.encode())


def test_special_tokens_have_no_bytes():
    assert not DEFAULT.token_bytes()[2012:].any() and DEFAULT.token_bytes()[:2012].all()


def test_parses_special_tokens_only_on_request():
    text = "<|user|>Hi<think>"
    assert max(DEFAULT.encode(text)) < 2012
    ids = DEFAULT.special_ids
    hi = DEFAULT.encode("Hi")
    parsed = DEFAULT.encode(text, parse_special=True)
    assert parsed == [ids["<|user|>"], *hi, ids["<think>"]]
    assert DEFAULT.decode(parsed, skip_special=True) == "Hi"


def test_rejects_lone_surrogate_with_position():
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        DEFAULT.encode("ab\ud800c")


def test_decodes_partial_character_to_replacement():
    ids = DEFAULT.encode("你")
    assert len(ids) == 3 and DEFAULT.decode(ids[:2]) == "\N{REPLACEMENT CHARACTER}"


def changed_definition(**parts) -> str:
    """Returns the shipped definition with some parts replaced."""
    content = json.loads(DEFAULT_PATH.read_text())
    for name, part in parts.items():
        content[name] = part
    return json.dumps(content)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "WhitespaceSplit"}


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPACES, BYTES]}},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}},
        *({"normalizer": {"type": t}} for t in ("NFC", "NFD", "NFKC", "Lowercase", "StripAccents")),
    ],
    ids=str,
)
def test_rejects_tokenizer_that_changes_text(parts):
    """Its ids would not represent the bytes of the text, and the loss mask of a chat is derived from bytes."""
    with pytest.raises(
        ValueError,
        match="the tokenizer (reads '.*' as|has a normalizer of type) '.*'; only ",
    ):
        Tokenizer(changed_definition(**parts))
    Tokenizer(changed_definition(pre_tokenizer=BYTES))


@pytest.mark.parametrize("token_id", [-1, 2048])
def test_rejects_id_without_token(token_id):
    with pytest.raises(ValueError, match=f"id {token_id} is not a token"):
        DEFAULT.decode([token_id])


def test_trains_deterministically_and_saves_losslessly(tmp_path):
    for folder in ("one", "two"):
        Tokenizer.train(iter(TEXTS), 310).save(tmp_path / folder)
    written = (tmp_path / "one" / "tokenizer.json").read_bytes()
    assert written == (tmp_path / "two" / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "one" / "tokenizer_config.json").read_text()) == CONFIG

    tokenizer = Tokenizer.load(tmp_path / "one")
    assert tokenizer.vocab_size == 310 and tokenizer.eos_id == 310 - 36
    assert len(tokenizer.encode("the cat")) < len("the cat")
    assert tokenizer.decode(tokenizer.encode("the 🐈 ist ä")) == "the 🐈 ist ä"
    tokenizer.save(tmp_path / "three")
    assert written == (tmp_path / "three" / "tokenizer.json").read_bytes()
    assert Tokenizer.load(tmp_path / "one" / "tokenizer.json").eos_ids == tokenizer.eos_ids


def test_loads_byte_tokenizer():
    tokenizer = Tokenizer.load("bytes")
    assert tokenizer.vocab_size == 256 + 36
    assert len(tokenizer.encode("1+ü")) == 4 and tokenizer.decode(tokenizer.encode("1+ü")) == "1+ü"


def test_rejects_impossible_vocabulary_size():
    with pytest.raises(ValueError, match="vocab_size is 291; it must be at least 292"):
        Tokenizer.train(TEXTS, 291)
    with pytest.raises(ValueError, match="give more text or a smaller vocab_size"):
        Tokenizer.train(["ab"], 1000)


def load_foreign(tmp_path, config):
    """Loads a tokenizer of another model: special tokens come first, and one added token is not special."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<eos>"])
    content = json.loads(inner.to_str())
    tokens = [
        "<bos>",
        "<eos>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
    ]  # the alphabet has no order
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    think = {**content["added_tokens"][0], "id": 258, "content": "<think>", "special": False}
    content["added_tokens"].append(think)
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(tmp_path)


def test_loads_tokenizer_of_another_model(tmp_path):
    config = {"eos_token": {"content": "<eos>"}, "pad_token": "<eos>", "extra": "ä"}
    tokenizer = load_foreign(tmp_path, config)
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.pad_id) == (259, (1,), 1)
    text = "<think>ä<eos>"
    assert len(tokenizer.encode(text)) == len(
        text.encode()
    )  # markers are not parsed, and no bos is added
    assert len(tokenizer.encode(text, parse_special=True)) == 4
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text()) == config


def test_rejects_special_token_with_inconsistent_id(tmp_path):
    load_foreign(tmp_path, None)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"][-1]["id"] = 300
    with pytest.raises(ValueError, match=r"'<think>' has id 300 .* 258"):
        Tokenizer(json.dumps(content))


def test_rejects_use_of_missing_end_of_document(tmp_path):
    tokenizer = load_foreign(tmp_path, None)
    assert tokenizer.eos_ids == () and tokenizer.pad_id is None
    with pytest.raises(ValueError, match="no end-of-document token"):
        _ = tokenizer.eos_id


def test_fingerprint_depends_on_definition_and_eos(tmp_path):
    load_foreign(tmp_path, None)
    definition = (tmp_path / "tokenizer.json").read_text()
    configs = ({"eos_token": "<eos>"}, {"eos_token": "<bos>"}, {})
    prints = [Tokenizer(definition, config).fingerprint for config in configs]
    assert len({*prints, Tokenizer.default().fingerprint}) == 4
    unrelated = {"eos_token": "<eos>", "model_max_length": 7}
    assert Tokenizer(definition, unrelated).fingerprint == prints[0]


def test_rejects_unreadable_tokenizers(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer at .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"cannot read the tokenizer at .*tokenizer.json"):
        Tokenizer.load(file)
    file.write_text(tokenizers.Tokenizer(models.BPE()).to_str())
    with pytest.raises(ValueError, match="only byte-level BPE"):
        Tokenizer.load(file)
    file.with_name("tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"cannot read the tokenizer at .*tokenizer.json"):
        Tokenizer.load(file)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "tokenizer_config.json holds 3; it must be an object"),
        ({"eos_token": [1]}, r"eos_token of tokenizer_config.json is \[1\]; it must be a token"),
        ({"pad_token": {}}, "pad_token of tokenizer_config.json is {}; it must be a token"),
    ],
)
def test_rejects_invalid_tokenizer_config(tmp_path, config, message):
    with pytest.raises(ValueError, match=f"cannot read the tokenizer at .*{message}"):
        load_foreign(tmp_path, config)


def test_replaces_ids_without_token_on_request():
    tokenizer = Tokenizer.default()
    ids = [*tokenizer.encode("to be"), tokenizer.vocab_size, -1]
    assert tokenizer.decode(ids, errors="replace") == "to be\ufffd\ufffd"
    with pytest.raises(ValueError, match="id 2048 is not a token"):
        tokenizer.decode(ids)
