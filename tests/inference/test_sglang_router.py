"""sglang-router in front of the server, where somebody has installed it (`pip install sglang-router`)."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest

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


@pytest.fixture(scope="module")
def routed(server):
    """The router's address, once it knows the server."""
    ports = {"--port": free_port(), "--prometheus-port": free_port()}
    options = [str(word) for pair in ports.items() for word in pair]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    router = subprocess.Popen([*command, "--worker-urls", server.url, *options])
    url = f"http://127.0.0.1:{ports['--port']}"
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                    if json.load(answer)["data"]:
                        break
            except (urllib.error.URLError, ValueError):
                assert router.poll() is None
            time.sleep(0.5)
        yield url
    finally:
        router.terminate()
        router.wait(30)


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
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    request = urllib.request.Request(
        f"{routed}/generate",
        json.dumps(body | {"return_logprob": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        got = json.load(answer)
    assert len(got["output_ids"]) == len(got["meta_info"]["output_token_logprobs"]) == 3
