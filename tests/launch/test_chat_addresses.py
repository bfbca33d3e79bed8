"""The chat in the terminal with a bad address or a strange server: one line and exit code 2."""

import json

import pytest
from aiohttp import web

from glm5_jax.inference.client import MAX_BYTES, Client, ServerError
from glm5_jax.runtime.addresses import check_url
from glm5_jax.runtime.http_server import HttpServer, ListenConfig
from launch import chat

NO_URLS = ["localhost", "http://", "http://[", "http://a b", "http://a:port", "file:///etc", "http://a\nb", "http://a:99999999"]  # fmt: skip


@pytest.mark.parametrize("url", NO_URLS)
def test_refuses_invalid_url(url, capsys):
    assert chat.main(["chat", f"--url={url}"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: url is ") and "give one such as http://HOST:PORT" in shown
    with pytest.raises(ValueError, match="orchestrator is .*, which is no URL"):
        check_url("orchestrator", url)


def test_accepts_urls_of_servers():
    for url in ("http://127.0.0.1:8000", "https://example.org/api/", "http://[::1]:80", "http://h"):
        check_url("url", url)


class Strange(HttpServer):
    """Server with the models and streams of a test."""

    def __init__(self, models: bytes, stream: bytes):
        super().__init__(ListenConfig(port=0))
        self._models, self._stream = models, stream

    def routes(self):
        def answer(body):
            async def handler(request):
                return web.Response(body=body)

            return handler

        chats = {"/v1/chat/completions": answer(self._stream)}
        return {"GET": {"/v1/models": answer(self._models)}, "POST": chats}


class FileServer(HttpServer):
    """Server that has no models and responds in its own form."""

    def __init__(self):
        super().__init__(ListenConfig(port=0))

    def routes(self):
        async def handler(request):
            return web.Response(status=404, body=b"<html>no such file</html>")

        return {"GET": {"/v1/models": handler}}


@pytest.mark.parametrize(
    "models", [b"", b"{}", b'{"data": []}', b"[1]", b"\xff", b"[" * 100_000], ids=range(6)
)
def test_refuses_invalid_models(models, capsys):
    with Strange(models, b"").running() as url:
        assert chat.main(["chat", f"--url={url}"]) == 2
    assert "is not of this API" in capsys.readouterr().err


def test_names_server_without_this_api(capsys):
    """Another program may listen at the port, as a file server does."""
    with FileServer().running() as url:
        assert chat.main(["chat", f"--url={url}"]) == 2
    assert f"the server at {url} responds with 404 Not Found" in capsys.readouterr().err


def chunk(**fields) -> bytes:
    return b"data: " + json.dumps({"choices": [fields]}).encode() + b"\n\n"


def test_reads_streams_of_other_servers():
    stream = b": ping\n\n" + chunk(delta={"content": "a"})
    stream += b'data:{"choices": [], "usage": {}}\n\n' + chunk(delta={}) + b"data: [DONE]\n\n"
    with Strange(b"", stream).running() as url:
        choices = list(Client(url).chat([]))
    assert [choice["delta"] for choice in choices] == [{"content": "a"}, {}]


@pytest.mark.parametrize(
    "stream",
    [b"data: {", b"data: 5\n\n", b'data: {"choices": 1}', chunk(delta=[]), b"data: \xff\n", b'data: {"error": 1}']
    + [b'data: {"choices": "' + b"x" * (MAX_BYTES + 1) + b'"}\n'],
    ids=range(7),
)  # fmt: skip
def test_refuses_invalid_stream(stream):
    with Strange(b"", chunk(delta={}) + stream).running() as url:
        with pytest.raises(ServerError, match="is not of this API"):
            list(Client(url).chat([]))


def test_shows_calls_of_several_chunks(capsys):
    calls = [{"index": 0, "function": {"name": "f", "arguments": ""}}, {"index": 0, "function": {"arguments": "{}"}}, 7]  # fmt: skip
    stream = b"".join(chunk(delta={"tool_calls": [call], "content": 3}) for call in calls)
    lines = iter(["hi", "/quit"])
    with Strange(b'{"data": [{"id": "m"}]}', stream).running() as url:
        assert chat.main(["chat", f"--url={url}"], lambda prompt: next(lines)) == 0
    shown = capsys.readouterr().out
    assert "f()" in shown and "({})" in shown
