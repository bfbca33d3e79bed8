"""Multi-Task Rollout Orchestrator: distributes rollouts of all tasks, and gives batches to the trainer (GLM-5 4.1.1).

    orchestrator = Orchestrator(OrchestratorConfig(port=8100, gateway="http://10.0.0.1:9000", journal="DIR"))
    asyncio.run(orchestrator.serve())

    POST   /tasks                     registers a task service (`task_service.TaskService`)
    POST   /tasks/NAME/heartbeat      records a heartbeat of a service
    DELETE /tasks/NAME                stops new groups for a service
    POST   /trainer/begin             {step, version, checksum} -> {lease}: registers the trainer after a start or resume
    POST   /groups/take               {lease, step, timeout_s}: returns the batch of a step, after a wait, with the counts
                                      since the previous batch (`GroupBuffer.batch_counts`), and the URL of the gateway,
                                      which has the records
    POST   /groups/lost               {lease, rollout_ids}: reports that the gateway has lost records
    POST   /groups/trained            {lease, step}: reports that the batch was trained on
    POST   /groups/cancel             {group_id, should_resample}: cancels a running group
    POST   /version                   {lease, version, checksum}: reports the weights of the engines
    POST   /evaluate                  {count, timeout_s, group, temperature, top_p}: runs attempts at held-out tasks
    POST   /pause, /resume            stops or allows new groups
    GET    /status                    returns the status of everything

The group buffer admits groups, the task registry selects their tasks, and the dispatcher runs their rollouts concurrently.
Every wait has a timeout. Services and gateways that are down are listed in /status and in the reply to a batch request
that is not ready. Finished groups are in the journal, with which the next orchestrator continues. There is one trainer:
after another one has begun, all requests under an earlier lease are refused.

Token records never pass through this process. It has their summaries, and the trainer fetches the records of its batch
from the gateway. Those of groups that were trained on or dropped are then deleted there.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import pathlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TypeVar

from aiohttp import web

from glm5_jax.rl.orchestrator.client import NO_TRAINER, JsonClient, batch_group_to_json
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig, RolloutDispatcher
from glm5_jax.rl.orchestrator.fair_share import CLOSED
from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer
from glm5_jax.rl.orchestrator.group_scheduler import GroupScheduler
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig, TaskRegistry
from glm5_jax.rl.request_bodies import (
    BeginTrainer,
    CancelGroup,
    EvaluateTasks,
    MarkLost,
    MarkTrained,
    ServiceHeartbeat,
    SetWeights,
    TakeGroups,
)
from glm5_jax.rl.types import is_lease_ahead
from glm5_jax.runtime.addresses import check_url
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.http_server import ApiError, Handler, HttpServer, ListenConfig, json_response
from glm5_jax.runtime.json_structs import JsonStruct, decode

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=JsonStruct)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrchestratorConfig(ListenConfig):
    """Options of the orchestrator. Raises ValueError for values out of range.

    Attributes:
      gateway: URL of the gateway.
      seed: seed of all rollouts.
      journal: folder of finished groups, for the next orchestrator; None: no journal.
      poll_timeout_s: longest wait of one request for a batch, in seconds.
      poll_interval_s: time between two checks of what only time changes, in seconds.
      max_response_bytes: size limit of a response of the gateway or of a service, in bytes.
      buffer, registry, dispatcher: options of the parts.
      api_key: key that the orchestrator and the gateway require. A service requires the token that it registers with.
    """

    port: int = 8100
    gateway: str = "http://127.0.0.1:9000"
    seed: int = 0
    journal: str | None = None
    poll_timeout_s: float = 60.0
    poll_interval_s: float = 0.1
    max_response_bytes: int = 2**28
    buffer: BufferConfig = BufferConfig()
    registry: RegistryConfig = RegistryConfig()
    dispatcher: DispatcherConfig = DispatcherConfig()

    def __post_init__(self):
        super().__post_init__()
        check_url("gateway", self.gateway)
        for name in ("poll_timeout_s", "poll_interval_s", "max_response_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class Orchestrator(HttpServer):
    """Server between the trainer, the gateway and the task services."""

    config: OrchestratorConfig

    def __init__(self, config: OrchestratorConfig = OrchestratorConfig()):
        super().__init__(config)
        self._clock = time.monotonic
        folder = None if config.journal is None else pathlib.Path(config.journal)
        with contextlib.ExitStack() as stack:
            # Two orchestrators would give out the same groups, and overwrite each other's entries.
            if folder is not None:
                stack.enter_context(FolderLock(folder))
            # Agents of a killed orchestrator may still run; the random prefix keeps session names unique.
            self._buffer = GroupBuffer(config.buffer, folder, f"{secrets.token_hex(4)}-")
            self._locks = stack.pop_all()
        self._registry = TaskRegistry(config.buffer.group, config.registry)
        self._registry.num_drawn.update(self._buffer.num_started)
        self._scheduler = GroupScheduler(
            self._buffer,
            self._registry,
            clock=self._clock,
            poll_interval_s=config.poll_interval_s,
        )
        self._scheduler.queue_resamples()
        self._is_closing = False

    @property
    def num_active(self) -> int:
        return super().num_active + len(self._scheduler.groups)

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        post = {
            "/tasks": self._register,
            "/tasks/{name}/heartbeat": self._heartbeat,
            "/trainer/begin": self._begin,
            "/groups/take": self._take,
            "/groups/trained": self._mark_trained,
            "/groups/lost": self._mark_lost,
            "/groups/cancel": self._cancel,
            "/version": self._set_version,
            "/evaluate": self._evaluate,
            "/pause": functools.partial(self._pause, True),
            "/resume": functools.partial(self._pause, False),
        }
        get = {"/status": self._status, "/health": self._health}
        return {"POST": post, "GET": get, "DELETE": {"/tasks/{name}": self._leave}}

    def app(self) -> web.Application:
        app = super().app()

        async def end_waits(app):
            # Otherwise the server would wait for trainers that wait for batches.
            self._is_closing = True
            self._scheduler.notify()

        app.on_shutdown.append(end_waits)
        return app

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        with self._locks:
            async for _ in self._run():
                yield

    async def _run(self) -> AsyncIterator[None]:
        config = self.config
        async with (
            JsonClient(self.api_key, max_response_bytes=config.max_response_bytes) as gateway,
            # Without the key of the run, which must not go to URLs that somebody registered.
            JsonClient(max_response_bytes=config.max_response_bytes) as services,
        ):
            self._dispatcher = RolloutDispatcher(
                gateway,
                services,
                config.gateway,
                seed=config.seed,
                config=config.dispatcher,
                clock=self._clock,
                run_id=self._buffer.run_id,
                has_group=self._buffer.has_group,
                weights=self._buffer.weights,
            )
            self._scheduler.start(self._dispatcher)
            yield
            await self._scheduler.stop(config.grace_s)

    async def drain(self) -> None:
        """Stops new groups, then drains like `HttpServer`. Running groups may finish."""
        self._scheduler.is_draining = True
        self._scheduler.notify()
        await super().drain()

    def _check_journal(self) -> None:
        """Raises ApiError unless the journal has everything that earlier replies depend on."""
        if self._buffer.journal_error:
            self._scheduler.write_journal(self._clock())
        if self._buffer.journal_error:
            raise ApiError(self._buffer.journal_error, 503, "journal")

    # -- services ------------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: body)
        service, is_new_process = self._registry.register(body, self._clock())
        if is_new_process:
            self._scheduler.cancel_calls(service)
        _log.info("%s is served at %s", service.spec.name, service.spec.url)
        self._scheduler.notify()
        return json_response({"name": service.spec.name})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await self._read(request, ServiceHeartbeat)
        name = request.match_info["name"]
        self._registry.heartbeat(name, body.instance, self._clock())
        return json_response({"name": name})

    async def _leave(self, request: web.Request) -> web.Response:
        service = self._registry.leave(request.match_info["name"])
        return json_response({"name": service.spec.name, "groups": service.groups})

    # -- the trainer ---------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        body = await self._read(request, BeginTrainer)
        with _as_conflict():
            # Time makes the lease larger than those of an orchestrator that has left no journal, too.
            min_lease = int(1e3 * time.time())
            self._buffer.begin(body.step, body.version, body.checksum, min_lease)
        self._check_journal()
        self._scheduler.queue_resamples()
        self._scheduler.notify()
        required = await self._require_weights()
        if required > self._buffer.lease and not is_lease_ahead(required, time.time()):
            # The gateway's journal is from a time before the clock was set back, and this orchestrator's is gone.
            self._buffer.raise_lease(required + 1)
            self._check_journal()
            await self._require_weights()
        return json_response(self._position() | {"lease": self._buffer.lease})

    async def _take(self, request: web.Request) -> web.Response:
        body = await self._read(request, TakeGroups)
        end = self._clock() + min(body.timeout_s, self.config.poll_timeout_s)
        while True:
            self._check_lease(body.lease)
            change = self._scheduler.change
            with _as_conflict():
                groups = self._buffer.take(body.step)
            self._scheduler.queue_resamples()
            # A batch is sent only after the journal has recorded it.
            if groups is not None and not self._buffer.journal_error:
                self._scheduler.notify()
                return json_response(
                    {
                        "groups": [batch_group_to_json(group) for group in groups],
                        "counts": self._buffer.batch_counts(body.step),
                        "gateway": self.config.gateway,
                    }
                )
            remaining_s = end - self._clock()
            if remaining_s <= 0 or self._is_closing:
                self._check_journal()
                return json_response({"groups": None, "blockers": self._blockers()})
            await self._scheduler.wait(change, remaining_s)

    async def _mark_trained(self, request: web.Request) -> web.Response:
        body = await self._read(request, MarkTrained)
        self._check_lease(body.lease)
        with _as_conflict():
            self._buffer.mark_trained(body.step)
        self._check_journal()
        self._scheduler.queue_resamples()
        self._scheduler.notify()
        return json_response(self._position())

    async def _mark_lost(self, request: web.Request) -> web.Response:
        body = await self._read(request, MarkLost)
        self._check_lease(body.lease)
        self._buffer.mark_lost(body.rollout_ids)
        self._check_journal()
        self._scheduler.queue_resamples()
        self._scheduler.notify()
        return json_response(self._position())

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await self._read(request, SetWeights)
        self._check_lease(body.lease)
        with _as_conflict():
            self._buffer.push(body.version, body.checksum)
        self._check_journal()
        self._scheduler.notify()
        await self._require_weights()
        return json_response(self._position())

    async def _require_weights(self) -> int:
        """Sends the weights of the buffer to the gateway. Returns the lease whose weights it requires; 0: it has none."""
        if (weights := self._buffer.weights) is None:
            return 0
        return await self._dispatcher.require_weights(weights)

    async def _read(self, request: web.Request, kind: type[_Body]) -> _Body:
        return await self.read_body(request, lambda body: decode(body, kind))

    def _check_lease(self, lease: int) -> None:
        """Raises ApiError unless the request is from the trainer that began last."""
        if self._scheduler.main_loop.done():
            error = self._scheduler.main_loop.exception()
            raise ApiError(f"the orchestrator has failed: {error!r}", 500, "internal")
        if not self._buffer.lease or is_lease_ahead(self._buffer.lease, time.time()):
            # The clock may have been set back since the lease, and gateways refuse a lease ahead of their clocks.
            raise ApiError(
                "no trainer has begun; send its position to /trainer/begin", NO_TRAINER, "begin"
            )
        if lease != self._buffer.lease:
            raise ApiError(
                f"the trainer of lease {lease} has been replaced: one has begun since with lease "
                f"{self._buffer.lease}; end this one, or restart it from its checkpoint",
                409,
                "replaced",
                "lease",
            )

    def _position(self) -> dict[str, int]:
        names = ("step", "version", "waiting", "running")
        return {name: getattr(self._buffer, name) for name in names}

    # -- people --------------------------------------------------------------------------------------------

    async def _cancel(self, request: web.Request) -> web.Response:
        body = await self._read(request, CancelGroup)
        group = self._scheduler.groups.get(body.group_id)
        if group is None or group.task is None:
            raise ApiError(f"no group {body.group_id!r} is running", 404, param="group_id")
        group.should_resample = body.should_resample
        group.task.cancel()
        return json_response({"group_id": body.group_id, "task": group.ticket.task})

    async def _pause(self, is_paused: bool, request: web.Request) -> web.Response:
        del request
        self._scheduler.is_paused = is_paused
        self._scheduler.notify()
        return json_response({"paused": is_paused})

    async def _status(self, request: web.Request) -> web.Response:
        now = self._clock()
        gateway = {
            "url": self.config.gateway,
            "state": self._dispatcher.gateway.state,
            "error": self._dispatcher.error,
        }
        return json_response(
            {
                **self._position(),
                "num_admissible": self._buffer.num_admissible(),
                "begun": self._buffer.lease > 0,
                "paused": self._scheduler.is_paused,
                "draining": self._draining,
                "blockers": self._blockers(),
                "gateway": gateway,
                "tasks": self._registry.status(self._buffer.accepted, now),
                "groups": {
                    group_id: {
                        "task": group.ticket.task,
                        "number": group.ticket.number,
                        "num_left": group.num_left,
                    }
                    for group_id, group in self._scheduler.groups.items()
                },
                "metrics": self._buffer.metrics(),
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        has_failed = self._scheduler.main_loop.done()
        state = "failed" if has_failed else "draining" if self._draining else "ok"
        return json_response({"status": state}, 503 if has_failed else 200)

    def _blockers(self) -> list[str]:
        """Returns one line per reason why batches may be late."""
        lines = []
        if not self._buffer.lease:
            lines.append("no trainer has begun")
        if self._buffer.journal_error:
            lines.append(self._buffer.journal_error)
        if self._scheduler.is_paused:
            lines.append("the orchestrator is paused")
        if self._draining:
            lines.append("the orchestrator is shutting down")
        if self._dispatcher.gateway.state != CLOSED:
            lines.append(f"the gateway at {self.config.gateway} fails: {self._dispatcher.error}")
        if not self._registry.services:
            lines.append("no task service is registered")
        return lines + self._registry.blockers()

    async def _evaluate(self, request: web.Request) -> web.Response:
        body = await self._read(request, EvaluateTasks)
        services = [s for s in self._registry.services.values() if s.spec.held_out]
        self._active += 1
        try:
            evaluations = (self._dispatcher.evaluate(service, body) for service in services)
            results = await asyncio.gather(*evaluations)
        finally:
            self._active -= 1
        names = (service.spec.name for service in services)
        return json_response({"tasks": dict(zip(names, results))})


@contextlib.contextmanager
def _as_conflict() -> Iterator[None]:
    """Turns a ValueError of the buffer into HTTP 409."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error), 409) from None
