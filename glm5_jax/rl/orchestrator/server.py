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
    POST   /evaluate                  {count, timeout_s}: runs attempts at held-out tasks
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
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import TypeVar

from aiohttp import web

from glm5_jax.rl.orchestrator.client import NO_TRAINER, JsonClient, batch_group_to_json
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig, RolloutDispatcher
from glm5_jax.rl.orchestrator.fair_share import CLOSED
from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer, GroupTicket
from glm5_jax.rl.orchestrator.task_registry import RegisteredService, RegistryConfig, TaskRegistry
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
from glm5_jax.rl.trajectory import Trajectory
from glm5_jax.rl.types import is_lease_ahead
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.http_server import (
    ApiError,
    Handler,
    HttpServer,
    ListenConfig,
    check_url,
    json_response,
)
from glm5_jax.runtime.json_structs import JsonStruct, decode

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=JsonStruct)
RETRY_S = 1.0  # between two attempts to write the journal of a full disk


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


@dataclasses.dataclass(eq=False, kw_only=True)
class _RunningGroup:
    """Group whose rollouts are running.

    Attributes:
      service: service of the task.
      ticket: identity of the group.
      num_left: number of rollouts that have not ended.
      should_resample: whether the task number is sampled again if the group is cancelled.
      is_accepted: whether the buffer has accepted the finished group; None: it has not finished.
      task: asyncio task that runs the group; None: not started yet.
    """

    service: RegisteredService
    ticket: GroupTicket
    num_left: int
    should_resample: bool = True
    is_accepted: bool | None = None
    task: asyncio.Task | None = None


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
        self._queue_resamples()
        self._groups: dict[str, _RunningGroup] = {}
        self._tasks: set[asyncio.Task] = set()  # all tasks that run until they are cancelled
        self._is_paused = self._is_closing = False
        self._next_write = 0.0
        self._change = asyncio.Event()  # set at the next change of state

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
            self._notify()

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
            self._main_loop = self._create_task(self._start_groups_forever())
            self._create_task(self._dispatcher.delete_orphans())
            yield
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            # Cancelled rollouts end their sessions. Their task numbers are in the journal.
            await asyncio.wait(tasks, timeout=config.grace_s)

    def _create_task(self, coroutine: Coroutine) -> asyncio.Task:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Stops new groups, then drains like `HttpServer`. Running groups may finish."""
        self._draining = True
        self._notify()
        await super().drain()

    # -- groups --------------------------------------------------------------------------------------------

    async def _start_groups_forever(self) -> None:
        """Starts groups whenever the buffer admits them, and detects lost services."""
        while True:
            change, now = self._change, self._clock()
            for service in self._registry.expire(now):
                _log.warning("%s is lost: %s", service.spec.name, service.error)
                self._cancel_calls(service)
            if now >= self._next_write:
                self._write_journal(now)
            can_start = not (self._draining or self._is_paused or self._buffer.journal_error)
            if self._buffer.lease and can_start:
                self._start_groups(now)
            await self._wait(change, self.config.poll_interval_s)

    def _write_journal(self, now: float) -> None:
        """Writes the pending changes of the journal, and sets the time of the next attempt."""
        error_before = self._buffer.journal_error
        self._buffer.write_journal()
        self._next_write = now + (RETRY_S if self._buffer.journal_error else 0.0)
        if self._buffer.journal_error and not error_before:
            _log.error("%s", self._buffer.journal_error)
        if error_before and not self._buffer.journal_error:
            _log.warning("the journal can be written again")
            self._notify()

    def _check_journal(self) -> None:
        """Raises ApiError unless the journal has everything that earlier replies depend on."""
        if self._buffer.journal_error:
            self._write_journal(self._clock())
        if self._buffer.journal_error:
            raise ApiError(self._buffer.journal_error, 503, "journal")

    def _start_groups(self, now: float) -> None:
        accepted = None
        while self._buffer.num_admissible() and not self._dispatcher.gateway.wait(now):
            if self._buffer.journal_error:
                return
            ready = self._registry.ready_tasks(now)
            if not ready:
                return
            if accepted is None:  # counting takes time, and starting groups does not change it
                accepted = self._buffer.accepted
            service, number = self._registry.next_group(accepted, ready)
            self._start_group(service, number, now)

    def _start_group(self, service: RegisteredService, number: int, now: float) -> None:
        ticket = self._buffer.admit(service.spec.name, number)
        self._dispatcher.gateway.start_trial(now)
        self._registry.start_group(service, now)
        group = _RunningGroup(service=service, ticket=ticket, num_left=self.config.buffer.group)
        group.task = self._create_task(self._run_group(group))
        group.task.add_done_callback(functools.partial(self._finish_group, group))
        self._groups[ticket.group_id] = group
        self._active += 1

    async def _run_group(self, group: _RunningGroup) -> None:
        async def run(index: int) -> Trajectory:
            try:
                return await self._dispatcher.run_rollout(group.service, group.ticket, index)
            finally:
                group.num_left -= 1
                group.service.in_flight -= 1
                self._notify()

        # Not `gather`, whose cancellation waits for the first rollout only.
        async with asyncio.TaskGroup() as members:
            tasks = [members.create_task(run(index)) for index in range(group.num_left)]
        trajectories = [task.result() for task in tasks]
        group.is_accepted = self._buffer.put(group.ticket.group_id, trajectories)

    def _finish_group(self, group: _RunningGroup, task: asyncio.Task) -> None:
        """Records the end of a group. It is a callback, because a task may be cancelled before it starts."""
        del self._groups[group.ticket.group_id]
        self._active -= 1
        group.service.in_flight -= group.num_left
        if not task.cancelled() and (error := task.exception()):
            _log.error("group %s", group.ticket.group_id, exc_info=error)
            group.service.trip_breaker(f"{type(error).__name__}: {error}", self._clock())
        if group.is_accepted is None:
            self._buffer.cancel(group.ticket.group_id, group.should_resample)
        self._registry.finish_group(group.service, group.is_accepted)
        self._queue_resamples()
        self._notify()

    def _queue_resamples(self) -> None:
        """Queues the task numbers of dropped groups at the registry."""
        for task, number in self._buffer.pop_resamples():
            self._registry.resample(task, number)

    def _cancel_calls(self, service: RegisteredService) -> None:
        """Cancels the running requests to a service, so that their rollouts fail."""
        for call in tuple(service.calls):
            call.cancel()

    def _notify(self) -> None:
        """Wakes everything that waits for a change."""
        self._change.set()
        self._change = asyncio.Event()

    async def _wait(self, change: asyncio.Event, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await change.wait()

    # -- services ------------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: body)
        service, is_new_process = self._registry.register(body, self._clock())
        if is_new_process:
            self._cancel_calls(service)
        _log.info("%s is served at %s", service.spec.name, service.spec.url)
        self._notify()
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
        lease = self._buffer.lease
        self._queue_resamples()
        self._notify()
        await self._require_weights()
        return json_response(self._position() | {"lease": lease})

    async def _take(self, request: web.Request) -> web.Response:
        body = await self._read(request, TakeGroups)
        end = self._clock() + min(body.timeout_s, self.config.poll_timeout_s)
        while True:
            self._check_lease(body.lease)
            change = self._change
            with _as_conflict():
                groups = self._buffer.take(body.step)
            self._queue_resamples()
            # A batch is sent only after the journal has recorded it.
            if groups is not None and not self._buffer.journal_error:
                self._notify()
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
            await self._wait(change, remaining_s)

    async def _mark_trained(self, request: web.Request) -> web.Response:
        body = await self._read(request, MarkTrained)
        self._check_lease(body.lease)
        with _as_conflict():
            self._buffer.mark_trained(body.step)
        self._check_journal()
        self._queue_resamples()
        self._notify()
        return json_response(self._position())

    async def _mark_lost(self, request: web.Request) -> web.Response:
        body = await self._read(request, MarkLost)
        self._check_lease(body.lease)
        self._buffer.mark_lost(body.rollout_ids)
        self._check_journal()
        self._queue_resamples()
        self._notify()
        return json_response(self._position())

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await self._read(request, SetWeights)
        self._check_lease(body.lease)
        with _as_conflict():
            self._buffer.push(body.version, body.checksum)
        self._check_journal()
        self._notify()
        await self._require_weights()
        return json_response(self._position())

    async def _require_weights(self) -> None:
        """Sends the weights of the buffer to the gateway."""
        if (weights := self._buffer.weights) is not None:
            await self._dispatcher.require_weights(weights)

    async def _read(self, request: web.Request, kind: type[_Body]) -> _Body:
        return await self.read_body(request, lambda body: decode(body, kind))

    def _check_lease(self, lease: int) -> None:
        """Raises ApiError unless the request is from the trainer that began last."""
        if self._main_loop.done():
            error = self._main_loop.exception()
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
        group = self._groups.get(body.group_id)
        if group is None or group.task is None:
            raise ApiError(f"no group {body.group_id!r} is running", 404, param="group_id")
        group.should_resample = body.should_resample
        group.task.cancel()
        return json_response({"group_id": body.group_id, "task": group.ticket.task})

    async def _pause(self, is_paused: bool, request: web.Request) -> web.Response:
        del request
        self._is_paused = is_paused
        self._notify()
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
                "paused": self._is_paused,
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
                    for group_id, group in self._groups.items()
                },
                "metrics": self._buffer.metrics(),
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        has_failed = self._main_loop.done()
        state = "failed" if has_failed else "draining" if self._draining else "ok"
        return json_response({"status": state}, 503 if has_failed else 200)

    def _blockers(self) -> list[str]:
        """Returns one line per reason why batches may be late."""
        lines = []
        if not self._buffer.lease:
            lines.append("no trainer has begun")
        if self._buffer.journal_error:
            lines.append(self._buffer.journal_error)
        if self._is_paused:
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
            evaluations = (
                self._dispatcher.evaluate(service, body.count, body.timeout_s)
                for service in services
            )
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
