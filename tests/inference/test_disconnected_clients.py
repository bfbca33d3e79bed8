"""Tests that requests of disconnected clients are cancelled without an error in the log."""

import contextlib
import http.client
import json
import logging
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_logs_no_error_for_disconnected_client(healthy, monkeypatch, caplog, path):
    written = []

    async def write(response, data):
        written.append(data)
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", write)
    body = {"prompt": "a", "max_tokens": 40, "stream": True}
    if path == "/generate":
        body = {"text": "a", "sampling_params": {"max_new_tokens": 40}, "stream": True}
    parts = urlsplit(healthy.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    with caplog.at_level(logging.ERROR):
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        with contextlib.suppress(http.client.HTTPException, OSError):
            response.read()
    connection.close()
    assert len(written) == 1 and not caplog.records
