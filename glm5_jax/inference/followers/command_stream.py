"""Connects the processes of an engine over TCP: the first one sends commands (commands.py) to the others.

    stream = connect(on_lost)            # in every process of the pod, before its other programs
    stream.send(command, arrays)         # `CommandSender`, in the first process
    command, arrays = stream.receive()   # `CommandReceiver`, in the others

The first process listens at a free port. It passes the port, and a key that a connection must begin with, to the others
over the network of the devices. If a process ends, its connections close: `on_lost` of the first process and ProcessLost
in the others end the engine, and its launcher restarts all of its processes.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from glm5_jax.compat import coordinator_host
from glm5_jax.inference.array_messages import encode
from glm5_jax.inference.commands import (
    MESSAGES,
    Command,
    Listening,
    Stop,
    StopRequested,
)
from glm5_jax.parallel import multihost
from glm5_jax.runtime.addresses import is_loopback
from glm5_jax.runtime.placement import http_url

_KEY_BYTES = 32
_GREETING_BYTES = _KEY_BYTES + 4  # key and number of the process
_GREETING_TIMEOUT_S = 10.0
_MAX_WAITING = 256  # connections that have not sent their key
_CONNECT_TIMEOUT_S = 300.0  # of `jax.distributed.initialize`


class ProcessLost(ConnectionError):
    """Raised if another process of the engine has ended without a `Stop`."""


class _Greeting(NamedTuple):
    """Begin of a connection: the bytes received, and the time by which it must be complete."""

    received: bytearray
    ends_at: float


class CommandSender:
    """Connections of the first process to the others.

    on_lost: called in a thread of its own with the number of a process that ends before `stop`.

    Attributes:
      on_stop_requested: called in a thread of its own if another process receives a stop signal; None: nothing is called.
    """

    def __init__(self, host: str, num_processes: int, on_lost: Callable[[int], object]):
        """Listens for the other processes. host: name by which they reach this one."""
        self.on_stop_requested: Callable[[], object] | None = None
        self._count, self._on_lost, self._host = num_processes - 1, on_lost, host
        self._key = secrets.token_hex(_KEY_BYTES // 2)
        self._listener = _listen(host)
        self._connections: dict[int, socket.socket] = {}
        self._ports: dict[int, int] = {}
        self._stopped = False

    @property
    def rendezvous(self) -> list:
        """Host, port and key, by which the other processes connect."""
        return [self._host, self._listener.getsockname()[1], self._key]

    @property
    def urls(self) -> list[str] | None:
        """URLs of the HTTP servers of the other processes, in order; None until all listen."""
        if len(self._ports) < self._count:
            return None
        numbered = sorted(self._connections.items())
        # IPv4 addresses arrive as IPv6 ones such as ::ffff:10.0.0.1.
        hosts = {i: one.getpeername()[0].removeprefix("::ffff:") for i, one in numbered}
        return [http_url(host, self._ports[i]) for i, host in hosts.items()]

    def accept(self, timeout_s: float = _CONNECT_TIMEOUT_S) -> None:
        """Waits for all other processes. Raises TimeoutError if one does not connect in time."""
        deadline = time.monotonic() + timeout_s
        waiting: dict[socket.socket, _Greeting] = {}
        self._listener.setblocking(False)
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(self._connections) < self._count:
                now = time.monotonic()
                if now >= deadline:
                    missing = sorted({*range(1, self._count + 1)} - self._connections.keys())
                    raise TimeoutError(f"processes {missing} did not connect within {timeout_s} s")
                # Strangers must not hold up the others: all are read at the same time, and none for long.
                for late in [one for one, greeting in waiting.items() if greeting.ends_at <= now]:
                    _drop(late, waiting, selector)
                ends = [deadline, *(greeting.ends_at for greeting in waiting.values())]
                for key, _ in selector.select(min(ends) - now):
                    if key.fileobj is self._listener:
                        self._begin_greeting(waiting, selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in waiting:
                        self._continue_greeting(key.fileobj, waiting, selector)
            for one in list(waiting):
                _drop(one, waiting, selector)
        for number, connection in self._connections.items():
            threading.Thread(
                target=self._watch, args=(number, connection), name=f"process {number}", daemon=True
            ).start()

    def _begin_greeting(
        self, waiting: dict[socket.socket, _Greeting], selector: selectors.BaseSelector
    ) -> None:
        """Accepts a connection, in place of the oldest one that has not sent the key if there are too many."""
        try:
            connection = self._listener.accept()[0]
        except OSError:  # it was closed meanwhile
            return
        connection.setblocking(False)
        if len(waiting) >= _MAX_WAITING:
            _drop(next(iter(waiting)), waiting, selector)
        waiting[connection] = _Greeting(bytearray(), time.monotonic() + _GREETING_TIMEOUT_S)
        selector.register(connection, selectors.EVENT_READ)

    def _continue_greeting(
        self,
        connection: socket.socket,
        waiting: dict[socket.socket, _Greeting],
        selector: selectors.BaseSelector,
    ) -> None:
        """Reads from a connection. Keeps it if it begins with the key and the number of its process, and closes others."""
        received = waiting[connection].received
        try:
            data = connection.recv(_GREETING_BYTES - len(received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if data and len(received) < _GREETING_BYTES:
            return
        key, number = bytes(received[:_KEY_BYTES]), int.from_bytes(received[_KEY_BYTES:])
        is_valid = hmac.compare_digest(key, self._key.encode()) and 1 <= number <= self._count
        if not is_valid or number in self._connections:
            _drop(connection, waiting, selector)
            return
        del waiting[connection]
        selector.unregister(connection)
        _configure(connection)
        self._connections[number] = connection

    def send(self, command: Command, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a command to all other processes. Raises ProcessLost if one has ended."""
        message = encode(command, arrays)
        for number, connection in self._connections.items():
            try:
                connection.sendall(message)
            except OSError as error:
                raise ProcessLost(f"process {number} of the engine has ended ({error})") from None

    def stop(self) -> None:
        """Ends all other processes."""
        self._stopped = True
        self.send(Stop())

    def close(self) -> None:
        """Closes all connections, which ends the other processes with an error unless they were stopped."""
        self._stopped = True
        self._listener.close()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the other process has closed it
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _watch(self, number: int, connection: socket.socket) -> None:
        """Reads the messages of a process until it ends."""
        try:
            while True:
                message, _ = MESSAGES.read(lambda count: _read(connection, count))
                if isinstance(message, Listening):
                    self._ports[number] = message.port
                elif isinstance(message, StopRequested) and self.on_stop_requested:
                    self.on_stop_requested()
        except OSError:
            if not self._stopped:
                self._on_lost(number)


class CommandReceiver:
    """Connection of another process to the first one."""

    def __init__(self, rendezvous: Sequence, number: int):
        """Connects. Raises OSError if the first process does not respond."""
        host, port, key = rendezvous
        self._connection = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
        self._connection.sendall(key.encode() + number.to_bytes(4))
        _configure(self._connection)

    def receive(self) -> tuple[Command, list[np.ndarray]]:
        """Waits for the next command. Raises ProcessLost if the first process has ended."""
        try:
            return MESSAGES.read(lambda count: _read(self._connection, count))
        except OSError as error:
            raise ProcessLost(f"the first process of the engine has ended ({error})") from None

    def reply(self, message: Listening | StopRequested) -> None:
        """Sends a message to the first process. Raises ProcessLost if it has ended."""
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise ProcessLost(f"the first process of the engine has ended ({error})") from None

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def connect(on_lost: Callable[[int], object]) -> CommandSender | CommandReceiver:
    """Connects all processes of the pod; every process must call it. on_lost: see `CommandSender`."""
    if jax.process_index() == 0:
        sender = CommandSender(coordinator_host(), jax.process_count(), on_lost)
        multihost.broadcast_from_first(lambda: sender.rendezvous)
        sender.accept()
        return sender
    return CommandReceiver(multihost.broadcast_from_first(list), jax.process_index())


def _drop(
    connection: socket.socket,
    waiting: dict[socket.socket, _Greeting],
    selector: selectors.BaseSelector,
) -> None:
    """Closes a connection that has not sent the key."""
    del waiting[connection]
    selector.unregister(connection)
    connection.close()


def _listen(host: str) -> socket.socket:
    """Listens at a free port, on this machine only if no other one reaches `host`."""
    if is_loopback(host):
        return socket.create_server((host, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _configure(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read(connection: socket.socket, count: int) -> bytes:
    """Returns the next `count` bytes. Raises ProcessLost if the connection closes before."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ProcessLost("it closed the connection")
        view = view[received:]
    return bytes(data)
