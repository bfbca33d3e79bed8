"""sglang-router in front of the server, where somebody has installed it (`pip install sglang-router`)."""

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
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def router(url, *options):
    """The address of one, once it knows a server."""
    ports = {"--port": free_port(), "--prometheus-port": free_port()}
    options = (*options, *(str(word) for pair in ports.items() for word in pair))
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--worker-urls", url, *options])
    found = f"http://127.0.0.1:{ports['--port']}"
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(f"{found}/v1/models", timeout=5) as answer:
                    if json.load(answer)["data"]:
                        break
            except (urllib.error.URLError, ValueError):
                assert process.poll() is None
            time.sleep(0.5)
        yield found
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def routed(server):
    with router(server.url) as found:
        yield found


def generate(url, ids, **headers):
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    headers = {"Content-Type": "application/json", **headers}
    data = json.dumps(body | {"return_logprob": True}).encode()
    request = urllib.request.Request(f"{url}/generate", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_chats_stream_and_ids_pass_through(routed, server):
    asked = ASKED | {"temperature": 0, "logprobs": True}
    with (
        openai.OpenAI(base_url=f"{routed}/v1", api_key="x") as through,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as direct,
    ):
        assert [own.id for own in through.models.list().data] == ["tiny"]
        one, other = (c.chat.completions.create(**asked).choices[0] for c in (through, direct))
        chunks = list(through.chat.completions.create(**asked, stream=True))
    assert one == other and one.finish_reason == "length"
    said = [getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks]
    assert "".join(said) == one.message.reasoning_content
    got = generate(routed, [5, 6, 7])
    assert len(got["output_ids"]) == len(got["meta_info"]["output_token_logprobs"]) == 3


def test_ranks_inside_a_server_are_routed_to_by_number():
    """It takes their number from `dp_size` and adds `data_parallel_rank` to every body."""
    made = engine(make_mesh(AXES), num_pages=100)
    ids = np.random.default_rng(0).integers(0, CFG.vocab_size, (8, 20)).tolist()
    with Server(made, Tokenizer.load("bytes"), ServerConfig(port=0)).running() as url:
        with router(url, "--dp-aware", "--policy", "manual") as routed:
            for turn in range(2):
                for session, prompt in enumerate(ids):
                    told = generate(routed, prompt, **{"X-SMG-Routing-Key": f"session {session}"})
                    assert told["meta_info"]["cached_tokens"] == 16 * turn
            # What one session has said is unknown to others, until one that shares their rank has said it.
            cached = [
                generate(routed, ids[0], **{"X-SMG-Routing-Key": f"other {other}"})["meta_info"]
                for other in range(16)
            ]
    assert 1 <= [own["cached_tokens"] for own in cached].count(0) <= 3
