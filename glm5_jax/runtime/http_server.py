"""Provides the base of all HTTP servers: listening, shutdown, access control and errors in OpenAI's form."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import gc
import hmac
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from aiohttp import web

from glm5_jax.runtime import json_body
from glm5_jax.runtime.addresses import (
    can_be_host,
    host_of,
    is_address,
    is_loopback,
    is_unspecified,
    is_wildcard,
    machine_names,
    netloc_of,
)
from glm5_jax.runtime.api_keys import load_api_key
from glm5_jax.runtime.json_body import JsonLimits
from glm5_jax.runtime.json_encoding import json_bytes
from glm5_jax.runtime.ready_file import write_port_file
from glm5_jax.runtime.utilization import UtilizationRecorder

_MAX_MESSAGE, _MAX_PARAM = 2000, 200  # characters of an error
_BACKLOG = 128  # connections that wait to be accepted, as in aiohttp
_SMALL_BODY_BYTES = 2**16  # bodies up to this size do not count as large
_MAX_BODIES = 64  # bodies of the largest size whose memory all large bodies share
_LINGERING_S = 10.0  # reading the rest of a rejected body, so that its client sees the reply
FULL_DISK_RETRY_S = 1.0  # between two tries to write to a full disk
_SHUTDOWN_S = 2.0  # time that connections have to close after all replies are sent
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def truncate_text(text: str, max_length: int) -> str:
    """Returns a text truncated to `max_length` characters, with dots at the end if it was longer."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


class ApiError(Exception):
    """Error reply in OpenAI's form.

    Attributes:
      status: HTTP status.
      code: code of the error; None: none.
      param: field of the request that is wrong; None: no single field.
    """

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ):
        # Messages quote the request. A large body must not cause a large reply.
        super().__init__(truncate_text(message, _MAX_MESSAGE))
        self.status, self.code = status, code
        self.param = None if param is None else truncate_text(param, _MAX_PARAM)

    @property
    def body(self) -> dict:
        """The JSON of the reply."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else None)
        return {
            "error": {
                "message": str(self),
                "type": kind or "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }


def read_json(body: bytes, limits: JsonLimits = JsonLimits()) -> Any:
    """Returns the value of a UTF-8 JSON body. Raises ApiError if it is not JSON or exceeds the limits."""
    try:
        return json_body.parse(body, limits)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except json_body.TooLarge as error:
        raise ApiError(str(error), code=error.code) from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Options of an HTTP server. Raises ValueError if a value is out of range.

    Attributes:
      host: address to listen at; 127.0.0.1 is this machine only, 0.0.0.0 every network it is in.
      port: port to listen at; 0: any free one.
      api_key: key that clients must send; None: that of api_key_file, or none. It has no flag, because `ps` shows flags.
      api_key_file: file that holds the key; None: no file.
      trusted_network: whether it may listen on every network without a key, where all machines trust each other.
      names: further names of this machine in URLs of clients, in addition to its host name and addresses.
      max_body_bytes: maximum size of a request's body, in bytes.
      receive_timeout_s: time limit of receiving a request, in seconds; also of an idle connection.
      grace_s: time that running requests have to end after a stop signal, in seconds.
      ready_file: file that receives the port once the server listens (`write_port_file`); None: no file.
      utilization_file: file that receives its utilization (`runtime.utilization`); None: no file.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = dataclasses.field(default=None, repr=False, metadata={"flag": False})
    api_key_file: str | None = None
    trusted_network: bool = False
    names: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    receive_timeout_s: float = 60.0
    grace_s: float = 60.0
    ready_file: str | None = None
    utilization_file: str | None = None

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        if self.api_key == "":
            raise ValueError("api_key is empty; give a key, or None for none")
        if not can_be_host(self.host):
            raise ValueError(
                f"host is {self.host!r:.200}, which is no name or address of a machine; give one such as 127.0.0.1"
            )
        if is_wildcard(self.host):
            self.check_reach()
        for name in ("max_body_bytes", "receive_timeout_s", "grace_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")

    def check_reach(self) -> None:
        """Raises ValueError unless it may listen on every network, by a key or because all machines trust each other."""
        if not (self.trusted_network or self.api_key or self.api_key_file):
            raise ValueError(
                f"host is {self.host}, which every network reaches, and there is no API key; give api_key_file, or "
                "trusted_network=True where all machines trust each other"
            )


def check_port(config: ListenConfig) -> None:
    """Raises OSError if a server could not listen at the config's address at this moment."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()


def find_free_port(host: str = "127.0.0.1") -> int:
    """Returns a port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


class HttpServer:
    """HTTP server of the handlers in `routes`.

    Attributes:
      port: port once it listens; None: not yet.
      api_key: key that clients must send; None: none.
    """

    open_to_all = ("/health",)  # paths that need no API key

    def __init__(self, config: ListenConfig):
        """Reads the API key of the config. Raises ValueError if it cannot be read."""
        self.config = config
        self.port: int | None = None
        self.api_key = load_api_key(config)
        self._active = 0  # requests that `drain` waits for
        # Bytes of large bodies, by the identity of their requests, and their sum.
        self._held_by_request: dict[int, int] = {}
        self._num_held_bytes = 0
        self._draining = False
        self._stop: asyncio.Event | None = None  # of `serve`
        self._machine_names: frozenset[str] = frozenset()

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """Returns the handlers by method and path."""
        raise NotImplementedError

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        """Starts the resources of the handlers, yields, and closes them."""
        yield

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """The keys of which clients must send one; empty: no key is needed."""
        return () if self.api_key is None else (self.api_key,)

    @property
    def num_active(self) -> int:
        """Number of requests that `drain` waits for."""
        return self._active

    @property
    def failed(self) -> bool:
        """Whether the server has failed, so that the process must be restarted."""
        return False

    def to_api_error(self, error: Exception) -> ApiError | None:
        """Returns the reply to a handler's error; None if the error is the server's fault (status 500)."""
        return error if isinstance(error, ApiError) else None

    def error_response(self, request: web.Request, error: ApiError) -> web.Response:
        """Returns the response to a request that has failed, in OpenAI's form."""
        return json_response(error.body, error.status)

    def app(self) -> web.Application:
        """Returns the application; `lifespan` runs with it."""
        app = web.Application(client_max_size=self.config.max_body_bytes, middlewares=[self._guard])
        app.cleanup_ctx.append(self.lifespan)
        for method, handlers in self.routes().items():
            app.add_routes([web.route(method, path, handler) for path, handler in handlers.items()])
        return app

    async def serve(self, ready: Callable[[int], None] | None = None) -> None:
        """Listens until SIGTERM or SIGINT, then waits for running requests.

        ready: called with the port. Raises OSError if it cannot listen there. It raises the process's limit of open files
        to the maximum, because each connection is a file, and a thousand rollouts need more than usual limits.
        """
        _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
        stop = self._stop = asyncio.Event()
        # Otherwise each collection would scan all imported objects for 0.1 s while requests wait.
        gc.freeze()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with self._listening() as port:
            with self._record_utilization():
                await self._tell_port(port, stop)
                if ready:
                    ready(port)
                await stop.wait()
                await self.drain()

    async def _tell_port(self, port: int, stop: asyncio.Event) -> None:
        """Writes the ready file. On a full disk it waits for room, because ending would not make any."""
        while self.config.ready_file is not None and not stop.is_set():
            try:
                return write_port_file(self.config.ready_file, port)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                _log.error("%s; the server waits for room on the disk", error)
            await asyncio.sleep(FULL_DISK_RETRY_S)

    def stop(self) -> None:
        """Ends `serve` like SIGTERM; call it in the server's event loop. It has no effect on `running`."""
        if self._stop is not None:
            self._stop.set()

    def _record_utilization(self) -> contextlib.AbstractContextManager:
        path = self.config.utilization_file
        return (
            UtilizationRecorder(path, lambda: self.num_active) if path else contextlib.nullcontext()
        )

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[int]:
        """Listens while entered, and yields the port. Raises OSError if it cannot listen there."""
        loop = asyncio.get_running_loop()
        runner = web.AppRunner(
            self.app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
            # Otherwise a connection that sent half a request head stays open for an hour.
            keepalive_timeout=self.config.receive_timeout_s,
            lingering_time=min(_LINGERING_S, self.config.receive_timeout_s),
        )
        try:
            await runner.setup()
            if self.api_key is None and not is_loopback(self.config.host):
                # In another thread, because it may query a name server.
                self._machine_names = await loop.run_in_executor(None, machine_names)
            assert runner.server is not None, "setup makes the server"
            server = await loop.create_server(
                runner.server, self.config.host, self.config.port, backlog=_BACKLOG
            )
            port: int = server.sockets[0].getsockname()[1]
            self.port = port
            try:
                # A host name may also resolve to every network, so the addresses of the sockets are checked.
                if any(is_unspecified(one.getsockname()[0]) for one in server.sockets):
                    self.config.check_reach()
                yield port
            finally:
                # Otherwise a connection accepted while its server closes would stay open (CPython before 3.12).
                for listening in server.sockets:
                    loop.remove_reader(listening)
                await asyncio.sleep(0.01)
                server.close()
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Listens in another thread while entered, and yields the URL. Raises OSError if it cannot listen there."""
        loop, ended = asyncio.new_event_loop(), asyncio.Event()
        ready = concurrent.futures.Future()

        async def run():
            try:
                async with self._listening() as port:
                    ready.set_result(f"http://{self.config.host}:{port}")
                    await ended.wait()
            except Exception as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="server")
        thread.start()
        try:
            with self._record_utilization():
                yield ready.result()
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()

    async def read_bytes(self, request: web.Request, max_bytes: int | None = None) -> bytes:
        """Returns the body of a request. Raises ApiError if it is too long or does not arrive in time.

        All large bodies together may have the size of `_MAX_BODIES` of the largest ones. A body counts until
        `forget_body`, or until its request has ended.

        max_bytes: maximum size, in bytes; None: that of the config.
        """
        max_bytes = max_bytes or self.config.max_body_bytes
        if (request.content_length or 0) > max_bytes:
            raise _too_long(max_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.receive_timeout_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > max_bytes:
                        raise _too_long(max_bytes)
                    if len(body) > _SMALL_BODY_BYTES:
                        self._hold_memory(request, len(body), _MAX_BODIES * max_bytes)
        except web.RequestPayloadError as error:
            reason = " ".join(str(error).split())
            raise ApiError(
                f"the body cannot be read ({reason}); send it without Content-Encoding"
            ) from None
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {self.config.receive_timeout_s:g} s",
                408,
                "timeout",
            ) from None
        return bytes(body)

    def _hold_memory(self, request: web.Request, num_bytes: int, max_bytes: int) -> None:
        """Counts the bytes of a request's body. Raises ApiError if all bodies together have more than `max_bytes`."""
        added = num_bytes - self._held_by_request.get(id(request), 0)
        if self._num_held_bytes + added > max_bytes:
            raise ApiError(
                f"the bodies that are being read have {self._num_held_bytes} bytes, and this one has no room; send a "
                "smaller one, or try again later",
                429,
                "overloaded",
            )
        self._num_held_bytes += added
        self._held_by_request[id(request)] = num_bytes

    def forget_body(self, request: web.Request) -> None:
        """Records that the body of a request is no longer in memory."""
        self._num_held_bytes -= self._held_by_request.pop(id(request), 0)

    async def read_body(
        self,
        request: web.Request,
        read: Callable[[Any], Any],
        limits: JsonLimits = JsonLimits(num_values=json_body.MAX_VALUES),
        empty: bytes = b"",
    ) -> Any:
        """Returns read(value) of a request's body of JSON, where `empty` stands for a body without any bytes.

        A large body is read in another thread, because that takes long.
        """
        body = await self.read_bytes(request) or empty
        if len(body) <= json_body.MAX_SINGLE_PASS_BYTES:
            return read(read_json(body, limits))
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(None, lambda: read(read_json(body, limits)))
        finally:
            self.forget_body(request)

    async def drain(self) -> None:
        """Rejects new requests, and waits at most `grace_s` for the running ones."""
        self._draining = True
        deadline = time.monotonic() + self.config.grace_s
        while self.num_active and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.num_active:
            _log.warning("%d requests are cut off after %s s", self.num_active, self.config.grace_s)

    @web.middleware
    async def _guard(self, request: web.Request, handler):
        """Checks access, runs a handler and converts every error to a response."""
        try:
            self._admit(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return self.error_response(request, _too_long(self.config.max_body_bytes))
        except web.HTTPNotFound:
            known = "; ".join(
                f"{method} {', '.join(paths)}" for method, paths in _paths(request.app)
            )
            unknown = ApiError(f"there is no {request.path}; there are {known}", 404)
            return self.error_response(request, unknown)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return self.error_response(request, ApiError(error.reason, error.status))
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception as error:
            if refused := self.to_api_error(error):
                return self.error_response(request, refused)
            _log.exception("%s %s", request.method, request.path)
            failure = ApiError("the server has failed; its log says why", 500, "internal")
            return self.error_response(request, failure)
        finally:
            self.forget_body(request)

    def _admit(self, request: web.Request) -> None:
        # Not `request.host`, which asks a name server if there is no such header, while all requests wait. Browsers
        # always send one.
        origin, host = request.headers.get("Origin"), request.headers.get("Host")
        # A page of another site in the user's browser must not reach a server in the user's network, not even through
        # a name that resolves to it (DNS rebinding).
        if origin is not None and (netloc_of(origin) or "") != host:
            raise ApiError(f"pages of {origin[:200]} may not use this server", 403, "origin")
        if self.api_key is None and host is not None and not self._is_named(host):
            raise ApiError(
                f"this server is not {host[:200]!r}; use its address, add the name to names, or start it with an API key",
                403,
                "host",
            )
        if self.api_key is None or request.path in self.open_to_all:
            return
        # Clients of Anthropic's API send the key in a header of its own.
        sent = request.headers.get("Authorization") or request.headers.get("X-Api-Key", "")
        sent = sent.removeprefix("Bearer ")
        sent = sent.encode("utf-8", "surrogateescape")
        if not any(hmac.compare_digest(sent, key.encode()) for key in self.accepted_keys):
            raise ApiError("the API key is missing or wrong", 401, "invalid_api_key")

    def _is_named(self, host: str) -> bool:
        """Returns True if a Host header is an address or a name of this machine.

        Requests from pages of other sites have neither.
        """
        name = host_of(host)
        if name is None:
            return False
        known = {"localhost", self.config.host.lower(), *map(str.lower, self.config.names)}
        return is_address(name) or name in known or name in self._machine_names


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(f"the body is longer than {max_bytes} bytes", 413, "too_large")


def _paths(app: web.Application) -> list[tuple[str, list[str]]]:
    """Returns (method, paths) of all routes."""
    paths: dict[str, list[str]] = {"GET": [], "POST": [], "DELETE": []}
    for route in app.router.routes():
        if route.method in paths and route.resource is not None:
            paths[route.method].append(route.resource.canonical)
    return list(paths.items())


def json_response(value: Any, status: int = 200) -> web.Response:
    """Returns a reply whose body is JSON."""
    return web.Response(body=json_bytes(value), status=status, content_type="application/json")
