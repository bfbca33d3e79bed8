"""Replies told whole and in pieces: the same text, calls and tokens however they come."""

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
    """What an engine would tell of a reply: (request's handle, tokens, reason, what stopped it)."""
    ids = TOKENIZER.encode(text, parse_special=True)
    tokens = [Token(i, -0.5 - n, 3, ((i, -0.5 - n), (7, -2.0))) for n, i in enumerate(ids)]
    made = Handle(Request([1, 2, 3], Sampling(top_logprobs=2)))
    made.cached_tokens = 2
    end = ids[-1] if ids[-1] in TOKENIZER.eos_ids else None
    return made, tokens, "length" if end is None else "stop", end


def whole(form, asked, text):
    made, *told = handle(text)
    made.append_output(*told)
    return form(asked, [made], ORIGIN, TOKENIZER).complete()


def pieces(form, asked, text, rng):
    """The chunks of a stream whose tokens come a few at a time."""
    made, left, *end = handle(text)
    answer = form(asked, [made], ORIGIN, TOKENIZER)
    chunks = answer.first()
    while left:
        count = rng.randint(1, 4)
        now, left = left[:count], left[count:]
        made.append_output(now, *([None] if left else end))
        chunks += answer.piece(0)
    return chunks + answer.last()


def asked(**more):
    options = dict(stream=True, usage=True, logprobs=True, token_ids=True, thinking=True)
    return ParsedRequest(requests=(Request([1, 2, 3]),), **options | more)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_streamed_chat_is_the_whole_one(text, tools):
    own = asked(tools=tools)
    want = whole(Chats, own, text)
    [choice] = want["choices"]
    for seed in range(5):
        *chunks, last = pieces(Chats, own, text, random.Random(seed))
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
        told = [
            e
            for c in chunks
            for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]
        ]
        assert told == choice["logprobs"]["content"]
        ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
        assert ids == choice["token_ids"] == [token.id for token in handle(text)[1]]
        assert (
            chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"] == [1, 2, 3]
        )


def test_a_chat_s_parts():
    made = whole(Chats, asked(tools=TOOLS), TEXTS[1])
    [choice] = made["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "why")
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [{"n": 2}] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    count = len(handle(TEXTS[1])[1])
    thought = len(TOKENIZER.encode("why</think>", parse_special=True))
    assert made["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": count,
        "total_tokens": 3 + count,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }
    assert (made["model"], made["object"], made["weight_version"]) == ("m", "chat.completion", 3)
    first = choice["logprobs"]["content"][0]
    assert bytes(first["bytes"]).decode() == first["token"] and first["logprob"] == -0.5
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -2.0]


def test_a_call_alone_has_no_content_and_one_without_a_name_is_content():
    [choice] = whole(Chats, asked(tools=TOOLS), f"x</think>{CALL}<|observation|>")["choices"]
    assert choice["message"]["content"] is None
    [choice] = whole(Chats, asked(tools=TOOLS), TEXTS[4])["choices"]
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL.replace("look", "")


@pytest.mark.parametrize("form", [Completions, Generated])
def test_a_streamed_text_is_the_whole_one(form):
    for text in ("Hélène 🦙 says<|user|>", "never ends"):
        own = asked()
        want = whole(form, own, text)
        for seed in range(5):
            chunks = pieces(form, own, text, random.Random(seed))
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


def test_generate_tells_versions_and_log_probs():
    own = asked(rid="r")
    meta = whole(Generated, own, "To be<|user|>")["meta_info"]
    tokens = handle("To be<|user|>")[1]
    end = TOKENIZER.special_ids["<|user|>"]
    assert meta["finish_reason"] == {"type": "stop", "matched": end} and meta["id"] == "r"
    assert meta["output_token_logprobs"] == [[t.logprob, t.id, None] for t in tokens]
    assert meta["weight_versions"] == [3] * len(tokens) and meta["weight_version"] == "3"
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (3, 2)


def test_an_echo_comes_first():
    own = asked(echo=("To be ",), logprobs=False)
    [choice] = whole(Completions, own, "or not")["choices"]
    assert choice["text"] == "To be or not"
    chunks = pieces(Completions, own, "or not", random.Random(0))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "To be or not"


@pytest.mark.parametrize("stops", [("END",), ("ND", "END!"), ("\n\n", "E")])
def test_nothing_of_a_stop_is_told_and_all_before_it(stops):
    text = "one two three END!\n\nfour"
    whole_at = min(text.find(stop) + len(stop) for stop in stops if stop in text)
    for seed in range(20):
        rng, held, told, at = np.random.default_rng(seed), StopFilter(stops), "", 0
        while at < whole_at:  # the engine ends with the piece that completes a stop
            size = int(rng.integers(1, 5))
            told += held.feed(text[at : at + size])
            at += size
            assert text.startswith(told)
        cut = min(text.find(stop) for stop in stops if stop in text[:at])
        assert told + held.close(True) == text[:cut]


def test_a_text_that_is_no_stop_is_told_in_the_end():
    held = StopFilter(("END",))
    assert held.feed("it is the EN") + held.close(False) == "it is the EN"
