"""HTTP server of a process of an engine that is not the first one.

GET  /health            whether it follows the first process
POST /weights/pull, /weights/abort    pushes of weights (shards/receiver.py)
GET  /weights/shard     weights that it passes on to other engines (shards/server.py)
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence

from aiohttp import web

from glm5_jax.inference.commands import Listening, StopRequested
from glm5_jax.inference.followers.command_stream import ProcessLost
from glm5_jax.inference.followers.follower import Follower
from glm5_jax.inference.request_bodies import WEIGHT_LIMITS, AbortPush, PullRequest
from glm5_jax.inference.shards.hosts import check_sources
from glm5_jax.inference.shards.receiver import Conflict, ShardReceiver
from glm5_jax.runtime.http_server import (
    ApiError,
    Handler,
    HttpServer,
    ListenConfig,
    json_response,
)
from glm5_jax.runtime.json_structs import decode

_log = logging.getLogger(__name__)


class FollowerServer(HttpServer):
    """HTTP server of a follower, which it runs in a thread: health checks, and pushes of weights.

    Attributes:
      shards: receiver of the weights that this process pulls.
      failure: error that ended the follower; None: it runs, or was stopped.
    """

    def __init__(self, follower: Follower, config: ListenConfig, pull_hosts: Sequence[str] = ()):
        """Creates the server. pull_hosts: hosts that it pulls weights from, besides the client's (`shards.hosts`)."""
        super().__init__(
            dataclasses.replace(
                config,
                # After a stop signal the first process may use all of its grace period before it stops this one.
                grace_s=1.5 * config.grace_s,
                utilization_file=None,  # the first process records that of the engine
            )
        )
        self.failure: BaseException | None = None
        self._follower, self._pull_hosts = follower, tuple(pull_hosts)
        self.shards = ShardReceiver(follower.cfg, follower.weights, self.api_key)
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        post = {"/weights/pull": self._pull, "/weights/abort": self._abort}
        get = {"/health": self._health, "/weights/shard": self.shards.library.answer}
        return {"POST": post, "GET": get}

    def to_api_error(self, error: Exception) -> ApiError | None:
        if isinstance(error, Conflict):
            return ApiError(str(error), 409, "conflict")
        return super().to_api_error(error)

    @property
    def failed(self) -> bool:
        return self.failure is not None or self._draining and self._thread.is_alive()

    @property
    def num_active(self) -> int:
        """1 until the first process has stopped this one."""
        return int(self._thread.is_alive())

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        yield

    async def drain(self) -> None:
        """Lets the first process complete the running requests, then stop all processes."""
        if self._thread.is_alive():
            with contextlib.suppress(ProcessLost):
                self._follower.stream.reply(StopRequested())
        await super().drain()

    async def _tell_port(self, port: int, stop: asyncio.Event) -> None:
        await super()._tell_port(port, stop)
        with contextlib.suppress(ProcessLost):  # the thread ends with it, too
            self._follower.stream.reply(Listening(port=port))

    def _run(self) -> None:
        try:
            self._follower.run()
        except BaseException as error:
            self.failure = error
            _log.error("the follower has failed: %s", error)
        finally:
            assert self._loop is not None, "the thread starts in the loop"
            self._loop.call_soon_threadsafe(self.stop)

    async def _pull(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: decode(body, PullRequest), WEIGHT_LIMITS)
        try:
            check_sources(body, request.remote, self._pull_hosts)
            return json_response(await self.shards.pull(body))
        except Conflict:
            raise
        except ValueError as error:
            raise ApiError(str(error), param="sources") from None
        except OSError as error:  # a process of the trainer, or another engine
            raise ApiError(str(error), 502, "pull_failed") from None

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: decode(body, AbortPush), WEIGHT_LIMITS)
        self.shards.abort(body.push)
        return json_response({"aborted": body.push})

    async def _health(self, request: web.Request) -> web.Response:
        return json_response(
            {"status": "failed" if self.failed else "ok"}, 503 * self.failed or 200
        )
