"""Small real parts of an asynchronous system: engines that answer at random, services whose tasks are sums, a trainer
that learns nothing.

    python -m tests.rl.fleet PART '{"port": 0, ...}'

runs one of them as a process; it prints its port.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import secrets
import subprocess
import sys
import time
import urllib.request

from aiohttp import web

from glm5_jax.inference.client import INSTANCE, Client
from glm5_jax.rl.orchestrator.client import JsonClient, OrchestratorClient
from glm5_jax.rl.orchestrator.dispatcher import DispatcherConfig
from glm5_jax.rl.orchestrator.fair_share import CircuitBreakerConfig
from glm5_jax.rl.orchestrator.group_buffer import BufferConfig
from glm5_jax.rl.orchestrator.server import Orchestrator, OrchestratorConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig
from glm5_jax.rl.orchestrator.task_service import Outcome, ServiceConfig, TaskService
from glm5_jax.rl.types import Reward
from glm5_jax.runtime.http_server import (
    ApiError,
    HttpServer,
    ListenConfig,
    json_response,
    read_json,
)

# Of the byte tokenizer, `Tokenizer.load("bytes")`: "</think>", and what ends a turn.
CLOSES, STOPS = 278, 263


class Engine(HttpServer):
    """Answers `/generate` after a random delay of so many seconds on average. version: of what it samples; instance: which
    process it seems to be."""

    def __init__(self, config=ListenConfig(port=0), delay=0.01, tokens=8):
        super().__init__(config)
        self.version, self.delay, self.tokens = 0, delay, tokens
        self.checksum, self.instance = None, secrets.token_hex(4)
        self._random = random.Random(0)

    def routes(self):
        post = {"/generate": self._generate, "/version": self._set}
        return {"POST": post, "GET": {"/health": self._health, "/weights": self._held}}

    async def _generate(self, request):
        said = read_json(await request.read())
        own = random.Random(said["sampling_params"]["sampling_seed"])
        await asyncio.sleep(self._random.uniform(0, 2 * self.delay))
        ids = self.reply(said["input_ids"], own)
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-own.random(), i, None] for i in ids],
            "weight_versions": [self.version] * len(ids),
            "cached_tokens": 0,
        }
        answer = json_response({"output_ids": ids, "meta_info": meta})
        answer.headers[INSTANCE] = self.instance
        return answer

    async def _held(self, request):
        held = {"version": self.version, "checksum": self.checksum}
        return json_response(held | {"instance": self.instance})

    def reply(self, prompt, draw):
        """The ids of a reply: digits, in the byte tokenizer."""
        return [CLOSES, *(draw.randrange(15, 25) for _ in range(self.tokens)), STOPS]

    async def _set(self, request):
        self.version = read_json(await request.read())["version"]
        return json_response({})

    async def _health(self, request):
        return json_response({"status": "ok"})


class Sums(TaskService):
    """Chats for so many turns; what an attempt is worth is whether the last reply's digits are even.

    mode: "ok"; "fails" (the environment does), "hangs", "deaf" (it does so whatever its deadline), "500" or "garbage".
    broken: says of what is asked whether its environment fails. pause: seconds before each turn.
    seen: what was asked; places: of its tasks; cancelled: rollouts; called_off: those that the orchestrator said are.
    """

    def __init__(self, config, size=100, held_out=4, turns=2, pause=0.0):
        super().__init__(config, size, held_out)
        self.turns, self.pause, self.mode = turns, pause, "ok"
        self.broken = lambda asked: False
        self.seen, self.places, self.cancelled, self.called_off = [], [], [], []

    def routes(self):
        own = super().routes()
        return own | {"POST": {"/rollout": self._moody, "/cancel": self._off}}

    async def _off(self, request):
        self.called_off.append(read_json(await request.read())["rollout_id"])
        return await self._cancel(request)

    async def _moody(self, request):
        if self.mode == "500":
            raise ApiError("the disk is full", 500)
        if self.mode == "garbage":
            return web.Response(text='{"messages": "none"}')
        if self.mode == "deaf":
            await asyncio.sleep(3600)
        return await self._rollout(request)

    async def lifespan(self, app):
        # One pool for all agents, which a thousand separate ones need not be.
        async with JsonClient() as self._agents:
            async for _ in super().lifespan(app):
                yield

    async def attempt(self, asked, place):
        self.seen.append(asked)
        self.places.append(place)
        try:
            return await self._chat(asked, place)
        except asyncio.CancelledError:
            self.cancelled.append(asked.rollout_id)
            raise

    async def _chat(self, asked, place):
        if self.mode == "fails" or self.broken(asked):
            raise OSError("the sandbox is gone")
        if self.mode == "hangs":
            await asyncio.sleep(3600)
        messages = [{"role": "user", "content": f"{place}+1?"}]
        url = f"{asked.base_url}/v1/chat/completions"
        for turn in range(self.turns):
            await asyncio.sleep(self.pause)
            if turn:
                messages.append({"role": "user", "content": "And?"})
            said = await self._agents.request("POST", url, {"messages": messages}, timeout_s=60)
            messages.append(said["choices"][0]["message"])
        right = float(int(messages[-1]["content"]) % 2 == 0)
        return Outcome(tuple(messages), Reward(right, {"right": right}), {"turns": self.turns})


QUICK = dict(port=0, grace_s=5.0)
# Everything that a test would wait for is short.
SOON = dict(
    poll_interval_s=0.02,
    registry=RegistryConfig(
        heartbeat_timeout_s=10.0,
        breaker=CircuitBreakerConfig(failure_threshold=4, reset_timeout_s=0.5),
    ),
    dispatcher=DispatcherConfig(
        retry_delay_s=0.05,
        response_grace_s=1.0,
        breaker=CircuitBreakerConfig(failure_threshold=4, reset_timeout_s=0.5),
    ),
)


def orchestrator_config(
    gateway, group=4, batch_groups=4, max_staleness=2, max_running=16, **options
):
    """An orchestrator's; options: others of it, and of its buffer."""
    names = {field.name for field in dataclasses.fields(BufferConfig)}
    more = {name: options.pop(name) for name in names & options.keys()}
    own = BufferConfig(
        group=group,
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        max_running=max_running,
        **more,
    )
    return OrchestratorConfig(**QUICK | SOON | {"gateway": gateway, "buffer": own} | options)


def service_config(orchestrator, name="sums", **options):
    options = dict(heartbeat_interval_s=0.5, rollout_timeout_s=20.0, max_inflight=64) | options
    return ServiceConfig(**QUICK | {"orchestrator": orchestrator, "name": name} | options)


@contextlib.contextmanager
def gateway(engine, **options):
    """The real one, in front of an engine, or several with commas between them; its URL."""
    from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
    from glm5_jax.text.tokenizer import Tokenizer

    options = QUICK | dict(probe_interval_s=0.1, reply_timeout_s=30.0) | options
    made = Gateway(Tokenizer.load("bytes"), engine.split(","), GatewayConfig(**options))
    with made.running() as url:
        yield url


def told(url, path, body, seconds=60.0):
    """What a server says to a body of JSON."""
    with Client(url).open(path, json.dumps(body).encode(), timeout_s=seconds) as answer:
        return json.load(answer)


def server_info(gate):
    """Returns the numbers of a gateway."""
    with urllib.request.urlopen(f"{gate}/server_info", timeout=60) as response:
        return json.load(response)


def sessions(gate):
    """How many a gateway has."""
    return server_info(gate)["sessions"]


async def body_of(response):
    """Returns the JSON of an aiohttp response, or the bytes of encoded records."""
    is_json = response.content_type == "application/json"
    return await (response.json() if is_json else response.read())


def rollout(url, number=0, **fields):
    """What a service says of a rollout that it is asked for as by the orchestrator; fields: others of what is asked, `base_url`
    always."""
    ids = {"rollout_id": f"r{number}", "group_id": "g", "number": number}
    return told(url, "/rollout", ids | {"held_out": False, "seed": 1} | fields)


def until(holds, seconds=20.0):
    """Waits for something to hold; what it is then."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.02)
    return found


ENGINE = Engine()  # of the fixtures `engine` and `gate`


class Fleet:
    """An orchestrator and its services, and what their trainer does. services: options by name; a list: of the same ones."""

    def __init__(self, stack, gate, services=("sums",), **options):
        self.stack, self.orchestrator = stack, Orchestrator(orchestrator_config(gate, **options))
        self.url = stack.enter_context(self.orchestrator.running())
        self.client = OrchestratorClient(self.url, patience_s=10.0)
        self.services = {}
        ENGINE.version, self.step = 0, 0
        for name in services:
            self.add(name, **(services[name] if isinstance(services, dict) else {}))

    def add(self, name, stack=None, *, turns=2, pause=0.0, size=100, **options):
        """A service, once it is registered."""
        made = Sums(service_config(self.url, name, **options), size, turns=turns, pause=pause)
        self.services[name] = made
        (stack or self.stack).enter_context(made.running())
        until(lambda: made.is_registered)
        return made

    def begin(self):
        self.client.begin(self.step, self.step)
        return self

    def train(self, updates=1, seconds=20.0):
        """The groups of so many batches."""
        found = []
        for _ in range(updates):
            taken = self.client.take(self.step, seconds)
            assert taken is not None, json.dumps(self.client.status(), indent=1)
            self.client.mark_trained(self.step)
            self.step += 1
            ENGINE.version = self.step
            self.client.push(self.step)
            found += taken
        return found

    def told(self, name="sums"):
        return self.client.status()["tasks"][name]


# -- as processes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(part, *, env=None, **options):
    """One of `PARTS` as a process; (its URL, the process), which is killed at the end."""
    command = [sys.executable, "-m", "tests.rl.fleet", part, json.dumps(options)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        port = child.stdout.readline().strip()
        assert port.isdigit(), f"{part} has not begun: {port!r}"
        yield f"http://127.0.0.1:{port}", child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


class Parts:
    """Processes by name, which can be killed and started anew at the same port with the same journal."""

    def __init__(self, stack):
        self._stack, self._started, self.processes = stack, {}, {}

    def start(self, name, part, /, **options):
        own = contextlib.ExitStack()
        url, self.processes[name] = own.enter_context(process(part, **options))
        self._stack.push(own)
        port = int(url.rpartition(":")[2])
        self._started[name] = own, part, options | {"port": port}
        return url

    def kill(self, name):
        own, part, options = self._started[name]
        own.close()  # with SIGKILL
        self.start(name, part, **options)


def resident(child, what="VmRSS"):
    """Bytes of memory that a process has, or had at most (VmHWM)."""
    with open(f"/proc/{child.pid}/status") as file:
        [line] = [line for line in file if line.startswith(what + ":")]
    return int(line.split()[1]) * 1024


def _engine(port=0, **options):
    return Engine(ListenConfig(port=port), **options)


def _gateway(engine, **options):
    from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
    from glm5_jax.text.tokenizer import Tokenizer

    return Gateway(Tokenizer.load("bytes"), engine.split(","), GatewayConfig(**QUICK | options))


def _service(turns=2, pause=0.0, size=100, **options):
    return Sums(service_config(**options), size, turns=turns, pause=pause)


def _orchestrator(heartbeat_timeout_s=10.0, gateway_timeout_s=60.0, **options):
    registry = dataclasses.replace(SOON["registry"], heartbeat_timeout_s=heartbeat_timeout_s)
    dispatcher = dataclasses.replace(SOON["dispatcher"], gateway_timeout_s=gateway_timeout_s)
    return Orchestrator(orchestrator_config(registry=registry, dispatcher=dispatcher, **options))


PARTS = {"engine": _engine, "gateway": _gateway, "service": _service, "orchestrator": _orchestrator}

if __name__ == "__main__":
    made = PARTS[sys.argv[1]](**json.loads(sys.argv[2]))
    asyncio.run(made.serve(lambda port: print(port, flush=True)))
