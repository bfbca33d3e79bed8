"""Tests that a server that starts on a full disk waits for room to write its port, and ends on other errors."""

import asyncio
import errno
import os

import pytest

from glm5_jax.runtime import http_server
from glm5_jax.runtime.http_server import HttpServer, ListenConfig
from glm5_jax.runtime.ready_file import read_port_file


class Small(HttpServer):
    """Server without routes."""

    def routes(self):
        return {}


@pytest.fixture
def full_disk(monkeypatch):
    """Returns a list of error numbers, with which the next writes of a ready file fail, without delay between tries."""
    write, numbers = http_server.write_port_file, []

    def fail(ready_file, port):
        if numbers:
            number = numbers.pop()
            raise OSError(number, os.strerror(number), ready_file)
        write(ready_file, port)

    monkeypatch.setattr(http_server, "write_port_file", fail)
    monkeypatch.setattr(http_server, "FULL_DISK_RETRY_S", 0.0)
    return numbers


def test_waits_for_room_to_write_port(tmp_path, full_disk):
    full_disk += [errno.ENOSPC, errno.EDQUOT, errno.ENOSPC]
    small, ports = Small(ListenConfig(port=0, ready_file=str(tmp_path / "ready"))), []

    def ready(port):
        ports.append(port)
        small.stop()

    asyncio.run(small.serve(ready))
    assert not full_disk and ports == [read_port_file(tmp_path / "ready")]


def test_ends_without_permission_to_write_port(tmp_path, full_disk):
    full_disk += [errno.EACCES]
    small = Small(ListenConfig(port=0, ready_file=str(tmp_path / "ready")))
    with pytest.raises(PermissionError):
        asyncio.run(small.serve())
