"""Requests to a gateway that are large or malformed: refused before they are encoded, and never read by the event loop."""

import asyncio
import threading

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
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


async def asked(url, *requests):
    """Answers to (path, body), or the errors that they are."""
    answers = []
    async with JsonClient() as client:
        for path, body in requests:
            try:
                answers.append(await client.request("POST", url + path, body, timeout_s=30))
            except ServerError as error:
                answers.append(error)
    return answers


def refusals(url, name, *bodies):
    begun, *answers = asyncio.run(
        asked(url, ("/sessions", {"id": name}), *((f"/sessions/{name}{CHATS}", b) for b in bodies))
    )
    assert begun == {"id": name}
    return answers


def test_refuses_a_session_of_many_values(url):
    [answer] = asyncio.run(asked(url, ("/sessions", {"id": [[]] * 60_000})))
    assert answer.status == 400 and "more than 50000 values" in str(answer)


def test_refuses_long_lists(url):
    bodies = [{"messages": [USER], field: [1] * 100_000} for field in ("stop", "tools")]
    for answer in refusals(url, "lists", *bodies):
        assert answer.status == 400 and "100000 items are too many" in str(answer)


@pytest.mark.parametrize(
    ("content", "description"),
    [("\ud83d", "Looks."), ("Where?", "\ud800")],
    ids=["message", "tool"],
)
def test_refuses_half_of_a_surrogate_pair(content, description):
    tool = {"type": "function", "function": {"name": "look", "description": description}}
    with pytest.raises(SessionError, match="lone surrogate") as caught:
        Session(TOKENIZER).plan([USER | {"content": content}], [tool])
    assert caught.value.status == 400


def test_refuses_long_messages_before_encoding_them(url, monkeypatch):
    sizes, encode = [], Tokenizer.encode

    def watched(tokenizer, text, **options):
        sizes.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    body = {"messages": [USER | {"content": "word " * 200_000}]}
    [answer] = refusals(url, "long", body)
    assert answer.status == 400 and "raise max_length of sessions" in str(answer)
    assert sum(sizes) < 100_000


@pytest.mark.parametrize("name", ["plan", "records"])
def test_works_on_tokens_apart_from_the_event_loop(url, monkeypatch, name):
    threads, method = [], getattr(Session, name)

    def watched(session, *arguments, **options):
        threads.append(threading.current_thread().name)
        return method(session, *arguments, **options)

    monkeypatch.setattr(Session, name, watched)
    requests = [
        ("/sessions", {"id": name}),
        (f"/sessions/{name}{CHATS}", {"messages": [USER], "max_tokens": 20}),
        (f"/sessions/{name}/finish", {}),
    ]
    _, reply, summary = asyncio.run(asked(url, *requests))
    assert reply["choices"] and len(summary["lengths"]) == 1
    assert len(threads) == 1 and threads[0] != "server"


def test_refuses_deeply_nested_tools():
    inner: list = []
    for _ in range(3000):
        inner = [inner]
    tool = {"name": "look", "parameters": {"properties": {"a": inner}}}
    with pytest.raises(SessionError, match="nested too deeply|(no|not) JSON") as caught:
        Session(TOKENIZER).plan([USER], [tool])
    assert caught.value.status == 400
