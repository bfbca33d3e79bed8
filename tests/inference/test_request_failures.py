"""Tests failures: a request that fails ends only itself, and an engine that fails ends its process."""

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
from glm5_jax.model import glm5
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import GREEDY, make_engine, make_prompts, model


def run(engine):
    while engine.step():
        pass


def test_engine_survives_listener_that_raises():
    engine, calls = make_engine(), []

    def listener(handle):
        calls.append(handle.finish_reason)
        raise RuntimeError("a client that is gone")

    first = engine.submit(Request(make_prompts(1)[0], GREEDY), listener)
    second = engine.submit(Request(make_prompts(2)[1], GREEDY))
    run(engine)
    assert first.finish_reason == second.finish_reason == "length" and len(calls) == 8


class Panic(BaseException):
    """Error of native code, which is no Exception."""


@pytest.mark.parametrize("error_type", [RuntimeError, Panic])
def test_ends_request_whose_tokens_cannot_be_decoded(monkeypatch, error_type):
    """The other requests continue, and its pages and its slot become free."""
    engine, feed = make_engine(), StopChecker.feed
    handles = [engine.submit(Request(ids, GREEDY)) for ids in make_prompts(3)]
    fed = []

    def broken(self, token):
        fed.append(self)
        if self is fed[0] and len(fed) > 3:
            raise error_type("a text that nobody can decode")
        return feed(self, token)

    monkeypatch.setattr(StopChecker, "feed", broken)
    run(engine)
    reasons = sorted(handle.finish_reason for handle in handles)
    assert reasons == ["failed", "length", "length"]
    assert engine.num_running == engine.num_waiting == 0
    assert engine.num_free_pages + engine.num_cached_pages == engine.description["num_pages"]
    monkeypatch.setattr(StopChecker, "feed", feed)
    want = make_engine().generate([make_prompts(1)[0]], GREEDY)[0]
    assert engine.generate([make_prompts(1)[0]], GREEDY)[0].ids == want.ids


def test_ends_requests_whose_logprobs_are_no_numbers():
    """Damaged weights would otherwise answer with the first token for ever."""
    params = glm5.params_of(model())
    broken = params | {"final_norm": params["final_norm"].at[0].set(np.nan)}
    engine = make_engine()
    engine.update_weights(broken, 1)
    handle = engine.submit(Request(make_prompts(1)[0], GREEDY))
    run(engine)
    assert handle.finish_reason == "failed" and handle.num_tokens == 0
    engine.update_weights(params, 2)
    assert engine.generate([make_prompts(1)[0]], GREEDY)[0].finish_reason == "length"


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
def test_rejects_sampling_values_outside_array_types(field, value):
    with pytest.raises(ValueError, match=f"^{field}"):
        Sampling(**{field: value})


def test_accepts_integers_of_any_type_and_size():
    sampling = Sampling(
        max_tokens=np.int64(1), top_k=2**70, seed=np.uint32(7), stop_ids=(np.int32(4),)
    )
    assert [
        type(n) for n in (sampling.max_tokens, sampling.top_k, sampling.seed, *sampling.stop_ids)
    ] == [int] * 4
    replies = make_engine().generate([[1, 2]], dataclasses.replace(sampling, ignore_eos=True))
    assert len(replies[0].ids) == 1
    with pytest.raises(ValueError, match="a token that is no integer"):
        Request([1.0, 2])
    with pytest.raises(ValueError, match="dp_rank is 1.0"):
        Request([1], dp_rank=1.0)


class BrokenEngine:
    """Simulates an engine whose device has failed."""

    paused = False

    def __init__(self):
        self.is_ended = threading.Event()
        self.error: BaseException = RuntimeError("no device")

    def step(self):
        raise self.error

    def fail(self):
        self.is_ended.set()


class IdleEngine(BrokenEngine):
    """Simulates an engine without requests."""

    def step(self):
        return False


def test_worker_answers_all_calls_after_engine_failure():
    """Covers calls that wait and calls whose caller has cancelled."""
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


@pytest.mark.parametrize("error_type", [RuntimeError, Panic])
def test_worker_fails_with_any_error_of_its_engine(error_type):
    engine, failed = BrokenEngine(), threading.Event()
    engine.error = error_type("no device")
    worker = Worker(engine)
    worker.on_failure = failed.set
    worker.start()
    worker.call(lambda engine: None)
    assert failed.wait(30) and worker.failure is engine.error and engine.is_ended.is_set()
    worker.stop()


def test_panic_in_call_ends_only_the_call():
    def panic(engine):
        raise Panic("index out of bounds")

    worker = Worker(IdleEngine())
    worker.start()
    with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
        worker.call(panic).result(30)
    assert worker.call(lambda engine: 7).result(30) == 7 and worker.failure is None
    worker.stop()


def test_process_exits_with_code_for_restart(capsys):
    """Neither 2, which means an invalid argument, nor 75, which requests restarts without limit."""
    engine = Engine(
        model(),
        Tokenizer.default(),
        EngineConfig(page_size=16, max_num_seqs=4, prefill_chunk=32, max_length=64),
    )
    config = serve.ServeConfig(server=ServerConfig(port=0, model="tiny"))
    server = Server(engine, Tokenizer.default(), config.server)

    def broken():
        raise RuntimeError("no\ndevice")

    engine.step = broken
    threading.Timer(0.2, lambda: server.worker.call(lambda engine: None)).start()
    assert serve.serve_until_ended(server, config) == 1
    assert capsys.readouterr().err == "error: the engine has failed: RuntimeError no\ndevice\n"
    assert server.failed and isinstance(server.to_api_error(WorkerStopped()), ApiError)


def test_process_exits_with_0_when_stopped():
    engine = Engine(
        model(),
        Tokenizer.default(),
        EngineConfig(page_size=16, max_num_seqs=4, prefill_chunk=32, max_length=64),
    )
    server = Server(engine, Tokenizer.default(), ServerConfig(port=0))
    asyncio.run(server.serve(lambda port: server.stop()))
    assert not server.failed
