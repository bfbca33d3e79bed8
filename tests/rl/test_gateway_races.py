"""Concurrent requests of one session: an ended session keeps nothing, no sample repeats, and no rank counts it."""

import asyncio
import collections
import contextlib
import random

import aiohttp
import pytest

from glm5_jax.rl.rollouts.record_codec import decode_records
from glm5_jax.rl.rollouts.sessions import SessionConfig
from glm5_jax.runtime.http_server import ApiError
from tests.rl.fleet import Engine, body_of, gateway

QUESTION, MORE = ({"role": "user", "content": text} for text in ("2*3?", "And?"))


class BlockingEngine(Engine):
    """Engine that answers when it is released.

    Attributes:
      seeds: seeds of the requests, in their order.
      is_blocked: whether replies wait.
      fails: whether requests fail.
      num_disconnects: number of requests whose client disconnected.
    """

    def __init__(self):
        super().__init__(delay=0)
        self.seeds, self.is_blocked, self.fails, self.num_disconnects = [], False, False, 0

    async def _generate(self, request):
        sampling_params = (await request.json())["sampling_params"]
        self.seeds.append(sampling_params["sampling_seed"])
        try:
            while self.is_blocked:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_disconnects += 1
            raise
        if self.fails:
            raise ApiError("the engine has failed", 500)
        return await super()._generate(request)


@pytest.fixture(scope="module")
def engines():
    with contextlib.ExitStack() as stack:
        pair = [BlockingEngine(), BlockingEngine()]
        for server in pair:
            server.url = stack.enter_context(server.running())
        yield pair


@pytest.fixture
def engine(engines):
    """Returns the first of two engines, after a reset of both."""
    for server in engines:
        server.seeds, server.is_blocked, server.fails, server.num_disconnects = [], False, False, 0
    return engines[0]


class Agent:
    """Client of a gateway, with a session named s."""

    def __init__(self, client, url):
        self.client, self.url = client, url

    async def request(self, method, path, body=None):
        """Returns (status, body) of a request."""
        async with self.client.request(method, self.url + path, json=body) as response:
            return response.status, await body_of(response)

    async def begin(self, name="s"):
        """Opens a session."""
        return await self.request("POST", "/sessions", {"id": name, "seed": 7})

    def chat(self, *messages, name="s"):
        """Starts a chat, and returns its task."""
        path, body = f"/sessions/{name}/v1/chat/completions", {"messages": messages}
        return asyncio.create_task(self.request("POST", path, body))

    async def records(self):
        """Returns the records of the session."""
        status, content = await self.request("GET", "/sessions/s/records")
        assert status == 200
        return decode_records(content)

    async def info(self):
        """Returns the status of the gateway."""
        return (await self.request("GET", "/server_info"))[1]

    async def idle(self):
        """Waits until no request is active, and returns (number of sessions, sum of loads)."""
        while (status := await self.info())["active"]:
            await asyncio.sleep(0.005)
        return status["sessions"], sum(status["loads"].values())


def run(url, work):
    """Returns the result of work(agent)."""

    async def with_agent():
        async with aiohttp.ClientSession() as client, asyncio.timeout(30):
            return await work(Agent(client, url))

    return asyncio.run(with_agent())


async def until(condition):
    """Waits until a condition is true."""
    while not condition():
        await asyncio.sleep(0.005)


def message(body):
    """Returns the message of a chat response."""
    return body["choices"][0]["message"]


def num_trained_tokens(records):
    """Returns the number of tokens to train on."""
    return sum(record.loss_mask.sum() for record in records)


def is_gone(response):
    """Returns whether a response says that the session was ended."""
    status, body = response
    return status == 404 and "'s' was ended meanwhile" in body["error"]["message"]


@pytest.mark.parametrize("reopens", [False, True])
def test_session_that_ends_during_reply_discards_it(engine, tmp_path, reopens):
    """reopens: whether a session of the same name starts before the reply arrives."""

    async def work(agent):
        await agent.begin()
        _, first = await agent.chat(QUESTION)
        engine.is_blocked = True
        pending = agent.chat(QUESTION, message(first), MORE)
        await until(lambda: len(engine.seeds) == 2)
        assert (await agent.request("DELETE", "/sessions/s"))[0] == 200
        assert (await agent.request("DELETE", "/sessions/s"))[0] == 404
        if reopens:
            assert (await agent.begin())[0] == 200
        engine.is_blocked = False
        assert is_gone(await pending)
        assert await agent.idle() == (reopens, reopens)
        if reopens:
            assert await agent.records() == ()
            assert (await agent.chat(QUESTION))[0] == 200
            await agent.request("DELETE", "/sessions/s")
        assert not list(tmp_path.glob("*.jsonl"))

    with gateway(engine.url, journal=str(tmp_path)) as url:
        run(url, work)


def test_cancels_engine_requests_of_ended_session(engine):
    """The engine blocks until the gateway disconnects: neither agent nor engine waits for the other."""

    async def work(agent):
        for name in ("s", "other"):
            await agent.begin(name)
        engine.is_blocked = True
        pending = [agent.chat(QUESTION) for _ in range(2)]
        other_pending = agent.chat(QUESTION, name="other")
        await until(lambda: len(engine.seeds) == 3)
        await agent.request("DELETE", "/sessions/s")
        assert all(map(is_gone, await asyncio.gather(*pending)))
        await until(lambda: engine.num_disconnects == 2)
        engine.is_blocked = False
        assert (await other_pending)[0] == 200 and engine.num_disconnects == 2
        assert await agent.idle() == (1, 1)

    with gateway(engine.url) as url:
        run(url, work)


def test_session_that_ends_during_engine_failure_is_not_moved(engine, engines):
    async def work(agent):
        await agent.begin()
        [rank] = [url for url, load in (await agent.info())["loads"].items() if load]
        [first, other] = sorted(engines, key=lambda server: server.url != rank)
        first.is_blocked = first.fails = True
        pending = agent.chat(QUESTION)
        await until(lambda: first.seeds)
        await agent.request("DELETE", "/sessions/s")
        first.is_blocked = False
        assert is_gone(await pending)
        assert not other.seeds and await agent.idle() == (0, 0)

    with gateway(",".join(server.url for server in engines)) as url:
        run(url, work)


def test_session_that_ends_during_upload_is_not_placed_again(engine):
    async def work(agent):
        await agent.begin()
        has_started, may_end = asyncio.Event(), asyncio.Event()

        async def body():
            yield b'{"messages": [{"role": "user", '
            has_started.set()
            await may_end.wait()
            yield b'"content": "2*3?"}]}'

        path = f"{agent.url}/sessions/s/v1/chat/completions"
        pending = asyncio.create_task(agent.client.post(path, data=body()))
        await has_started.wait()
        await asyncio.sleep(0.1)  # the gateway has begun to read it
        await agent.request("DELETE", "/sessions/s")
        may_end.set()
        assert (await pending).status == 404
        assert await agent.idle() == (0, 0) and not engine.seeds

    with gateway(engine.url) as url:
        run(url, work)


def test_concurrent_equal_prompts_have_different_seeds(engine):
    async def work(agent):
        await agent.begin()
        engine.is_blocked = True
        chats = [agent.chat(QUESTION) for _ in range(3)]
        await until(lambda: len(engine.seeds) == 3)
        engine.is_blocked = False
        replies = [body for _, body in await asyncio.gather(*chats)]
        assert len(set(engine.seeds)) == 3
        assert len({message(reply)["content"] for reply in replies}) == 3
        assert {reply["id"] for reply in replies} == {"s-0", "s-1", "s-2"}
        _, status = await agent.request("GET", "/sessions/s")
        assert status["kinds"] == ["clean", "fork", "fork"]
        records = await agent.records()
        assert len(records) == 3 and num_trained_tokens(records) == sum(status["tokens"])
        # Each branch continues separately.
        for reply in replies:
            assert (await agent.chat(QUESTION, message(reply), MORE))[0] == 200
        records = await agent.records()
        assert len(records) == 3 and num_trained_tokens(records) == 2 * sum(status["tokens"])
        await agent.chat(QUESTION)
        assert len(set(engine.seeds)) == 7

    with gateway(engine.url) as url:
        run(url, work)


@pytest.mark.parametrize("is_answered", [False, True])
def test_retry_of_failed_request_keeps_its_seed(engine, is_answered):
    """The first of two concurrent requests fails. is_answered: whether the second is done before the retry."""

    async def work(agent):
        await agent.begin()
        engine.is_blocked = True
        first = agent.chat(QUESTION)
        await until(lambda: len(engine.seeds) == 1)
        second = agent.chat(QUESTION)
        await until(lambda: len(engine.seeds) == 2)
        first.cancel()
        while (await agent.info())["active"] > 1:
            await asyncio.sleep(0.005)
        if is_answered:
            engine.is_blocked = False
            await second
        retry = agent.chat(QUESTION)
        await until(lambda: len(engine.seeds) == 3)
        engine.is_blocked = False
        (_, second_reply), (_, retry_reply) = await asyncio.gather(second, retry)
        assert engine.seeds[0] == engine.seeds[2] != engine.seeds[1]
        assert message(second_reply) != message(retry_reply)

    with gateway(engine.url) as url:
        run(url, work)


def test_concurrent_requests_count_towards_max_turns(engine):
    async def work(agent):
        await agent.begin()
        engine.is_blocked = True
        chats = [agent.chat(QUESTION) for _ in range(4)]
        await until(lambda: sum(chat.done() for chat in chats) == 2)
        engine.is_blocked = False
        assert sorted(status for status, _ in await asyncio.gather(*chats)) == [200, 200, 429, 429]
        assert (await agent.request("GET", "/sessions/s"))[1]["turns"] == 2

    with gateway(engine.url, session=SessionConfig(max_turns=2)) as url:
        run(url, work)


def test_concurrent_agents_leave_no_sessions(engine, tmp_path):
    counts = collections.Counter()

    async def act(agent, rng):
        for _ in range(25):
            name = rng.choice("abc")
            action = rng.choice(("begin", "chat", "chat", "end"))
            if action == "begin":
                response = await agent.begin(name)
            elif action == "chat":
                response = await agent.chat(QUESTION, name=name)
            else:
                response = await agent.request("DELETE", f"/sessions/{name}")
            counts[action, response[0]] += 1

    async def work(agent):
        await asyncio.gather(*(act(agent, random.Random(i)) for i in range(12)))
        for name in "abc":
            await agent.request("DELETE", f"/sessions/{name}")
        assert await agent.idle() == (0, 0)

    engine.delay = 0.01
    with gateway(engine.url, journal=str(tmp_path)) as url:
        run(url, work)
    engine.delay = 0
    assert not list(tmp_path.glob("*.jsonl"))
    expected = {"begin": (200, 409), "chat": (200, 404), "end": (200, 404)}
    assert set(counts) == {
        (action, status) for action, statuses in expected.items() for status in statuses
    }
