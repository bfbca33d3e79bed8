"""Answers of engines that are no replies: the engine is lost, others go on, and no service or policy is blamed."""

import json

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
NO_REPLIES = [
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
    REPLY | {"meta_info": META | {"weight_versions": [0, 0.5]}},
    REPLY | {"meta_info": META | {"output_token_logprobs": [[-0.5], [None]]}},
    REPLY | {"meta_info": META | {"output_token_logprobs": [-0.5, -1]}},
    REPLY | {"meta_info": META | {"cached_tokens": None}},
]


DEEP = b"[" * 100_000 + b"]" * 100_000


def answer(body, status=200):
    """An answer of JSON; bytes are sent as they are."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return web.Response(body=text, status=status, content_type="application/json")


class Odd(Engine):
    """Answers with `status` and `body`; None: as it should. held: what it says of its weights; None: the truth."""

    status, body, held = 200, None, None

    async def _generate(self, request):
        if self.body is None and self.status == 200:
            return await super()._generate(request)
        return answer(self.body, self.status)

    async def _held(self, request):
        if self.held is None:
            return await super()._held(request)
        return answer(self.held)


def test_reads_reply_of_engine():
    reply = read_reply(REPLY)
    assert reply.output_ids == [15, 263] and reply.logprobs == [-0.5, -1]
    aborted = META | {"finish_reason": {"type": "abort"}, "weight_versions": []}
    assert read_reply({"output_ids": [], "meta_info": aborted}) is None


@pytest.mark.parametrize("answer", NO_REPLIES)
def test_rejects_answer_that_is_no_reply(answer):
    with pytest.raises(ValueError, match="the answer is no reply"):
        read_reply(answer)


@pytest.fixture
def pair(stack):
    """Two engines and the gateway in front of them."""
    engines = [Odd(delay=0), Odd(delay=0)]
    urls = [stack.enter_context(engine.running()) for engine in engines]
    url = stack.enter_context(gateway(",".join(urls), probe_interval_s=0.05))
    return dict(zip(urls, engines)), url


def begun(url, name):
    """The engine that a new session is placed at."""
    client = Client(url)
    client.open("/sessions", json.dumps({"id": name}).encode()).close()
    with client.open(f"/sessions/{name}") as answer:
        return json.load(answer)["rank"]


def chat(url, name):
    """HTTP's status of a chat in a session."""
    try:
        Client(url).open(f"/sessions/{name}/v1/chat/completions", MESSAGES).close()
    except ServerError as error:
        return error.status
    return 200


def loads(url):
    with Client(url).open("/server_info") as answer:
        return json.load(answer)["loads"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, []),
        (200, {"output_ids": [15]}),
        (200, DEEP),
        (401, {}),
        (404, None),
        (405, []),
        (500, "text"),
    ],
)
def test_goes_on_at_another_engine(pair, status, body):
    engines, url = pair
    engine = engines[begun(url, "s")]
    engine.status, engine.body = status, body
    assert chat(url, "s") == 200


def test_passes_overload_of_engine_on_as_overload(pair):
    engines, url = pair
    engine = engines[begun(url, "s")]
    engine.status, engine.body = 429, {"error": {"message": "1024 replies are under way"}}
    # An answer of 400 would count as the policy's fault.
    assert chat(url, "s") == 429
    assert len(loads(url)) == 2
    engine.status, engine.body = 400, {"error": {"message": "too many tokens"}}
    assert chat(url, "s") == 400


@pytest.mark.parametrize("held", [[], "text", {}, {"version": None}, {"version": "3"}, 5, DEEP])
def test_takes_other_engines_in_again(pair, held):
    """One that says nonsense of its weights stays lost; that keeps no other from coming back."""
    engines, url = pair
    first, second = engines.values()
    for engine in engines.values():
        engine.version = 1
    Client(url).open("/weights", b'{"lease": 1, "version": 2}').close()
    assert not loads(url)
    first.held, second.version = held, 2
    until(lambda: len(loads(url)) == 1)
    first.held, first.version = None, 2
    until(lambda: len(loads(url)) == 2)
