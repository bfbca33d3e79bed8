"""What all servers have in common: how they listen and end, who may ask, errors in OpenAI's form."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hmac
import json
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from glm5_jax.core.activity import Activity

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form: status of HTTP, message, code, and the field it is about."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

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


def read_json(body: bytes) -> Any:
    """The value of a body of UTF-8 JSON; ApiError."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is no UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}") from None


def _no_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")


@dataclasses.dataclass(frozen=True)
class ListenConfig:
    """How something is offered over HTTP. Construction refuses values out of range (ValueError).

    Attributes:
      host: where it listens; 127.0.0.1 is this machine alone, 0.0.0.0 every network it is in.
      port: 0: any that is free.
      api_key: that clients must bring; None: none.
      max_body: bytes of a request.
      grace: seconds that what runs has to end once the server is told to.
      ready_file: where it says its port once it listens, for whoever started it (`tell_port`); None: nowhere.
      activity_file: where it says what it has in hand (`core.activity`); None: nowhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body: int = 16 * 2**20
    grace: float = 60.0
    ready_file: str | None = None
    activity_file: str | None = None

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        if self.api_key == "":
            raise ValueError("api_key is empty; give a key, or None for none")
        for name in ("max_body", "grace"):
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
    """

    open_to_all = ("/health",)  # without the API key

    def __init__(self, config: ListenConfig):
        self.config = config
        self.port: int | None = None
        self._active = 0  # that `drain` waits for
        self._draining = False

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers by method and path."""
        raise NotImplementedError

    async def opened(self, app: web.Application) -> AsyncIterator[None]:
        """Begins what the handlers need, and behind its yield ends it."""
        yield

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
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        with self._saying():
            await self._listen(runner, stop, ready)

    def _saying(self) -> contextlib.AbstractContextManager:
        path = self.config.activity_file
        return Activity(path, lambda: self._active) if path else contextlib.nullcontext()

    async def _listen(self, runner, stop, ready) -> None:
        try:
            site = web.TCPSite(runner, self.config.host, self.config.port)
            await site.start()
            self.port = runner.addresses[0][1]
            if self.config.ready_file is not None:
                tell_port(self.config.ready_file, self.port)
            if ready:
                ready(self.port)
            await stop.wait()
            await self.drain()
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Listens in a thread of its own; its URL. OSError if it cannot listen there."""
        loop, ended = asyncio.new_event_loop(), asyncio.Event()
        ready = concurrent.futures.Future()

        async def run():
            runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None)
            try:
                await runner.setup()
                server = await loop.create_server(runner.server, self.config.host, self.config.port)
                self.port = server.sockets[0].getsockname()[1]
                ready.set_result(f"http://{self.config.host}:{self.port}")
                await ended.wait()
                # A connection that is being accepted when its server closes would stay open (CPython before 3.12).
                for listening in server.sockets:
                    loop.remove_reader(listening)
                await asyncio.sleep(0.01)
                server.close()
            except OSError as error:
                ready.set_exception(error)
            finally:
                await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="server")
        thread.start()
        try:
            with self._saying():
                yield ready.result()
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()

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
            return _error(
                ApiError(f"the body is longer than {self.config.max_body} bytes", 413, "too_large")
            )
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
        origin, key = request.headers.get("Origin"), self.config.api_key
        # A page of somebody else's in the user's browser must not reach a server on loopback, nor one whose name
        # leads there.
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise ApiError(f"pages of {origin} may not ask this server", 403, "origin")
        name = urlsplit(f"//{request.host}").hostname
        if key is None and self.config.host in _LOOPBACK and name not in _LOOPBACK:
            raise ApiError(
                f"this server on {self.config.host} is not {name}; ask it as {self.config.host}, or start it with an "
                "api_key",
                403,
                "host",
            )
        if key is None or request.path in self.open_to_all:
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = given.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, key.encode()):
            raise ApiError("the API key is missing or wrong", 401, "invalid_api_key")


def _paths(app: web.Application) -> list[tuple[str, list[str]]]:
    """(method, paths) of all that is served."""
    found = {"GET": [], "POST": [], "DELETE": []}
    for route in app.router.routes():
        if route.method in found:
            found[route.method].append(route.resource.canonical)
    return list(found.items())


def encoded(value: Any) -> bytes:
    """JSON on one line; what is half a character in a text becomes "?"."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def as_json(value: Any, status: int = 200) -> web.Response:
    """An answer whose body is JSON."""
    return web.Response(body=encoded(value), status=status, content_type="application/json")


def _error(error: ApiError) -> web.Response:
    return as_json(error.body, error.status)
