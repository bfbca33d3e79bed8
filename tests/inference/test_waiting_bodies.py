"""Tests that the bodies of requests take no memory while the requests wait for the engine."""

import contextlib
import http.client
import json
from urllib.parse import urlsplit

from tests.inference.conftest import serving
from tests.inference.test_server import post


def test_bodies_of_waiting_requests_take_no_memory():
    # All large bodies together may have 64 times the size of the largest one.
    body = json.dumps({"prompt": "x", "stream": True}).encode() + b" " * 69_000
    with serving(max_body_bytes=70_000) as server, contextlib.ExitStack() as stack:
        assert post(server, "/pause", {}) == (200, {"paused": True})
        for _ in range(70):
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
            stack.callback(connection.close)
            connection.request("POST", "/v1/completions", body)
            assert connection.getresponse().status == 200
