"""Pushes, restarts, new trainers, sessions and chats at the gateway in random order.

Each call returns. Replies are sampled by required weights. After all engines have these weights, every chat is
answered.
"""

import asyncio
import contextlib
import random
import secrets

import aiohttp
import pytest
from aiohttp import web

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.rollouts.record_codec import decode_records
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import Engine

TOKENIZER = Tokenizer.load("bytes")
ACTIONS = [
    *("push one", "push all", "want", "late want", "new trainer", "restart engine", "pause engine"),
    *(
        "resume engine",
        "resume engine",
        "begin",
        "begin",
        "begin",
        "end",
        "restart gateway",
        "probe",
    ),
    *("chat",) * 6,
]
ERROR_STATUSES = (404, 409, 429, 502, 503)  # statuses of a call that may occur, besides 200
CHAT = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 16}


class PausableEngine(Engine):
    """Engine that refuses requests while it is paused, as during a push, and records whose weights sample.

    Attributes:
      lease: lease of the trainer that pushed last; None: no push since the start.
      leases: lease of each reply of all engines.
    """

    paused, lease = False, None

    def __init__(self, leases):
        super().__init__(delay=0.0, tokens=2)
        self.leases = leases

    def load(self, lease, version):
        """Loads the weights of a trainer."""
        self.lease, self.version, self.checksum = lease, version, f"{lease}-{version}"

    def restart(self):
        """Restarts the engine with its initial weights."""
        self.lease = self.checksum = None
        self.version, self.instance, self.paused = 0, secrets.token_hex(4), False

    async def _generate(self, request):
        if self.paused:
            return web.json_response({"error": {"message": "paused"}}, status=503)
        self.leases.append(self.lease)
        return await super()._generate(request)


class RandomActions:
    """A gateway and two engines on which random actions are performed.

    Attributes:
      lease: lease of the trainer.
      version: weight version of the trainer.
      required: (lease, version) that the gateway got last; None: none yet.
      sessions: names of open sessions.
      num_names: number of names so far.
      num_replies: number of replies so far.
    """

    def __init__(self, seed, journal):
        self.rng, self.journal = random.Random(seed), str(journal)
        self.leases = []
        self.engines = [PausableEngine(self.leases) for _ in range(2)]
        self.lease, self.version = 1, 0
        self.required = None
        self.sessions, self.num_names, self.num_replies = set(), 0, 0

    async def run(self, count):
        """Performs `count` actions, and then checks that all chats are answered."""
        async with contextlib.AsyncExitStack() as stack:
            self.urls = []
            for engine in self.engines:
                self.urls.append(await serve(stack, engine))
            self.client = await stack.enter_async_context(JsonClient())
            await self.start_gateway()
            try:
                for _ in range(count):
                    await self.act(self.rng.choice(ACTIONS))
                await self.settle()
            finally:
                await self.gateway_stack.aclose()

    async def start_gateway(self):
        """Starts the gateway."""
        self.gateway_stack = contextlib.AsyncExitStack()
        config = GatewayConfig(
            port=0, grace_s=1.0, probe_interval_s=0.02, reply_timeout_s=5.0, journal=self.journal
        )
        gateway = Gateway(TOKENIZER, self.urls, config)
        self.url = await serve(self.gateway_stack, gateway)

    async def request(self, method, path, body=None):
        """Returns (status, response) of a call, which must return in time."""
        try:
            response = await self.client.request(method, self.url + path, body, timeout_s=10)
        except ServerError as error:
            assert error.status in ERROR_STATUSES, error
            return error.status, None
        return 200, response

    async def act(self, action):
        """Performs one action."""
        engine = self.rng.choice(self.engines)
        match action:
            case "push one":
                self.version += 1
                engine.load(self.lease, self.version)
            case "push all":
                self.version += 1
                for other in self.engines:
                    other.load(self.lease, self.version)
            case "want":
                await self.require_weights()
            case "late want":
                if self.required is not None:  # an outdated request changes nothing
                    lease, version = self.required
                    await self.send_weights(lease, max(0, version - 1))
            case "new trainer":
                self.lease += 1
                self.version = self.rng.randrange(self.version + 1)
                for other in self.engines:
                    if (
                        self.rng.random() < 0.6
                    ):  # the others keep the weights of the earlier trainer
                        other.load(self.lease, self.version)
                await self.require_weights()
            case "restart engine":
                engine.restart()
            case "pause engine":
                engine.paused = True
            case "resume engine":
                engine.paused = False
            case "begin":
                await self.begin()
            case "chat" if self.sessions:
                await self.chat(self.rng.choice(sorted(self.sessions)))
            case "end" if self.sessions:
                name = self.sessions.pop()
                status, _ = await self.request("DELETE", f"/sessions/{name}")
                assert status == 200
            case "restart gateway":
                await self.gateway_stack.aclose()
                await self.start_gateway()
                _, response = await self.request("GET", "/server_info")
                weights = response["weights"]
                assert (weights and (weights["lease"], weights["version"])) == self.required
            case "probe":
                await asyncio.sleep(0.03)
        status, response = await self.request("GET", "/sessions")
        assert status == 200 and set(response["sessions"]) == self.sessions

    async def require_weights(self):
        """Requires the trainer's weights."""
        self.required = self.lease, self.version
        await self.send_weights(*self.required)

    async def send_weights(self, lease, version):
        """Sends weights to the gateway."""
        weights = {"lease": lease, "version": version, "checksum": f"{lease}-{version}"}
        status, response = await self.request("POST", "/weights", weights)
        assert status == 200
        assert (response["lease"], response["version"]) == self.required

    async def begin(self):
        """Opens a session, and returns its name; False: no engine is ready."""
        name, self.num_names = f"s{self.num_names}", self.num_names + 1
        status, _ = await self.request("POST", "/sessions", {"id": name, "seed": self.num_names})
        assert status in (200, 502)
        if status == 200:
            self.sessions.add(name)
        return status == 200 and name

    async def chat(self, name):
        """Chats in a session, and returns whether it was answered."""
        lowest = self.required[1] if self.required else 0
        status, _ = await self.request("POST", f"/sessions/{name}/v1/chat/completions", CHAT)
        assert status in (200, 502)
        if status == 200:
            self.num_replies += 1
            assert self.required is None or self.leases[-1] == self.required[0]
            url = f"{self.url}/sessions/{name}/records"
            async with aiohttp.ClientSession() as client, client.get(url) as response:
                versions = decode_records(await response.read())[-1].weight_version
            assert versions[versions >= 0].min() >= lowest
        return status == 200

    async def settle(self):
        """Runs all engines with the trainer's weights, and checks that everything is answered."""
        for engine in self.engines:
            engine.load(self.lease, self.version)
            engine.paused = False
        if self.required != (self.lease, self.version):
            await self.require_weights()
        async with asyncio.timeout(10):
            while not (name := await self.begin()):
                await asyncio.sleep(0.01)
            for session in (name, *sorted(self.sessions)):
                while not await self.chat(session):
                    await asyncio.sleep(0.01)
            for session in sorted(self.sessions):
                assert (await self.request("DELETE", f"/sessions/{session}"))[0] == 200
        _, response = await self.request("GET", "/server_info")
        assert response["sessions"] == response["active"] == 0
        assert not any(response["loads"].values())


async def serve(stack, server):
    """Runs a server in this event loop until the stack is closed, and returns its URL."""
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    [(host, port)] = runner.addresses
    return f"http://{host}:{port}"


def run_actions(seed, count, folder):
    """Performs random actions, and returns the number of replies."""
    actions = RandomActions(seed, folder)
    asyncio.run(actions.run(count))
    return actions.num_replies


@pytest.mark.parametrize("seed", range(4))
def test_answers_all_chats_after_random_actions(tmp_path, seed):
    assert run_actions(seed, 150, tmp_path) > 10


@pytest.mark.slow
def test_answers_all_chats_after_many_random_actions(tmp_path):
    assert sum(run_actions(seed, 60, tmp_path / str(seed)) for seed in range(100, 300)) > 1000
