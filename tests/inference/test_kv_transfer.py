"""Tests the move of pages of prompts from an engine that prefills to an engine that decodes."""

import asyncio
import contextlib
import dataclasses
import io
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import msgspec
import numpy as np
import pytest

from glm5_jax.inference.array_messages import encode
from glm5_jax.inference.client import Client, ServerError
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.kv_transfer.messages import END, PartHead, encode_part, read_part
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import light_model

PAGE = 4
OPTIONS = dict(page_size=PAGE, num_pages=18, max_num_seqs=2, prefill_chunk=32, max_length=64)
GREEDY = Sampling(max_tokens=6, temperature=0, ignore_eos=True)
PREFILL = dataclasses.replace(GREEDY, max_tokens=0)


def make_engine(**options) -> Engine:
    return Engine(light_model(), Tokenizer.default(), EngineConfig(**(OPTIONS | options)))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles the programs of all engines here."""
    prompts = [[1] * 30, [2] * 5]
    make_engine().generate(prompts, GREEDY), make_engine(num_pages=60).generate(prompts, GREEDY)


def generate_single(ids, sampling):
    return make_engine().generate([ids], sampling)[0]


@contextlib.contextmanager
def serving(**config):
    engine = make_engine()
    server = Server(engine, Tokenizer.default(), ServerConfig(port=0, model="tiny", **config))
    with server.running() as server.url:
        server.engine = engine
        yield server


def prefill(engine: Engine, ids) -> list:
    """Returns the parts of a prompt's pages, after the engine has read the prompt."""
    engine.submit(Request(ids, PREFILL))
    while engine.step():
        pass
    parts, start = [], 0
    while (part := engine.read_prefix(ids, start)) is not None:
        parts.append(part)
        start += part.count
    return parts


def test_moved_pages_give_tokens_of_one_engine():
    """The second engine, with more pages, reads only what does not fill a page."""
    sampling = dataclasses.replace(GREEDY, temperature=1, seed=3)
    prompts = [list(range(first, first + count)) for first, count in ((0, 23), (0, 24), (9, 3))]
    sender, receiver = make_engine(), make_engine(num_pages=60)
    for prompt in prompts:
        for part in prefill(sender, prompt):
            receiver.write_prefix(prompt, part, 0)
        assert receiver.count_prefix(prompt) == len(prompt) // PAGE
    replies = receiver.generate(prompts, sampling)
    for prompt, got in zip(prompts, replies):
        want = generate_single(prompt, sampling)
        assert got.cached_tokens == (len(prompt) - 1) // PAGE * PAGE
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert receiver.stats.read_tokens == 3 + 4 + 3
    assert receiver.num_free_pages == 60 - receiver.num_cached_pages
    assert sender.num_free_pages == 18 - sender.num_cached_pages


def test_adds_only_pages_that_are_missing_and_have_room():
    prompt = list(range(2, 4 * PAGE + 3))
    sender = make_engine()
    parts = prefill(sender, prompt)
    pages = sum(part.count for part in parts)
    assert pages == 4
    receiver = make_engine()
    assert receiver.write_prefix(prompt, parts[0], 3) == 0, "other weights computed them"
    assert receiver.write_prefix(prompt, parts[-1]._replace(start=2), 0) == 0, "none before them"
    receiver.generate([prompt[: PAGE + 1]], PREFILL)
    assert sum(receiver.write_prefix(prompt, part, 0) for part in parts) == 3
    assert sum(receiver.write_prefix(prompt, part, 0) for part in parts) == 0
    small = make_engine(num_pages=2)
    assert sum(small.write_prefix(prompt, part, 0) for part in parts) <= 2
    assert small.num_free_pages == 2 - small.num_cached_pages
    with pytest.raises(ValueError, match="page_size, num_speculative_tokens, .* must be the same"):
        make_engine(page_size=8).write_prefix(prompt, parts[0], 0)
    for wrong in ([], [array[:, 1:] for array in parts[0].arrays]):
        with pytest.raises(ValueError, match="other sizes"):
            make_engine().write_prefix(prompt, parts[0]._replace(arrays=wrong), 0)
    fresh = make_engine()
    assert fresh.write_prefix(prompt[: PAGE + 1], parts[0], 0) == 1, "no pages after the prompt"
    assert fresh.num_free_pages == 18 - 1
    sender.update_weights(jax.tree.map(lambda x: 2 * x, glm5.params_of(light_model())), 1)
    assert sender.read_prefix(prompt, 0) is None, "new weights have other pages"


@pytest.fixture(scope="module")
def pair():
    """Runs a server that prefills, and one that decodes with a key."""
    with (
        serving(api_key="k") as sender,
        serving(api_key="k", prefill_urls=sender.url, prefill_min_tokens=2 * PAGE) as receiver,
    ):
        yield sender.engine, receiver


def generate_body(ids, **fields) -> dict:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": 6, "temperature": 0}, **fields}


def complete(server, ids, **fields) -> dict:
    return Client(server.url, "k").post("/generate", generate_body(ids, **fields))


def test_server_decodes_what_another_has_prefilled(pair):
    sender, receiver = pair
    ids = list(range(100, 100 + 5 * PAGE + 2))
    got = complete(receiver, ids, return_logprob=True)
    want = generate_single(ids, dataclasses.replace(GREEDY, ignore_eos=False))
    assert got["output_ids"] == want.ids
    got_logprobs = [one[0] for one in got["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(got_logprobs, want.logprobs, atol=1e-5)
    assert got["meta_info"]["cached_tokens"] == 5 * PAGE
    assert receiver.engine.stats.received_tokens == 5 * PAGE
    assert receiver.engine.stats.read_tokens == 2 and sender.stats.read_tokens == len(ids)
    metrics = Client(receiver.url, "k").open("/metrics").read().decode()
    assert f"glm5_received_tokens_total {5.0 * PAGE}" in metrics
    # What is cached here, or short, is not asked for.
    complete(receiver, ids)
    complete(receiver, ids[: PAGE + 1])
    complete(receiver, [*ids, *range(2 * PAGE)])
    assert sender.stats.num_requests == 1


def test_server_prefills_itself_without_the_other(pair, caplog):
    sender, receiver = pair
    ids = list(range(300, 300 + 5 * PAGE))
    want = generate_single(ids, dataclasses.replace(GREEDY, ignore_eos=False)).ids
    before = receiver.engine.stats.received_tokens
    with mock.patch.object(sender, "version", 7):
        assert complete(receiver, ids)["output_ids"] == want
    assert "prefills no prompts for 5.0 s: status 409: " in caplog.text
    assert "version is 0, and this server's is 7" in caplog.text
    with serving(prefill_urls="http://127.0.0.1:9", prefill_min_tokens=1) as alone:
        assert complete(alone, ids)["output_ids"] == want
    assert receiver.engine.stats.received_tokens == before


def test_rejects_requests_for_pages_that_do_not_fit(pair):
    sender, receiver = pair
    body = dict(ids=[1] * 9, model="tiny", version=0, layout=receiver.engine.page_layout)
    client = Client(receiver.url, "k")
    for change, message in (
        ({"layout": "x"}, "layout is 'x'"),
        ({"model": "other"}, "model is 'other'"),
        ({"ids": []}, "ids"),
        ({"ids": [10**6]}, "token id 1000000"),
        ({"ids": [1] * 65}, "65 tokens"),
        ({"start": -1}, "start"),
    ):
        with pytest.raises(ServerError, match=message) as caught:
            client.post("/prefill", body | change)
        assert caught.value.status in (400, 409)
    with pytest.raises(ServerError, match="key"):
        Client(receiver.url).post("/prefill", body)
    with client.open("/prefill", json.dumps(body | {"start": 1}).encode()) as response:
        part = asyncio.run(read_part(reader(response.read()), body["layout"]))
    assert (part.start, part.count) == (1, 1)


def reader(data: bytes):
    stream = io.BytesIO(data)

    async def read(count: int) -> bytes:
        if len(chunk := stream.read(count)) < count:
            raise EOFError(f"{count} bytes are missing")
        return chunk

    return read


def test_part_keeps_arrays_without_padding_and_refuses_other_data():
    [part] = prefill(make_engine(), list(range(9)))
    sent = asyncio.run(read_part(reader(encode_part(part)), part.layout))
    assert sent[:3] == (0, 2, part.layout)
    for got, want in zip(sent.arrays, part.arrays, strict=True):
        np.testing.assert_array_equal(got, np.asarray(want)[:2])
        assert got.dtype == want.dtype
    assert asyncio.run(read_part(reader(END), "")) is None
    for data in (
        encode(PartHead(start=0, count=2), [np.zeros(1)]),
        encode(PartHead(start=-1, count=1), [np.zeros(1)]),
        encode(PartHead(start=0, count=1)),
        (2**30).to_bytes(4) + bytes(8),
        bytes(4) + (2**40).to_bytes(8),
        bytes(12),
    ):
        with pytest.raises(ValueError):
            asyncio.run(read_part(reader(data), ""))


def test_sends_no_pages_of_weights_that_arrive_while_prompt_waits():
    ids = list(range(100, 100 + 5 * PAGE))
    with serving() as sender:
        body = dict(ids=ids, model="tiny", version=0, layout=sender.engine.page_layout)
        client = Client(sender.url)
        client.post("/pause", {})
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: client.open("/prefill", json.dumps(body).encode()).read())
            while not sender.engine.stats.num_requests:
                time.sleep(0.01)
            with mock.patch.object(sender.engine, "read_prefix") as read:
                time.sleep(0.05)
            assert not read.called, "the engine's thread looks at no prompt that waits"
            params = jax.tree.map(lambda x: 2 * x, glm5.params_of(light_model()))
            sender.worker.call(lambda engine: engine.update_weights(params, 1)).result()
            client.post("/resume", {})
            assert answer.result() == b""


@contextlib.contextmanager
def stub_server(answer: bytes):
    """Runs a server that sends `answer` to each connection, and nothing more."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            with contextlib.suppress(OSError):
                while True:
                    held.append(listener.accept()[0])
                    held[-1].recv(2**16)
                    held[-1].sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for one in held:
        one.close()


def answer_of(*types) -> bytes:
    """Returns a response with a part whose arrays have these dtypes and shapes."""
    head = msgspec.msgpack.encode((PartHead(start=0, count=1), types))
    message = struct.pack("!IQ", len(head), 0) + head
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(message) + message


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"]
    + [answer_of(("no_dtype", [1])), answer_of(("float32", [2**63])), b"x"],
    ids=["silent", "silent after its head", "unknown dtype", "huge array", "no HTTP"],
)
def test_prefills_itself_where_the_other_hangs_or_answers_nonsense(answer):
    options = dict(prefill_min_tokens=1, prefill_silence_s=0.2)
    ids = list(range(300, 300 + 5 * PAGE))
    want = generate_single(ids, dataclasses.replace(GREEDY, ignore_eos=False)).ids
    with stub_server(answer) as url, serving(prefill_urls=url, **options) as receiver:
        assert Client(receiver.url).post("/generate", generate_body(ids))["output_ids"] == want
