"""Runs the system of asynchronous RL as separate processes, with sleeps in place of tools and engines.

    with fleet(workload, seed, folder) as programs:
        OrchestratorClient(programs.orchestrator).begin(0, 0)

Orchestrator, gateway and the services' protocols with both are those of every run.
"""

import asyncio
import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web

from experiments.benchmarks.discrete_event_model import Span, Workload
from glm5_jax.inference.client import Client
from glm5_jax.rl.orchestrator.client import JsonClient, OrchestratorClient
from glm5_jax.rl.orchestrator.server import Orchestrator, OrchestratorConfig
from glm5_jax.rl.orchestrator.task_service import (
    Outcome,
    RolloutRequest,
    ServiceConfig,
    TaskService,
)
from glm5_jax.rl.types import Reward
from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response, read_json
from glm5_jax.runtime.placement import http_url
from glm5_jax.runtime.process import ChildProcess
from glm5_jax.runtime.ready_file import read_port_file
from glm5_jax.runtime.utilization import FOLDER, read_utilization

SERVICES = ("search", "terminal")
ROLLOUT_TIMEOUT_S = 600.0
START_TIMEOUT_S = 120.0  # also the time limit of an answer
ROOT = pathlib.Path(__file__).parents[2]
# Ids of the byte tokenizer, `Tokenizer.load("bytes")`: "</think>", a digit, and the end of a turn.
CLOSES, DIGIT, STOPS = 278, 15, 263


class SimulatedEngine(HttpServer):
    """Engine that answers `/generate` with the maximum number of tokens at the workload's speed.

    Requests wait while all slots are taken. The weights are a version number, which `/version` sets.
    """

    def __init__(self, config: ListenConfig, workload: Workload):
        super().__init__(config)
        self._workload, self._slots = workload, asyncio.Semaphore(workload.slots)
        self._spans: list[Span] = []
        self._since, self._versions = [0.0], [0]  # start of each version, by `time.monotonic`
        self._logprobs = (-np.random.default_rng(0).random(997, np.float32)).tolist()

    def routes(self):
        post = {"/generate": self._generate, "/version": self._set}
        get = {"/health": self._health, "/weights": self._weights, "/spans": self._list_spans}
        return {"POST": post, "GET": get}

    async def _generate(self, request):
        body = read_json(await request.read())
        count, speed = body["sampling_params"]["max_new_tokens"], self._workload.speed
        self._active += 1
        try:
            async with self._slots:
                began = time.monotonic()
                await asyncio.sleep(count / speed)
                self._spans.append((began, time.monotonic()))
        finally:
            self._active -= 1
        ids = [CLOSES, *[DIGIT] * (count - 2), STOPS]
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [
                [logp, i, None] for logp, i in zip(itertools.cycle(self._logprobs), ids)
            ],
            "weight_versions": [self._version_at(began + i / speed) for i in range(count)],
            "cached_tokens": 0,
        }
        return json_response({"output_ids": ids, "meta_info": meta})

    def _version_at(self, moment: float) -> int:
        return self._versions[bisect.bisect(self._since, moment) - 1]

    async def _set(self, request):
        self._versions.append(read_json(await request.read())["version"])
        self._since.append(time.monotonic())
        return json_response({})

    async def _weights(self, request):
        del request
        return json_response({"version": self._versions[-1]})

    async def _list_spans(self, request):
        del request
        return json_response(self._spans)

    async def _health(self, request):
        del request
        return json_response({"status": "ok"})


class SimulatedEnvironment(TaskService):
    """Task service of the workload: its environment sleeps, its agent chats, and its rewards are random."""

    def __init__(self, config: ServiceConfig, workload: Workload):
        super().__init__(config, size=1_000_000)
        self._workload, self._spans = workload, []

    def routes(self):
        routes = super().routes()
        return {**routes, "GET": {**routes["GET"], "/spans": self._list_spans}}

    async def lifespan(self, app):
        async with JsonClient() as self._agents:  # one pool of connections for all
            async for _ in super().lifespan(app):
                yield

    async def attempt(self, request: RolloutRequest, index: int) -> Outcome:
        turns = self._workload.rollout(request.seed)
        url = f"{request.base_url}/v1/chat/completions"
        messages = []
        for turn in turns:
            began = time.monotonic()
            await asyncio.sleep(turn.answer_s)
            self._spans.append((began, time.monotonic()))
            messages.append({"role": "user", "content": f"{index}: {len(messages)}"})
            chat_request = {"messages": messages, "max_tokens": turn.tokens}
            reply = await self._agents.request(
                "POST", url, chat_request, timeout_s=ROLLOUT_TIMEOUT_S
            )
            messages.append(reply["choices"][0]["message"])
        met = sum(turn.answer_s for turn in turns)
        return Outcome(tuple(messages), Reward(float(request.seed % 2)), {"met": met})

    async def _list_spans(self, request):
        del request
        return json_response(self._spans)


class MeasuredOrchestrator(Orchestrator):
    """Orchestrator that counts the bytes of all HTTP bodies by peer. `/traffic` returns them, and its memory."""

    def __init__(self, config: OrchestratorConfig):
        super().__init__(config)
        self._bytes: collections.Counter[str] = collections.Counter()
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(self._count_request)
        trace.on_request_end.append(self._count_response)
        aiohttp.ClientSession = functools.partial(aiohttp.ClientSession, trace_configs=[trace])

    def routes(self):
        routes = super().routes()
        return {**routes, "GET": {**routes["GET"], "/traffic": self._traffic}}

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.append(self._count_served)
        return app

    @web.middleware
    async def _count_served(self, request, handler):
        peer = "services" if request.path.startswith("/tasks") else "trainer"
        response = await handler(request)
        self._bytes[f"from {peer}"] += request.content_length or 0
        self._bytes[f"to {peer}"] += len(response.body or b"")
        return response

    def _peer(self, url) -> str:
        return "gateway" if str(url).startswith(self.config.gateway) else "services"

    async def _count_request(self, session, context, parameters) -> None:
        del session, context
        self._bytes[f"to {self._peer(parameters.url)}"] += len(parameters.chunk)

    async def _count_response(self, session, context, parameters) -> None:
        del session, context
        size = parameters.response.content_length or 0
        self._bytes[f"from {self._peer(parameters.url)}"] += size

    async def _traffic(self, request):
        del request
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return json_response(
            {
                "bytes": self._bytes,
                "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
            }
        )


# -- as processes ---------------------------------------------------------------------------------------------


def _engine(name: str, listen: Mapping, workload: Workload) -> HttpServer:
    del name
    return SimulatedEngine(ListenConfig(**listen), workload)


def _gateway(
    name: str, listen: Mapping, workload: Workload, engines: list[str], journal: str
) -> HttpServer:
    from glm5_jax.rl.rollouts.gateway import (  # imports jax, which other programs do not need
        Gateway,
        GatewayConfig,
    )
    from glm5_jax.text.tokenizer import Tokenizer

    del name, workload
    config = GatewayConfig(**listen, reply_timeout_s=ROLLOUT_TIMEOUT_S, journal=journal)
    return Gateway(Tokenizer.load("bytes"), engines, config)


def _orchestrator(
    name: str, listen: Mapping, workload: Workload, gateway: str, journal: str, seed: int
) -> HttpServer:
    del name
    config = OrchestratorConfig(
        **listen, gateway=gateway, journal=journal, seed=seed, buffer=workload.buffer()
    )
    return MeasuredOrchestrator(config)


def _service(name: str, listen: Mapping, workload: Workload, orchestrator: str) -> HttpServer:
    return SimulatedEnvironment(
        ServiceConfig(
            **listen, name=name, orchestrator=orchestrator, rollout_timeout_s=ROLLOUT_TIMEOUT_S
        ),
        workload,
    )


PROGRAMS = {
    "engine": _engine,
    "gateway": _gateway,
    "orchestrator": _orchestrator,
    "service": _service,
}


class Fleet(NamedTuple):
    """URLs of the running programs, and the folder of their utilization files."""

    orchestrator: str
    engines: list[str]
    services: list[str]
    folder: pathlib.Path

    def set_version(self, version: int) -> None:
        """Sets the version of all engines."""
        for engine in self.engines:
            _request(engine, "/version", {"version": version})

    def replies(self) -> list[Span]:
        """Returns start and end of each reply, by `time.monotonic`."""
        return [tuple(span) for engine in self.engines for span in _request(engine, "/spans")]

    def answers(self) -> list[Span]:
        """Returns start and end of each answer of an environment."""
        return [tuple(span) for service in self.services for span in _request(service, "/spans")]

    def cores(self) -> dict[str, float]:
        """Returns the number of cores that each program has kept busy, on average since it started to listen."""
        return {life.name: life.cpu for life in read_utilization(self.folder)}


class _Child:
    """A running program of the fleet."""

    def __init__(self, program: str, name: str, folder: pathlib.Path, options: Mapping[str, Any]):
        self.name = name
        self._ready, self._log = folder / f"{name}.ready", folder / f"{name}.log"
        utilization_path = folder / FOLDER / f"{name}.jsonl"
        listen = dict(port=0, ready_file=str(self._ready), utilization_file=str(utilization_path))
        arguments = [program, json.dumps({"name": name, "listen": listen, **options})]
        argv = [sys.executable, "-m", "experiments.benchmarks.simulated_fleet", *arguments]
        self._program = ChildProcess(argv, log=self._log, cwd=ROOT)

    def url(self) -> str:
        """Returns its URL once it listens. Raises RuntimeError if it does not."""
        until = time.monotonic() + START_TIMEOUT_S
        while (port := read_port_file(self._ready)) is None:
            self.check()
            if time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not listen within {START_TIMEOUT_S:g} s")
            time.sleep(0.02)
        return http_url("127.0.0.1", port)

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if (code := self._program.exit_code()) is not None:
            tail = self._log.read_text()[-2000:]
            raise RuntimeError(f"{self.name} has ended with {code}; {self._log} ends:\n{tail}")

    def kill(self) -> None:
        """Kills it, because it has nothing to save."""
        self._program.kill()


@contextlib.contextmanager
def fleet(workload: Workload, seed: int, folder: pathlib.Path) -> Iterator[Fleet]:
    """Starts all programs and waits until the services have registered.

    Raises RuntimeError, with the end of its log, if a program cannot be started or ends too early.

    Args:
      workload: durations and sizes.
      seed: seed of the orchestrator.
      folder: new folder for logs and journals.
    """
    folder.mkdir(parents=True)
    shared = {"workload": dataclasses.asdict(workload)}
    children: list[_Child] = []

    def start(program: str, *names: str, **options) -> list[str]:
        programs = [_Child(program, name, folder, shared | options) for name in names]
        children.extend(programs)
        return [child.url() for child in programs]

    try:
        engines = start("engine", *(f"engine-{i}" for i in range(workload.engines)))
        journal = str(folder / "gateway")
        [gateway] = start("gateway", "gateway", engines=engines, journal=journal)
        journal = str(folder / "orchestrator")
        [orchestrator] = start(
            "orchestrator", "orchestrator", gateway=gateway, seed=seed, journal=journal
        )
        services = start("service", *SERVICES, orchestrator=orchestrator)
        client, until = OrchestratorClient(orchestrator), time.monotonic() + START_TIMEOUT_S
        while len(client.status()["tasks"]) < len(SERVICES):
            if time.monotonic() > until:
                raise RuntimeError(f"the services have not registered within {START_TIMEOUT_S:g} s")
            time.sleep(0.02)
        yield Fleet(orchestrator, engines, services, folder)
        for child in children:
            child.check()
    finally:
        for child in reversed(children):
            child.kill()


def _request(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with Client(url, direct=True).open(path, data, timeout_s=START_TIMEOUT_S) as response:
        return json.load(response)


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    workload = options.pop("workload")
    workload = Workload(**workload | {"tokens": tuple(workload["tokens"])})
    asyncio.run(PROGRAMS[sys.argv[1]](workload=workload, **options).serve())
