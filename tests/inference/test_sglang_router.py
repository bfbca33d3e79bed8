"""Tests sglang-router in front of the server, if it is installed (`pip install sglang-router`)."""

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest

from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.text.tokenizer import Tokenizer
from tests.mesh.test_engine_mesh import AXES, CFG, engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"
    ),
]
REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def router(url, *options):
    """Runs a router and yields its address once it knows a server."""
    ports = {"--port": free_port(), "--prometheus-port": free_port()}
    options = (*options, *(str(word) for pair in ports.items() for word in pair))
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--worker-urls", url, *options])
    address = f"http://127.0.0.1:{ports['--port']}"
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(f"{address}/v1/models", timeout=5) as answer:
                    if json.load(answer)["data"]:
                        break
            except (urllib.error.URLError, ValueError):
                assert process.poll() is None
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def routed(server):
    with router(server.url) as address:
        yield address


def generate(url, ids, **headers):
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    headers = {"Content-Type": "application/json", **headers}
    data = json.dumps(body | {"return_logprob": True}).encode()
    request = urllib.request.Request(f"{url}/generate", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_routes_chats_streams_and_ids(routed, server):
    request_fields = REQUEST | {"temperature": 0, "logprobs": True}
    with (
        openai.OpenAI(base_url=f"{routed}/v1", api_key="x") as through,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as direct,
    ):
        assert [served_model.id for served_model in through.models.list().data] == ["tiny"]
        routed_choice, direct_choice = (
            c.chat.completions.create(**request_fields).choices[0] for c in (through, direct)
        )
        chunks = list(through.chat.completions.create(**request_fields, stream=True))
    assert routed_choice == direct_choice and routed_choice.finish_reason == "length"
    reasoning = [getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks]
    assert "".join(reasoning) == routed_choice.message.reasoning_content
    got = generate(routed, [5, 6, 7])
    assert len(got["output_ids"]) == len(got["meta_info"]["output_token_logprobs"]) == 3


def test_routes_to_ranks_of_server():
    """The router reads `dp_size` and adds `data_parallel_rank` to every body."""
    rank_engine = engine(make_mesh(AXES), num_pages=100)
    ids = np.random.default_rng(0).integers(0, CFG.vocab_size, (8, 20)).tolist()
    with Server(rank_engine, Tokenizer.load("bytes"), ServerConfig(port=0)).running() as url:
        with router(url, "--dp-aware", "--policy", "manual") as routed:
            for turn in range(2):
                for session, prompt in enumerate(ids):
                    reply = generate(routed, prompt, **{"X-SMG-Routing-Key": f"session {session}"})
                    assert reply["meta_info"]["cached_tokens"] == 16 * turn
            # Another session finds the prompt cached only if it shares the rank of a session that sent it.
            cached = [
                generate(routed, ids[0], **{"X-SMG-Routing-Key": f"other {other}"})["meta_info"]
                for other in range(16)
            ]
    assert 1 <= [meta_info["cached_tokens"] for meta_info in cached].count(0) <= 3
