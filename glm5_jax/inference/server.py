"""An engine behind HTTP: OpenAI's API, SGLang's `/generate`, and what a pod needs to run it.

    server = Server(engine, tokenizer, ServerConfig(port=8000))
    asyncio.run(server.serve())      # until SIGTERM or SIGINT, which lets what runs end

Requests wait in the engine, not here: a handler sleeps until its tokens come. A reader that is slow holds back
nothing but its own answer, and one that is gone cancels what it asked for.
"""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from aiohttp import web

from glm5_jax.checkpoint import models
from glm5_jax.core.schema import checked
from glm5_jax.core.server import (
    ApiError,
    Handler,
    HttpServer,
    ListenConfig,
    as_json,
    encoded,
    read_json,
)
from glm5_jax.inference import protocol, replies
from glm5_jax.inference.client import INSTANCE
from glm5_jax.inference.engine import FINISH, Engine
from glm5_jax.inference.gauges import Gauges
from glm5_jax.inference.protocol import Asked, Defaults, Reader
from glm5_jax.inference.request import FAILED, Handle, Paused, TooLong
from glm5_jax.inference.runner import WeightsLost
from glm5_jax.inference.weights import Conflict, Receiver
from glm5_jax.inference.worker import Worker, WorkerStopped
from glm5_jax.text.tokenizer import Tokenizer

_PAGE = pathlib.Path(__file__).parent / "page.html"
_PARTS_AT_ONCE = 2  # parts of a push in memory, so that one arrives while another is read


@dataclasses.dataclass(frozen=True)
class ServerConfig(ListenConfig):
    """How an engine is offered. Construction refuses values out of range (ValueError).

    Attributes:
      model: its name for clients.
      variant: of the chat's layout (`text.layouts.VARIANTS`).
      max_requests: choices that wait and run at once; more are refused with 429.
      deadline: seconds that a request may take; None: any.
      push_seconds: without a word, after which a push of new weights is over.
      max_part: bytes of a part of it.
      defaults: of requests that say nothing.
    """

    model: str = "glm-5"
    variant: str = "glm5"
    max_requests: int = 1024
    deadline: float | None = None
    push_seconds: float = 120.0
    max_part: int = 256 * 2**20
    defaults: Defaults = Defaults()

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_requests", "push_seconds", "max_part"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class Server(HttpServer):
    """Serves one engine, whose only owner it is from then on.

    load(path) gives the weights of a folder, for `/update_weights`, or says in a ValueError why it does not; without
    it there are none, and none can be pushed. clock: by which a push that sends nothing ends.

    Attributes:
      worker: owner of the engine, for callers in this process (`rl.reshard.Reshard`).
    """

    open_to_all = ("/", "/health")

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServerConfig = ServerConfig(),
        load: Callable[[str], dict] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(config)
        self._tokenizer, self._load = tokenizer, load
        self.worker = Worker(engine)
        self._weights = Receiver(engine, self.worker.call, config.push_seconds, clock)
        self._receiving = asyncio.Semaphore(_PARTS_AT_ONCE)
        self._reader = Reader(
            tokenizer,
            model=config.model,
            variant=config.variant,
            deadline=config.deadline,
            defaults=config.defaults,
            max_length=engine.max_length,
            max_requests=config.max_requests,
        )
        self._gauges = Gauges(engine)
        self._instance = secrets.token_hex(8)

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        post = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/generate": self._generate,
            "/pause": self._pause,
            "/resume": self._resume,
            "/update_weights": self._update,
            "/weights/begin": self._begin_push,
            "/weights/part": self._take_part,
            "/weights/commit": self._commit_push,
            "/weights/abort": self._abort_push,
        }
        get = {
            "/": self._page,
            "/v1/models": self._models,
            "/v1/models/{name:.+}": self._model,
            "/health": self._health,
            "/metrics": self._metrics,
            "/weights": self._held_weights,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
        }
        return {"POST": post, "GET": get}

    @property
    def failed(self) -> bool:
        return self.worker.failure is not None

    def refusal(self, error: Exception) -> ApiError | None:
        if isinstance(error, WorkerStopped):
            return ApiError("the engine has ended", 503, "unavailable")
        if isinstance(error, WeightsLost):
            return ApiError(str(error), 503, "weights_lost")
        if isinstance(error, Conflict):
            return ApiError(str(error), 409, "conflict")
        if isinstance(error, Paused):
            return ApiError(str(error), param="policy")
        return super().refusal(error)

    async def opened(self, app) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        # An engine that has failed serves nobody: the process ends, so that who started it starts it again.
        self.worker.on_failure = lambda: loop.call_soon_threadsafe(self.stop)
        self.worker.start()
        yield
        await loop.run_in_executor(None, self.worker.stop)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.chat, replies.Chats)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.completion, replies.Completions)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = await self._answer(request, self._reader.generate, replies.Generated)
        # So that who has looked at /weights knows whose answer it is.
        if not response.prepared:
            response.headers[INSTANCE] = self._instance
        return response

    async def _answer(self, request: web.Request, read, form) -> web.StreamResponse:
        """Reads a body, submits what it asks for and answers in a form of replies.py, whole or in pieces."""
        if self._draining:
            raise ApiError("the server is ending; ask another", 503, "unavailable")
        loop, body = asyncio.get_running_loop(), await self.received(request)
        # A long prompt takes long to encode: not while others wait for their tokens.
        asked = await loop.run_in_executor(None, self._read, read, body)
        count = len(asked.requests)
        if self._active + count > self.config.max_requests:
            raise ApiError(
                f"{count} replies are asked for and {self._active} under way, {self.config.max_requests} at most; ask "
                "again later",
                429,
                "overloaded",
            )
        self._active += count
        waiting = Waiting(loop, asked, self._gauges)
        try:
            await asyncio.wrap_future(self.worker.call(waiting.submit))
            origin = replies.Origin(self.config.model, self.worker.engine.version)
            answer = form(asked, waiting.handles, origin, self._tokenizer)
            if asked.stream:
                return await self._stream(request, answer, waiting)
            async for _ in waiting.news():
                pass
            self._check_failed(waiting.handles)
            return as_json(answer.whole())
        finally:
            self._active -= count
            waiting.leave()

    async def _stream(self, request: web.Request, answer, waiting: "Waiting"):
        """Server-sent events: an object each, then [DONE]."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)

        async def send(objects):
            for one in objects:
                await response.write(b"data: " + encoded(one) + b"\n\n")

        await send(answer.first())
        async for indices in waiting.news():
            for index in indices:
                await send(answer.piece(index))
        try:
            self._check_failed(waiting.handles)
            await send(answer.last())
        except ApiError as error:
            await send([error.body])
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _read(self, read, body: bytes) -> Asked:
        engine = self.worker.engine
        asked = read(read_json(body, self._reader.limits), engine.version)
        try:
            # The choices of a prompt differ in their seeds alone.
            for request in asked.requests[:: asked.num_choices]:
                engine.check(request)
        except TooLong as error:
            raise ApiError(str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise ApiError(str(error)) from None
        return asked

    def _check_failed(self, handles) -> None:
        if not any(handle.finish_reason == FAILED for handle in handles):
            return
        if self.worker.engine.is_drained:
            raise ApiError("the engine has failed", 503, "unavailable")
        raise ApiError("the request has failed; the server's log says why", 500, "internal")

    async def _pause(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.worker.call(lambda engine: engine.pause()))
        return as_json({"paused": True})

    async def _resume(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.worker.call(lambda engine: engine.resume()))
        return as_json({"paused": False})

    async def _update(self, request: web.Request) -> web.Response:
        """New weights from a folder that this machine sees."""
        said = await self._told(request, protocol.UPDATE)
        path = said["path"]
        with _refusing("path"):
            try:
                answer = await self._weights.open(
                    path,
                    said["version"],
                    said.get("policy", FINISH),
                    load=self._load,
                    rewind=said.get("rewind", False),
                )
            except (ValueError, OSError) as error:
                if isinstance(error, Conflict | Paused) or models.is_checkpoint(path):
                    raise
                # One answer for all other paths, or it would say which of them there are.
                raise ValueError(
                    f"{path[:200]} is no checkpoint that this server can read; give a run's workdir, one of its "
                    "checkpoints/STEP, or an HF folder"
                ) from None
        return as_json({"success": True, **answer})

    async def _held_weights(self, request: web.Request) -> web.Response:
        return as_json(self._weights.status() | {"instance": self._instance})

    async def _begin_push(self, request: web.Request) -> web.Response:
        said = await self._told(request, protocol.BEGIN)
        base = said.get("base")
        with _refusing("tensors"):
            await self._weights.begin(
                said["push"],
                protocol.manifest(said),
                base=base and (base["version"], base["checksum"]),
                keep=said.get("keep", False),
                rewind=said.get("rewind", False),
            )
        return as_json(self._weights.status())

    async def _take_part(self, request: web.Request) -> web.Response:
        """A part of a push: `?push=NAME`, and safetensors."""
        push = request.query.get("push", "")
        self._weights.check(push)
        if coding := request.headers.get("Content-Encoding"):
            # A small one could become any size.
            raise ApiError(f"the part has Content-Encoding {coding[:50]}; send it as it is", 415)
        async with self._receiving:
            data = await self.received(request, self.config.max_part)
            with _refusing("part"):
                complete = await self._weights.take(push, data)
        return as_json({"complete": complete})

    async def _commit_push(self, request: web.Request) -> web.Response:
        said = await self._told(request, protocol.COMMIT)
        with _refusing("checksums"):
            policy = said.get("policy", FINISH)
            answer = await self._weights.commit(said["push"], said["checksums"], policy)
        return as_json({"success": True, **answer})

    async def _abort_push(self, request: web.Request) -> web.Response:
        said = await self._told(request, protocol.ABORT)
        self._weights.abort(said["push"])
        return as_json(self._weights.status())

    async def _told(self, request: web.Request, schema: Mapping) -> dict:
        if self._load is None:
            raise ApiError("this server takes no weights", 404, "not_found")
        if self.failed:
            raise WorkerStopped("the engine has ended")
        return await self.read_body(request, lambda body: checked(body, schema))

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=_PAGE.read_text("utf-8"), content_type="text/html")

    async def _models(self, request: web.Request) -> web.Response:
        return as_json({"object": "list", "data": [self._description()]})

    async def _model(self, request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) != self.config.model:
            raise ApiError(f"the model {name!r} is not served", 404, "model_not_found", "model")
        return as_json(self._description())

    def _description(self) -> dict:
        return {
            "id": self.config.model,
            "object": "model",
            "created": 0,
            "owned_by": "glm5_jax",
            "max_model_len": self.worker.engine.max_length,
        }

    async def _health(self, request: web.Request) -> web.Response:
        state = "failed" if self.failed else "draining" if self._draining else "ok"
        return as_json({"status": state}, 200 if state == "ok" else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._gauges.text(), headers={"Content-Type": self._gauges.kind})

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self.worker.engine
        return as_json(
            {
                "model": self.config.model,
                "served_model_name": self.config.model,  # where routers look for it
                "dp_size": engine.num_groups,  # where routers look for ranks
                "variant": self.config.variant,
                "weight_version": engine.version,
                "paused": engine.paused,
                "draining": self._draining,
                "max_requests": self.config.max_requests,
                "num_active": self._active,
                **engine.description,
            }
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        engine = self.worker.engine
        return as_json(
            {
                "model_path": self.config.model,
                "is_generation": True,
                "max_context_length": engine.max_length,
                "weight_version": str(engine.version),
            }
        )


class Waiting:
    """What one body asked for, between the engine's thread, which writes, and its handler, which waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, asked: Asked, gauges: Gauges):
        self.handles: list[Handle] = []
        self._loop, self._asked, self._gauges = loop, asked, gauges
        self._heard, self._event = set(), asyncio.Event()
        self._gone = False

    def submit(self, engine: Engine) -> None:
        """In the engine's thread. What is submitted for a handler that is gone is cancelled at once."""
        for index, request in enumerate(self._asked.requests):
            handle = engine.submit(request, functools.partial(self._listen, index))
            self.handles.append(handle)
            if self._gone:
                handle.cancel()

    def leave(self) -> None:
        """Nobody waits any more; what has not ended is cancelled."""
        self._gone = True
        for handle in list(self.handles):
            handle.cancel()

    async def news(self) -> AsyncIterator[set[int]]:
        """Numbers of the requests of which something has come, each with its end once, until all have ended."""
        over: set[int] = set()
        while len(over) < len(self.handles):
            # An end is seen before it is heard of.
            ended = {i for i, own in enumerate(self.handles) if own.finish_reason is not None}
            heard, self._heard = (self._heard | ended) - over, set()
            if heard:
                yield heard
                over |= ended
            else:
                await self._event.wait()
            self._event.clear()

    def _listen(self, index: int, handle: Handle) -> None:
        if handle.finish_reason is not None:
            self._gauges.observe(handle)
        if not self._gone:
            try:
                self._loop.call_soon_threadsafe(self._hear, index)
            except RuntimeError:  # the loop has ended before the engine
                handle.cancel()

    def _hear(self, index: int) -> None:
        self._heard.add(index)
        self._event.set()


@contextlib.contextmanager
def _refusing(param: str) -> Iterator[None]:
    """What weights are not is the fault of who sent them; param: of which part of the request."""
    try:
        yield
    except (Conflict, Paused):
        raise
    except (ValueError, OSError) as error:
        raise ApiError(str(error), param=param) from None
