"""A server that starts while the disk is full waits for room to tell its port; other errors end it."""

import asyncio
import errno
import os

import pytest

from glm5_jax.runtime import http_server
from glm5_jax.runtime.http_server import HttpServer, ListenConfig
from glm5_jax.runtime.ready_file import read_port_file


class Small(HttpServer):
    """Has no routes."""

    def routes(self):
        return {}


@pytest.fixture
def full_disk(monkeypatch):
    """Has the next writes of a ready file fail, each with an error of this number, and none of them wait."""
    write, numbers = http_server.write_port_file, []

    def fail(ready_file, port):
        if numbers:
            number = numbers.pop()
            raise OSError(number, os.strerror(number), ready_file)
        write(ready_file, port)

    monkeypatch.setattr(http_server, "write_port_file", fail)
    monkeypatch.setattr(http_server, "FULL_DISK_RETRY_S", 0.0)
    return numbers


def test_waits_for_room_to_tell_port(tmp_path, full_disk):
    full_disk += [errno.ENOSPC, errno.EDQUOT, errno.ENOSPC]
    small, ports = Small(ListenConfig(port=0, ready_file=str(tmp_path / "ready"))), []

    def ready(port):
        ports.append(port)
        small.stop()

    asyncio.run(small.serve(ready))
    assert not full_disk and ports == [read_port_file(tmp_path / "ready")]


def test_ends_where_it_may_not_tell_port(tmp_path, full_disk):
    full_disk += [errno.EACCES]
    small = Small(ListenConfig(port=0, ready_file=str(tmp_path / "ready")))
    with pytest.raises(PermissionError):
        asyncio.run(small.serve())
