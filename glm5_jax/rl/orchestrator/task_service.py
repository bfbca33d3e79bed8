"""What a task service is: it has tasks of one kind, attempts them over the gateway, and says what each attempt is worth
(GLM-5 4.1.1: rollout and reward logic of a task are a microservice of its own).

    class Sums(TaskService):
        async def attempt(self, asked, place): ...

    asyncio.run(Sums(ServiceConfig(name="sums", hub="http://10.0.0.2:8100"), size=1000).serve())

    POST /rollout   {rollout_id, group_id, number, held_out, base_url, seed} -> {messages, reward {value, parts, error}, metrics}
    POST /cancel    {rollout_id}
    GET  /health

It tells the hub that it is there, and again every few seconds, and takes its leave when it is told to end. What is not
the policy's fault, a tool, a sandbox or the gateway that fails, is a reward of None, never 0.
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
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.orchestrator.fair_share import check_weight, shuffled
from glm5_jax.rl.orchestrator.task_registry import MAX_ERROR, SCHEMA, check_name
from glm5_jax.rl.types import Message, Reward, check_number
from glm5_jax.runtime.addresses import is_wildcard
from glm5_jax.runtime.http_server import (
    ApiError,
    Handler,
    HttpServer,
    ListenConfig,
    check_url,
    json_response,
    truncate_text,
)
from glm5_jax.runtime.json_schema import object_schema, validate
from glm5_jax.runtime.placement import http_url

_log = logging.getLogger(__name__)
MAX_DEPTH = 100  # levels of a rollout's outcome
MAX_NAMES, MAX_NAME = (
    100,
    100,
)  # of its reward's parts and of its metrics: their count, and characters of each


@dataclasses.dataclass(frozen=True)
class ServiceConfig(ListenConfig):
    """Construction refuses values out of range (ValueError).

    Attributes:
      name: of the task, in the hub and in metrics.
      hub: its URL.
      url: URL by which the hub reaches this service; None: where it listens. Port 0 stands for the port it listens at.
      weight: how often its tasks come, beside those of others.
      max_inflight: rollouts at once.
      rate: groups per second at most; None: any number.
      seconds: of a rollout; past them its environment has failed. What an agent may take is less, and its own limit.
      heartbeat: seconds between two of them, and that the hub has to answer one.
      seed: of the order of the tasks.
      api_key: key that the hub and the gateway require, and this service; the hub sends it a token of its own.
    """

    name: str = "task"
    hub: str = "http://127.0.0.1:8100"
    url: str | None = None
    weight: float = 1.0
    max_inflight: int = 512  # ours; GLM-5 4.1.1 has more than 1000 of all tasks
    rate: float | None = None
    seconds: float = 10_800.0  # ours: an agent has 7200 (GLM-5 B.2), then it is judged
    heartbeat: float = 3.0
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_name(self.name)
        check_url("hub", self.hub)
        if self.url is not None:
            check_url("url", self.url)
        elif is_wildcard(self.host):
            raise ValueError(
                f"host is {self.host}, which is no address; give url, by which the hub reaches this service"
            )
        for name in ("weight", "max_inflight", "rate", "seconds", "heartbeat"):
            value = getattr(self, name)
            if not (value is None or (value > 0 and math.isfinite(value))):
                raise ValueError(f"{name} is {value}; it must be positive and finite")
        check_weight(self.weight)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A rollout that the hub asks for. number: counts the service's tasks, over all epochs; held_out: of those, instead;
    base_url: in front of OpenAI's API, of the session whose samples are trained on; seed: of what the attempt draws
    itself."""

    rollout_id: str
    group_id: str
    number: int
    held_out: bool
    base_url: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a rollout: the task's messages and those behind them, its worth, and numbers by name."""

    messages: tuple[Message, ...]
    reward: Reward
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, value in self.metrics.items():
            check_number(f"metric {name}", value)

    def told(self) -> dict:
        """As JSON; `outcome` is the way back."""
        reward = dataclasses.asdict(self.reward)
        return {"messages": list(self.messages), "reward": reward, "metrics": dict(self.metrics)}


def outcome(said: Any) -> Outcome:
    """Returns the outcome that `Outcome.told` encoded. Raises ValueError if it is none."""
    try:
        _check_depth(said)
        messages, reward = said["messages"], Reward(**said["reward"])
        metrics = dict(said.get("metrics", {}))
        _check_names("metrics", metrics)
        _check_names("parts", reward.parts)
        if not (isinstance(messages, list) and all(isinstance(m["role"], str) for m in messages)):
            raise TypeError("the messages are none")
        if not isinstance(reward.error, str):
            raise TypeError("the reward's error is no text")
        return Outcome(tuple(messages), reward, metrics)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        why = truncate_text(f"{type(error).__name__} {error}", MAX_ERROR)
        raise ValueError(f"this is no outcome of a rollout ({why}): {reprlib.repr(said)}") from None


def _check_names(what: str, numbers: Mapping[str, Any]) -> None:
    """Raises ValueError for more names of numbers, or longer ones, than reports can show."""
    if len(numbers) > MAX_NAMES or any(len(name) > MAX_NAME for name in numbers):
        raise ValueError(
            f"{what} has {len(numbers)} names; give at most {MAX_NAMES}, of at most {MAX_NAME} characters each"
        )


def _check_depth(value: Any) -> None:
    """Raises ValueError for JSON that is nested too deeply to be encoded again, or that holds something else."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep; flatten it")
        for one in level:
            if not isinstance(one, dict | list | str | int | float | None):
                raise TypeError(f"it holds a {type(one).__name__}; leave out long lists of numbers")
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1


class TaskService(HttpServer):
    """Offers tasks, size of them to learn from and held_out others; a subclass says in `attempt` what a rollout is."""

    def __init__(self, config: ServiceConfig, size: int, held_out: int = 0):
        super().__init__(config)
        if size < 1 or held_out < 0:
            raise ValueError(
                f"{config.name} has {size} tasks and {held_out} held out; give at least one to learn from"
            )
        self.size, self.held_out = size, held_out
        self.registered = False
        self._running: dict[str, asyncio.Task] = {}
        self._ending: set[asyncio.Task] = set()
        # A service that was started anew has none of the rollouts of the one before.
        self._instance = secrets.token_hex(8)
        # What the hub sends back, so that the key of the run goes to no URL that somebody has registered.
        self._token = None if self.api_key is None else secrets.token_urlsafe(32)
        self._problem = "it has not been reached yet"
        self._leaving = asyncio.Event()

    async def attempt(self, asked: Asked, place: int) -> Outcome:
        """An attempt at a task by its place among those to learn from, or those held out. What it raises is the
        environment's failure; what the policy does wrong, its limits included, is an ordinary reward."""
        raise NotImplementedError

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """See `HttpServer`; the token that the hub was given is one, too."""
        tokens = () if self._token is None else (self._token,)
        return *super().accepted_keys, *tokens

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "POST": {"/rollout": self._rollout, "/cancel": self._cancel},
            "GET": {"/health": self._health},
        }

    def app(self) -> web.Application:
        app = super().app()

        async def end(app):
            # Or the server would wait for rollouts until their deadlines.
            for task in self._running.values():
                task.cancel()

        app.on_shutdown.append(end)
        return app

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        async with JsonClient(self.api_key) as self._http:
            announcing = asyncio.create_task(self._announce())
            yield
            announcing.cancel()
            await asyncio.wait({announcing, *self._ending}, timeout=self.config.grace_s)

    async def drain(self) -> None:
        """See `HttpServer`; before that, the groups that the hub has begun may end, their later rollouts too."""
        self._leaving.set()
        until = time.monotonic() + self.config.grace_s
        try:
            await self._hub("DELETE", f"/tasks/{self.config.name}")
            while self.registered and time.monotonic() < until:
                await asyncio.sleep(0.05)
        except ServerError as error:
            _log.warning("%s leaves without its hub's knowledge: %s", self.config.name, error)
        await super().drain()

    # -- rollouts ------------------------------------------------------------------------------------------

    async def _rollout(self, request: web.Request) -> web.Response:
        if self._draining:
            raise ApiError("the service is ending; ask another", 503, "unavailable")
        said = await self.read_body(request, lambda said: validate(said, _ASKED))
        asked = Asked(**said)
        if asked.rollout_id in self._running:
            raise ApiError(f"rollout {asked.rollout_id!r} is under way; cancel it first", 409)
        if len(self._running) >= self.config.max_inflight:
            raise ApiError(
                f"{self.config.max_inflight} rollouts are under way, and no more can be; ask again later, or raise "
                "max_inflight",
                429,
                "overloaded",
            )
        place = self._place(asked)
        task = asyncio.create_task(self._attempted(asked, place))
        self._running[asked.rollout_id] = task
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._active += 1
        try:
            # Not `asyncio.timeout`: what an attempt does with its cancellation must not make the hub wait.
            await asyncio.wait({task}, timeout=self.config.seconds)
            if task.cancelled():
                raise ApiError(f"rollout {asked.rollout_id!r} was cancelled", 409, "cancelled")
            if not task.done():
                late = f"the rollout has not ended within {self.config.seconds:g} s"
                return json_response(Outcome((), Reward(None, error=late)).told())
            return json_response(task.result().told())
        finally:
            task.cancel()
            del self._running[asked.rollout_id]
            self._active -= 1

    async def _attempted(self, asked: Asked, place: int) -> Outcome:
        try:
            return await self.attempt(asked, place)
        except Exception as error:
            # Whatever it is, it is not the policy's fault, and one rollout must not end a service.
            told = f"{type(error).__name__}: {error}"
            _log.warning("rollout %s of task %d: %s", asked.rollout_id, asked.number, told)
            return Outcome((), Reward(None, error=told))

    def _place(self, asked: Asked) -> int:
        if asked.held_out:
            if asked.number >= self.held_out:
                raise ApiError(
                    f"number is {asked.number} and {self.held_out} tasks are held out; ask for one of them",
                    param="number",
                )
            return asked.number
        epoch, place = divmod(asked.number, self.size)
        return int(shuffled(self.config.seed, self.config.name, epoch, self.size)[place])

    async def _cancel(self, request: web.Request) -> web.Response:
        said = await self.read_body(request, lambda said: validate(said, _NAMED))
        name = said["rollout_id"]
        task = self._running.get(name)
        if task is not None:
            task.cancel()
        return json_response({"rollout_id": name, "cancelled": task is not None})

    async def _health(self, request: web.Request) -> web.Response:
        told = {
            "status": "draining" if self._draining else "ok",
            "name": self.config.name,
            "running": len(self._running),
            "registered": self.registered,
        }
        return json_response(told if self.registered else {**told, "problem": self._problem})

    # -- the hub -------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Registers, and again when the hub does not know of it; then tells it every few seconds that it is there."""
        while self.port is None:  # `HttpServer` is about to listen
            await asyncio.sleep(0.01)
        while True:
            try:
                if self.registered:
                    beat = {"instance": self._instance}
                    await self._hub("POST", f"/tasks/{self.config.name}/heartbeat", beat)
                elif not self._leaving.is_set():
                    await self._hub("POST", "/tasks", self._described())
                    self.registered = True
                    _log.info("%s is registered at %s", self.config.name, self.config.hub)
            except ServerError as error:
                forgotten = self.registered and error.status == 404
                if str(error) != self._problem:
                    self._problem = str(error)
                    _log.warning("%s and its hub: %s", self.config.name, error)
                if forgotten:
                    self.registered = False
                    continue
            with contextlib.suppress(TimeoutError):
                # Sooner once it leaves; then it is a matter of when the last group ends.
                async with asyncio.timeout(self.config.heartbeat):
                    await self._leaving.wait()
                    await asyncio.sleep(0.2)

    def _described(self) -> dict:
        config = self.config
        return {
            "schema": SCHEMA,
            "name": config.name,
            "url": _at_port(config.url or http_url(config.host, 0), self.port),
            "weight": config.weight,
            "size": self.size,
            "held_out": self.held_out,
            "max_inflight": config.max_inflight,
            "rate": config.rate,
            "seconds": config.seconds,
            "instance": self._instance,
            "token": self._token,
        }

    async def _hub(self, method: str, path: str, body: Mapping | None = None) -> Any:
        url = self.config.hub.rstrip("/") + path
        return await self._http.ask(method, url, body, seconds=self.config.heartbeat)


def _at_port(url: str, port: int) -> str:
    """Returns a URL, with this port in place of port 0."""
    parts = urlsplit(url)
    if parts.port != 0:
        return url
    return parts._replace(netloc=f"{parts.netloc.removesuffix('0')}{port}").geturl()


_TEXT, _COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
_ASKED = object_schema(
    tuple(field.name for field in dataclasses.fields(Asked)),
    rollout_id=_TEXT,
    group_id=_TEXT,
    number=_COUNT,
    held_out={"type": "boolean"},
    base_url=_TEXT,
    seed=_COUNT,
)
_NAMED = object_schema(("rollout_id",), rollout_id=_TEXT)
