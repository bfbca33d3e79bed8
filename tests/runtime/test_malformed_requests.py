"""Tests that malformed requests are rejected as the client's fault, without name server lookups."""

import gzip
import http.client
import json
import socket
import zlib
from urllib.parse import urlsplit

import pytest

from glm5_jax.runtime.http_server import ListenConfig
from tests.runtime.test_server_admission import Small, ask
from tests.traced_memory import traced_memory


@pytest.fixture(scope="module")
def url():
    with Small(ListenConfig(port=0)).running() as url:
        yield url


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_rejects_body_that_cannot_be_decompressed(url, coding):
    status, message = ask(url, "/length", {"Content-Encoding": coding}, b"no archive")
    assert status == 400 and "the body cannot be read" in message


@pytest.mark.parametrize(
    ("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_stops_decompressing_at_maximum_size(coding, compress):
    body = compress(b" " * 20_000_000)
    with Small(ListenConfig(port=0, max_body_bytes=1_000_000)).running() as url:
        with traced_memory() as memory:
            status, _ = ask(url, "/length", {"Content-Encoding": coding}, body)
    assert status == 413 and memory.peak < 5_000_000


def test_does_not_look_up_names_without_host(url, monkeypatch):
    """HTTP/1.0 allows requests without a host, and health checks send them. Browsers always send a host."""

    def fail(*_):
        raise AssertionError("a name was looked up")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname"):
        monkeypatch.setattr(socket, name, fail)
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 30) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 OK" in connection.recv(4096)


def test_rejects_foreign_host_without_origin(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.putrequest("GET", "/health", skip_host=True)
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 403 and json.load(answer)["error"]["code"] == "host"
    connection.close()


def test_rejects_body_of_many_values(url):
    """Each value takes 20 times the bytes of its text."""
    status, message = ask(url, "/length", data=b"[" + b"[]," * 60_000 + b"[]]")
    assert status == 400 and "more than 50000 values" in message
    assert ask(url, "/length", data=b"[" + b"1," * 60_000 + b"1]")[0] == 200
