"""Failures: one that a request causes ends that request, one of the engine ends the process that serves it."""

import asyncio
import dataclasses
import threading

import numpy as np
import pytest

from experiments import serve
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.inference.stop_checker import StopChecker
from glm5_jax.inference.worker import Worker, WorkerStopped
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import GREEDY, engine, model, prompts


def run(made):
    while made.step():
        pass


def test_listener_that_raises_ends_no_engine():
    made, calls = engine(), []

    def listener(handle):
        calls.append(handle.finish_reason)
        raise RuntimeError("a client that is gone")

    first = made.submit(Request(prompts(1)[0], GREEDY), listener)
    second = made.submit(Request(prompts(2)[1], GREEDY))
    run(made)
    assert first.finish_reason == second.finish_reason == "length" and len(calls) == 8


def test_ends_the_request_whose_tokens_cannot_be_taken(monkeypatch):
    """The others go on, and its pages and its slot are free again."""
    made, feed = engine(), StopChecker.feed
    handles = [made.submit(Request(ids, GREEDY)) for ids in prompts(3)]
    fed = []

    def broken(self, token):
        fed.append(self)
        if self is fed[0] and len(fed) > 3:
            raise RuntimeError("a text that nobody can decode")
        return feed(self, token)

    monkeypatch.setattr(StopChecker, "feed", broken)
    run(made)
    reasons = sorted(handle.finish_reason for handle in handles)
    assert reasons == ["failed", "length", "length"]
    assert made.num_running == made.num_waiting == 0
    assert made.num_free_pages + made.num_cached_pages == made.description["num_pages"]
    monkeypatch.setattr(StopChecker, "feed", feed)
    want = engine().generate([prompts(1)[0]], GREEDY)[0]
    assert made.generate([prompts(1)[0]], GREEDY)[0].ids == want.ids


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 15.0),
        ("max_tokens", "15"),
        ("top_k", 2.0),
        ("top_k", 1e300),
        ("top_logprobs", 2.0),
        ("seed", 1.5),
        ("seed", 2**63),
        ("stop_ids", (1.5,)),
        ("temperature", 10**400),
        ("logit_bias", {7: float("inf")}),
        ("logit_bias", {7: float("nan")}),
        ("logit_bias", {1.5: 1.0}),
    ],
)
def test_refuses_samplings_that_fit_no_array(field, value):
    with pytest.raises(ValueError, match=f"^{field}"):
        Sampling(**{field: value})


def test_takes_integers_of_any_type_and_size():
    own = Sampling(max_tokens=np.int64(1), top_k=2**70, seed=np.uint32(7), stop_ids=(np.int32(4),))
    assert [type(n) for n in (own.max_tokens, own.top_k, own.seed, *own.stop_ids)] == [int] * 4
    replies = engine().generate([[1, 2]], dataclasses.replace(own, ignore_eos=True))
    assert len(replies[0].ids) == 1
    with pytest.raises(ValueError, match="a token that is no integer"):
        Request([1.0, 2])
    with pytest.raises(ValueError, match="dp_rank is 1.0"):
        Request([1], dp_rank=1.0)


class BrokenEngine:
    """Stands for an engine whose device has failed."""

    paused = False

    def __init__(self):
        self.is_ended = threading.Event()

    def step(self):
        raise RuntimeError("no device")

    def fail(self):
        self.is_ended.set()


def test_worker_answers_all_calls_of_an_engine_that_fails():
    """Also those that wait, and those whose caller does not wait any more."""
    worker, failed = Worker(BrokenEngine()), threading.Event()
    worker.on_failure = failed.set
    calls = [worker.call(lambda engine: 7) for _ in range(3)]
    calls[1].cancel()
    worker.start()
    assert failed.wait(30) and worker.engine.is_ended.is_set()
    assert calls[0].result(30) == calls[2].result(30) == 7 and calls[1].cancelled()
    assert str(worker.failure) == "no device"
    with pytest.raises(WorkerStopped):
        worker.call(lambda engine: 7)
    worker.stop()


def test_process_ends_with_a_code_that_launchers_restart(capsys):
    """Neither 2, a mistake of the user, nor 75, which asks for a start without end."""
    made = Engine(
        model(),
        Tokenizer.default(),
        EngineConfig(page_size=16, max_num_seqs=4, prefill_chunk=32, max_length=64),
    )
    config = serve.ServeConfig(server=ServerConfig(port=0, model="tiny"))
    server = Server(made, Tokenizer.default(), config.server)

    def broken():
        raise RuntimeError("no\ndevice")

    made.step = broken
    threading.Timer(0.2, lambda: server.worker.call(lambda engine: None)).start()
    assert serve.serve_until_ended(server, config) == 1
    assert capsys.readouterr().err == "error: the engine has failed: RuntimeError no device\n"
    assert server.failed and isinstance(server.to_api_error(WorkerStopped()), ApiError)


def test_process_ends_with_0_when_it_is_stopped():
    made = Engine(
        model(),
        Tokenizer.default(),
        EngineConfig(page_size=16, max_num_seqs=4, prefill_chunk=32, max_length=64),
    )
    server = Server(made, Tokenizer.default(), ServerConfig(port=0))
    asyncio.run(server.serve(lambda port: server.stop()))
    assert not server.failed
