"""Pushes, restarts, new trainers, sessions and chats at the gateway in any order: each call returns, what is answered was
sampled by weights that were wanted, and once all engines have those everything is answered again."""

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
REFUSED = (404, 409, 429, 502, 503)  # what a call may be answered with besides 200
CHAT = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 16}


class Pausing(Engine):
    """Refuses while it is paused, as one whose weights are being replaced; else notes which trainer's weights it has.

    lease: of the trainer that pushed last, None: none has since its start. served: leases, of all engines.
    """

    paused, lease = False, None

    def __init__(self, served):
        super().__init__(delay=0.0, tokens=2)
        self.served = served

    def take(self, lease, version):
        self.lease, self.version, self.checksum = lease, version, f"{lease}-{version}"

    def restart(self):
        self.lease = self.checksum = None
        self.version, self.instance, self.paused = 0, secrets.token_hex(4), False

    async def _generate(self, request):
        if self.paused:
            return web.json_response({"error": {"message": "paused"}}, status=503)
        self.served.append(self.lease)
        return await super()._generate(request)


class Orders:
    """A gateway and two engines, to which one action after the other happens, and what must hold of them."""

    def __init__(self, seed, journal):
        self.draw, self.journal = random.Random(seed), str(journal)
        self.served = []
        self.engines = [Pausing(self.served) for _ in range(2)]
        self.lease, self.version = 1, 0  # of the trainer
        self.wanted = None  # what the gateway was told last
        self.sessions, self.names, self.answers = set(), 0, 0

    async def run(self, count):
        async with contextlib.AsyncExitStack() as stack:
            self.urls = []
            for engine in self.engines:
                self.urls.append(await serving(stack, engine))
            self.client = await stack.enter_async_context(JsonClient())
            await self.start_gateway()
            try:
                for _ in range(count):
                    await self.act(self.draw.choice(ACTIONS))
                await self.settle()
            finally:
                await self.gateway_stack.aclose()

    async def start_gateway(self):
        self.gateway_stack = contextlib.AsyncExitStack()
        config = GatewayConfig(
            port=0, grace_s=1.0, probe_interval_s=0.02, reply_timeout_s=5.0, journal=self.journal
        )
        gateway = Gateway(TOKENIZER, self.urls, config)
        self.url = await serving(self.gateway_stack, gateway)

    async def ask(self, method, path, body=None):
        """(HTTP's status, answer) of a call, which must return."""
        try:
            answer = await self.client.request(method, self.url + path, body, timeout_s=10)
        except ServerError as error:
            assert error.status in REFUSED, error
            return error.status, None
        return 200, answer

    async def act(self, action):
        engine = self.draw.choice(self.engines)
        match action:
            case "push one":
                self.version += 1
                engine.take(self.lease, self.version)
            case "push all":
                self.version += 1
                for one in self.engines:
                    one.take(self.lease, self.version)
            case "want":
                await self.want()
            case "late want":
                if self.wanted is not None:  # one that was overtaken changes nothing
                    lease, version = self.wanted
                    await self.tell(lease, max(0, version - 1))
            case "new trainer":
                self.lease += 1
                self.version = self.draw.randrange(self.version + 1)
                for one in self.engines:
                    if self.draw.random() < 0.6:  # the others keep what the trainer before pushed
                        one.take(self.lease, self.version)
                await self.want()
            case "restart engine":
                engine.restart()
            case "pause engine":
                engine.paused = True
            case "resume engine":
                engine.paused = False
            case "begin":
                await self.begin()
            case "chat" if self.sessions:
                await self.chat(self.draw.choice(sorted(self.sessions)))
            case "end" if self.sessions:
                name = self.sessions.pop()
                status, _ = await self.ask("DELETE", f"/sessions/{name}")
                assert status == 200
            case "restart gateway":
                await self.gateway_stack.aclose()
                await self.start_gateway()
                _, answer = await self.ask("GET", "/server_info")
                weights = answer["weights"]
                assert (weights and (weights["lease"], weights["version"])) == self.wanted
            case "probe":
                await asyncio.sleep(0.03)
        status, answer = await self.ask("GET", "/sessions")
        assert status == 200 and set(answer["sessions"]) == self.sessions

    async def want(self):
        self.wanted = self.lease, self.version
        await self.tell(*self.wanted)

    async def tell(self, lease, version):
        weights = {"lease": lease, "version": version, "checksum": f"{lease}-{version}"}
        status, answer = await self.ask("POST", "/weights", weights)
        assert status == 200
        assert (answer["lease"], answer["version"]) == self.wanted

    async def begin(self):
        name, self.names = f"s{self.names}", self.names + 1
        status, _ = await self.ask("POST", "/sessions", {"id": name, "seed": self.names})
        assert status in (200, 502)
        if status == 200:
            self.sessions.add(name)
        return status == 200 and name

    async def chat(self, name):
        lowest = self.wanted[1] if self.wanted else 0
        status, _ = await self.ask("POST", f"/sessions/{name}/v1/chat/completions", CHAT)
        assert status in (200, 502)
        if status == 200:
            self.answers += 1
            assert self.wanted is None or self.served[-1] == self.wanted[0]
            url = f"{self.url}/sessions/{name}/records"
            async with aiohttp.ClientSession() as client, client.get(url) as response:
                versions = decode_records(await response.read())[-1].weight_version
            assert versions[versions >= 0].min() >= lowest
        return status == 200

    async def settle(self):
        """All engines run and have the weights of the trainer: everything is answered."""
        for engine in self.engines:
            engine.take(self.lease, self.version)
            engine.paused = False
        if self.wanted != (self.lease, self.version):
            await self.want()
        async with asyncio.timeout(10):
            while not (name := await self.begin()):
                await asyncio.sleep(0.01)
            for session in (name, *sorted(self.sessions)):
                while not await self.chat(session):
                    await asyncio.sleep(0.01)
            for session in sorted(self.sessions):
                assert (await self.ask("DELETE", f"/sessions/{session}"))[0] == 200
        _, answer = await self.ask("GET", "/server_info")
        assert answer["sessions"] == answer["active"] == 0
        assert not any(answer["loads"].values())


async def serving(stack, server):
    """The URL of a server that listens in this loop until the stack ends."""
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    [(host, port)] = runner.addresses
    return f"http://{host}:{port}"


def play(seed, count, folder):
    orders = Orders(seed, folder)
    asyncio.run(orders.run(count))
    return orders.answers


@pytest.mark.parametrize("seed", range(4))
def test_every_order_comes_to_an_end(tmp_path, seed):
    assert play(seed, 150, tmp_path) > 10


@pytest.mark.slow
def test_many_orders_come_to_an_end(tmp_path):
    assert sum(play(seed, 60, tmp_path / str(seed)) for seed in range(100, 300)) > 1000
