"""What all servers have in common: how they listen and end, who may send requests, errors in OpenAI's form."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import hmac
import ipaddress
import json
import logging
import math
import os
import pathlib
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from glm5_jax.core import json_body
from glm5_jax.core.activity import Activity
from glm5_jax.core.json_body import Limits

_MAX_MESSAGE, _MAX_PARAM = 2000, 200  # characters of an error
_BACKLOG = 128  # connections that wait to be accepted, as aiohttp's
_LINGERING_S = (
    10.0  # that the rest of a refused body is read for, so that its client sees the answer
)
_SHUTDOWN_S = 2.0  # that connections have to close once all answers are out
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def shortened(text: str, max_length: int) -> str:
    """Returns a text cut to `max_length` characters; dots mark what was cut."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form: status of HTTP, message, code, and the field it is about."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ):
        # Messages quote what was sent: of a large body the answer must not be another one.
        super().__init__(shortened(message, _MAX_MESSAGE))
        self.status, self.code = status, code
        self.param = None if param is None else shortened(param, _MAX_PARAM)

    @property
    def body(self) -> dict:
        """The JSON of the answer."""
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


def read_json(body: bytes, limits: Limits = Limits()) -> Any:
    """Returns the value of a body of UTF-8 JSON; raises ApiError for anything else, or more than the limits allow."""
    try:
        return json_body.parse(body, limits)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is no UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except json_body.TooLarge as error:
        raise ApiError(str(error), code=error.code) from None
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}") from None


def read_key(file: str | os.PathLike, name: str = "api_key_file") -> str:
    """Returns the API key that a file holds. Raises ValueError, with the option's name, if it holds none."""
    try:
        key = pathlib.Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} {file} cannot be read ({error}); name a file") from None
    if len(key.split()) != 1:
        raise ValueError(f"{name} {file} must hold the key and nothing else")
    return key


def key_of(config) -> str | None:
    """Returns the API key of a config with the fields api_key and api_key_file. Raises ValueError if the file holds none."""
    if config.api_key is None and config.api_key_file is not None:
        return read_key(config.api_key_file)
    return config.api_key


@dataclasses.dataclass(frozen=True)
class ListenConfig:
    """How something is offered over HTTP. Construction refuses values out of range (ValueError).

    Attributes:
      host: address to listen at; 127.0.0.1 is this machine only, 0.0.0.0 every network it is in.
      port: port to listen at; 0: any that is free.
      api_key: key that clients must send; None: that of api_key_file, or none. No flag sets it, as `ps` shows flags.
      api_key_file: file that holds the key; None: no file.
      trusted_network: whether it may listen on every network without a key, where all machines trust each other.
      names: names of this machine in URLs of clients, besides its own host name and addresses.
      max_body: size of a request's body, in bytes.
      receive_timeout_s: time limit of receiving a request, in seconds; also of an idle connection.
      grace: seconds that what runs has to end once the server is told to.
      ready_file: where it says its port once it listens, for whoever started it (`tell_port`); None: nowhere.
      activity_file: where it says what it has in hand (`core.activity`); None: nowhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = dataclasses.field(default=None, repr=False, metadata={"flag": False})
    api_key_file: str | None = None
    trusted_network: bool = False
    names: tuple[str, ...] = ()
    max_body: int = 16 * 2**20
    receive_timeout_s: float = 60.0
    grace: float = 60.0
    ready_file: str | None = None
    activity_file: str | None = None

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        if self.api_key == "":
            raise ValueError("api_key is empty; give a key, or None for none")
        if _is_wildcard(self.host) and not (
            self.trusted_network or self.api_key or self.api_key_file
        ):
            raise ValueError(
                f"host is {self.host}, which every network reaches, and there is no API key; give api_key_file, or "
                "trusted_network=True where all machines trust each other"
            )
        for name in ("max_body", "receive_timeout_s", "grace"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


def tell_port(ready_file: str, port: int) -> None:
    """Writes {"port": port} into a file, whole or not at all; `read_port` is the other end."""
    unfinished = f"{ready_file}.{os.getpid()}"
    with open(unfinished, "w") as file:
        json.dump({"port": port}, file)
    os.replace(unfinished, ready_file)


def read_port(ready_file: str | os.PathLike) -> int | None:
    """What `tell_port` wrote; None: nothing yet. ValueError if something else is in the file."""
    try:
        with open(ready_file) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        return int(json.loads(text)["port"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f'{ready_file} has {text[:100]!r}; a server writes {{"port": N}}'
        ) from None


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine that nothing listens at just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def check_url(name: str, url: str) -> None:
    """ValueError unless it is the URL of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name} is {url!r}, which is no URL; give one such as http://HOST:PORT")


class HttpServer:
    """Answers what `routes` lists.

    Attributes:
      port: once it listens.
      api_key: key that clients must send; None: none.
    """

    open_to_all = ("/health",)  # without the API key

    def __init__(self, config: ListenConfig):
        """config: how it listens. Raises ValueError if its API key cannot be read."""
        self.config = config
        self.port: int | None = None
        self.api_key = key_of(config)
        self._active = 0  # that `drain` waits for
        self._draining = False
        self._stop: asyncio.Event | None = None  # of `serve`
        self._machine_names: frozenset[str] = frozenset()

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers by method and path."""
        raise NotImplementedError

    async def opened(self, app: web.Application) -> AsyncIterator[None]:
        """Begins what the handlers need, and behind its yield ends it."""
        yield

    @property
    def failed(self) -> bool:
        """Whether it has ended by a failure, after which the process must be started again."""
        return False

    def refusal(self, error: Exception) -> ApiError | None:
        """The answer to an error of a handler that is no fault of the server; None: it is one."""
        return error if isinstance(error, ApiError) else None

    def app(self) -> web.Application:
        """The application; what `opened` begins begins and ends with it."""
        app = web.Application(client_max_size=self.config.max_body, middlewares=[self._guard])
        app.cleanup_ctx.append(self.opened)
        for method, handlers in self.routes().items():
            app.add_routes([web.route(method, path, own) for path, own in handlers.items()])
        return app

    async def serve(self, ready: Callable[[int], None] | None = None) -> None:
        """Listens until SIGTERM or SIGINT, then lets what runs end. ready: called with the port.

        OSError if it cannot listen there. The process may then have as many files as it is allowed to: each connection is
        one, and usual limits are below what a thousand rollouts take.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._stop = asyncio.Event()
        # Collections would otherwise look at all that was imported, which takes 0.1 s, while requests wait.
        gc.freeze()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        async with self._listening() as port:
            with self._saying():
                if self.config.ready_file is not None:
                    tell_port(self.config.ready_file, port)
                if ready:
                    ready(port)
                await self._stop.wait()
                await self.drain()

    def stop(self) -> None:
        """Ends `serve` as SIGTERM does; call it in the server's event loop. `running` goes on."""
        if self._stop is not None:
            self._stop.set()

    def _saying(self) -> contextlib.AbstractContextManager:
        path = self.config.activity_file
        return Activity(path, lambda: self._active) if path else contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[int]:
        """Listens while it is entered; yields the port. Raises OSError if it cannot listen there."""
        loop = asyncio.get_running_loop()
        runner = web.AppRunner(
            self.app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
            # Without it a connection on which half a request's head has come stays open for an hour.
            keepalive_timeout=self.config.receive_timeout_s,
            lingering_time=min(_LINGERING_S, self.config.receive_timeout_s),
        )
        try:
            await runner.setup()
            if self.api_key is None and not _is_loopback(self.config.host):
                # In another thread, as it may ask a name server.
                self._machine_names = await loop.run_in_executor(None, _machine_names)
            server = await loop.create_server(
                runner.server, self.config.host, self.config.port, backlog=_BACKLOG
            )
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield self.port
            finally:
                # A connection that is being accepted when its server closes would stay open (CPython before 3.12).
                for listening in server.sockets:
                    loop.remove_reader(listening)
                await asyncio.sleep(0.01)
                server.close()
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Listens in a thread of its own; its URL. OSError if it cannot listen there."""
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
            with self._saying():
                yield ready.result()
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()

    async def received(self, request: web.Request, most: int | None = None) -> bytes:
        """Returns the body of a request. Raises ApiError if it is too long, or does not arrive in time.

        most: its largest size, in bytes; None: that of the config.
        """
        most = most or self.config.max_body
        if (request.content_length or 0) > most:
            raise _too_long(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.receive_timeout_s):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > most:
                        raise _too_long(most)
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {self.config.receive_timeout_s:g} s",
                408,
                "timeout",
            ) from None
        return bytes(body)

    async def read_body(
        self, request: web.Request, read: Callable[[Any], Any], limits: Limits = Limits()
    ) -> Any:
        """Returns read(value) of a request's body of JSON. A large body is read in another thread, as it takes long."""
        body = await self.received(request)
        if len(body) <= json_body.WHOLE_BYTES:
            return read(read_json(body, limits))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: read(read_json(body, limits)))

    async def drain(self) -> None:
        """Takes nothing more and waits, `grace` seconds at most, until all answers are out."""
        self._draining = True
        until = time.monotonic() + self.config.grace
        while self._active and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if self._active:
            _log.warning("%d requests are cut off after %s s", self._active, self.config.grace)

    @web.middleware
    async def _guard(self, request: web.Request, handler):
        """Who may ask, and every error in OpenAI's form."""
        try:
            self._admit(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _error(_too_long(self.config.max_body))
        except web.HTTPNotFound:
            there = "; ".join(f"{how} {', '.join(paths)}" for how, paths in _paths(request.app))
            return _error(ApiError(f"there is no {request.path}; there are {there}", 404))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _error(ApiError(error.reason, error.status))
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception as error:
            if refused := self.refusal(error):
                return _error(refused)
            _log.exception("%s %s", request.method, request.path)
            return _error(ApiError("the server has failed; its log says why", 500, "internal"))

    def _admit(self, request: web.Request) -> None:
        origin, host = request.headers.get("Origin"), request.host
        # A page of another site in the user's browser must not reach a server of his network, nor one whose name
        # was made to lead there.
        if origin is not None and (netloc_of(origin) or "") != host:
            raise ApiError(f"pages of {origin[:200]} may not use this server", 403, "origin")
        if self.api_key is None and not self._is_named(host):
            raise ApiError(
                f"this server is not {host[:200]!r}; use its address, add the name to names, or start it with an API key",
                403,
                "host",
            )
        if self.api_key is None or request.path in self.open_to_all:
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = given.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self.api_key.encode()):
            raise ApiError("the API key is missing or wrong", 401, "invalid_api_key")

    def _is_named(self, host: str) -> bool:
        """Whether the Host of a request is an address or a name of this machine, which no page of others can have."""
        name = _name_of(host)
        if name is None:
            return False
        known = {"localhost", self.config.host.lower(), *map(str.lower, self.config.names)}
        return _is_address(name) or name in known or name in self._machine_names


def netloc_of(url: str) -> str | None:
    """Returns the host and port of a URL; None if it is not a URL."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def _name_of(host: str) -> str | None:
    """Returns the name or address in a Host header, without the port; None if it is malformed."""
    try:
        return None if "@" in host else urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _machine_names() -> frozenset[str]:
    """Returns the host name of this machine, and what its full name begins with, label by label."""
    labels = socket.getfqdn().lower().split(".")
    full = (".".join(labels[:count]) for count in range(1, len(labels) + 1))
    return frozenset({socket.gethostname().lower(), *full})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_wildcard(host: str) -> bool:
    """Whether a host to listen at stands for every network of the machine."""
    return not host or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)


def _too_long(most: int) -> ApiError:
    return ApiError(f"the body is longer than {most} bytes", 413, "too_large")


def _paths(app: web.Application) -> list[tuple[str, list[str]]]:
    """(method, paths) of all that is served."""
    found = {"GET": [], "POST": [], "DELETE": []}
    for route in app.router.routes():
        if route.method in found:
            found[route.method].append(route.resource.canonical)
    return list(found.items())


def encoded(value: Any) -> bytes:
    """Returns JSON on one line; half a character in a text becomes "?", a number that is not finite null."""
    options = dict(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        text = json.dumps(value, **options)
    except ValueError:
        text = json.dumps(_finite(value), **options)
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    """Returns a value with null in place of Infinity and NaN, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return value


def as_json(value: Any, status: int = 200) -> web.Response:
    """An answer whose body is JSON."""
    return web.Response(body=encoded(value), status=status, content_type="application/json")


def _error(error: ApiError) -> web.Response:
    return as_json(error.body, error.status)
