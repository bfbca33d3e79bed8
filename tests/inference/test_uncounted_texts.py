"""Tests parts of bodies that become tokens but are no texts: names of fields, numbers, and texts whose begin misleads."""

import json
import random

import pytest

from glm5_jax.inference.prompts import num_characters
from glm5_jax.inference.protocol import Reader
from glm5_jax.runtime.http_server import ApiError, read_json
from glm5_jax.text.tokenizer import Tokenizer

LENGTH = 20_000
READER = Reader(Tokenizer.default(), model="m", max_length=LENGTH)
USER = {"role": "user", "content": "Where?"}
LONG_USER = {"role": "user", "content": " " * 70_000}  # a body that is parsed in pieces
NUMBERS = list(range(400))


def tools_of(properties):
    function = {"name": "look", "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": function}]


def call_of(arguments):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "no"}]


def noise(num_characters):
    letters = random.Random(0).choices("qxzjkvwQXZJKVW0%&$#@~", k=num_characters)
    return "".join(letters)


NAMES = {f"{i} " + "x y" * 100: 1 for i in range(1500)}
LARGE = {
    "names of properties": (
        "chat",
        {"messages": [USER], "tools": tools_of({n: {} for n in NAMES})},
    ),
    "names of arguments": ("chat", {"messages": [USER, *call_of(NAMES)]}),
    "numbers": (
        "chat",
        {
            "messages": [USER],
            "tools": tools_of({"a": {"enum": list(range(10**6, 10**6 + 60_000))}}),
        },
    ),
    "blanks before noise": ("completion", {"prompt": " " * 20_000 + noise(200_000)}),
}


@pytest.mark.parametrize("case", LARGE)
def test_refuses_long_prompt_before_encoding_it(case, monkeypatch):
    sizes, encode = [], Tokenizer.encode

    def recording_encode(self, text, **options):
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", recording_encode)
    name, body = LARGE[case]
    with pytest.raises(ApiError, match="the prompt has at least") as raised:
        getattr(READER, name)(read_json(json.dumps(body).encode(), READER.limits), 0)
    assert raised.value.code == "context_length_exceeded"
    assert max(sizes) <= 4 * LENGTH


def test_counts_names_texts_and_numbers():
    assert num_characters([{"ab": ["cde", 12, -1.5]}, "f", True]) == 2 + 3 + 2 + 4 + 1 + 4


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [LONG_USER], "tools": tools_of({"a": {"enum": NUMBERS}})},
        {"messages": [LONG_USER, *call_of({"a": NUMBERS})]},
        {
            "messages": [LONG_USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": NUMBERS}},
            },
        },
    ],
    ids=["tool", "arguments", "format"],
)
def test_reads_long_lists_of_numbers_in_large_bodies(fields):
    body = json.dumps(fields).encode()
    parsed = READER.chat(read_json(body, READER.limits), 0)
    assert parsed.requests[0].ids == READER.chat(json.loads(body), 0).requests[0].ids


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [[1] * 19_000] * 13, "logprobs": 20},
        {"prompt": [[1] * 19_000] * 3, "logprobs": 0, "n": 128},
    ],
    ids=["alternatives", "choices"],
)
def test_limits_log_probs_of_prompts(fields):
    body = {"echo": True, "max_tokens": 0, **fields}
    with pytest.raises(ApiError, match="at most 5000000 are given at once") as raised:
        READER.completion(body, 0)
    assert raised.value.param == "logprobs"
    body["prompt"] = body["prompt"][:1]
    assert READER.completion(body, 0).requests[0].sampling.prompt_logprobs


def test_limits_ids_of_prompts_that_responses_repeat():
    body = {"return_token_ids": True, "prompt": [[1] * 19_000] * 3, "n": 128}
    with pytest.raises(ApiError, match="7296000 ids; at most 5000000") as raised:
        READER.completion(body, 0)
    assert raised.value.param == "return_token_ids"
    assert READER.completion(body | {"n": 2}, 0).token_ids
