"""HTTP server of an engine: OpenAI's and Anthropic's APIs, SGLang's `/generate`, weight updates, health and metrics.

    POST /v1/chat/completions       OpenAI's chats: tools, response_format, reasoning_effort, continue_final_message
    POST /v1/responses              OpenAI's Responses API (responses_protocol.py); nothing is stored
    POST /v1/completions            OpenAI's completions of texts or ids
    POST /v1/messages               Anthropic's Messages API (anthropic_protocol.py)
    POST /v1/messages/count_tokens  tokens of the prompt of such a body
    POST /generate                  SGLang's schema, with token ids and weight versions
    POST /tokenize, /detokenize     vLLM's endpoints of the tokenizer
    POST /prefill                   pages of a prompt's cache, for a server that decodes (kv_transfer/service.py)
    POST /pause, /resume            stop and continue launching work
    POST /update_weights, /weights/pull, /weights/commit, /weights/abort    new weights (weights.py)
    GET  /weights/shard             weights that this engine passes on to others (shards/server.py)
    GET  /                          a page to chat
    GET  /v1/models                 the served model
    GET  /health                    200 {"status": "ok"}; 503 while it compiles ("compiling 11 of 38"), ends or has failed
    GET  /metrics                   Prometheus
    GET  /weights, /server_info, /model_info, /tokenizer_info    states

    server = Server(engine, tokenizer, ServerConfig(port=8000))
    asyncio.run(server.serve())      # until SIGTERM or SIGINT, after running requests

With `warm` the server listens before the engine compiles its programs, and requests wait until it has.

1. A handler parses the body in a thread and submits its requests to the engine.
2. It sleeps until tokens arrive, and sends them. A slow client delays only its own response.
3. If the client disconnects, its requests are cancelled.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TypeVar

from aiohttp import web

from glm5_jax.checkpoint import models
from glm5_jax.inference import anthropic_protocol, replies, responses_protocol
from glm5_jax.inference.client import INSTANCE
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.engine_weights import WeightsLost
from glm5_jax.inference.event_stream import send_events
from glm5_jax.inference.followers.command_stream import CommandSender, ProcessLost
from glm5_jax.inference.grammar_trial import GrammarBusy
from glm5_jax.inference.kv_transfer.client import PrefillClient
from glm5_jax.inference.kv_transfer.messages import PrefillRequest
from glm5_jax.inference.kv_transfer.service import PrefillService
from glm5_jax.inference.metrics import EngineMetrics
from glm5_jax.inference.pending_requests import PendingRequests
from glm5_jax.inference.protocol import Defaults, ParsedRequest, Reader
from glm5_jax.inference.request import FAILED, Paused, TooLong
from glm5_jax.inference.request_bodies import (
    WEIGHT_LIMITS,
    AbortPush,
    CommitPush,
    PullRequest,
    UpdateRequest,
)
from glm5_jax.inference.shards.hosts import check_pull_hosts, check_sources
from glm5_jax.inference.shards.receiver import ShardReceiver
from glm5_jax.inference.tokenizer_api import TokenizerApi
from glm5_jax.inference.weights import Conflict, Receiver
from glm5_jax.inference.worker import Worker, WorkerStopped
from glm5_jax.runtime.addresses import check_url
from glm5_jax.runtime.http_server import (
    ApiError,
    Handler,
    HttpServer,
    ListenConfig,
    json_response,
    read_json,
)
from glm5_jax.runtime.json_encoding import encode_in_pieces
from glm5_jax.runtime.json_structs import JsonStruct, decode
from glm5_jax.text.tokenizer import Tokenizer

_Update = TypeVar("_Update", bound=JsonStruct)
_MESSAGES = "/v1/messages"
_PAGE = pathlib.Path(__file__).parent / "page.html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(ListenConfig):
    """Options of the server. Raises ValueError for values out of range.

    Attributes:
      model: name of the model for clients.
      variant: variant of the chat layout (`text.layouts.VARIANTS`).
      max_requests: maximum choices that wait and run; more are refused with 429.
      timeout_s: time limit of a request, in seconds; None: no limit.
      push_timeout_s: time between the pull and the commit of a push after which it is dropped, in seconds.
      prefill_urls: URLs of servers of the same checkpoint that prefill long prompts for this one, separated by commas
        (kv_transfer/client.py); empty: none.
      prefill_min_tokens: minimum tokens of a prompt, without those in the cache, for which they are asked.
      prefill_silence_s: maximum time in which such a server sends nothing, in seconds; then this one prefills the prompt.
      pull_hosts: names, addresses and networks of machines from which weights are pulled, besides the client's own.
      defaults: values of fields that a request leaves out.
    """

    model: str = "glm-5"
    variant: str = "glm5"
    max_requests: int = 1024
    timeout_s: float | None = None
    push_timeout_s: float = 120.0
    prefill_urls: str = ""
    prefill_min_tokens: int = 512  # ours, not measured on accelerators
    prefill_silence_s: float = 30.0
    pull_hosts: tuple[str, ...] = ()
    defaults: Defaults = Defaults()

    def __post_init__(self):
        super().__post_init__()
        check_pull_hosts(self.pull_hosts)
        for url in self.prefill_servers:
            check_url("prefill_urls", url)
        for name in ("max_requests", "push_timeout_s", "prefill_min_tokens", "prefill_silence_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")

    @property
    def prefill_servers(self) -> tuple[str, ...]:
        """URLs of the servers that prefill."""
        return tuple(url.strip() for url in self.prefill_urls.split(",") if url.strip())


class Server(HttpServer):
    """Server of one engine, which it owns.

    load: returns the weights of a folder, for `/update_weights`, and raises ValueError if it cannot; None: the server
    accepts no weights. clock: clock for the timeout of a push. warm: whether the engine compiles all programs before
    the first request. stream: connections to the other processes of the engine; None: it has one process.

    Attributes:
      worker: thread that owns the engine, for callers in this process (`rl.weights.reshard.ReshardPusher`).
    """

    config: ServerConfig
    open_to_all = ("/", "/health")

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServerConfig = ServerConfig(),
        load: Callable[[str], dict] | None = None,
        clock: Callable[[], float] = time.monotonic,
        warm: bool = False,
        stream: CommandSender | None = None,
    ):
        super().__init__(config)
        self._stream = stream
        self._tokenizer, self._load = tokenizer, load
        self.worker = Worker(engine, warm)
        self._weights = Receiver(
            engine, self.worker.call, config.push_timeout_s, clock, self.api_key
        )
        self._reader = Reader(
            tokenizer,
            model=config.model,
            variant=config.variant,
            timeout_s=config.timeout_s,
            defaults=config.defaults,
            max_length=engine.max_length,
            max_requests=config.max_requests,
        )
        self._prefill_client = PrefillClient(
            config.prefill_servers,
            self.worker,
            model=config.model,
            min_tokens=config.prefill_min_tokens,
            timeout_s=config.timeout_s,
            max_silence_s=config.prefill_silence_s,
            api_key=self.api_key,
        )
        self._prefill_service = PrefillService(
            worker=self.worker, model=config.model, timeout_s=config.timeout_s
        )
        self._tokenizer_api = TokenizerApi(tokenizer, engine.max_length)
        self._engine_metrics = EngineMetrics(engine)
        self._instance = secrets.token_hex(8)

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        post = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._responses,
            _MESSAGES: self._messages,
            f"{_MESSAGES}/count_tokens": self._count_tokens,
            "/generate": self._generate,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/prefill": self._prefill,
            "/pause": self._pause,
            "/resume": self._resume,
            "/update_weights": self._update,
            "/weights/pull": self._pull_weights,
            "/weights/commit": self._commit_push,
            "/weights/abort": self._abort_push,
        }
        get = {
            "/": self._page,
            "/v1/models": self._models,
            "/v1/models/{name:.+}": self._model,
            "/health": self._health,
            "/metrics": self._metrics,
            "/weights": self._weights_status,
            "/weights/shard": self._weights.shards.library.answer,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/tokenizer_info": self._tokenizer_info,
        }
        return {"POST": post, "GET": get}

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine; None: it runs, or was stopped."""
        return self.worker.failure

    def to_api_error(self, error: Exception) -> ApiError | None:
        if isinstance(error, WorkerStopped):
            return ApiError("the engine has ended", 503, "unavailable")
        if isinstance(error, WeightsLost):
            return ApiError(str(error), 503, "weights_lost")
        if isinstance(error, GrammarBusy):
            return ApiError(str(error), 429, "overloaded")
        if isinstance(error, Conflict):
            return ApiError(str(error), 409, "conflict")
        if isinstance(error, Paused):
            return ApiError(str(error), param="policy")
        return super().to_api_error(error)

    @property
    def shards(self) -> ShardReceiver:
        """Receiver of the weights that this process pulls."""
        return self._weights.shards

    async def lifespan(self, app) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        # After a failure of the engine the process ends, so that a supervisor restarts it.
        self.worker.on_failure = lambda: loop.call_soon_threadsafe(self.stop)
        if self._stream is not None:
            self._stream.on_stop_requested = lambda: loop.call_soon_threadsafe(self.stop)
        self.worker.start()
        yield
        await self._prefill_client.close()
        await loop.run_in_executor(None, self.worker.stop)
        if self._stream is not None and not self.failed:
            self._stream.on_stop_requested = None  # the loop ends
            with contextlib.suppress(ProcessLost):
                self._stream.stop()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.chat, replies.Chats)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.completion, replies.Completions)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._read_response, responses_protocol.Responses)

    def _read_response(self, body, version: int) -> ParsedRequest:
        chat, repeated = responses_protocol.to_chat(body)
        return dataclasses.replace(self._reader.chat(chat, version), repeated=repeated)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(
            request, self._read_messages, anthropic_protocol.AnthropicMessages
        )

    def _read_messages(self, body, version: int) -> ParsedRequest:
        return self._reader.chat(anthropic_protocol.to_chat(body), version)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        parsed = await self._read_in_thread(request, self._read_messages)
        return json_response({"input_tokens": len(parsed.requests[0].ids)})

    def error_response(self, request: web.Request, error: ApiError) -> web.Response:
        if request.path.startswith(_MESSAGES):
            return json_response(anthropic_protocol.error_body(error), error.status)
        return super().error_response(request, error)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = await self._answer(request, self._reader.generate, replies.Generated)
        # Tells clients of /weights which process sent this response.
        if not response.prepared:
            response.headers[INSTANCE] = self._instance
        return response

    async def _answer(self, request: web.Request, read, form) -> web.StreamResponse:
        """Parses a body, submits its requests and sends the response, complete or streamed.

        read: method of `Reader`. form: class of replies.py.
        """
        self._check_draining()
        loop = asyncio.get_running_loop()
        parsed = await self._read_in_thread(request, read)
        pending = PendingRequests(loop, parsed, self._engine_metrics)
        with self._counted(len(parsed.requests)):
            try:
                await self._prefill_client.fetch(parsed.requests)
                await asyncio.wrap_future(self.worker.call(pending.submit))
                origin = replies.Origin(self.config.model, self.worker.engine.version)
                response = form(parsed, pending.handles, origin, self._tokenizer)
                if parsed.stream:
                    return await self._send_stream(request, response, pending)
                async for _ in pending.updates():
                    pass
                self._check_failed(pending.handles)
                # All replies have ended, so that another thread may read them. Encoding many log-probs takes seconds.
                body = await loop.run_in_executor(
                    None, lambda: encode_in_pieces(response.complete())
                )
                return web.Response(body=body, content_type="application/json")
            finally:
                pending.leave()

    def _check_draining(self) -> None:
        if self._draining:
            raise ApiError("the server is ending; use another", 503, "unavailable")

    @contextlib.contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        """Counts choices as active. Raises ApiError if there are too many."""
        if self._active + count > self.config.max_requests:
            raise ApiError(
                f"{count} replies are requested and {self._active} are active, at most {self.config.max_requests}; "
                "try again later",
                429,
                "overloaded",
            )
        self._active += count
        try:
            yield
        finally:
            self._active -= count

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        self._check_draining()
        body = await self.read_body(request, lambda body: decode(body, PrefillRequest))
        with _client_errors("ids"):
            prompt = self._prefill_service.check(body)
        with self._counted(1):
            return await self._prefill_service.answer(request, prompt, body.start, body.version)

    async def _send_stream(self, request: web.Request, reply, pending: "PendingRequests"):
        """Sends server-sent events: one for each chunk, then [DONE] unless the events have names."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        # A client that has disconnected is no error of the server; `_answer` cancels its requests.
        with contextlib.suppress(ConnectionResetError):
            await send_events(
                response.write, reply, pending, lambda: self._check_failed(pending.handles)
            )
            await response.write_eof()
        return response

    async def _read_in_thread(self, request: web.Request, read) -> ParsedRequest:
        """Parses a request's body in a thread, because encoding a long prompt would delay other responses.

        The body is gone afterwards, because thousands of requests may wait for the engine.
        """
        body = await self.read_bytes(request)
        parsed = await asyncio.get_running_loop().run_in_executor(None, self._read, read, body)
        self.forget_body(request)
        return parsed

    def _read(self, read, body: bytes) -> ParsedRequest:
        """Parses a body with a method of `Reader` and checks its requests. Raises ApiError."""
        engine = self.worker.engine
        parsed = read(read_json(body, self._reader.limits), engine.version)
        try:
            # The choices of a prompt differ only in their seeds.
            for request in parsed.requests[:: parsed.num_choices]:
                engine.check(request)
        except TooLong as error:
            raise ApiError(str(error), code="context_length_exceeded") from None
        except ValueError as error:
            raise ApiError(str(error)) from None
        return parsed

    def _check_failed(self, handles) -> None:
        """Raises ApiError if the engine or a request has failed."""
        if not any(handle.finish_reason == FAILED for handle in handles):
            return
        if self.worker.engine.is_drained:
            raise ApiError("the engine has failed", 503, "unavailable")
        raise ApiError("the request has failed; see the server's log", 500, "internal")

    async def _tokenize(self, request: web.Request) -> web.Response:
        api = self._tokenizer_api
        return json_response(await self.read_body(request, api.tokenize, api.prompts.limits))

    async def _detokenize(self, request: web.Request) -> web.Response:
        api = self._tokenizer_api
        return json_response(await self.read_body(request, api.detokenize, api.prompts.limits))

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        return json_response(self._tokenizer_api.info())

    async def _pause(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.worker.call(lambda engine: engine.pause()))
        return json_response({"paused": True})

    async def _resume(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.worker.call(lambda engine: engine.resume()))
        return json_response({"paused": False})

    async def _update(self, request: web.Request) -> web.Response:
        """Loads weights from a folder of this machine."""
        body = await self._read_update(request, UpdateRequest)
        assert self._load is not None, "checked by _read_update"
        path = body.path
        with _client_errors("path"):
            try:
                reply = await self._weights.open(
                    path, body.version, body.policy, load=self._load, rewind=body.rewind
                )
            except (ValueError, OSError) as error:
                if isinstance(error, Conflict | Paused) or models.is_checkpoint(path):
                    raise
                # The same reply for all other paths, so that it does not reveal which of them exist.
                raise ValueError(
                    f"{path[:200]} is no checkpoint that this server can read; give a run's workdir, one of its "
                    "checkpoints/STEP, or an HF folder"
                ) from None
        return json_response({"success": True, **reply})

    async def _weights_status(self, request: web.Request) -> web.Response:
        status = self._weights.status() | {"instance": self._instance}
        if self._stream is not None:
            if (followers := self._stream.urls) is None:
                raise ApiError("the engine's processes are starting", 503, "unavailable")
            status["followers"] = followers
        return json_response(status)

    async def _pull_weights(self, request: web.Request) -> web.Response:
        body = await self._read_update(request, PullRequest)
        with _client_errors("sources"):
            check_sources(body, request.remote, self.config.pull_hosts)
            try:
                reply = await self._weights.pull(body)
            except OSError as error:  # a process of the trainer, or another engine
                raise ApiError(str(error), 502, "pull_failed") from None
        return json_response(reply)

    async def _commit_push(self, request: web.Request) -> web.Response:
        body = await self._read_update(request, CommitPush)
        with _client_errors("push"):
            reply = await self._weights.commit(body.push, body.policy)
        return json_response({"success": True, **reply})

    async def _abort_push(self, request: web.Request) -> web.Response:
        body = await self._read_update(request, AbortPush)
        self._weights.abort(body.push)
        return json_response(self._weights.status())

    async def _read_update(self, request: web.Request, kind: type[_Update]) -> _Update:
        """Reads a body about weights. Raises ApiError."""
        if self._load is None:
            raise ApiError("this server accepts no weights", 404, "not_found")
        if self.failed:
            raise WorkerStopped("the engine has ended")
        return await self.read_body(request, lambda body: decode(body, kind), WEIGHT_LIMITS)

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=_PAGE.read_text("utf-8"), content_type="text/html")

    async def _models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._description()]})

    async def _model(self, request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) != self.config.model:
            raise ApiError(f"the model {name!r} is not served", 404, "model_not_found", "model")
        return json_response(self._description())

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
        if state == "ok" and self.worker.compiling is not None:
            state = "compiling {} of {}".format(*self.worker.compiling)
        return json_response({"status": state}, 200 if state == "ok" else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._engine_metrics.text(), headers={"Content-Type": self._engine_metrics.kind}
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self.worker.engine
        return json_response(
            {
                "model": self.config.model,
                "served_model_name": self.config.model,  # the name that routers read
                "dp_size": engine.dp_size,  # the number of ranks that routers read
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
        return json_response(
            {
                "model_path": self.config.model,
                "is_generation": True,
                "max_context_length": engine.max_length,
                "weight_version": str(engine.version),
            }
        )


@contextlib.contextmanager
def _client_errors(param: str) -> Iterator[None]:
    """Turns ValueError and OSError into ApiError, because the client sent wrong weights. param: request's field."""
    try:
        yield
    except (Conflict, Paused):
        raise
    except (ValueError, OSError) as error:
        raise ApiError(str(error), param=param) from None
