"""Large or malformed requests to a gateway: refused before they are encoded, and never read by the event loop."""

import asyncio
import threading

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.rollouts import gateway
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.rollouts.sessions import Session, SessionConfig, SessionError
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import Engine

TOKENIZER = Tokenizer.load("bytes")
USER = {"role": "user", "content": "Where?"}
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def url():
    config = GatewayConfig(port=0, session=SessionConfig(max_length=50_000))
    with (
        Engine(delay=0).running() as engine,
        Gateway(TOKENIZER, [engine], config).running() as url,
    ):
        yield url


async def send_requests(url, *requests):
    """Returns the responses to requests of (path, body); of a refused request its error."""
    responses = []
    async with JsonClient() as client:
        for path, body in requests:
            try:
                responses.append(await client.request("POST", url + path, body, timeout_s=30))
            except ServerError as error:
                responses.append(error)
    return responses


def send_chats(url, name, *bodies):
    """Returns the responses to chats in a new session."""
    created, *responses = asyncio.run(
        send_requests(
            url,
            ("/sessions", {"id": name}),
            *((f"/sessions/{name}{CHATS}", body) for body in bodies),
        )
    )
    assert created == {"id": name}
    return responses


def test_rejects_session_body_with_many_values(url):
    [answer] = asyncio.run(send_requests(url, ("/sessions", {"id": [[]] * 60_000})))
    assert answer.status == 400 and "more than 50000 values" in str(answer)


def test_rejects_long_lists(url):
    bodies = [{"messages": [USER], field: [1] * 100_000} for field in ("stop", "tools")]
    for answer in send_chats(url, "lists", *bodies):
        assert answer.status == 400 and "100000 items are too many" in str(answer)


@pytest.mark.parametrize(
    ("content", "description"),
    [("\ud83d", "Looks."), ("Where?", "\ud800")],
    ids=["message", "tool"],
)
def test_rejects_lone_surrogate(content, description):
    tool = {"type": "function", "function": {"name": "look", "description": description}}
    with pytest.raises(SessionError, match="lone surrogate") as raised:
        Session(TOKENIZER).plan([USER | {"content": content}], [tool])
    assert raised.value.status == 400


def test_rejects_long_messages_before_encoding_them(url, monkeypatch):
    sizes, encode = [], Tokenizer.encode

    def record_size(tokenizer, text, **options):
        sizes.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", record_size)
    body = {"messages": [USER | {"content": "word " * 200_000}]}
    [answer] = send_chats(url, "long", body)
    assert answer.status == 400 and "raise max_length of sessions" in str(answer)
    assert sum(sizes) < 100_000


@pytest.mark.parametrize(
    ("owner", "name"), [(Session, "plan"), (Session, "records"), (gateway, "parse_reply")]
)
def test_processes_tokens_outside_event_loop(url, monkeypatch, owner, name):
    threads, method = [], getattr(owner, name)

    def record_thread(*arguments, **options):
        threads.append(threading.current_thread().name)
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, record_thread)
    requests = [
        ("/sessions", {"id": name}),
        (f"/sessions/{name}{CHATS}", {"messages": [USER], "max_tokens": 20}),
        (f"/sessions/{name}/finish", {}),
    ]
    _, reply, summary = asyncio.run(send_requests(url, *requests))
    assert reply["choices"] and len(summary["lengths"]) == 1
    assert len(threads) == 1 and threads[0] != "server"


def test_rejects_deeply_nested_tools():
    nested: list = []
    for _ in range(3000):
        nested = [nested]
    tool = {"name": "look", "parameters": {"properties": {"a": nested}}}
    with pytest.raises(SessionError, match="nested too deeply|(no|not) JSON") as raised:
        Session(TOKENIZER).plan([USER], [tool])
    assert raised.value.status == 400
