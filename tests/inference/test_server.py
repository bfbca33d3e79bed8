"""Tests the server over real sockets: responses to clients, and robustness to malformed and abandoned requests."""

import asyncio
import concurrent.futures
import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request

import openai
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from glm5_jax.agents.client import ChatClient
from glm5_jax.inference.client import ServerError
from glm5_jax.inference.metrics import EngineMetrics
from glm5_jax.inference.pending_requests import PendingRequests
from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.request import Handle, Request, Token
from glm5_jax.inference.sampling import Sampling
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply
from tests.inference.conftest import LENGTH, serving
from tests.inference.test_engine import generate_single, make_engine

TOKENIZER = Tokenizer.default()
HI = [{"role": "user", "content": "hi"}]
PUSHES = ("/weights/pull", "/weights/commit", "/weights/abort")
POSTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"),
    *("/update_weights", *PUSHES),
)


@pytest.fixture
def client(healthy):
    """Closes the client at the end, because a socket that is left to the garbage collector raises in another test."""
    with openai.OpenAI(base_url=f"{healthy.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server, path, body, headers=None):
    """Returns (status, JSON) of a POST. body: JSON value or bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers or {}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def get(server, path, headers=None):
    try:
        request = urllib.request.Request(server.url + path, headers=headers or {})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def greedy(messages, max_tokens, **options):
    """Returns the engine's reply to a chat, and the parsed reply."""
    ids = render_chat(messages, TOKENIZER, **options).ids
    sampling = Sampling(max_tokens=max_tokens, temperature=0)
    got = generate_single(ids, sampling, page_size=16, num_pages=None)
    thinking = options.get("enable_thinking", True)
    return got, parse_reply(got.ids, tokenizer=TOKENIZER, thinking=thinking)


@pytest.mark.parametrize("num_top", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_chat_equals_reply_of_engine(client, num_top):
    want, reply = greedy(HI, 12)
    options = dict(max_tokens=12, temperature=0, logprobs=True, top_logprobs=num_top)
    got = client.chat.completions.create(model="tiny", messages=HI, **options)
    [choice] = got.choices
    assert choice.message.reasoning_content == reply.reasoning_content
    assert choice.message.content == reply.content and choice.finish_reason == "length"
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(want.logprobs)
    for one in choice.logprobs.content:
        assert [top.logprob for top in one.top_logprobs] == [one.logprob] * num_top
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        len(render_chat(HI, TOKENIZER).ids),
        12,
    )
    assert usage.completion_tokens_details.reasoning_tokens == 12


def test_asynchronous_client_gets_same_reply(healthy):
    async def run():
        async with ChatClient(healthy.url, timeout_s=60) as chat_client:
            choice = await chat_client.chat(HI, max_tokens=12, temperature=0)
            with pytest.raises(ServerError) as caught:
                await chat_client.chat(HI, max_tokens=-1)
            return choice, caught.value

    _, reply = greedy(HI, 12)
    choice, error = asyncio.run(run())
    assert choice["message"]["reasoning_content"] == reply.reasoning_content
    assert choice["finish_reason"] == "length"
    assert error.status == 400 and "max_tokens" in str(error)


def test_stream_equals_complete_reply(client):
    messages = [{"role": "user", "content": "stream"}]
    want, reply = greedy(messages, 10, enable_thinking=False)
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=10,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"thinking": {"type": "disabled"}, "return_token_ids": True},
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reply.content and last.usage.completion_tokens == 10
    ids = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", ())]
    assert ids == want.ids and chunks[-1].choices[0].finish_reason == "length"


def test_streams_with_helper_and_returns_several_choices(client):
    end = str(TOKENIZER.special_ids["<|user|>"])
    fields = dict(
        model="tiny", messages=HI, top_p=1
    )  # values that use the compiled programs of other tests
    with client.chat.completions.stream(**fields, logit_bias={end: 100}) as stream:
        final = list(stream) and stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop" and final.choices[0].message.content == ""
    got = client.chat.completions.create(**fields, max_tokens=5, n=3, seed=1)
    texts = [choice.message.reasoning_content for choice in got.choices]
    assert len(set(texts)) > 1 and got.usage.completion_tokens == 15


def test_completions_and_generate_continue_text(client, healthy):
    ids = TOKENIZER.encode("To be")
    want = generate_single(ids, Sampling(max_tokens=6, temperature=0), page_size=16, num_pages=None)
    got = client.completions.create(
        model="tiny", prompt="To be", max_tokens=6, temperature=0, echo=True
    )
    assert got.choices[0].text == "To be" + TOKENIZER.decode(want.ids, errors="replace")
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0},
        "return_logprob": True,
    }
    status, got = post(healthy, "/generate", body)
    assert status == 200 and got["output_ids"] == want.ids
    logprobs = [logprob for logprob, *_ in got["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(want.logprobs)
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    stream = client.completions.create(
        model="tiny", prompt=ids, max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == TOKENIZER.decode(
        want.ids, errors="replace"
    )


def test_reports_model_health_info_and_metrics(client, healthy):
    [served_model] = client.models.list().data
    assert served_model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    assert get(healthy, "/health") == (200, '{"status":"ok"}')
    info = json.loads(get(healthy, "/server_info")[1])
    assert info["max_length"] == LENGTH and info["weight_version"] == 0 and not info["paused"]
    assert info["served_model_name"] == "tiny" and info["dp_size"] == 1
    assert json.loads(get(healthy, "/model_info")[1])["max_context_length"] == LENGTH
    before = metrics(healthy)
    post(healthy, "/v1/completions", {"prompt": "x", "max_tokens": 3, "temperature": 0})
    after = metrics(healthy)
    assert after["glm5_new_tokens_total"] - before["glm5_new_tokens_total"] == 3
    assert after['glm5_replies_total{reason="length"}'] >= 1
    assert after["glm5_first_token_seconds_count"] - before["glm5_first_token_seconds_count"] == 1
    assert "<title>Chat</title>" in get(healthy, "/")[1]


def metrics(server):
    lines = get(server, "/metrics")[1].splitlines()
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}


@pytest.mark.parametrize(
    "path, body, status, expected_error",
    [
        ("/v1/chat/completions", {"messages": [{"role": "x"}]}, 400, "message 0 has role 'x'"),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 99}, 400, "exceed the 64"),
        ("/v1/completions", {"prompt": [10**9]}, 400, "token id 1000000000"),
        ("/generate", {}, 400, "either text or input_ids"),
        (
            "/generate",
            {"input_ids": [5], "data_parallel_rank": 1},
            400,
            "dp_rank is 1; there are 1 data-parallel ranks,",
        ),
        ("/update_weights", {"path": "x", "version": 1}, 400, "no checkpoint that this server"),
        ("/v1/chat/completion", {}, 404, "no /v1/chat/completion; there are GET /, /v1/models, "),
        (
            "/nowhere",
            {},
            404,
            "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, ",
        ),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_errors_have_form_of_openai(healthy, path, body, status, expected_error):
    code, answer = post(healthy, path, body)
    assert code == status and expected_error in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_client_raises_typed_errors(client):
    with pytest.raises(openai.BadRequestError, match="wizard"):
        client.chat.completions.create(model="tiny", messages=[{"role": "wizard", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "word " * 400_000}]
        )
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_serves_many_requests_at_once(client, healthy, count):
    def request(seed):
        body = {"prompt": f"{seed} of", "max_tokens": 3, "seed": seed, "stream": seed % 2 == 0}
        if seed % 2:
            return post(healthy, "/v1/completions", body)[1]["choices"][0]["text"]
        chunks = list(client.completions.create(model="tiny", **body))
        assert chunks[-1].choices[0].finish_reason == "length"
        return "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(request, range(count)))
    assert len(texts) == count and texts[7] == request(7)


def open_stream(server, body, path="/v1/completions"):
    """Returns a socket that has requested a stream."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + data)
    return connection


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_reports_end_of_each_choice_once():
    """The first of three choices ends before the first update, the second after a chunk, and the third later."""
    token = Token(5, -1.0, 0)

    class AcceptingWorker:
        def submit(self, request, listener, submitted_at):
            return Handle(request, listener)

    async def collect_updates():
        parsed = ParsedRequest(requests=(Request([1]),) * 3)
        waiting = PendingRequests(asyncio.get_running_loop(), parsed, EngineMetrics(make_engine()))
        waiting.submit(AcceptingWorker())
        first, second, third = waiting.handles
        first.append_output([token], "length")
        second.append_output([token], None)
        updates = []
        async for indices in waiting.updates():
            updates.append(sorted(indices))
            if second.finish_reason is None:
                second.append_output([token], "stop")
            elif third.finish_reason is None:
                third.append_output([], "cancelled")
        return updates

    updates = asyncio.run(collect_updates())
    assert updates[0] == [0] and all(0 not in indices for indices in updates[1:])
    assert {1, 2} == set().union(*updates[1:]) and updates[-1] == [2]


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_client_frees_slot(healthy, stream):
    post(healthy, "/pause", {})
    before = metrics(healthy).get('glm5_replies_total{reason="cancelled"}', 0)
    body = {"prompt": "x", "max_tokens": 60, "stream": stream}
    connection = open_stream(healthy, body)
    until(lambda: healthy.engine.num_waiting == 1)
    connection.close()
    until(lambda: healthy.engine.num_waiting == 0)
    post(healthy, "/resume", {})
    until(lambda: metrics(healthy)['glm5_replies_total{reason="cancelled"}'] == before + 1)


def test_slow_reader_does_not_block_others(healthy):
    slow = open_stream(
        healthy, {"prompt": "x", "max_tokens": 60, "stream": True, "ignore_eos": True}
    )
    for _ in range(3):
        assert post(healthy, "/v1/completions", {"prompt": "y", "max_tokens": 3})[0] == 200
    slow.settimeout(20)
    text = b""
    while b"[DONE]" not in text:
        text += slow.recv(100)
    slow.close()


def test_partial_request_does_not_block_others(healthy):
    connection = socket.create_connection(("127.0.0.1", healthy.port))
    connection.sendall(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    )
    assert post(healthy, "/v1/completions", {"prompt": "y", "max_tokens": 3})[0] == 200
    connection.close()


def test_pauses_and_updates_weights(healthy):
    ids = TOKENIZER.encode("To be")
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    assert post(healthy, "/pause", {}) == (200, {"paused": True})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, healthy, "/generate", body)
        until(lambda: healthy.engine.num_waiting == 1)
        update = {"path": "1", "version": 4, "policy": "recompute"}
        assert post(healthy, "/update_weights", update) == (200, {"success": True, "version": 4})
        assert post(healthy, "/resume", {}) == (200, {"paused": False})
        got = waiting.result()[1]
    sampling = Sampling(max_tokens=5, temperature=0)
    want = generate_single(ids, sampling, seed=1, page_size=16, num_pages=None)
    assert got["output_ids"] == want.ids and got["meta_info"]["weight_versions"] == [4] * 5
    assert post(healthy, "/generate", {**body, "weight_version": 0})[0] == 409
    assert post(healthy, "/update_weights", {"path": "0", "version": 0})[0] == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = (
    "messages prompt input_ids text model stream n stop tools logit_bias temperature max_tokens thinking "
    "sampling_params path version seed top_logprobs logprobs stream_options echo push tensors arithmetic checksums"
).split()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(POSTS),
    body=st.binary(max_size=50)
    | st.dictionaries(st.sampled_from(NAMES), json_values, max_size=5)
    | json_values,
    has_valid_fields=st.booleans(),
)
def test_survives_any_body(healthy, path, body, has_valid_fields):
    if has_valid_fields and isinstance(body, dict):
        texts = {"messages": HI, "prompt": "x", "input": "x", "input_ids": [1]}
        body = texts | {"max_tokens": 2} | body
    data = body if isinstance(body, bytes) else json.dumps(body, allow_nan=True).encode()
    connection = http.client.HTTPConnection("127.0.0.1", healthy.port, timeout=60)
    connection.request("POST", path, data)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert response.status < 500, answer
    if response.status != 200:
        assert json.loads(answer)["error"]["message"]


def test_requires_key():
    with serving(api_key="secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}):
            assert get(server, "/v1/models", headers)[0] == 401
        assert get(server, "/v1/models", {"Authorization": "Bearer secret"})[0] == 200
        assert get(server, "/health")[0] == get(server, "/")[0] == 200
        code, answer = post(server, "/generate", {})
        assert code == 401 and answer["error"]["code"] == "invalid_api_key"


def test_rejects_foreign_origins_and_hosts(healthy):
    headers = {"Origin": healthy.url}
    assert get(healthy, "/v1/models", headers)[0] == 200
    assert get(healthy, "/v1/models", {"Origin": "http://evil.example"})[0] == 403
    # A foreign name may resolve to this server.
    rebound = {"Origin": "http://evil.example", "Host": "evil.example"}
    assert get(healthy, "/v1/models", rebound)[0] == 403
    assert get(healthy, "/v1/models", {"Host": f"localhost:{healthy.port}"})[0] == 200


def test_limits_requests_and_drains():
    with serving(max_requests=2, max_body_bytes=1000, grace_s=30.0) as server:
        assert post(server, "/generate", b"x" * 2000)[0] == 413
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
        code, answer = post(server, "/v1/completions", {**body, "n": 3})
        assert code == 429 and answer["error"]["code"] == "overloaded"
        post(server, "/pause", {})
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            running = [pool.submit(post, server, "/v1/completions", body) for _ in range(2)]
            until(lambda: server.engine.num_waiting == 2)
            assert post(server, "/v1/completions", body)[0] == 429
            ending = pool.submit(asyncio.run, server.drain())
            until(lambda: get(server, "/health")[0] == 503)
            assert post(server, "/v1/completions", body)[0] == 503
            assert not ending.done()
            post(server, "/resume", {})
            assert [request.result()[0] for request in running] == [200, 200]
            ending.result(10)


def test_reports_failed_engine():
    with serving() as server:
        assert post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200

        def broken():
            raise RuntimeError("no device")

        server.engine.step = broken
        code, answer = post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert code == 503 and answer["error"]["message"] == "the engine has failed"
        assert get(server, "/health") == (503, '{"status":"failed"}')
        assert post(server, "/v1/completions", {"prompt": "x"})[0] == 503


def memory():
    """Returns the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_requests_leave_memory_flat(healthy):
    def send_requests(count):
        connection = http.client.HTTPConnection("127.0.0.1", healthy.port, timeout=60)
        for number in range(count):
            body = {"prompt": f"{number}", "max_tokens": 1, "stream": number % 3 == 0}
            data = b"{" if number % 10 == 9 else json.dumps(body).encode()
            connection.request("POST", "/v1/completions", data)
            response = connection.getresponse()
            assert response.read() and response.status == (400 if number % 10 == 9 else 200)
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(send_requests, [500] * 4))
        before = memory()
        list(pool.map(send_requests, [2500] * 4))
    growth = memory() - before
    assert growth < 20e6, f"{growth / 1e6:.0f} MB more after 10,000 requests"
    assert get(healthy, "/health")[0] == 200
