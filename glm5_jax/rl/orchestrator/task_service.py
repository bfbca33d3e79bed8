"""Task service: a server with tasks of one kind that runs rollouts over the gateway and computes their rewards.

GLM-5 4.1.1: the rollout and reward logic of each task is a microservice.

    class Sums(TaskService):
        async def attempt(self, request, index): ...

    asyncio.run(Sums(ServiceConfig(name="sums", orchestrator="http://10.0.0.2:8100"), size=1000).serve())

    POST /rollout   {rollout_id, group_id, number, held_out, base_url, seed} -> {messages, reward {value, parts, error}, metrics}
    POST /cancel    {rollout_id}
    GET  /health

The service registers at the orchestrator, sends a heartbeat every few seconds, and deregisters when it shuts down. A
failure that is not the policy's fault (of a tool, a sandbox or the gateway) is a reward of None, never 0.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import reprlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import Meta

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.orchestrator.fair_share import check_weight, shuffled_indices
from glm5_jax.rl.orchestrator.task_registry import (
    MAX_ERROR_LENGTH,
    SCHEMA,
    ServiceSpec,
    check_name,
)
from glm5_jax.rl.request_bodies import CancelRollout, ServiceHeartbeat
from glm5_jax.rl.types import Message, Reward, check_number
from glm5_jax.runtime.addresses import check_url, is_wildcard
from glm5_jax.runtime.http_server import (
    ApiError,
    Handler,
    HttpServer,
    ListenConfig,
    json_response,
    truncate_text,
)
from glm5_jax.runtime.json_encoding import json_bytes
from glm5_jax.runtime.json_structs import Count, JsonStruct, decode
from glm5_jax.runtime.placement import http_url

_log = logging.getLogger(__name__)
MAX_DEPTH = 100  # nesting levels of a rollout's outcome
MAX_NAMES, MAX_NAME_LENGTH = 100, 100  # of a reward's parts and of metrics
MAX_MESSAGES_BYTES = 2**22  # of an outcome's messages as JSON; half of what the orchestrator reads
_MAX_SHORTENED = 200  # characters of a message of longer ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceConfig(ListenConfig):
    """Options of a task service. Raises ValueError for values out of range.

    Attributes:
      name: name of the task, in the orchestrator and in metrics.
      orchestrator: URL of the orchestrator.
      url: URL by which the orchestrator reaches this service; None: the address where it listens. Port 0 stands for the
        port where it listens.
      weight: share of this task among all tasks, relative to their weights.
      max_inflight: maximum number of concurrent rollouts.
      rate: maximum number of groups per second; None: unlimited.
      rollout_timeout_s: time limit of a rollout, in seconds, after which its environment has failed. The agent's own
        limit must be shorter.
      heartbeat_interval_s: time between two heartbeats, and time limit of the orchestrator's response, in seconds.
      seed: seed of the order of the tasks.
      api_key: key that the orchestrator, the gateway and this service require. The orchestrator sends this service a
        separate token instead.
    """

    name: str = "task"
    orchestrator: str = "http://127.0.0.1:8100"
    url: str | None = None
    weight: float = 1.0
    max_inflight: int = 512  # ours; GLM-5 4.1.1 has more than 1000 of all tasks
    rate: float | None = None
    rollout_timeout_s: float = 10_800.0  # ours: an agent has 7200 (GLM-5 B.2), then it is judged
    heartbeat_interval_s: float = 3.0
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_name(self.name)
        check_url("orchestrator", self.orchestrator)
        if self.url is not None:
            check_url("url", self.url)
        elif is_wildcard(self.host):
            raise ValueError(
                f"host is {self.host}, which is no address; give url, by which the orchestrator reaches this service"
            )
        for name in ("weight", "max_inflight", "rate", "rollout_timeout_s", "heartbeat_interval_s"):
            value = getattr(self, name)
            if not (value is None or 0 < value < math.inf):
                raise ValueError(f"{name} is {value}; it must be positive and finite")
        check_weight(self.weight)


_Name = Annotated[str, Meta(min_length=1)]


class RolloutRequest(JsonStruct, kw_only=True, frozen=True):
    """Request of the orchestrator for one rollout.

    Attributes:
      rollout_id, group_id: ids of the rollout and of its group.
      number: number of the task, counted over all epochs.
      held_out: whether `number` counts held-out tasks instead of training tasks.
      base_url: URL of the rollout's session at the gateway, which serves OpenAI's API and records the samples.
      seed: seed of what the attempt itself draws.
    """

    rollout_id: _Name
    group_id: _Name
    number: Count
    held_out: bool
    base_url: _Name
    seed: Count


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a rollout.

    Attributes:
      messages: messages of the task, followed by those of the attempt.
      reward: reward of the attempt.
      metrics: numbers by name.
    """

    messages: tuple[Message, ...]
    reward: Reward
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, value in self.metrics.items():
            check_number(f"metric {name}", value)

    def to_json(self) -> dict:
        """Returns the outcome as JSON; `outcome_from_json` is the inverse.

        Messages of more than `MAX_MESSAGES_BYTES` are shortened to their roles and the start of their texts. The
        orchestrator would reject them, and a policy that writes megabytes of blanks would never be judged.
        """
        reward, messages = dataclasses.asdict(self.reward), list(self.messages)
        if len(json_bytes(messages)) > MAX_MESSAGES_BYTES:
            messages = [
                {"role": one["role"], "content": str(one.get("content") or "")[:_MAX_SHORTENED]}
                for one in messages
            ]
        return {"messages": messages, "reward": reward, "metrics": dict(self.metrics)}


def outcome_from_json(body: Any) -> Outcome:
    """Returns the outcome that `Outcome.to_json` encoded. Raises ValueError if the body is not an outcome."""
    try:
        _check_depth(body)
        outcome = msgspec.convert(body, Outcome)
        _check_names("metrics", outcome.metrics)
        _check_names("parts", outcome.reward.parts)
        if not all(isinstance(message.get("role"), str) for message in outcome.messages):
            raise ValueError("a message has no role")
        return outcome
    except (TypeError, ValueError) as error:
        why = truncate_text(f"{type(error).__name__} {error}", MAX_ERROR_LENGTH)
        raise ValueError(f"this is no outcome of a rollout ({why}): {reprlib.repr(body)}") from None


def _check_names(field: str, numbers: Mapping[str, Any]) -> None:
    """Raises ValueError for more or longer names of numbers than reports can show."""
    if len(numbers) > MAX_NAMES or any(len(name) > MAX_NAME_LENGTH for name in numbers):
        raise ValueError(
            f"{field} has {len(numbers)} names; give at most {MAX_NAMES}, of at most {MAX_NAME_LENGTH} characters each"
        )


def _check_depth(value: Any) -> None:
    """Raises ValueError for JSON that is nested too deeply to be encoded again, TypeError for other values."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep; flatten it")
        for item in level:
            if not isinstance(item, dict | list | str | int | float | None):
                raise TypeError(
                    f"it holds a {type(item).__name__}; leave out long lists of numbers"
                )
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1


class TaskService(HttpServer):
    """Server of one kind of tasks. Subclasses implement `attempt`.

    Attributes:
      size, held_out: number of training tasks and of held-out tasks.
      is_registered: whether the orchestrator knows this service.
    """

    config: ServiceConfig

    def __init__(self, config: ServiceConfig, size: int, held_out: int = 0):
        super().__init__(config)
        if size < 1 or held_out < 0:
            raise ValueError(
                f"{config.name} has {size} tasks and {held_out} held out; give at least one to train on"
            )
        self.size, self.held_out = size, held_out
        self.is_registered = False
        self._running: dict[str, asyncio.Task] = {}
        self._unfinished: set[asyncio.Task] = set()  # with those whose request has ended
        # A service that restarted has none of the rollouts of the process before it.
        self._instance = secrets.token_hex(8)
        # The orchestrator sends this token, so that the run's key never goes to a URL that somebody has registered.
        self._token = None if self.api_key is None else secrets.token_urlsafe(32)
        self._problem = "it has not been reached yet"
        self._leaving = asyncio.Event()

    async def attempt(self, request: RolloutRequest, index: int) -> Outcome:
        """Runs an attempt at the task with this index among the training tasks, or among the held-out ones.

        An exception is a failure of the environment. Mistakes of the policy, exceeded limits included, are an ordinary
        reward.
        """
        raise NotImplementedError

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """Returns the keys of `HttpServer`, and the token that the orchestrator sends."""
        tokens = () if self._token is None else (self._token,)
        return *super().accepted_keys, *tokens

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "POST": {"/rollout": self._rollout, "/cancel": self._cancel},
            "GET": {"/health": self._health},
        }

    def app(self) -> web.Application:
        app = super().app()

        async def cancel_rollouts(app):
            # Otherwise the server would wait for rollouts until their deadlines.
            for task in self._running.values():
                task.cancel()

        app.on_shutdown.append(cancel_rollouts)
        return app

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        async with JsonClient(self.api_key) as self._http:
            announcing = asyncio.create_task(self._announce())
            yield
            announcing.cancel()
            await asyncio.wait({announcing, *self._unfinished}, timeout=self.config.grace_s)

    async def drain(self) -> None:
        """Deregisters, waits until the started groups have ended, then drains like `HttpServer`.

        The orchestrator still sends the later rollouts of groups that it has started.
        """
        self._leaving.set()
        end = time.monotonic() + self.config.grace_s
        try:
            await self._call_orchestrator("DELETE", f"/tasks/{self.config.name}")
            while self.is_registered and time.monotonic() < end:
                await asyncio.sleep(0.05)
        except ServerError as error:
            _log.warning("%s could not deregister at the orchestrator: %s", self.config.name, error)
        await super().drain()

    # -- rollouts ------------------------------------------------------------------------------------------

    async def _rollout(self, http_request: web.Request) -> web.Response:
        if self._draining:
            raise ApiError("the service is shutting down; use another service", 503, "unavailable")
        request = await self.read_body(http_request, lambda body: decode(body, RolloutRequest))
        if request.rollout_id in self._running:
            raise ApiError(f"rollout {request.rollout_id!r} is running; cancel it first", 409)
        if len(self._running) >= self.config.max_inflight:
            raise ApiError(
                f"{self.config.max_inflight} rollouts are running, which is the maximum; try again later, or raise "
                "max_inflight",
                429,
                "overloaded",
            )
        index = self._task_index(request)
        task = asyncio.create_task(self._run_attempt(request, index))
        self._running[request.rollout_id] = task
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        self._active += 1
        try:
            # Not `asyncio.timeout`, because an attempt that ignores its cancellation must not delay the response.
            await asyncio.wait({task}, timeout=self.config.rollout_timeout_s)
            if task.cancelled():
                raise ApiError(f"rollout {request.rollout_id!r} was cancelled", 409, "cancelled")
            if not task.done():
                why = f"the rollout has not ended within {self.config.rollout_timeout_s:g} s"
                return json_response(Outcome((), Reward(None, error=why)).to_json())
            return json_response(task.result().to_json())
        finally:
            task.cancel()
            del self._running[request.rollout_id]
            self._active -= 1

    async def _run_attempt(self, request: RolloutRequest, index: int) -> Outcome:
        try:
            return await self.attempt(request, index)
        except Exception as error:
            # It is not the policy's fault, and one rollout must not end a service.
            why = f"{type(error).__name__}: {error}"
            _log.warning("rollout %s of task %d: %s", request.rollout_id, request.number, why)
            return Outcome((), Reward(None, error=why))

    def _task_index(self, request: RolloutRequest) -> int:
        """Returns the index of a task, in the shuffled order of its epoch. Raises ApiError if there is none."""
        if request.held_out:
            if request.number >= self.held_out:
                raise ApiError(
                    f"number is {request.number} and {self.held_out} tasks are held out; give a smaller number",
                    param="number",
                )
            return request.number
        epoch, position = divmod(request.number, self.size)
        order = shuffled_indices(self.config.seed, self.config.name, epoch, self.size)
        return int(order[position])

    async def _cancel(self, http_request: web.Request) -> web.Response:
        body = await self.read_body(http_request, lambda body: decode(body, CancelRollout))
        name = body.rollout_id
        task = self._running.get(name)
        if task is not None:
            task.cancel()
        return json_response({"rollout_id": name, "cancelled": task is not None})

    async def _health(self, http_request: web.Request) -> web.Response:
        health = {
            "status": "draining" if self._draining else "ok",
            "name": self.config.name,
            "running": len(self._running),
            "registered": self.is_registered,
        }
        return json_response(health if self.is_registered else {**health, "problem": self._problem})

    # -- registration --------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Registers the service, sends heartbeats, and registers again if the orchestrator does not know it."""
        while self.port is None:  # `HttpServer` is about to listen
            await asyncio.sleep(0.01)
        while True:
            try:
                if self.is_registered:
                    body = ServiceHeartbeat(instance=self._instance)
                    path = f"/tasks/{self.config.name}/heartbeat"
                    await self._call_orchestrator("POST", path, body)
                elif not self._leaving.is_set():
                    await self._call_orchestrator("POST", "/tasks", self._spec(self.port))
                    self.is_registered = True
                    _log.info("%s is registered at %s", self.config.name, self.config.orchestrator)
            except ServerError as error:
                is_unknown = self.is_registered and error.status == 404
                if str(error) != self._problem:
                    self._problem = str(error)
                    _log.warning("%s and its orchestrator: %s", self.config.name, error)
                if is_unknown:
                    self.is_registered = False
                    continue
            with contextlib.suppress(TimeoutError):
                # Shorter intervals while the service leaves, to notice soon that the last group has ended.
                async with asyncio.timeout(self.config.heartbeat_interval_s):
                    await self._leaving.wait()
                    await asyncio.sleep(0.2)

    def _spec(self, port: int) -> ServiceSpec:
        config = self.config
        return ServiceSpec(
            schema=SCHEMA,
            name=config.name,
            url=_with_port(config.url or http_url(config.host, 0), port),
            weight=config.weight,
            size=self.size,
            held_out=self.held_out,
            max_inflight=config.max_inflight,
            rate=config.rate,
            rollout_timeout_s=config.rollout_timeout_s,
            instance=self._instance,
            token=self._token,
        )

    async def _call_orchestrator(
        self, method: str, path: str, body: JsonStruct | None = None
    ) -> Any:
        url = self.config.orchestrator.rstrip("/") + path
        timeout_s = self.config.heartbeat_interval_s
        return await self._http.request(method, url, body, timeout_s=timeout_s)


def _with_port(url: str, port: int) -> str:
    """Returns the URL with this port if its port is 0, else unchanged."""
    parts = urlsplit(url)
    if parts.port != 0:
        return url
    return parts._replace(netloc=f"{parts.netloc.removesuffix('0')}{port}").geturl()
