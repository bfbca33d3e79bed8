"""Tests the memory that all bodies of a server together may take."""

import contextlib
import socket
import time
from urllib.parse import urlsplit

from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response
from tests.runtime.test_server_admission import ask

MAX_BODY_BYTES = 100_000
LARGE = b'"' + b"x" * 90_000 + b'"'


class Lengths(HttpServer):
    """Server that returns the length of a text."""

    def routes(self):
        return {"POST": {"/length": self._length}}

    async def _length(self, request):
        return json_response(await self.read_body(request, len))


def send_part(url, stack):
    """Sends a request without the end of its body, and returns the open connection."""
    parts = urlsplit(url)
    connection = stack.enter_context(socket.create_connection((parts.hostname, parts.port), 30))
    head = f"POST /length HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(LARGE)}\r\n\r\n"
    connection.sendall(head.encode() + LARGE[:-1])
    return connection


def status_within(url, body, expected, timeout_s=30.0):
    """Returns the status of a body, which is repeated until it is the expected one or the time is over."""
    end = time.monotonic() + timeout_s
    while True:
        status, _ = ask(url, "/length", data=body)
        if status == expected or time.monotonic() > end:
            return status


def test_limits_memory_of_all_bodies():
    with Lengths(ListenConfig(port=0, max_body_bytes=MAX_BODY_BYTES)).running() as url:
        with contextlib.ExitStack() as stack:
            connections = [send_part(url, stack) for _ in range(80)]
            assert status_within(url, LARGE, 429) == 429
            assert ask(url, "/length", data=b'"small"') == (200, 5)
            # One of those that had room.
            connections[0].sendall(LARGE[-1:])
            assert b" 200 OK" in connections[0].recv(1000)
        assert status_within(url, LARGE, 200) == 200


def test_forgets_bodies_that_were_read():
    with Lengths(ListenConfig(port=0, max_body_bytes=MAX_BODY_BYTES)).running() as url:
        for _ in range(100):
            assert ask(url, "/length", data=LARGE) == (200, 90_000)
            assert ask(url, "/length", data=LARGE[:-1])[0] == 400
