"""Tests health checks of servers, and the files in which servers write their ports."""

import asyncio
import signal
import socket
import subprocess
import sys
import time

import pytest

from glm5_jax.runtime.client import is_healthy
from glm5_jax.runtime.http_server import HttpServer, ListenConfig, find_free_port, json_response
from glm5_jax.runtime.ready_file import read_port_file, write_port_file


class Server(HttpServer):
    def routes(self):
        return {"GET": {"/health": self._health, "/slow": self._slow}}

    async def _health(self, request):
        return json_response({})

    async def _slow(self, request):
        await asyncio.sleep(60)


@pytest.fixture(scope="module")
def url():
    with Server(ListenConfig(port=0)).running() as url:
        yield url


def test_is_healthy_only_after_ok_response(url):
    assert is_healthy(f"{url}/health", 30)
    assert not is_healthy(f"{url}/nowhere", 30)
    assert not is_healthy(f"http://127.0.0.1:{find_free_port()}/health", 30)


def test_is_not_healthy_after_timeout(url):
    began = time.monotonic()
    assert not is_healthy(f"{url}/slow", 0.2)
    assert time.monotonic() - began < 30


def test_is_not_healthy_without_http():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        command = [
            sys.executable,
            "-c",
            f"from glm5_jax.runtime.client import is_healthy; print(is_healthy({address!r}, 30))",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as checker:
            listener.settimeout(60)
            connection, _ = listener.accept()
            connection.sendall(b"220 smtp\r\n")
            connection.close()
            assert checker.communicate(timeout=60)[0] == "False\n"


def test_ignores_proxy_of_environment(url, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{find_free_port()}")
    assert is_healthy(f"{url}/health", 30)


def test_writes_port_file_atomically(tmp_path):
    file = tmp_path / "ready"
    assert read_port_file(file) is None
    write_port_file(str(file), 8123)
    assert read_port_file(file) == 8123
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]
    for wrong in ("8123", "", '{"url": 1}', '{"port": null}'):
        file.write_text(wrong)
        with pytest.raises(ValueError, match='a server writes {"port": N}'):
            read_port_file(file)


def test_server_writes_port_once_it_listens(tmp_path):
    file = tmp_path / "ready"
    code = f"""
import asyncio
from glm5_jax.runtime.http_server import HttpServer, ListenConfig
class Server(HttpServer):
    def routes(self): return {{}}
asyncio.run(Server(ListenConfig(port=0, ready_file={str(file)!r})).serve())
"""
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        deadline = time.monotonic() + 60
        while (port := read_port_file(file)) is None:
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.02)
        socket.create_connection(("127.0.0.1", port), 30).close()
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0
