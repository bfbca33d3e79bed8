"""The Multi-Task Rollout Orchestrator: a hub between the trainer and the services of its tasks (GLM-5 4.1.1).

    hub = Orchestrator(HubConfig(port=8100, gateway="http://10.0.0.1:9000", journal="DIR"))
    asyncio.run(hub.serve())

    POST   /tasks                     a service (`service.TaskService`) is there, and says what it has
    POST   /tasks/NAME/heartbeat      it still is
    DELETE /tasks/NAME                it takes nothing more
    POST   /trainer/begin             {step, version, checksum} -> {lease}: the trainer starts, or goes on from a
                                      checkpoint
    POST   /groups/take               {lease, step, seconds}: the batch of a step, waited for so long, and what was
                                      counted meanwhile (`Buffer.counted`)
    POST   /groups/trained            {lease, step}: it was learnt from
    POST   /groups/cancel             {group_id, again}: a group that is under way is called off
    POST   /version                   {lease, version, checksum}: of the weights that the engines have now
    POST   /evaluate                  {count, seconds}: attempts at held-out tasks
    POST   /pause, /resume            whether groups begin
    GET    /status                    how everything is doing

Groups are admitted as the buffer allows (`buffer`), of the task whose turn it is (`registry`), and their rollouts go side
by side (`remote`). Nothing is waited for without a limit: a service or gateway that is gone is told in /status and with
every batch that is not there yet. What has come is in the journal, and the next hub goes on with it. There is one
trainer: once another has begun, whatever a former one still says, under its lease, is refused.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import pathlib
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

from aiohttp import web

from glm5_jax.rl import request_schemas
from glm5_jax.rl.orchestrator.client import NOT_BEGUN, JsonClient, told_taken
from glm5_jax.rl.orchestrator.dispatcher import Remote, RemoteConfig
from glm5_jax.rl.orchestrator.group_buffer import Admitted, Buffer, BufferConfig
from glm5_jax.rl.orchestrator.task_registry import Registry, RegistryConfig, Service
from glm5_jax.rl.trajectory import Taken, Trajectory
from glm5_jax.rl.types import is_ahead
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.http_server import (
    ApiError,
    Handler,
    HttpServer,
    ListenConfig,
    check_url,
    json_bytes,
    json_response,
)
from glm5_jax.runtime.json_schema import validate

_log = logging.getLogger(__name__)
RETRY_S = 1.0  # between two tries to write the journal of a full disk


@dataclasses.dataclass(frozen=True)
class HubConfig(ListenConfig):
    """Construction refuses values out of range (ValueError).

    Attributes:
      gateway: its URL.
      seed: of all rollouts.
      journal: folder with what has come, for the next hub; None: none.
      poll_seconds: that a trainer is kept waiting at most before it has to ask again.
      tick: seconds between two looks at what only time changes.
      most_bytes: of an answer.
      api_key: key that the hub and the gateway require; services require the token that they register with.
    """

    port: int = 8100
    gateway: str = "http://127.0.0.1:9000"
    seed: int = 0
    journal: str | None = None
    poll_seconds: float = 60.0
    tick: float = 0.1
    most_bytes: int = 2**28
    buffer: BufferConfig = BufferConfig()
    registry: RegistryConfig = RegistryConfig()
    remote: RemoteConfig = RemoteConfig()

    def __post_init__(self):
        super().__post_init__()
        check_url("gateway", self.gateway)
        for name in ("poll_seconds", "tick", "most_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclasses.dataclass(eq=False)
class _UnderWay:
    """A group. left: of its rollouts, those that have not ended; again: whether its number is to be admitted again if it
    is called off; accepted: once it has come."""

    service: Service
    admitted: Admitted
    left: int
    again: bool = True
    accepted: bool | None = None
    task: asyncio.Task | None = None


class Orchestrator(HttpServer):
    """The hub."""

    def __init__(self, config: HubConfig = HubConfig()):
        super().__init__(config)
        self._clock = time.monotonic
        folder = None if config.journal is None else pathlib.Path(config.journal)
        with contextlib.ExitStack() as held:
            # Two hubs would give out the same groups, and write over each other's.
            if folder is not None:
                held.enter_context(FolderLock(folder))
            # Agents of a hub that was killed may go on in their sessions, which no other's must be named like.
            self._buffer = Buffer(config.buffer, folder, f"{secrets.token_hex(4)}-")
            self._held = held.pop_all()
        self._registry = Registry(config.buffer.group, config.registry)
        self._registry.drawn.update(self._buffer.begun)
        self._collect()
        self._groups: dict[str, _UnderWay] = {}
        self._tasks: set[asyncio.Task] = set()  # all that run until they are cancelled
        self._paused = self._ending = False
        self._next_write = 0.0
        self._news = asyncio.Event()

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        post = {
            "/tasks": self._register,
            "/tasks/{name}/heartbeat": self._heartbeat,
            "/trainer/begin": self._begin,
            "/groups/take": self._take,
            "/groups/trained": self._trained,
            "/groups/cancel": self._cancel,
            "/version": self._version,
            "/evaluate": self._evaluate,
            "/pause": functools.partial(self._pause, True),
            "/resume": functools.partial(self._pause, False),
        }
        get = {"/status": self._status, "/health": self._health}
        return {"POST": post, "GET": get, "DELETE": {"/tasks/{name}": self._leave}}

    def app(self) -> web.Application:
        app = super().app()

        async def end(app):
            # Or the server would wait for trainers that wait for batches.
            self._ending = True
            self._tell()

        app.on_shutdown.append(end)
        return app

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        with self._held:
            async for _ in self._working():
                yield

    async def _working(self) -> AsyncIterator[None]:
        config = self.config
        async with (
            JsonClient(self.api_key, most_bytes=config.most_bytes) as gateway,
            # Without the key of the run, which must not go to whatever URL was registered.
            JsonClient(most_bytes=config.most_bytes) as services,
        ):
            own = config.gateway, config.seed, config.remote, self._clock, self._buffer.life
            self._remote = Remote(gateway, services, *own)
            self._remote.weights = self._buffer.weights
            self._filling = self._started(self._fill())
            self._started(self._remote.sweep())
            yield
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            # They end their sessions, and their numbers are in the journal.
            await asyncio.wait(tasks, timeout=config.grace_s)

    def _started(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """See `HttpServer`; groups that are under way may end."""
        self._draining = True
        self._tell()
        await super().drain()

    # -- groups --------------------------------------------------------------------------------------------

    async def _fill(self) -> None:
        """Lets groups begin whenever they may, and sees who is lost."""
        while True:
            news, now = self._news, self._clock()
            for service in self._registry.expire(now):
                _log.warning("%s is lost: %s", service.spec.name, service.error)
                self._call_off(service)
            if now >= self._next_write:
                self._write_journal(now)
            can_start = not (self._draining or self._paused or self._buffer.unwritten)
            if self._buffer.lease and can_start:
                self._start_groups(now)
            await self._hear(news, self.config.tick)

    def _write_journal(self, now: float) -> None:
        """Writes what a full disk has kept out of the journal, and looks again after a while if it still does."""
        before = self._buffer.unwritten
        self._buffer.write_journal()
        self._next_write = now + (RETRY_S if self._buffer.unwritten else 0.0)
        if self._buffer.unwritten and not before:
            _log.error("%s", self._buffer.unwritten)
        if before and not self._buffer.unwritten:
            _log.warning("the journal can be written again")
            self._tell()

    def _check_journal(self) -> None:
        """Raises ApiError unless everything that was answered before is in the journal."""
        if self._buffer.unwritten:
            self._write_journal(self._clock())
        if self._buffer.unwritten:
            raise ApiError(self._buffer.unwritten, 503, "journal")

    def _start_groups(self, now: float) -> None:
        accepted = None
        while self._buffer.room() and not self._remote.gateway.wait(now):
            if self._buffer.unwritten:
                return
            ready = self._registry.ready(now)
            if not ready:
                return
            if accepted is None:  # counted anew each time
                accepted = self._buffer.accepted
            self._start(*self._registry.next(accepted, ready), now)

    def _start(self, service: Service, number: int, now: float) -> None:
        admitted = self._buffer.admit(service.spec.name, number)
        self._remote.gateway.begun(now)
        self._registry.begun(service, now)
        own = _UnderWay(service, admitted, self.config.buffer.group)
        own.task = self._started(self._attempt(own))
        own.task.add_done_callback(functools.partial(self._settle, own))
        self._groups[admitted.group_id] = own
        self._active += 1

    async def _attempt(self, own: _UnderWay) -> None:
        async def one(place: int) -> Trajectory:
            try:
                return await self._remote.rollout(own.service, own.admitted, place)
            finally:
                own.left -= 1
                own.service.in_flight -= 1
                self._tell()

        # Not `gather`, whose cancellation waits for the first of them alone.
        async with asyncio.TaskGroup() as members:
            tasks = [members.create_task(one(place)) for place in range(own.left)]
        found = [task.result() for task in tasks]
        own.accepted = self._buffer.put(own.admitted.group_id, found)

    def _settle(self, own: _UnderWay, task: asyncio.Task) -> None:
        """A group has come, or was called off. Behind the task, which may be cancelled before it begins."""
        del self._groups[own.admitted.group_id]
        self._active -= 1
        own.service.in_flight -= own.left
        if not task.cancelled() and (error := task.exception()):
            _log.error("group %s", own.admitted.group_id, exc_info=error)
            own.service.broken(f"{type(error).__name__}: {error}", self._clock())
        if own.accepted is None:
            self._buffer.cancel(own.admitted.group_id, own.again)
        self._registry.ended(own.service, own.accepted)
        self._collect()
        self._tell()

    def _collect(self) -> None:
        """Numbers that are to be admitted again go to their services."""
        for task, number in self._buffer.again():
            self._registry.repeat(task, number)

    def _call_off(self, service: Service) -> None:
        """What is asked of a service now has failed."""
        for call in tuple(service.calls):
            call.cancel()

    def _tell(self) -> None:
        """Something has changed; who waits looks again."""
        self._news.set()
        self._news = asyncio.Event()

    async def _hear(self, news: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await news.wait()

    # -- services ------------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        service, other = self._registry.register(
            await self.read_body(request, lambda said: said), self._clock()
        )
        if other:
            self._call_off(service)
        _log.info("%s is served at %s", service.spec.name, service.spec.url)
        self._tell()
        return json_response({"name": service.spec.name})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        said = await self._said(request, request_schemas.BEAT)
        name = request.match_info["name"]
        self._registry.heartbeat(name, said.get("instance", ""), self._clock())
        return json_response({"name": name})

    async def _leave(self, request: web.Request) -> web.Response:
        service = self._registry.leave(request.match_info["name"])
        return json_response({"name": service.spec.name, "groups": service.groups})

    # -- the trainer ---------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        said = await self._said(request, request_schemas.BEGIN)
        with _conflicts():
            # By the clock they differ from those of a hub that has left no journal, too.
            least = int(1e3 * time.time())
            self._buffer.begin(said["step"], said["version"], said.get("checksum"), least)
        self._check_journal()
        lease = self._buffer.lease
        self._collect()
        self._tell()
        await self._remote.want(self._buffer.weights)
        return json_response(self._position() | {"lease": lease})

    async def _take(self, request: web.Request) -> web.Response:
        said = await self._said(request, request_schemas.TAKE)
        until = self._clock() + min(said["seconds"], self.config.poll_seconds)
        while True:
            self._check_lease(said)
            news = self._news
            with _conflicts():
                taken = self._buffer.take(said["step"])
            self._collect()
            # A batch is given out once the journal has that it was taken.
            if taken is not None and not self._buffer.unwritten:
                self._tell()
                loop = asyncio.get_running_loop()
                counts = self._buffer.counted(said["step"])
                body = await loop.run_in_executor(None, _batch, taken, counts)
                return web.Response(body=body, content_type="application/json")
            left = until - self._clock()
            if left <= 0 or self._ending:
                self._check_journal()
                return json_response({"groups": None, "hindered": self._hindered()})
            await self._hear(news, left)

    async def _trained(self, request: web.Request) -> web.Response:
        said = await self._said(request, request_schemas.TRAINED)
        self._check_lease(said)
        with _conflicts():
            self._buffer.trained(said["step"])
        self._check_journal()
        self._collect()
        self._tell()
        return json_response(self._position())

    async def _version(self, request: web.Request) -> web.Response:
        said = await self._said(request, request_schemas.VERSION)
        self._check_lease(said)
        with _conflicts():
            self._buffer.push(said["version"], said.get("checksum"))
        self._check_journal()
        self._tell()
        await self._remote.want(self._buffer.weights)
        return json_response(self._position())

    async def _said(self, request: web.Request, schema: Mapping) -> Any:
        return await self.read_body(request, lambda said: validate(said, schema))

    def _check_lease(self, said: Mapping[str, Any]) -> None:
        """ApiError unless it is the trainer that began last who says this."""
        if self._filling.done():
            raise ApiError(f"the hub has failed: {self._filling.exception()!r}", 500, "internal")
        if not self._buffer.lease or is_ahead(self._buffer.lease, time.time()):
            # The clock may have been set back since the lease was given, and gateways refuse what is ahead of theirs.
            raise ApiError(
                "no trainer has begun; say where it is with /trainer/begin", NOT_BEGUN, "begin"
            )
        if said["lease"] != self._buffer.lease:
            raise ApiError(
                f"the trainer of lease {said['lease']} has been replaced: one has begun since with lease "
                f"{self._buffer.lease}; end this one, or begin anew from its checkpoint",
                409,
                "replaced",
                "lease",
            )

    def _position(self) -> dict[str, int]:
        buffer = self._buffer
        names = ("step", "version", "waiting", "running")
        return {name: getattr(buffer, name) for name in names}

    # -- people --------------------------------------------------------------------------------------------

    async def _cancel(self, request: web.Request) -> web.Response:
        said = await self._said(request, request_schemas.CANCEL)
        own = self._groups.get(said["group_id"])
        if own is None:
            raise ApiError(f"no group {said['group_id']!r} is under way", 404, param="group_id")
        own.again = said.get("again", False)
        own.task.cancel()
        return json_response({"group_id": said["group_id"], "task": own.admitted.task})

    async def _pause(self, paused: bool, request: web.Request) -> web.Response:
        del request
        self._paused = paused
        self._tell()
        return json_response({"paused": paused})

    async def _status(self, request: web.Request) -> web.Response:
        now = self._clock()
        gateway = {
            "url": self.config.gateway,
            "state": self._remote.gateway.state,
            "error": self._remote.error,
        }
        return json_response(
            {
                **self._position(),
                "room": self._buffer.room(),
                "begun": self._buffer.lease > 0,
                "paused": self._paused,
                "draining": self._draining,
                "hindered": self._hindered(),
                "gateway": gateway,
                "tasks": self._registry.told(self._buffer.accepted, now),
                "groups": {
                    name: {
                        "task": own.admitted.task,
                        "number": own.admitted.number,
                        "left": own.left,
                    }
                    for name, own in self._groups.items()
                },
                "metrics": self._buffer.metrics(),
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        failed = self._filling.done()
        state = "failed" if failed else "draining" if self._draining else "ok"
        return json_response({"status": state}, 503 if failed else 200)

    def _hindered(self) -> list[str]:
        """Why batches may be late, in words."""
        found = []
        if not self._buffer.lease:
            found.append("no trainer has begun")
        if self._buffer.unwritten:
            found.append(self._buffer.unwritten)
        if self._paused:
            found.append("the hub is paused")
        if self._draining:
            found.append("the hub is ending")
        if self._remote.gateway.state != "closed":
            found.append(f"the gateway at {self.config.gateway} fails: {self._remote.error}")
        if not self._registry.services:
            found.append("no task service is registered")
        return found + self._registry.hindered()

    async def _evaluate(self, request: web.Request) -> web.Response:
        said = await self._said(request, request_schemas.EVALUATE)
        able = [own for own in self._registry.services.values() if own.spec.held_out]
        self._active += 1
        try:
            found = await asyncio.gather(
                *(self._remote.examine(own, said["count"], said["seconds"]) for own in able)
            )
        finally:
            self._active -= 1
        return json_response({"tasks": dict(zip((own.spec.name for own in able), found))})


@contextlib.contextmanager
def _conflicts():
    """What the buffer cannot do is the trainer's mistake."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error), 409) from None


def _batch(taken: Sequence[Taken], counts: Mapping[str, int]) -> bytes:
    return json_bytes({"groups": [told_taken(group) for group in taken], "counts": counts})
