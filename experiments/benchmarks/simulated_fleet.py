"""Runs the system of asynchronous RL as separate processes, with sleeps in place of tools and engines.

    with fleet(workload, seed, folder) as programs:
        HubClient(programs.hub).begin(0, 0)

Hub, gateway and the services' protocols with both are those of every run.
"""

import asyncio
import bisect
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from experiments.benchmarks.discrete_event_model import Span, Workload
from glm5_jax.inference.client import Client
from glm5_jax.rl.orchestrator.client import HubClient, JsonClient
from glm5_jax.rl.orchestrator.server import HubConfig, Orchestrator
from glm5_jax.rl.orchestrator.task_service import Asked, Outcome, ServiceConfig, TaskService
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
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
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
        return routes | {"GET": routes["GET"] | {"/spans": self._list_spans}}

    async def lifespan(self, app):
        async with JsonClient() as self._agents:  # one pool of connections for all
            async for _ in super().lifespan(app):
                yield

    async def attempt(self, request: Asked, place: int) -> Outcome:
        turns = self._workload.rollout(request.seed)
        url = f"{request.base_url}/v1/chat/completions"
        messages = []
        for turn in turns:
            began = time.monotonic()
            await asyncio.sleep(turn.answer_s)
            self._spans.append((began, time.monotonic()))
            messages.append({"role": "user", "content": f"{place}: {len(messages)}"})
            chat_request = {"messages": messages, "max_tokens": turn.tokens}
            reply = await self._agents.ask("POST", url, chat_request, seconds=ROLLOUT_TIMEOUT_S)
            messages.append(reply["choices"][0]["message"])
        met = sum(turn.answer_s for turn in turns)
        return Outcome(tuple(messages), Reward(float(request.seed % 2)), {"met": met})

    async def _list_spans(self, request):
        del request
        return json_response(self._spans)


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
    config = GatewayConfig(**listen, seconds=ROLLOUT_TIMEOUT_S, journal=journal)
    return Gateway(Tokenizer.load("bytes"), engines, config)


def _hub(
    name: str, listen: Mapping, workload: Workload, gateway: str, journal: str, seed: int
) -> HttpServer:
    del name
    options = dict(gateway=gateway, journal=journal, seed=seed, buffer=workload.buffer())
    return Orchestrator(HubConfig(**listen, **options))


def _service(name: str, listen: Mapping, workload: Workload, hub: str) -> HttpServer:
    return SimulatedEnvironment(
        ServiceConfig(**listen, name=name, hub=hub, seconds=ROLLOUT_TIMEOUT_S), workload
    )


PROGRAMS = {"engine": _engine, "gateway": _gateway, "hub": _hub, "service": _service}


class Fleet(NamedTuple):
    """URLs of the running programs, and the folder of their utilization files."""

    hub: str
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
      seed: seed of the hub.
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
        journal = str(folder / "hub")
        [hub] = start("hub", "hub", gateway=gateway, seed=seed, journal=journal)
        services = start("service", *SERVICES, hub=hub)
        client, until = HubClient(hub), time.monotonic() + START_TIMEOUT_S
        while len(client.status()["tasks"]) < len(SERVICES):
            if time.monotonic() > until:
                raise RuntimeError(f"the services have not registered within {START_TIMEOUT_S:g} s")
            time.sleep(0.02)
        yield Fleet(hub, engines, services, folder)
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
