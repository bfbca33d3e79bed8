"""Small real parts of an asynchronous system.

Engines answer at random, the tasks of the services are sums, and the trainer trains nothing.

    python -m tests.rl.fleet PART '{"port": 0, ...}'

runs one part as a process, which prints its port.
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

# Ids of the byte tokenizer, `Tokenizer.load("bytes")`: "</think>", and the end of a turn.
END_OF_THINKING, END_OF_TURN = 278, 263


class Engine(HttpServer):
    """Answers `/generate` after a random delay.

    Attributes:
      delay: mean delay, in seconds.
      tokens: number of digits of a reply.
      version: version of the weights that sample.
      checksum: checksum of the weights; None: the engine reports none.
      instance: id of the process that the engine pretends to be.
      distributions: pairs of temperature and top_p of the requests so far.
    """

    def __init__(self, config=ListenConfig(port=0), delay=0.01, tokens=8):
        super().__init__(config)
        self.version, self.delay, self.tokens = 0, delay, tokens
        self.checksum, self.instance = None, secrets.token_hex(4)
        self.distributions: set[tuple[float, float]] = set()
        self._random = random.Random(0)

    def routes(self):
        post = {"/generate": self._generate, "/version": self._set_version}
        return {"POST": post, "GET": {"/health": self._health, "/weights": self._weights}}

    async def _generate(self, request):
        body = read_json(await request.read())
        sampling = body["sampling_params"]
        self.distributions.add((sampling["temperature"], sampling["top_p"]))
        rng = random.Random(sampling["sampling_seed"])
        await asyncio.sleep(self._random.uniform(0, 2 * self.delay))
        output_ids = self.reply(body["input_ids"], rng)
        meta_info = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-rng.random(), i, None] for i in output_ids],
            "weight_versions": [self.version] * len(output_ids),
            "cached_tokens": 0,
        }
        answer = json_response({"output_ids": output_ids, "meta_info": meta_info})
        answer.headers[INSTANCE] = self.instance
        return answer

    async def _weights(self, request):
        weights = {"version": self.version, "checksum": self.checksum}
        return json_response(weights | {"instance": self.instance})

    def reply(self, prompt, rng):
        """Returns the ids of a reply: digits of the byte tokenizer."""
        return [END_OF_THINKING, *(rng.randrange(15, 25) for _ in range(self.tokens)), END_OF_TURN]

    async def _set_version(self, request):
        self.version = read_json(await request.read())["version"]
        return json_response({})

    async def _health(self, request):
        return json_response({"status": "ok"})


class Sums(TaskService):
    """Chats for some turns; the reward is 1 if the digits of the last reply are an even number.

    Attributes:
      turns: number of turns of an attempt.
      pause: delay before each turn, in seconds.
      mode: "ok"; "fails" (the environment fails), "hangs", "deaf" (it hangs past its deadline),
        "500" or "garbage".
      is_broken: function of a request; whether its environment fails.
      requests: requests for rollouts so far.
      indices: task indices of these requests.
      cancelled: rollouts whose attempt was cancelled.
      called_off: rollouts that the orchestrator has cancelled.
    """

    def __init__(self, config, size=100, held_out=4, turns=2, pause=0.0):
        super().__init__(config, size, held_out)
        self.turns, self.pause, self.mode = turns, pause, "ok"
        self.is_broken = lambda request: False
        self.requests, self.indices, self.cancelled, self.called_off = [], [], [], []

    def routes(self):
        routes = super().routes()
        return routes | {
            "POST": {"/rollout": self._rollout_by_mode, "/cancel": self._record_cancel}
        }

    async def _record_cancel(self, request):
        self.called_off.append(read_json(await request.read())["rollout_id"])
        return await self._cancel(request)

    async def _rollout_by_mode(self, request):
        if self.mode == "500":
            raise ApiError("the disk is full", 500)
        if self.mode == "garbage":
            return web.Response(text='{"messages": "none"}')
        if self.mode == "deaf":
            await asyncio.sleep(3600)
        return await self._rollout(request)

    async def lifespan(self, app):
        # One connection pool for all agents: a thousand separate ones would cost too much.
        async with JsonClient() as self._agents:
            async for _ in super().lifespan(app):
                yield

    async def attempt(self, request, index):
        self.requests.append(request)
        self.indices.append(index)
        try:
            return await self._chat(request, index)
        except asyncio.CancelledError:
            self.cancelled.append(request.rollout_id)
            raise

    async def _chat(self, request, index):
        if self.mode == "fails" or self.is_broken(request):
            raise OSError("the sandbox is gone")
        if self.mode == "hangs":
            await asyncio.sleep(3600)
        messages = [{"role": "user", "content": f"{index}+1?"}]
        url = f"{request.base_url}/v1/chat/completions"
        for turn in range(self.turns):
            await asyncio.sleep(self.pause)
            if turn:
                messages.append({"role": "user", "content": "And?"})
            response = await self._agents.request("POST", url, {"messages": messages}, timeout_s=60)
            messages.append(response["choices"][0]["message"])
        is_even = float(int(messages[-1]["content"]) % 2 == 0)
        return Outcome(tuple(messages), Reward(is_even, {"right": is_even}), {"turns": self.turns})


QUICK = dict(port=0, grace_s=5.0)
# Short intervals of everything that a test waits for.
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
    """Returns the config of an orchestrator; options: fields of it and of its buffer."""
    names = {field.name for field in dataclasses.fields(BufferConfig)}
    buffer_options = {name: options.pop(name) for name in names & options.keys()}
    buffer = BufferConfig(
        group=group,
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        max_running=max_running,
        **buffer_options,
    )
    return OrchestratorConfig(**QUICK | SOON | {"gateway": gateway, "buffer": buffer} | options)


def service_config(orchestrator, name="sums", **options):
    """Returns the config of a service with short intervals."""
    options = dict(heartbeat_interval_s=0.5, rollout_timeout_s=20.0, max_inflight=64) | options
    return ServiceConfig(**QUICK | {"orchestrator": orchestrator, "name": name} | options)


@contextlib.contextmanager
def gateway(engine, **options):
    """Runs the real gateway in front of engines, whose URLs are separated by commas, and returns its URL."""
    from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
    from glm5_jax.text.tokenizer import Tokenizer

    options = QUICK | dict(probe_interval_s=0.1, reply_timeout_s=30.0) | options
    server = Gateway(Tokenizer.load("bytes"), engine.split(","), GatewayConfig(**options))
    with server.running() as url:
        yield url


def post_json(url, path, body, timeout_s=60.0):
    """Posts a JSON body, and returns the JSON of the response."""
    with Client(url).open(path, json.dumps(body).encode(), timeout_s=timeout_s) as answer:
        return json.load(answer)


def server_info(gate):
    """Returns the status of a gateway."""
    with urllib.request.urlopen(f"{gate}/server_info", timeout=60) as response:
        return json.load(response)


def num_sessions(gate):
    """Returns the number of open sessions of a gateway."""
    return server_info(gate)["sessions"]


async def body_of(response):
    """Returns the JSON of an aiohttp response, or the bytes of encoded records."""
    is_json = response.content_type == "application/json"
    return await (response.json() if is_json else response.read())


def rollout(url, number=0, **fields):
    """Requests a rollout of a service as the orchestrator does, and returns the JSON of the response."""
    ids = {"rollout_id": f"r{number}", "group_id": "g", "number": number}
    return post_json(url, "/rollout", ids | {"held_out": False, "seed": 1} | fields)


def until(condition, timeout_s=20.0):
    """Waits until a condition is true, and returns its value."""
    end = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < end, f"the condition did not hold within {timeout_s} s"
        time.sleep(0.02)
    return result


ENGINE = Engine()  # engine of the fixtures `engine` and `gate`


class Fleet:
    """An orchestrator with its services, and the requests of a trainer.

    services: options of each service by name, or a list of names.
    """

    def __init__(self, stack, gate, services=("sums",), **options):
        self.stack, self.orchestrator = stack, Orchestrator(orchestrator_config(gate, **options))
        self.url = stack.enter_context(self.orchestrator.running())
        self.client = OrchestratorClient(self.url, patience_s=10.0)
        self.services = {}
        ENGINE.version, self.step = 0, 0
        for name in services:
            self.add(name, **(services[name] if isinstance(services, dict) else {}))

    def add(self, name, stack=None, *, turns=2, pause=0.0, size=100, **options):
        """Starts a service, and waits until it is registered."""
        service = Sums(service_config(self.url, name, **options), size, turns=turns, pause=pause)
        self.services[name] = service
        (stack or self.stack).enter_context(service.running())
        until(lambda: service.is_registered)
        return service

    def begin(self):
        """Starts the trainer at the current step."""
        self.client.begin(self.step, self.step)
        return self

    def train(self, updates=1, timeout_s=20.0):
        """Takes batches, reports them as trained on, and returns their groups."""
        groups = []
        for _ in range(updates):
            batch = self.client.take(self.step, timeout_s)
            assert batch is not None, json.dumps(self.client.status(), indent=1)
            self.client.mark_trained(self.step)
            self.step += 1
            ENGINE.version = self.step
            self.client.push(self.step)
            groups += batch
        return groups

    def task_status(self, name="sums"):
        """Returns the orchestrator's status of a task."""
        return self.client.status()["tasks"][name]


# -- parts as processes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(part, *, env=None, **options):
    """Runs one of `PARTS` as a process, and returns (URL, process). The process is killed at the end."""
    command = [sys.executable, "-m", "tests.rl.fleet", part, json.dumps(options)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        port = child.stdout.readline().strip()
        assert port.isdigit(), f"{part} did not print its port: {port!r}"
        yield f"http://127.0.0.1:{port}", child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


class Parts:
    """Processes by name that can be killed and restarted on the same port with the same journal."""

    def __init__(self, stack):
        self._stack, self._started, self.processes = stack, {}, {}

    def start(self, name, part, /, **options):
        """Starts a part under a name, and returns its URL."""
        process_stack = contextlib.ExitStack()
        url, self.processes[name] = process_stack.enter_context(process(part, **options))
        self._stack.push(process_stack)
        port = int(url.rpartition(":")[2])
        self._started[name] = process_stack, part, options | {"port": port}
        return url

    def kill(self, name):
        """Kills a process with SIGKILL, and starts it again."""
        process_stack, part, options = self._started[name]
        process_stack.close()
        self.start(name, part, **options)


def memory_bytes(child, field="VmRSS"):
    """Returns a memory field of a process in bytes: VmRSS is the current size, VmHWM the maximum."""
    with open(f"/proc/{child.pid}/status") as file:
        [line] = [line for line in file if line.startswith(field + ":")]
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
    server = PARTS[sys.argv[1]](**json.loads(sys.argv[2]))
    asyncio.run(server.serve(lambda port: print(port, flush=True)))
