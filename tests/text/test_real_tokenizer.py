"""Tests DeepSeek-R1's tokenizer, a byte-level BPE of 128,815 tokens, as it is and with GLM's markers appended."""

import gzip
import json
import pathlib
import time

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import SPECIAL_TOKENS, Detokenizer, Tokenizer
from glm5_jax.text.tool_calls import ReplyParser, parse_reply

FOLDER = pathlib.Path(__file__).parents[1] / "goldens" / "deepseek_r1"
DEFINITION = json.loads(gzip.decompress((FOLDER / "tokenizer.json.gz").read_bytes()))
CHAT = [
    {"role": "user", "content": "Wie groß ist 世界? <|user|> 👩‍👩‍👧"},
    {
        "role": "assistant",
        "reasoning_content": "naïve <think> 👩‍👩‍👧",
        "tool_calls": [{"name": "find", "arguments": {"text": "ß世", "limit": 3}}],
    },
    {"role": "tool", "content": "</tool_response> 12"},
    {"role": "assistant", "content": "Zwölf."},
]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    (folder / "tokenizer.json").write_text(json.dumps(DEFINITION))
    config = (FOLDER / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """Loads the same vocabulary with GLM-5's special tokens appended, except `<think>` and `</think>`, which it has."""
    added = DEFINITION["added_tokens"]
    first = 1 + max(token["id"] for token in added)
    missing = [name for name in SPECIAL_TOKENS if name not in {token["content"] for token in added}]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    markers = [
        {"id": first + i, "content": name, "special": True} | flags
        for i, name in enumerate(missing)
    ]
    folder = tmp_path_factory.mktemp("glm")
    definition = DEFINITION | {"added_tokens": added + markers}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return Tokenizer.load(folder)


@pytest.mark.slow
def test_reads_end_of_text_from_config(real):
    assert real.vocab_size == 128_815
    assert real.eos_id == real.special_ids["<｜end▁of▁sentence｜>"] and real.eos_ids == (1,)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_decodes_any_text_at_once_and_streamed(glm, text):
    ids = glm.encode(text)
    assert glm.decode(ids) == text
    detokenizer = Detokenizer(glm)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert "".join(pieces) + detokenizer.close() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.slow
def test_rejects_chat_without_glm_markers(real):
    with pytest.raises(ValueError, match=r"has no token '\[gMASK\]'; chats need one of the GLM"):
        render_chat(CHAT, real)


def test_encodes_markers_by_name_and_spelled_out_as_text(glm):
    assert glm.vocab_size == 128_815 + len(SPECIAL_TOKENS) - 2
    rendered = render_chat(CHAT, glm, close=True)
    assert glm.decode(rendered.ids) == rendered.text
    by_id = {glm.special_ids[name]: name for name in SPECIAL_TOKENS}
    names = [by_id[i] for i in rendered.ids if i in by_id]
    # Markers spelled out in the user's text, the tool's text and the reasoning are not counted.
    assert names.count("<|user|>") == 2 and names.count("<think>") == 1
    assert names.count("</tool_response>") == 1
    stops = [by_id[i] for i in rendered.ids if i in glm.eos_ids]
    assert stops == ["<|user|>", "<|observation|>", "<|user|>"]


def test_parses_reply_in_pieces_of_any_size(glm):
    rendered = render_chat(CHAT[:2], glm, close=True)
    ids = [i for i, is_trained in zip(rendered.ids, rendered.loss_mask) if is_trained]
    tools = [{"name": "find"}]
    parsed = parse_reply(ids, tools, tokenizer=glm)
    assert parsed.reasoning_content == CHAT[1]["reasoning_content"]
    assert (parsed.tool_calls[0].name, parsed.tool_calls[0].arguments) == (
        "find",
        {"text": "ß世", "limit": 3},
    )
    assert parsed.stopped_by == "<|observation|>"
    for size in (1, 2, 3, 7):
        parser = ReplyParser(tools, tokenizer=glm)
        for first in range(0, len(ids), size):
            parser.feed(ids[first : first + size])
        assert parser.close() == parsed


@pytest.mark.slow
def test_encodes_two_megabytes_quickly(glm):
    text = "The quick brown fox, 12 + 30 = 42; <|user|> 世界. " * 40_000
    assert len(text.encode()) > 2e6
    began = time.perf_counter()
    rendered = render_chat([{"role": "user", "content": text}], glm)
    assert time.perf_counter() - began < 30
    assert len(rendered.ids) > 500_000
