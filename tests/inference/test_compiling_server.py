"""Tests a server that listens before its engine has compiled: health, requests that wait, and a port in use."""

import concurrent.futures
import json
import threading

from experiments import serve
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.runtime.http_server import check_port
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import light_model
from tests.inference.test_server import get, post


class SlowEngine(Engine):
    """Engine that compiles one of three programs each time `go` is released, without using the device."""

    go = threading.Semaphore(0)

    def compile_programs(self):
        for done in range(4):
            yield done, 3
            self.go.acquire(timeout=30)


def compiling_server():
    engine = SlowEngine(
        light_model(),
        Tokenizer.default(),
        EngineConfig(page_size=16, max_num_seqs=2, prefill_chunk=32, max_length=32),
    )
    return Server(engine, Tokenizer.default(), ServerConfig(port=0, model="tiny"), warm=True)


def wait_for_health(server, text):
    for _ in range(600):
        status, body = get(server, "/health")
        if json.loads(body)["status"] == text:
            return status
        threading.Event().wait(0.01)
    raise AssertionError(f"health is {body}, not {text}")


def test_listens_while_it_compiles():
    server = compiling_server()
    body = {"prompt": "x", "max_tokens": 1, "temperature": 0}
    with (
        server.running() as server.url,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        server.worker.engine.go.release()
        assert wait_for_health(server, "compiling 1 of 3") == 503
        reply = pool.submit(post, server, "/v1/completions", body)
        server.worker.engine.go.release()
        assert wait_for_health(server, "compiling 2 of 3") == 503 and not reply.done()
        server.worker.engine.go.release(2)
        assert wait_for_health(server, "ok") == 200
        assert reply.result(60)[0] == 200


def test_stops_while_it_compiles():
    server = compiling_server()
    with server.running() as server.url:
        assert json.loads(get(server, "/health")[1])["status"].startswith("compiling")
        server.worker.engine.go.release()
        server.worker.stop()
        assert server.worker.compiling is None


def test_reports_port_in_use_before_loading(capsys):
    server = compiling_server()
    with server.running() as url:
        port = int(url.rsplit(":", 1)[1])
        config = serve.ServeConfig(checkpoint="/nowhere", server=ServerConfig(port=port))
        assert serve.run(config) == 2
        server.worker.engine.go.release(4)
    error = capsys.readouterr().err
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use); choose another" in error
    check_port(ServerConfig(port=0))
