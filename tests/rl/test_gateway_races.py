"""What is asked of a session while it is asked something else: nothing is kept of what has ended, nothing is drawn twice,
and no rank's load counts a session that is gone."""

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


class Held(Engine):
    """Answers once it may. seeds: that were asked for, in their order; fails: whether it does; left: how often who asked was gone."""

    def __init__(self):
        super().__init__(delay=0)
        self.seeds, self.holds, self.fails, self.left = [], False, False, 0

    async def _generate(self, request):
        said = (await request.json())["sampling_params"]
        self.seeds.append(said["sampling_seed"])
        try:
            while self.holds:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.left += 1
            raise
        if self.fails:
            raise ApiError("it has failed", 500)
        return await super()._generate(request)


@pytest.fixture(scope="module")
def engines():
    with contextlib.ExitStack() as stack:
        made = [Held(), Held()]
        for one in made:
            one.url = stack.enter_context(one.running())
        yield made


@pytest.fixture
def engine(engines):
    for one in engines:
        one.seeds, one.holds, one.fails, one.left = [], False, False, 0
    return engines[0]


class Agent:
    """Of a gateway, with a session s."""

    def __init__(self, client, url):
        self._client, self._url = client, url

    async def ask(self, method, path, body=None):
        """(status, what is said)."""
        async with self._client.request(method, self._url + path, json=body) as response:
            return response.status, await body_of(response)

    async def begin(self, name="s"):
        return await self.ask("POST", "/sessions", {"id": name, "seed": 7})

    def chat(self, *messages, name="s"):
        """A request that is under way."""
        path, body = f"/sessions/{name}/v1/chat/completions", {"messages": messages}
        return asyncio.create_task(self.ask("POST", path, body))

    async def records(self):
        status, content = await self.ask("GET", "/sessions/s/records")
        assert status == 200
        return decode_records(content)

    async def info(self):
        return (await self.ask("GET", "/server_info"))[1]

    async def idle(self):
        """(open sessions, their places) once nothing is under way."""
        while (told := await self.info())["active"]:
            await asyncio.sleep(0.005)
        return told["sessions"], sum(told["loads"].values())


def run(url, work):
    async def inner():
        async with aiohttp.ClientSession() as client, asyncio.timeout(30):
            return await work(Agent(client, url))

    return asyncio.run(inner())


async def until(holds):
    while not holds():
        await asyncio.sleep(0.005)


def message(said):
    return said["choices"][0]["message"]


def trained(records):
    return sum(record.loss_mask.sum() for record in records)


def is_gone(answer):
    status, said = answer
    return status == 404 and "'s' was ended meanwhile" in said["error"]["message"]


@pytest.mark.parametrize("anew", [False, True])
def test_a_session_that_ends_while_it_is_answered_keeps_nothing_of_it(engine, tmp_path, anew):
    """anew: whether one of its name has begun before the answer comes, which then has no part in it."""

    async def work(agent):
        await agent.begin()
        _, said = await agent.chat(QUESTION)
        engine.holds = True
        late = agent.chat(QUESTION, message(said), MORE)
        await until(lambda: len(engine.seeds) == 2)
        assert (await agent.ask("DELETE", "/sessions/s"))[0] == 200
        assert (await agent.ask("DELETE", "/sessions/s"))[0] == 404
        if anew:
            assert (await agent.begin())[0] == 200
        engine.holds = False
        assert is_gone(await late)
        assert await agent.idle() == (anew, anew)
        if anew:
            assert await agent.records() == ()
            assert (await agent.chat(QUESTION))[0] == 200
            await agent.ask("DELETE", "/sessions/s")
        assert not list(tmp_path.glob("*.jsonl"))

    with gateway(engine.url, journal=str(tmp_path)) as url:
        run(url, work)


def test_no_engine_goes_on_for_a_session_that_has_ended(engine):
    """It holds until it is left: neither the agent nor the engine has to wait for the other."""

    async def work(agent):
        for name in ("s", "other"):
            await agent.begin(name)
        engine.holds = True
        late = [agent.chat(QUESTION) for _ in range(2)]
        stays = agent.chat(QUESTION, name="other")
        await until(lambda: len(engine.seeds) == 3)
        await agent.ask("DELETE", "/sessions/s")
        assert all(map(is_gone, await asyncio.gather(*late)))
        await until(lambda: engine.left == 2)
        engine.holds = False
        assert (await stays)[0] == 200 and engine.left == 2
        assert await agent.idle() == (1, 1)

    with gateway(engine.url) as url:
        run(url, work)


def test_a_session_that_ends_while_its_engine_fails_goes_to_no_other(engine, engines):
    async def work(agent):
        await agent.begin()
        [rank] = [one for one, load in (await agent.info())["loads"].items() if load]
        [first, other] = sorted(engines, key=lambda one: one.url != rank)
        first.holds = first.fails = True
        late = agent.chat(QUESTION)
        await until(lambda: first.seeds)
        await agent.ask("DELETE", "/sessions/s")
        first.holds = False
        assert is_gone(await late)
        assert not other.seeds and await agent.idle() == (0, 0)

    with gateway(",".join(one.url for one in engines)) as url:
        run(url, work)


def test_a_session_that_ends_while_its_request_comes_in_is_not_placed_again(engine):
    async def work(agent):
        await agent.begin()
        has_begun, may_end = asyncio.Event(), asyncio.Event()

        async def body():
            yield b'{"messages": [{"role": "user", '
            has_begun.set()
            await may_end.wait()
            yield b'"content": "2*3?"}]}'

        path = f"{agent._url}/sessions/s/v1/chat/completions"
        late = asyncio.create_task(agent._client.post(path, data=body()))
        await has_begun.wait()
        await asyncio.sleep(0.1)  # the gateway has begun to read it
        await agent.ask("DELETE", "/sessions/s")
        may_end.set()
        assert (await late).status == 404
        assert await agent.idle() == (0, 0) and not engine.seeds

    with gateway(engine.url) as url:
        run(url, work)


def test_equal_prompts_at_once_are_answered_each_with_a_seed_of_its_own(engine):
    async def work(agent):
        await agent.begin()
        engine.holds = True
        asked = [agent.chat(QUESTION) for _ in range(3)]
        await until(lambda: len(engine.seeds) == 3)
        engine.holds = False
        said = [answer for _, answer in await asyncio.gather(*asked)]
        assert len(set(engine.seeds)) == 3
        assert len({message(one)["content"] for one in said}) == 3
        assert {one["id"] for one in said} == {"s-0", "s-1", "s-2"}
        _, told = await agent.ask("GET", "/sessions/s")
        assert told["kinds"] == ["clean", "fork", "fork"]
        records = await agent.records()
        assert len(records) == 3 and trained(records) == sum(told["tokens"])
        # Each goes on by itself.
        for one in said:
            assert (await agent.chat(QUESTION, message(one), MORE))[0] == 200
        records = await agent.records()
        assert len(records) == 3 and trained(records) == 2 * sum(told["tokens"])
        await agent.chat(QUESTION)
        assert len(set(engine.seeds)) == 7

    with gateway(engine.url) as url:
        run(url, work)


@pytest.mark.parametrize("answered", [False, True])
def test_who_asks_again_for_what_failed_draws_that_and_not_what_another_has(engine, answered):
    """Of two that were asked for at once, the first fails; answered: whether the second is there when it is asked for
    again."""

    async def work(agent):
        await agent.begin()
        engine.holds = True
        first = agent.chat(QUESTION)
        await until(lambda: len(engine.seeds) == 1)
        second = agent.chat(QUESTION)
        await until(lambda: len(engine.seeds) == 2)
        first.cancel()
        while (await agent.info())["active"] > 1:
            await asyncio.sleep(0.005)
        if answered:
            engine.holds = False
            await second
        again = agent.chat(QUESTION)
        await until(lambda: len(engine.seeds) == 3)
        engine.holds = False
        (_, one), (_, other) = await asyncio.gather(second, again)
        assert engine.seeds[0] == engine.seeds[2] != engine.seeds[1]
        assert message(one) != message(other)

    with gateway(engine.url) as url:
        run(url, work)


def test_what_is_asked_at_once_counts_for_the_most_replies(engine):
    async def work(agent):
        await agent.begin()
        engine.holds = True
        asked = [agent.chat(QUESTION) for _ in range(4)]
        await until(lambda: sum(one.done() for one in asked) == 2)
        engine.holds = False
        assert sorted(status for status, _ in await asyncio.gather(*asked)) == [200, 200, 429, 429]
        assert (await agent.ask("GET", "/sessions/s"))[1]["turns"] == 2

    with gateway(engine.url, session=SessionConfig(max_turns=2)) as url:
        run(url, work)


def test_sessions_that_begin_and_end_under_many_hands_leave_nothing(engine, tmp_path):
    seen = collections.Counter()

    async def one(agent, draw):
        for _ in range(25):
            name = draw.choice("abc")
            what = draw.choice(("begin", "chat", "chat", "end"))
            if what == "begin":
                answer = await agent.begin(name)
            elif what == "chat":
                answer = await agent.chat(QUESTION, name=name)
            else:
                answer = await agent.ask("DELETE", f"/sessions/{name}")
            seen[what, answer[0]] += 1

    async def work(agent):
        await asyncio.gather(*(one(agent, random.Random(i)) for i in range(12)))
        for name in "abc":
            await agent.ask("DELETE", f"/sessions/{name}")
        assert await agent.idle() == (0, 0)

    engine.delay = 0.01
    with gateway(engine.url, journal=str(tmp_path)) as url:
        run(url, work)
    engine.delay = 0
    assert not list(tmp_path.glob("*.jsonl"))
    expected = {"begin": (200, 409), "chat": (200, 404), "end": (200, 404)}
    assert set(seen) == {(what, status) for what, both in expected.items() for status in both}
