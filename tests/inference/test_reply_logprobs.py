"""Tests that the most likely tokens of all replies of a body are bounded, since they are kept until the last one ends."""

import pytest

from glm5_jax.inference.protocol import Reader
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer

READER = Reader(Tokenizer.default(), model="tiny", max_length=202_752, max_requests=1024)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
GENERATE = {"text": "hi", "return_logprob": True, "top_logprobs_num": 20}


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (READER.chat, CHAT | {"n": 128}),
        (READER.chat, CHAT | {"n": 8, "max_tokens": 10**9, "stream": True}),
        (READER.completion, {"prompt": ["a"] * 200, "logprobs": 20, "max_tokens": 10_000}),
        (READER.generate, GENERATE | {"sampling_params": {"n": 64, "max_new_tokens": 100_000}}),
    ],
)
def test_refuses_more_than_memory_holds(read, body):
    with pytest.raises(ApiError, match="more than 20000000; give a smaller max_tokens") as raised:
        read(body, 0)
    assert (raised.value.status, raised.value.param) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (READER.chat, CHAT),
        (READER.chat, CHAT | {"n": 128, "max_tokens": 1000}),
        (READER.chat, CHAT | {"n": 128, "top_logprobs": 0}),
        (READER.generate, GENERATE | {"sampling_params": {"n": 4}}),
    ],
)
def test_accepts_ordinary_numbers(read, body):
    assert len(read(body, 0).requests) in (1, 4, 128)
