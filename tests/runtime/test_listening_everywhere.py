"""No server listens on every network without a key, however its host is spelled."""

import contextlib
import socket

import pytest

from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response, read_key

EVERYWHERE = ["0.0.0.0", "0", "00", "0x0", "0.0", "0.0.0", "::", "0:0::0", "::ffff:0.0.0.0", ""]


class Small(HttpServer):
    """Has /health alone."""

    def routes(self):
        return {"GET": {"/health": self._health}}

    async def _health(self, request):
        return json_response({})


@pytest.mark.parametrize("host", EVERYWHERE)
def test_rejects_every_spelling_without_key(host):
    with pytest.raises(ValueError, match="every network reaches, and there is no API key"):
        ListenConfig(host=host)
    assert ListenConfig(host=host, api_key="secret").host == host
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
def test_rejects_key_that_no_header_can_hold(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must hold the key and nothing else"):
        read_key(path)
