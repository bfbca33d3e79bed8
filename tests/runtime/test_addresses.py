"""Addresses in place of names of hosts."""

import socket

import pytest

from glm5_jax.runtime.addresses import resolve_host


@pytest.fixture
def name_server(monkeypatch):
    """Name server that knows two engines of a run."""
    addresses = {"engine-0.run": "10.0.0.7", "engine-1.run": "fd00::7"}

    def look_up(host, port, **_):
        if host not in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("url", "resolved"),
    [
        ("http://engine-0.run:7000", "http://10.0.0.7:7000"),
        ("http://engine-0.run:7000/v1", "http://10.0.0.7:7000/v1"),
        ("http://engine-1.run:7000", "http://[fd00::7]:7000"),
        ("https://engine-0.run", "https://10.0.0.7"),
        ("http://10.9.9.9:1", "http://10.9.9.9:1"),
        ("http://[::1]:1", "http://[::1]:1"),
        ("http://localhost:1", "http://localhost:1"),
    ],
)
@pytest.mark.usefixtures("name_server")
def test_replaces_name_by_address(url, resolved):
    assert resolve_host(url) == resolved


@pytest.mark.usefixtures("name_server")
def test_raises_error_for_unknown_name():
    with pytest.raises(OSError, match="not known"):
        resolve_host("http://engine-2.run:7000")
