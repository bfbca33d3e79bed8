"""Tests that no server listens on every network without a key, in any spelling of the host."""

import contextlib
import socket

import pytest

from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response

EVERYWHERE = ["0.0.0.0", "0", "00", "0x0", "0.0", "0.0.0", "::", "0:0::0", "::ffff:0.0.0.0", ""]


class Small(HttpServer):
    """Server with /health only."""

    def routes(self):
        return {"GET": {"/health": self._health}}

    async def _health(self, request):
        return json_response({})


@pytest.mark.parametrize("host", EVERYWHERE)
def test_rejects_every_spelling_without_key(host, tmp_path):
    error = f"host is {host}, which every network reaches, and there is no API key"
    with pytest.raises(ValueError, match=error):
        ListenConfig(host=host)
    assert ListenConfig(host=host, trusted_network=True).host == host
    assert ListenConfig(host=host, api_key="secret").host == host
    file = tmp_path / "key"
    file.write_text("k\n")
    assert ListenConfig(host=host, api_key_file=str(file)).api_key is None
    with pytest.raises(
        ValueError, match="give url, by which the orchestrator reaches this service"
    ):
        ServiceConfig(host=host, api_key="secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "10.0.0.5", "gpu7", "0.0.0.1"])
def test_accepts_single_addresses_without_key(host):
    assert ListenConfig(host=host).host == host


def test_rejects_name_that_resolves_to_every_network(monkeypatch):
    real = socket.getaddrinfo

    def resolve(host, *arguments, **options):
        if host == "everywhere.example":
            if options.get("flags", 0) & socket.AI_NUMERICHOST:
                raise socket.gaierror("no number")
            host = "0.0.0.0"
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    server = Small(ListenConfig(host="everywhere.example", port=0))
    with pytest.raises(ValueError, match="there is no API key"), server.running():
        pass
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            Small(ListenConfig(host="everywhere.example", port=0, api_key="secret")).running()
        )


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"a b", b"a\nb", "ä".encode(), b"a\0b", b"a\x1bb"]
)
def test_rejects_key_that_is_invalid_in_header(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must hold the key and nothing else"):
        read_key(path)
