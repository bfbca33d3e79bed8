"""The gateway with real engines: the sampled tokens are the trained tokens, also after failures."""

import asyncio
import contextlib
import random

import aiohttp
import jax
import numpy as np
import openai
import pytest
from flax import nnx

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.rl.rollouts.gateway import Gateway, GatewayConfig
from glm5_jax.rl.rollouts.record_codec import decode_records
from glm5_jax.rl.rollouts.router import RouterConfig, SessionRouter, parse_rank
from glm5_jax.rl.rollouts.sessions import SessionConfig
from glm5_jax.text.tokenizer import Tokenizer
from tests.model.small import one_layer
from tests.rl.fleet import body_of

TOKENIZER = Tokenizer.load("bytes")
CFG = one_layer(vocab_size=292, max_position_embeddings=1024)
PAGE = 8
OPTIONS = dict(page_size=PAGE, num_pages=1000, max_num_seqs=8, prefill_chunk=64, max_length=1024)
QUESTION = {"role": "user", "content": "2*3?"}
MORE = {"role": "user", "content": "And?"}


@pytest.fixture(scope="module")
def params():
    return glm5.params_of(glm5.Glm5(CFG, rngs=nnx.Rngs(0)))


@contextlib.contextmanager
def engine(params, port=0, version=3):
    """Serves an engine, and returns its URL."""
    model = glm5.Glm5(CFG, params=params)
    inference_engine = Engine(model, TOKENIZER, EngineConfig(**OPTIONS), version=version)
    server = Server(inference_engine, TOKENIZER, ServerConfig(port=port, model="tiny"))
    with server.running() as url:
        yield url


@pytest.fixture(scope="module")
def engines(params):
    with engine(params) as one, engine(params) as two:
        yield [one, two]


@contextlib.contextmanager
def gateway(ranks, **options):
    """Runs a gateway, and returns its URL."""
    options = dict(port=0, max_tokens=300, reply_timeout_s=60.0, probe_interval_s=0.1) | options
    with Gateway(TOKENIZER, ranks, GatewayConfig(**options)).running() as url:
        yield url


def run(work, *urls):
    """Returns the result of work(request), where request(method, path, body) returns (status, response)."""

    async def with_request():
        async with aiohttp.ClientSession() as client:

            async def request(method, path, body=None):
                async with client.request(method, path, json=body) as response:
                    return response.status, await body_of(response)

            return await asyncio.wait_for(work(request), 120)

    return asyncio.run(with_request())


def chat(url, turns=3, name="s", seed=7, **fields):
    """Chats for some turns in a session, and returns its replies and records."""

    async def work(request):
        assert await request("POST", f"{url}/sessions", {"id": name, "seed": seed}) == (
            200,
            {"id": name},
        )
        messages, replies = [QUESTION], []
        for _ in range(turns):
            replies.append(await say(request, url, name, messages, **fields))
            messages += [replies[-1], MORE]
        return replies, await records(request, url, name)

    return run(work)


async def say(request, url, name, messages, **fields):
    """Returns the next message of a session."""
    status, response = await request(
        "POST", f"{url}/sessions/{name}/v1/chat/completions", {"messages": messages, **fields}
    )
    assert status == 200, response
    return response["choices"][0]["message"]


async def records(request, url, name):
    status, content = await request("GET", f"{url}/sessions/{name}/records")
    assert status == 200, content
    return list(decode_records(content, group_id="g"))


def logps(params, record):
    """Returns the log-prob of each token after the first, by the trained model; one program serves all lengths."""
    ids = np.zeros((1, OPTIONS["max_length"]), np.int32)
    ids[0, : len(record)] = record.token_ids
    logp = np.asarray(jax.nn.log_softmax(_logits(params, ids)[0]))
    return logp[np.arange(len(record) - 1), record.token_ids[1:]]


@jax.jit
def _logits(params, ids):
    return glm5.forward(params, ids, CFG).logits


def test_records_have_log_probs_of_trainer(engines, params):
    with gateway(engines) as url:
        replies, [record] = chat(url, 2)
    is_trained = record.loss_mask == 1
    assert len(replies) == 2 and record.status == "completed" and record.group_id == "g"
    assert set(record.weight_version[is_trained]) == {3}
    np.testing.assert_allclose(
        record.rollout_logp[is_trained], logps(params, record)[is_trained[1:]], atol=1e-4
    )
    # The text between two replies is that of the chat template, and is not trained on.
    text = TOKENIZER.decode(record.token_ids.tolist(), errors="replace")
    assert text.count("And?") == 1 and text.startswith("[gMASK]<sop><|user|>2*3?<|assistant|>")


@pytest.mark.slow
def test_sessions_continue_after_engine_is_lost(params):
    with engine(params) as remaining:
        with gateway([remaining]) as url:
            undisturbed, _ = chat(url, 2)
        with contextlib.ExitStack() as stack:
            lost = stack.enter_context(engine(params))
            stop = stack.pop_all()
            with gateway([lost, remaining], router=RouterConfig(points=1)) as url:

                async def work(request):
                    names = [f"s{i}" for i in range(20)]
                    for name in names:
                        await request("POST", f"{url}/sessions", {"id": name, "seed": 7})
                    ranks = [
                        (await request("GET", f"{url}/sessions/{session}"))[1]["rank"]
                        for session in names
                    ]
                    name = names[ranks.index(lost)]
                    messages = [QUESTION]
                    first = await say(request, url, name, messages)
                    await asyncio.get_running_loop().run_in_executor(None, stop.close)
                    second = await say(request, url, name, [*messages, first, MORE])
                    _, status = await request("GET", f"{url}/server_info")
                    assert status["loads"] == {remaining: 20}
                    port = int(lost.rpartition(":")[2])
                    with engine(params, port):
                        for _ in range(100):
                            _, status = await request("GET", f"{url}/server_info")
                            if lost in status["loads"]:
                                break
                            await asyncio.sleep(0.05)
                        assert status["loads"] == {remaining: 20, lost: 0}
                    return first, second

                assert run(work) == tuple(undisturbed)


def test_addresses_ranks_of_one_url_by_number(engines):
    with gateway([engines[0]]) as url:
        expected = chat(url, 2)[0]
    with gateway([f"{engines[0]}@0"]) as url:
        assert chat(url, 2)[0] == expected
    with gateway([f"{engines[0]}@1"]) as url:

        async def work(request):
            await request("POST", f"{url}/sessions", {"id": "s"})
            path = f"{url}/sessions/s/v1/chat/completions"
            return await request("POST", path, {"messages": [QUESTION]})

        status, response = run(work)
        assert (
            status == 400
            and "there are 1 data-parallel ranks, numbered from 0" in response["error"]["message"]
        )


@pytest.mark.parametrize(
    "rank, expected",
    [
        ("http://10.0.0.1:8000", ("http://10.0.0.1:8000", None)),
        ("http://10.0.0.1:8000@12", ("http://10.0.0.1:8000", 12)),
        ("http://[::1]:8000@0", ("http://[::1]:8000", 0)),
        ("http://me:key@host:8000", ("http://me:key@host:8000", None)),
        ("http://me:key@host:8000@3", ("http://me:key@host:8000", 3)),
    ],
)
def test_parses_rank_address(rank, expected):
    assert parse_rank(rank) == expected


def test_restarted_gateway_keeps_ranks_of_sessions(engines, tmp_path):
    first, second = engines
    names = [f"k{i}" for i in range(20)]
    name = next(
        candidate
        for candidate in names
        if SessionRouter([first, second]).route(candidate) == second
    )
    with gateway([first], journal=str(tmp_path)) as url:
        [reply], _ = chat(url, 1, name)

    async def work(request):
        await say(request, url, name, [QUESTION, reply, MORE])
        return (await request("GET", f"{url}/sessions/{name}"))[1]

    with gateway([first, second], journal=str(tmp_path)) as url:
        session = run(work)
    assert session["rank"] == first and session["cached_tokens"] > 0


class RandomRouter(SessionRouter):
    """Routes each request to a random rank."""

    rng = random.Random(1)

    def route(self, session):
        return self.rng.choice(sorted(self.loads))


@pytest.mark.slow
def test_sessions_reuse_prefix_unless_routed_at_random(engines, monkeypatch):
    async def talk(request, url, name):
        """Returns (cached tokens, tokens in full pages of earlier turns) of a session's prompts."""
        await request("POST", f"{url}/sessions", {"id": name, "seed": 3})
        messages = [{"role": "user", "content": f"{name} is the number?"}]
        for _ in range(3):
            path = f"{url}/sessions/{name}/v1/chat/completions"
            _, response = await request("POST", path, {"messages": messages})
            [choice] = response["choices"]
            if choice["finish_reason"] == "length":
                break
            messages += [choice["message"], MORE]
        [record] = await records(request, url, name)
        is_trained = record.loss_mask.astype(int)
        # Position of the last token of each reply but the last; that token is only sampled.
        [ends] = np.nonzero(np.diff([*is_trained, 0]) == -1)
        _, response = await request("GET", f"{url}/sessions/{name}")
        return response["cached_tokens"], sum(end // PAGE * PAGE for end in ends[:-1])

    def token_counts(names):
        with gateway(engines) as url:
            counts = run(
                lambda request: asyncio.gather(*(talk(request, url, name) for name in names))
            )
        return tuple(map(sum, zip(*counts)))

    cached, possible = token_counts([f"s{i}" for i in range(100, 103)])
    assert cached >= possible > 500
    monkeypatch.setattr("glm5_jax.rl.rollouts.gateway.SessionRouter", RandomRouter)
    cached, possible = token_counts([f"s{i}" for i in range(200, 203)])
    assert cached < 0.9 * possible > 450


def test_session_may_have_distribution_of_its_own(engines):
    async def replies(request, url, seed, **options):
        body = {"id": f"s{seed}", "seed": seed} | options
        assert (await request("POST", f"{url}/sessions", body))[0] == 200
        return await say(request, url, f"s{seed}", [QUESTION])

    async def work(request):
        greedy = [await replies(request, url, seed, temperature=0) for seed in (1, 2)]
        likeliest = [await replies(request, url, seed, top_p=1e-6) for seed in (3, 4)]
        sampled = [await replies(request, url, seed) for seed in (5, 6)]
        assert greedy[0] == greedy[1] == likeliest[0] == likeliest[1]
        assert sampled[0] != sampled[1]
        body = {"messages": [QUESTION], "temperature": 1}
        path = f"{url}/sessions/s1/v1/chat/completions"
        status, response = await request("POST", path, body)
        assert status == 400 and "all samples of this session have 0" in str(response)

    with gateway(engines) as url:
        run(work)


def test_serves_openai_client(engines):
    tools = [{"type": "function", "function": {"name": "calculate"}}]
    with gateway(engines) as url:
        run(lambda request: request("POST", f"{url}/sessions", {"id": "s", "seed": 7}))
        with openai.OpenAI(
            base_url=f"{url}/sessions/s/v1", api_key="none", max_retries=0
        ) as client:
            completion = client.chat.completions.create(
                model="glm-5", messages=[QUESTION], tools=tools, temperature=1, max_tokens=9
            )
            assert completion.choices[0].finish_reason in ("length", "stop")
            assert completion.usage.completion_tokens <= 9
            with pytest.raises(
                openai.BadRequestError, match="temperature is 0.5; all samples of this session"
            ):
                client.chat.completions.create(model="glm-5", messages=[QUESTION], temperature=0.5)


CHAT = "/sessions/s/v1/chat/completions"
FORCED = {
    "messages": [QUESTION],
    "tools": [{"type": "function", "function": {"name": "look"}}],
    "tool_choice": "required",
}
SINGLE = {"tool_choice": "auto", "parallel_tool_calls": False}
INVALID_REQUESTS = [
    ("GET", "/sessions/none", None, 404, "never begun"),
    ("POST", "/sessions", {"id": "s"}, 409, "already"),
    ("POST", "/sessions", {"id": "../s"}, 400, "letters"),
    ("POST", "/sessions", {"id": "t", "speed": 1}, 400, "speed: no such field"),
    ("POST", "/sessions", {"id": "t", "top_p": 0}, 400, "top_p"),
    ("POST", "/sessions", {"id": "t", "temperature": -1}, 400, "temperature"),
    ("POST", "/sessions", {"id": "t"}, 429, "1 sessions are open"),
    ("POST", CHAT, {"messages": [QUESTION], "stop": "x"}, 400, "take no stop"),
    ("POST", CHAT, {"messages": [QUESTION], "stream": True}, 400, "stream is True"),
    ("POST", CHAT, {"messages": []}, 400, "at least one"),
    ("POST", CHAT, FORCED, 400, "tool_choice is 'required', which constrains the reply"),
    ("POST", CHAT, FORCED | SINGLE, 400, "parallel_tool_calls is False, which constrains"),
    ("POST", CHAT, {"messages": [QUESTION | {"content": "a" * 3000}]}, 400, "engine refuses"),
    ("POST", CHAT, [], 400, "not of type 'object'"),
    ("POST", "/nowhere", None, 404, "DELETE /sessions/"),
]


def test_rejects_invalid_requests(engines):
    async def work(request):
        await request("POST", f"{url}/sessions", {"id": "s"})
        for method, path, body, status, message in INVALID_REQUESTS:
            actual_status, response = await request(method, url + path, body)
            assert actual_status == status and message in response["error"]["message"], (
                path,
                body,
                response,
            )
            assert (await request("GET", f"{url}/sessions/s"))[1]["turns"] == 0

    with gateway(engines, max_sessions=1) as url:
        run(work)


def test_rejects_chat_after_truncated_reply(engines):
    async def work(request):
        await request("POST", f"{url}/sessions", {"id": "s", "seed": 7})
        reply = await say(request, url, "s", [QUESTION], max_tokens=3)
        path, body = f"{url}/sessions/s/v1/chat/completions", {"messages": [QUESTION, reply, MORE]}
        status, response = await request("POST", path, body)
        assert status == 409 and "raise max_tokens" in response["error"]["message"]

    with gateway(engines, session=SessionConfig(max_turns=5)) as url:
        run(work)


def test_refuses_chats_without_engine():
    async def work(request):
        await request("POST", f"{url}/sessions", {"id": "s"})
        path = f"{url}/sessions/s/v1/chat/completions"
        status, response = await request("POST", path, {"messages": [QUESTION]})
        assert status == 502 and "no engine" in response["error"]["message"]
        assert await request("GET", f"{url}/health") == (200, {"status": "no engine"})
        assert (await request("GET", f"{url}/sessions/s"))[1]["turns"] == 0

    with gateway(["http://127.0.0.1:9"]) as url:
        run(work)
    with pytest.raises(ValueError, match="'127.0.0.1:9' is no URL"):
        Gateway(TOKENIZER, ["127.0.0.1:9"])
    with pytest.raises(ValueError, match="max_tries is 0"):
        GatewayConfig(max_tries=0)
