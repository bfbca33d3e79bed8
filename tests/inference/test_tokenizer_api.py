"""Tests vLLM's endpoints of the tokenizer."""

import json

from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.conftest import LENGTH
from tests.inference.test_server import get, post

TOKENIZER = Tokenizer.default()
TEXT = "To be, or not to be? naïve 🎭"


def test_tokenizes_text_and_back(server):
    ids = TOKENIZER.encode(TEXT)
    body = {"model": "tiny", "prompt": TEXT, "add_special_tokens": False}
    status, reply = post(server, "/tokenize", body)
    assert (status, reply) == (200, {"tokens": ids, "count": len(ids), "max_model_len": LENGTH})
    assert post(server, "/detokenize", {"tokens": ids}) == (200, {"prompt": TEXT})


def test_end_token_of_info_is_one_token(server):
    status, text = get(server, "/tokenizer_info")
    info = json.loads(text)
    assert status == 200 and info["chat_template"] == TOKENIZER.chat_template
    status, reply = post(server, "/tokenize", {"prompt": info["eos_token"]})
    assert reply["tokens"] == [TOKENIZER.eos_id]


def test_rejects_wrong_bodies(server):
    wrong = [
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "To be or " * 4000}, "the prompt has"),
        ("/tokenize", {"prompt": "\ud800"}, "surrogate"),
        ("/detokenize", {"tokens": "To be"}, "tokens is a text"),
        ("/detokenize", {"tokens": ["To"]}, "is no token id"),
        ("/detokenize", {"tokens": [1] * LENGTH}, "at most 64 are possible"),
    ]
    for path, body, expected_error in wrong:
        status, reply = post(server, path, body)
        assert status == 400 and expected_error in reply["error"]["message"], (path, body, reply)
