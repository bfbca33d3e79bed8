"""Bodies that are too large: refused before they are copied, and read without holding other threads."""

import gc
import json
import pathlib
import threading
import time
import tracemalloc

import numpy as np
import pytest

from glm5_jax.inference.prompts import MAX_PROMPTS
from glm5_jax.inference.protocol import Reader
from glm5_jax.runtime.http_server import ApiError, read_json
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.conftest import serving
from tests.inference.test_server import post

TOKENIZER = Tokenizer.default()
LONG = 20_000
LIMITED = {length: dict(max_length=length, max_requests=1024) for length in (64, LONG, 202_752)}
READERS = {n: Reader(TOKENIZER, model="m", **limits) for n, limits in LIMITED.items()}


def chat(text):
    return b'{"messages": [{"role": "user", "content": "' + text + b'"}]}'


def prompt(text, more=b""):
    return b'{"prompt": ' + text + more + b"}"


N = b', "n": 128'
# Of 2 MB, but for those that are refused for their number of replies.
LARGE = {
    "ids": ("completion", prompt(b"[" + b"1," * 1_000_000 + b"1]", N)),
    "ids of five digits": ("completion", prompt(b"[" + b"12345, " * 285_000 + b"1]")),
    "lists of ids": (
        "completion",
        prompt(b"[" + (b"[" + b"1," * 50_000 + b"1],") * 20 + b"[1]]", N),
    ),
    "text": ("completion", prompt(b'"' + b"word and " * 222_000 + b'"')),
    "text with escapes": ("completion", prompt(b'"' + b"a\\n" * 300_000 + b'"')),
    "chat": ("chat", chat(b"word and " * 222_000)),
    "chat with escapes": ("chat", chat(b"\\u4e2d" * 333_000)),
    "empty lists": ("completion", prompt(b"[" + b"[]," * 666_000 + b"[]]")),
    "stop ids": (
        "completion",
        prompt(b'"a"', b', "stop_token_ids": [' + b"1," * 1_000_000 + b"1]"),
    ),
    "unknown field": ("chat", chat(b"a")[:-1] + b', "x": "' + b"y" * 2_000_000 + b'"}'),
}


def refused(reader, name, body):
    with pytest.raises(ApiError) as caught:
        getattr(reader, name)(read_json(body, reader.limits), 0)
    assert caught.value.status in (400, 429) and len(str(caught.value)) < 500
    return caught.value


@pytest.mark.parametrize("length", [64, LONG, pytest.param(202_752, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", LARGE)
def test_refuses_large_bodies_in_little_memory(case, length):
    """The body and twice its size at most, texts and numbers that are too many among them."""
    name, body = LARGE[case]
    tracemalloc.start()
    try:
        refused(READERS[length], name, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.1 * len(body), f"{peak / len(body):.1f} times the body"


@pytest.mark.parametrize(
    "more",
    [
        {"x" * 60_000: 1},
        {"model": "x" * 60_000},
        {"stop": ["x" * 60_000, ""]},
        {"tool_choice": "x" * 60_000},
        {"messages": [{"role": "x" * 60_000}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 60_000}]}]},
        {"tools": [{"type": "x" * 60_000}]},
        {"seed": 10**300},
    ],
    ids=lambda more: next(iter(more))[:9],
)
def test_errors_do_not_repeat_large_bodies(more):
    with pytest.raises(ApiError) as caught:
        READERS[LONG].chat({"messages": [{"role": "user", "content": "a"}], **more}, 0)
    assert len(json.dumps(caught.value.body)) < 3000


def test_refuses_more_replies_than_are_given_at_once():
    reader = READERS[64]
    many = json.dumps({"prompt": ["a b c"] * MAX_PROMPTS, "n": 128}).encode()
    tracemalloc.start()
    try:
        error = refused(reader, "completion", many)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.status, error.code, error.param) == (429, "overloaded", "n")
    assert "262144 replies of 2048 prompts; at most 1024" in str(error) and peak < 1_000_000
    too_many = json.dumps({"prompt": ["a"] * (MAX_PROMPTS + 1)}).encode()
    assert "2049 prompts; give 1 to 2048" in str(refused(reader, "completion", too_many))


def test_choices_share_the_ids_of_their_prompt():
    body = json.dumps({"prompt": [[1] * 100_000, [2] * 100_000], "n": 64, "seed": 1}).encode()
    reader = READERS[202_752]
    tracemalloc.start()
    try:
        asked = reader.completion(read_json(body, reader.limits), 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(asked.requests) == 128 and len({id(own.ids) for own in asked.requests}) == 2
    assert peak < 10_000_000


def test_counts_long_texts_that_fit():
    """A text whose tokens are long fits though it has many characters."""
    token = int(np.argmax(TOKENIZER.token_bytes()))
    text = TOKENIZER.decode([token]) * 9_000
    count = len(TOKENIZER.encode(text))
    assert len(text) > 2 * count > 16_384
    body = json.dumps({"prompt": text}).encode()
    for length, fits in ((count + 2, True), (count // 2, False)):
        reader = Reader(TOKENIZER, model="m", max_length=length)
        if fits:
            assert (
                len(reader.completion(read_json(body, reader.limits), 0).requests[0].ids) == count
            )
        else:
            error = refused(reader, "completion", body)
            assert error.code == "context_length_exceeded" and f"at most {length}" in str(error)


@pytest.fixture
def frozen():
    """Garbage collections look at nothing that was there before, as in a process that serves."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def longest_hold(function):
    """Returns the CPU seconds that this process spends, at most, while another thread waits for the interpreter."""
    thread = threading.Thread(target=function)
    longest, last = 0.0, time.process_time()
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.parametrize("case", ["ids", "text", "text with escapes", "chat", "empty lists"])
def test_reads_large_bodies_without_holding_other_threads(frozen, case):
    """What holds the interpreter does so each time; the best of three is what the reader itself does."""
    name, body = LARGE[case]
    held = [longest_hold(lambda: refused(READERS[LONG], name, body))]
    while held[-1] > 0.05 and len(held) < 3:
        held.append(longest_hold(lambda: refused(READERS[LONG], name, body)))
    assert min(held) <= 0.05, held


def test_encodes_long_texts_without_holding_other_threads(frozen):
    text = "word and " * 30_000
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    held = [longest_hold(lambda: TOKENIZER.encode(text)) for _ in range(3)]
    assert min(held) <= 0.05, held


def resident(field):
    """Returns bytes of this process in memory: VmRSS now, VmHWM at most since the peak was reset."""
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith(f"{field}:")]
    return 1024 * int(line.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ids", "text", "chat with escapes", "empty lists"])
def test_server_refuses_large_bodies_in_little_memory(case):
    """The whole way, from the socket on: the body three times at most."""
    name, body = LARGE[case]
    body = body.replace(b"1,", b"1," * 7) if case == "ids" else body + b" " * (12_000_000)
    path = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}[name]
    with serving() as server:
        assert post(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        assert post(server, path, body)[0] == 400
        assert resident("VmHWM") - before < 3 * len(body) + 5_000_000
