"""Tests complete and streamed replies, which have the same text, calls and tokens."""

import json
import random

import numpy as np
import pytest

from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.replies import Chats, Completions, Generated, Origin, StopFilter
from glm5_jax.inference.request import Handle, Request, Token
from glm5_jax.inference.sampling import Sampling
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
ORIGIN = Origin("m", 3)
CALL = "<tool_call>look<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    },
)
TEXTS = [
    "I think, Hélène 🦙.</think>It is 42.<|user|>",
    f"why</think>Let me look.{CALL}{CALL}<|observation|>",
    "</think>no thought<|user|>",
    "never ends",
    f"x</think>{CALL.replace('look', '')}<|observation|>",
    f"x</think>{CALL[:-5]}",
]


def handle(text):
    """Returns the output of an engine for a reply: (handle of the request, tokens, finish reason, stop token)."""
    ids = TOKENIZER.encode(text, parse_special=True)
    tokens = [Token(i, -0.5 - n, 3, ((i, -0.5 - n), (7, -2.0))) for n, i in enumerate(ids)]
    request_handle = Handle(Request([1, 2, 3], Sampling(top_logprobs=2)))
    request_handle.cached_tokens = 2
    end = ids[-1] if ids[-1] in TOKENIZER.eos_ids else None
    return request_handle, tokens, "length" if end is None else "stop", end


def complete_reply(form, request, text):
    request_handle, *output = handle(text)
    request_handle.append_output(*output)
    return form(request, [request_handle], ORIGIN, TOKENIZER).complete()


def stream_chunks(form, request, text, rng):
    """Returns the chunks of a stream whose tokens arrive a few at a time."""
    request_handle, remaining, *end = handle(text)
    answer = form(request, [request_handle], ORIGIN, TOKENIZER)
    chunks = answer.first()
    while remaining:
        count = rng.randint(1, 4)
        arrived, remaining = remaining[:count], remaining[count:]
        request_handle.append_output(arrived, *([None] if remaining else end))
        chunks += answer.piece(0)
    return chunks + answer.last()


def parsed_request(**more):
    options = dict(stream=True, usage=True, logprobs=True, token_ids=True, thinking=True)
    return ParsedRequest(requests=(Request([1, 2, 3]),), **options | more)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_streamed_chat_equals_complete_chat(text, tools):
    request = parsed_request(tools=tools)
    want = complete_reply(Chats, request, text)
    [choice] = want["choices"]
    for seed in range(5):
        *chunks, last = stream_chunks(Chats, request, text, random.Random(seed))
        assert last["choices"] == [] and last["usage"] == want["usage"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        message = choice["message"]
        for part in ("content", "reasoning_content"):
            assert "".join(d.get(part) or "" for d in deltas) == (message.get(part) or "")
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        plain = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        assert plain == [(f["name"], f["arguments"]) for f in functions]
        assert [call["index"] for call in calls] == list(range(len(calls)))
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
        logprobs = [
            e
            for c in chunks
            for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]
        ]
        assert logprobs == choice["logprobs"]["content"]
        ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
        assert ids == choice["token_ids"] == [token.id for token in handle(text)[1]]
        assert (
            chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"] == [1, 2, 3]
        )


@pytest.mark.parametrize("form", [Chats, Completions])
def test_every_chunk_has_token_counts_on_request(form):
    request = parsed_request(continuous_usage=True, logprobs=False, echo=("a",))
    *chunks, last = stream_chunks(form, request, TEXTS[0], random.Random(0))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and len(set(counts)) > 3
    assert chunks[-1]["usage"] == last["usage"]
    plain = stream_chunks(form, parsed_request(), TEXTS[0], random.Random(0))
    assert [chunk for chunk in plain if "usage" in chunk] == plain[-1:]


def test_chat_has_parts_and_usage():
    completion = complete_reply(Chats, parsed_request(tools=TOOLS), TEXTS[1])
    [choice] = completion["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "why")
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [{"n": 2}] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    count = len(handle(TEXTS[1])[1])
    num_reasoning_tokens = len(TOKENIZER.encode("why</think>", parse_special=True))
    assert completion["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": count,
        "total_tokens": 3 + count,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }
    assert (completion["model"], completion["object"], completion["weight_version"]) == (
        "m",
        "chat.completion",
        3,
    )
    first = choice["logprobs"]["content"][0]
    assert bytes(first["bytes"]).decode() == first["token"] and first["logprob"] == -0.5
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -2.0]


def test_content_is_none_for_calls_only():
    [choice] = complete_reply(
        Chats, parsed_request(tools=TOOLS), f"x</think>{CALL}<|observation|>"
    )["choices"]
    assert choice["message"]["content"] is None
    [choice] = complete_reply(Chats, parsed_request(tools=TOOLS), TEXTS[4])["choices"]
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL.replace("look", "")


@pytest.mark.parametrize("form", [Completions, Generated])
def test_streamed_text_equals_complete_text(form):
    for text in ("Hélène 🦙 says<|user|>", "never ends"):
        request = parsed_request()
        want = complete_reply(form, request, text)
        for seed in range(5):
            chunks = stream_chunks(form, request, text, random.Random(seed))
            if form is Generated:
                assert {**chunks[-1], "meta_info": None} == {**want, "meta_info": None}
                assert chunks[-1]["text"] == text.removesuffix("<|user|>")
                continue
            *chunks, last = chunks
            assert last["usage"] == want["usage"]
            [choice] = want["choices"]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
            assert choice["text"] == text.removesuffix("<|user|>")
            assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_generate_returns_versions_and_logprobs():
    request = parsed_request(rid="r")
    meta = complete_reply(Generated, request, "To be<|user|>")["meta_info"]
    tokens = handle("To be<|user|>")[1]
    end = TOKENIZER.special_ids["<|user|>"]
    assert meta["finish_reason"] == {"type": "stop", "matched": end} and meta["id"] == "r"
    assert meta["output_token_logprobs"] == [[t.logprob, t.id, None] for t in tokens]
    assert meta["weight_versions"] == [3] * len(tokens) and meta["weight_version"] == "3"
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (3, 2)


def test_echo_precedes_reply():
    request = parsed_request(echo=("To be ",), logprobs=False)
    [choice] = complete_reply(Completions, request, "or not")["choices"]
    assert choice["text"] == "To be or not"
    chunks = stream_chunks(Completions, request, "or not", random.Random(0))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "To be or not"


@pytest.mark.parametrize("stops", [("END",), ("ND", "END!"), ("\n\n", "E")])
def test_streams_text_up_to_stop(stops):
    text = "one two three END!\n\nfour"
    stop_end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
    for seed in range(20):
        rng, stop_filter, streamed, at = np.random.default_rng(seed), StopFilter(stops), "", 0
        while at < stop_end:  # the engine ends with the token that completes a stop
            size = int(rng.integers(1, 5))
            streamed += stop_filter.feed(text[at : at + size])
            at += size
            assert text.startswith(streamed)
        cut = min(text.find(stop) for stop in stops if stop in text[:at])
        assert streamed + stop_filter.close(True) == text[:cut]


def test_streams_partial_stop_at_end():
    stop_filter = StopFilter(("END",))
    assert stop_filter.feed("it is the EN") + stop_filter.close(False) == "it is the EN"
