"""Engine responses that are no replies: the gateway removes the engine, others continue, and no service is blamed."""

import asyncio
import json
import math

import pytest
from aiohttp import web

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.rollouts.engine_answers import read_reply
from tests.rl.fleet import Engine, gateway, until

META = {
    "finish_reason": {"type": "stop"},
    "output_token_logprobs": [[-0.5, 15, None], [-1, 263, None]],
    "weight_versions": [0, 0],
    "cached_tokens": 0,
}
REPLY = {"output_ids": [15, 263], "meta_info": META}
MESSAGES = json.dumps({"messages": [{"role": "user", "content": "?"}], "max_tokens": 16}).encode()
INVALID_REPLIES = [
    None,
    [],
    "text",
    {},
    {"output_ids": [15, 263]},
    {"meta_info": META},
    REPLY | {"meta_info": None},
    REPLY | {"output_ids": []},
    REPLY | {"output_ids": ["15", "263"]},
    REPLY | {"output_ids": [15]},
    REPLY | {"output_ids": [-1, 263]},
    REPLY | {"output_ids": [True, 263]},
    REPLY | {"meta_info": META | {"finish_reason": None}},
    REPLY | {"meta_info": META | {"finish_reason": {"type": 3}}},
    REPLY | {"meta_info": META | {"weight_versions": [0, "0"]}},
    REPLY | {"meta_info": META | {"weight_versions": [0, 2**31]}},
    REPLY | {"meta_info": META | {"weight_versions": [0, -1]}},
    REPLY
    | {"meta_info": META | {"output_token_logprobs": [[-0.5, 15, None], [math.nan, 263, None]]}},
    REPLY
    | {"meta_info": META | {"output_token_logprobs": [[-math.inf, 15, None], [-1, 263, None]]}},
    REPLY | {"meta_info": META | {"weight_versions": [0, 0.5]}},
    REPLY | {"meta_info": META | {"output_token_logprobs": [[-0.5], [None]]}},
    REPLY | {"meta_info": META | {"output_token_logprobs": [-0.5, -1]}},
    REPLY | {"meta_info": META | {"cached_tokens": None}},
]


DEEP_JSON = b"[" * 100_000 + b"]" * 100_000


def json_answer(body, status=200):
    """Returns a response with a JSON body; bytes are sent as they are."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return web.Response(body=text, status=status, content_type="application/json")


class FaultyEngine(Engine):
    """Engine that answers with `status` and `body`.

    Attributes:
      body: body of replies; None, with status 200: those of `Engine`.
      weights: body that reports the weights; None: that of `Engine`.
    """

    status, body, weights = 200, None, None

    async def _generate(self, request):
        if self.body is None and self.status == 200:
            return await super()._generate(request)
        return json_answer(self.body, self.status)

    async def _weights(self, request):
        if self.weights is None:
            return await super()._weights(request)
        return json_answer(self.weights)


def test_reads_reply_of_engine():
    reply = read_reply(REPLY)
    assert reply.output_ids == [15, 263] and reply.logprobs == [-0.5, -1]
    aborted = META | {"finish_reason": {"type": "abort"}, "weight_versions": []}
    assert read_reply({"output_ids": [], "meta_info": aborted}) is None


@pytest.mark.parametrize("answer", INVALID_REPLIES)
def test_rejects_answer_that_is_no_reply(answer):
    with pytest.raises(ValueError, match="the answer is no reply"):
        read_reply(answer)


@pytest.fixture
def engine_pair(stack):
    """Returns two engines by URL, and the URL of the gateway in front of them."""
    engines = [FaultyEngine(delay=0), FaultyEngine(delay=0)]
    urls = [stack.enter_context(engine.running()) for engine in engines]
    url = stack.enter_context(gateway(",".join(urls), probe_interval_s=0.05))
    return dict(zip(urls, engines)), url


def start_session(url, name):
    """Opens a session, and returns the rank where it is placed."""
    client = Client(url)
    client.open("/sessions", json.dumps({"id": name}).encode()).close()
    with client.open(f"/sessions/{name}") as response:
        return json.load(response)["rank"]


def chat(url, name):
    """Returns the HTTP status of a chat in a session."""
    try:
        Client(url).open(f"/sessions/{name}/v1/chat/completions", MESSAGES).close()
    except ServerError as error:
        return error.status
    return 200


def loads(url):
    """Returns the number of sessions of each engine at the gateway."""
    with Client(url).open("/server_info") as response:
        return json.load(response)["loads"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, []),
        (200, {"output_ids": [15]}),
        (200, DEEP_JSON),
        (401, {}),
        (404, None),
        (405, []),
        (500, "text"),
    ],
)
def test_continues_at_another_engine(engine_pair, status, body):
    engines, url = engine_pair
    engine = engines[start_session(url, "s")]
    engine.status, engine.body = status, body
    assert chat(url, "s") == 200


def test_passes_overload_of_engine_to_agent(engine_pair):
    engines, url = engine_pair
    engine = engines[start_session(url, "s")]
    engine.status, engine.body = 429, {"error": {"message": "1024 replies are under way"}}
    # Status 400 would count as a fault of the policy.
    assert chat(url, "s") == 429
    assert len(loads(url)) == 2
    engine.status, engine.body = 400, {"error": {"message": "too many tokens"}}
    assert chat(url, "s") == 400


@pytest.mark.parametrize(
    "weights", [[], "text", {}, {"version": None}, {"version": "3"}, 5, DEEP_JSON]
)
def test_readmits_engines_despite_invalid_weights_report(engine_pair, weights):
    """An engine with an invalid report of its weights stays out, and does not delay the return of others."""
    engines, url = engine_pair
    first, second = engines.values()
    for engine in engines.values():
        engine.version = 1
    Client(url).open("/weights", b'{"lease": 1, "version": 2}').close()
    assert not loads(url)
    first.weights, second.version = weights, 2
    until(lambda: len(loads(url)) == 1)
    first.weights, first.version = None, 2
    until(lambda: len(loads(url)) == 2)


class HangingEngine(Engine):
    """Engine that never ends a reply.

    Attributes:
      responds: whether it answers probes.
    """

    responds = True

    async def _generate(self, request):
        await asyncio.Event().wait()

    async def _health(self, request):
        if not self.responds:
            await asyncio.Event().wait()
        return await super()._health(request)


@pytest.mark.parametrize("responds", [True, False])
def test_removes_engine_after_late_reply_only_if_it_does_not_respond(stack, responds):
    engine = HangingEngine()
    engine.responds = responds
    engine_url = stack.enter_context(engine.running())
    probe_s = 10.0 if responds else 0.2
    url = stack.enter_context(gateway(engine_url, reply_timeout_s=0.05, probe_interval_s=probe_s))
    start_session(url, "s")
    assert chat(url, "s") == (504 if responds else 502)
    assert loads(url) == ({engine_url: 1} if responds else {})
