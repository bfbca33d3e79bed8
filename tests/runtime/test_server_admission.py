"""Tests which requests a server admits, its responses to malformed ones, and the time limit of partial requests."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.client import is_healthy
from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response
from glm5_jax.runtime.json_encoding import json_bytes
from glm5_jax.runtime.ready_file import read_port_file


class Small(HttpServer):
    """Server that returns numbers that JSON does not have, and the length of a body."""

    def routes(self):
        get = {"/health": self._health, "/values": self._values}
        return {"GET": get, "POST": {"/length": self._length}}

    async def _health(self, request):
        return json_response({})

    async def _values(self, request):
        values = [float("inf"), float("-inf"), float("nan"), 1.5]
        return json_response({"a": values, "b": {"c": (float("nan"), "\ud800")}})

    async def _length(self, request):
        return json_response(await self.read_body(request, len))


def ask(url, path="/values", headers=None, data=None):
    """Returns (status, body) of a request."""
    request = urllib.request.Request(url + path, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


@pytest.fixture(scope="module")
def url():
    with Small(
        ListenConfig(port=0, max_body_bytes=200_000, names=("gpu7.example.org",))
    ).running() as url:
        yield url


def test_answers_json_without_infinity(url):
    status, value = ask(url)
    assert status == 200 and value == {"a": [None, None, None, 1.5], "b": {"c": [None, "?"]}}
    assert json_bytes([1.0, "é"]) == '[1.0,"é"]'.encode()


def test_admits_local_addresses_and_names_without_key(url):
    port = url.rpartition(":")[2]
    local_names = ["127.0.0.1", "10.1.2.3", "[::1]", "localhost", "LOCALHOST", "gpu7.example.org"]
    for name in local_names:
        assert ask(url, headers={"Host": f"{name}:{port}"})[0] == 200, name
    with Small(ListenConfig(host="0.0.0.0", port=0, trusted_network=True)).running() as everywhere:
        everywhere = everywhere.replace("0.0.0.0", "127.0.0.1")
        for name in (socket.gethostname(), socket.getfqdn(), "127.0.0.1"):
            assert ask(everywhere, headers={"Host": name})[0] == 200, name
        assert ask(everywhere, headers={"Host": "evil.example"})[0] == 403
    others = ["evil.example", f"{socket.gethostname()}.evil.example", "127.0.0.1.evil.example", "x"]
    for name in [*others, "gpu7", "[", "[::1", "a[b]c", "", "evil.example@localhost.evil"]:
        status, message = ask(url, headers={"Host": f"{name}:{port}" if name else ""})
        assert status in (400, 403) and "Traceback" not in message, name


@pytest.mark.parametrize(
    "origin", ["http://[", "http://]", "null", "file://", "http://evil.example", "["]
)
def test_rejects_foreign_origins(url, origin):
    status, message = ask(url, headers={"Origin": origin})
    assert status == 403 and "may not use this server" in message
    assert ask(url, headers={"Origin": url})[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_requires_key_of_file(tmp_path, host):
    file = tmp_path / "key"
    file.write_text("  secret\n")
    with Small(ListenConfig(host=host, port=0, api_key_file=str(file))).running() as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert ask(url)[0] == 401 and ask(url, "/health")[0] == 200
        # A request with the key may have any host, because pages of other sites do not have the key.
        headers = {"Authorization": "Bearer secret", "Host": "proxy.example"}
        assert ask(url, headers=headers)[0] == 200
    for text in ("", "two words"):
        file.write_text(text)
        with pytest.raises(ValueError, match="must hold the key and nothing else"):
            Small(ListenConfig(api_key_file=str(file)))
    with pytest.raises(ValueError, match="token_file .*nowhere cannot be read"):
        read_key(tmp_path / "nowhere", "token_file")


def test_limits_bodies(url):
    assert ask(url, "/length", data=b"[1, 2]") == (200, 2)
    assert ask(url, "/length", data=b"[" + b"1," * 80_000 + b"1]") == (200, 80_001)
    assert ask(url, "/length", data=b" " * 200_001)[0] == 413
    status, message = ask(url, "/length", data=b"{" + b"1" * 100_000)
    assert status == 400 and "not JSON" in message and len(message) < 300


def send_partial_request(port, text):
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.sendall(text)
    return connection


HEAD = b"POST /length HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
PARTIAL_REQUESTS = [b"", b"POST /length HT", HEAD, HEAD + b"\r\n", HEAD + b"\r\n["]


def test_closes_connections_with_partial_requests():
    """Holds also after a complete request. A slow response does not count as a partial request."""
    with Small(ListenConfig(port=0, receive_timeout_s=0.3)).running() as url:
        port = int(url.rpartition(":")[2])
        complete = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connections = [
            send_partial_request(port, text)
            for text in [*PARTIAL_REQUESTS, *(complete + text for text in PARTIAL_REQUESTS)]
        ]
        for connection in connections:
            while connection.recv(4096):
                pass
            connection.close()
        assert ask(url, "/health")[0] == 200


SERVER = """
import asyncio
from glm5_jax.runtime.http_server import ListenConfig
from tests.runtime.test_server_admission import Small
asyncio.run(Small(ListenConfig(port=0, ready_file={file!r})).serve())
"""


def test_ends_at_once_with_partial_requests_open(tmp_path):
    file = tmp_path / "ready"
    code = SERVER.format(file=str(file))
    with subprocess.Popen([sys.executable, "-c", code], cwd=os.getcwd()) as server:
        until = time.monotonic() + 60
        while (port := read_port_file(file)) is None:
            assert time.monotonic() < until and server.poll() is None
            time.sleep(0.05)
        connections = [send_partial_request(port, text) for text in PARTIAL_REQUESTS * 10]
        assert is_healthy(f"http://127.0.0.1:{port}/health", 30)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert time.monotonic() - began < 20
        for connection in connections:
            connection.close()


def test_stops_serving_on_request():
    async def run():
        server = Small(ListenConfig(port=0))
        server.stop()  # the server does not serve yet
        await asyncio.wait_for(server.serve(lambda port: server.stop()), 30)

    asyncio.run(run())
