"""The system of asynchronous RL with processes of its own for hub, gateway, services and engines, in which sleep stands for
all that would take a machine: tools in environments, replies of engines.

    with fleet(workload, seed, folder) as own:
        HubClient(own.hub).begin(0, 0)

Hub, gateway and what a service says to both are those of every run.
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

from experiments.benchmarks.ideal_system import Span, Workload
from glm5_jax.core.activity import FOLDER, read_activity
from glm5_jax.core.placement import address
from glm5_jax.core.process import Program
from glm5_jax.core.server import HttpServer, ListenConfig, as_json, read_json, read_port
from glm5_jax.inference.client import Client
from glm5_jax.rl.client import HubClient, JsonClient
from glm5_jax.rl.orchestrator import HubConfig, Orchestrator
from glm5_jax.rl.service import Asked, Outcome, ServiceConfig, TaskService
from glm5_jax.rl.types import Reward

SERVICES = ("search", "terminal")
LONGEST = 600.0  # seconds of a rollout; past them something is wrong
START = 120.0  # seconds that a program may take to listen, and that one may take to answer
ROOT = pathlib.Path(__file__).parents[2]
# Of the byte tokenizer, `Tokenizer.load("bytes")`: "</think>", a digit, and what ends a turn.
CLOSES, DIGIT, STOPS = 278, 15, 263


class Engine(HttpServer):
    """Answers `/generate` with as many tokens as it is asked for at most, at the workload's speed; who comes when all slots are
    taken waits. Its weights are a number that `/version` sets."""

    def __init__(self, config: ListenConfig, workload: Workload):
        super().__init__(config)
        self._workload, self._slots = workload, asyncio.Semaphore(workload.slots)
        self._spans: list[Span] = []
        self._since, self._versions = [0.0], [0]  # from when on which weights

    def routes(self):
        post = {"/generate": self._generate, "/version": self._set}
        get = {"/health": self._health, "/weights": self._weights, "/spans": self._told}
        return {"POST": post, "GET": get}

    async def _generate(self, request):
        said = read_json(await request.read())
        count, speed = said["sampling_params"]["max_new_tokens"], self._workload.speed
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
        return as_json({"output_ids": ids, "meta_info": meta})

    def _version_at(self, moment: float) -> int:
        return self._versions[bisect.bisect(self._since, moment) - 1]

    async def _set(self, request):
        self._versions.append(read_json(await request.read())["version"])
        self._since.append(time.monotonic())
        return as_json({})

    async def _weights(self, request):
        del request
        return as_json({"version": self._versions[-1]})

    async def _told(self, request):
        del request
        return as_json(self._spans)

    async def _health(self, request):
        del request
        return as_json({"status": "ok"})


class Environment(TaskService):
    """Rollouts of the workload: its environment sleeps, its agent chats, and what it is worth is drawn."""

    def __init__(self, config: ServiceConfig, workload: Workload):
        super().__init__(config, size=1_000_000)
        self._workload, self._spans = workload, []

    def routes(self):
        own = super().routes()
        return own | {"GET": own["GET"] | {"/spans": self._told}}

    async def opened(self, app):
        async with JsonClient() as self._agents:  # one pool of connections for all
            async for _ in super().opened(app):
                yield

    async def attempt(self, asked: Asked, place: int) -> Outcome:
        turns = self._workload.rollout(asked.seed)
        url = f"{asked.base_url}/v1/chat/completions"
        messages = []
        for turn in turns:
            began = time.monotonic()
            await asyncio.sleep(turn.seconds)
            self._spans.append((began, time.monotonic()))
            messages.append({"role": "user", "content": f"{place}: {len(messages)}"})
            request = {"messages": messages, "max_tokens": turn.tokens}
            said = await self._agents.ask("POST", url, request, seconds=LONGEST)
            messages.append(said["choices"][0]["message"])
        met = sum(turn.seconds for turn in turns)
        return Outcome(tuple(messages), Reward(float(asked.seed % 2)), {"met": met})

    async def _told(self, request):
        del request
        return as_json(self._spans)


# -- as processes ---------------------------------------------------------------------------------------------


def _engine(name: str, listen: Mapping, workload: Workload) -> HttpServer:
    del name
    return Engine(ListenConfig(**listen), workload)


def _gateway(
    name: str, listen: Mapping, workload: Workload, engines: list[str], journal: str
) -> HttpServer:
    from glm5_jax.rl.gateway import Gateway, GatewayConfig  # and with it jax, which others need not
    from glm5_jax.text.tokenizer import Tokenizer

    del name, workload
    own = GatewayConfig(**listen, seconds=LONGEST, journal=journal)
    return Gateway(Tokenizer.load("bytes"), engines, own)


def _hub(
    name: str, listen: Mapping, workload: Workload, gateway: str, journal: str, seed: int
) -> HttpServer:
    del name
    own = dict(gateway=gateway, journal=journal, seed=seed, buffer=workload.buffer())
    return Orchestrator(HubConfig(**listen, **own))


def _service(name: str, listen: Mapping, workload: Workload, hub: str) -> HttpServer:
    return Environment(ServiceConfig(**listen, name=name, hub=hub, seconds=LONGEST), workload)


PROGRAMS = {"engine": _engine, "gateway": _gateway, "hub": _hub, "service": _service}


class Fleet(NamedTuple):
    """What runs: URLs, and the folder in which programs say what they do."""

    hub: str
    engines: list[str]
    services: list[str]
    folder: pathlib.Path

    def set_version(self, version: int) -> None:
        """The engines have these weights from now on."""
        for engine in self.engines:
            _asked(engine, "/version", {"version": version})

    def replies(self) -> list[Span]:
        """From when to when each was written, by `time.monotonic`."""
        return [tuple(span) for engine in self.engines for span in _asked(engine, "/spans")]

    def answers(self) -> list[Span]:
        """From when to when an environment thought about each."""
        return [tuple(span) for service in self.services for span in _asked(service, "/spans")]

    def cores(self) -> dict[str, float]:
        """That each program has kept busy, on average since it began to listen."""
        return {life.name: life.cpu for life in read_activity(self.folder)}


class _Child:
    """A program of the fleet, from its start until it is killed."""

    def __init__(self, program: str, name: str, folder: pathlib.Path, said: Mapping[str, Any]):
        self.name = name
        self._ready, self._log = folder / f"{name}.ready", folder / f"{name}.log"
        told = folder / FOLDER / f"{name}.jsonl"
        listen = dict(port=0, ready_file=str(self._ready), activity_file=str(told))
        words = [program, json.dumps({"name": name, "listen": listen, **said})]
        argv = [sys.executable, "-m", "experiments.benchmarks.sleeping_fleet", *words]
        self._program = Program(argv, log=self._log, cwd=ROOT)

    def url(self) -> str:
        """Once it listens. RuntimeError."""
        until = time.monotonic() + START
        while (port := read_port(self._ready)) is None:
            self.check()
            if time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not listen within {START:g} s")
            time.sleep(0.02)
        return address("127.0.0.1", port)

    def check(self) -> None:
        """RuntimeError if it has ended."""
        if (code := self._program.exit_code()) is not None:
            tail = self._log.read_text()[-2000:]
            raise RuntimeError(f"{self.name} has ended with {code}; {self._log} ends:\n{tail}")

    def kill(self) -> None:
        """Ends it at once: it has nothing to save."""
        self._program.kill()


@contextlib.contextmanager
def fleet(workload: Workload, seed: int, folder: pathlib.Path) -> Iterator[Fleet]:
    """Starts all, and waits until they know each other. seed: of the hub; folder: a new one, for logs and journals. RuntimeError,
    with the end of its log, if one cannot be started, or has ended before the others were told to."""
    folder.mkdir(parents=True)
    shared = {"workload": dataclasses.asdict(workload)}
    children: list[_Child] = []

    def started(program: str, *names: str, **more) -> list[str]:
        own = [_Child(program, name, folder, shared | more) for name in names]
        children.extend(own)
        return [child.url() for child in own]

    try:
        engines = started("engine", *(f"engine-{i}" for i in range(workload.engines)))
        journal = str(folder / "gateway")
        [gateway] = started("gateway", "gateway", engines=engines, journal=journal)
        journal = str(folder / "hub")
        [hub] = started("hub", "hub", gateway=gateway, seed=seed, journal=journal)
        services = started("service", *SERVICES, hub=hub)
        client, until = HubClient(hub), time.monotonic() + START
        while len(client.status()["tasks"]) < len(SERVICES):
            if time.monotonic() > until:
                raise RuntimeError(f"the services have not registered within {START:g} s")
            time.sleep(0.02)
        yield Fleet(hub, engines, services, folder)
        for child in children:
            child.check()
    finally:
        for child in reversed(children):
            child.kill()


def _asked(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with Client(url, direct=True).open(path, data, timeout=START) as response:
        return json.load(response)


if __name__ == "__main__":
    said = json.loads(sys.argv[2])
    workload = said.pop("workload")
    workload = Workload(**workload | {"tokens": tuple(workload["tokens"])})
    asyncio.run(PROGRAMS[sys.argv[1]](workload=workload, **said).serve())
