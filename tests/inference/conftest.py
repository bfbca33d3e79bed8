"""Fixtures that run a real server on a free port of this machine, in a thread."""

import contextlib
import functools
import threading

import pytest
from flax import nnx

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import model
from tests.model.small import one_layer

LENGTH = 64


@functools.cache
def long_model():
    """Returns a one-layer model that ends at the family's end tokens and reads 512 positions."""
    return glm5.Glm5(one_layer(max_position_embeddings=512), rngs=nnx.Rngs(3))


@contextlib.contextmanager
def serving(options=None, load=None, **config):
    """Runs a server. options: options of its engine."""
    options = dict(page_size=16, max_num_seqs=4, prefill_chunk=32, max_length=LENGTH) | (
        options or {}
    )
    engine = Engine(model(), Tokenizer.default(), EngineConfig(**options))
    server = Server(engine, Tokenizer.default(), ServerConfig(port=0, model="tiny", **config), load)
    server.engine = engine
    with server.running() as server.url:
        yield server


@pytest.fixture(scope="session")
def server():
    """Runs one server for all tests. They must leave it unchanged."""
    with serving(load=lambda path: dict(glm5.params_of(model(int(path))))) as shared:
        yield shared


@pytest.fixture(scope="session")
def long_server():
    """Runs a server of a one-layer model with long prompts, one shape of prefills and one of decodes."""
    options = EngineConfig(
        page_size=128, max_num_seqs=4, prefill_chunk=512, min_prefill_bucket=512, max_length=512
    )
    engine = Engine(long_model(), Tokenizer.default(), options)
    server = Server(engine, Tokenizer.default(), ServerConfig(port=0, model="tiny"))
    server.engine = engine
    with server.running() as server.url:
        yield server


@pytest.fixture
def healthy(server):
    """Yields the shared server, and checks at the end that no request runs and no page is in use."""
    yield server
    engine = server.engine
    for _ in range(200):
        if not (engine.num_running or engine.num_waiting):
            break
        threading.Event().wait(0.05)
    assert engine.num_running == engine.num_waiting == 0
    assert engine.num_free_pages + engine.num_cached_pages == engine.description["num_pages"]
