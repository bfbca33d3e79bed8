"""Engines that receive weights over HTTP, and comparisons of their weights."""

import asyncio
import contextlib
import dataclasses
import functools
import time

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.inference.shards.server import ShardLibrary, ShardServer
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.rl.weights.offers import make_offer
from glm5_jax.rl.weights.pusher import SyncConfig
from glm5_jax.runtime.http_server import ListenConfig
from glm5_jax.text.tokenizer import Tokenizer
from tests.model.small import one_layer

TOKENIZER = Tokenizer.default()
CFG = dataclasses.replace(
    presets.tiny(), num_hidden_layers=2, index_topk=12, max_position_embeddings=64
)
OPTIONS = dict(page_size=16, num_pages=16, max_num_seqs=4, prefill_chunk=64, max_length=64)
# One dense layer, for replies whose weights change in the middle.
DENSE = one_layer(max_position_embeddings=64, model_type="glm4_moe_lite")
NARROW = dataclasses.replace(CFG, dtype="bfloat16")
SMALL = SyncConfig(bucket_bytes=2**16, timeout_s=20.0, load_timeout_s=60.0)
DELTA = dataclasses.replace(SMALL, delta=True)


@functools.cache
def params(seed=1, cfg=CFG):
    """Returns a trainer's parameters."""
    return glm5.params_of(glm5.Glm5(cfg, rngs=nnx.Rngs(seed)))


def make_engine(cfg=CFG, weights=None, version=0, **options):
    """Returns an engine with the small limits of `OPTIONS`."""
    weights = params(0) if weights is None else weights
    return Engine(
        glm5.Glm5(cfg, params=weights),
        TOKENIZER,
        EngineConfig(**OPTIONS | options),
        version=version,
    )


class ServedEngine:
    """Client of an engine that serves over HTTP.

    Attributes:
      engine: the engine.
      url: URL of its server.
      server: its server.
    """

    def __init__(self, engine, url, server=None):
        self.engine, self.url, self.server = engine, url, server

    def request(self, path, body=None, **params):
        """Sends a request, and returns (status, JSON)."""

        async def send():
            content = {"data": body} if isinstance(body, bytes) else {"json": body}
            async with aiohttp.ClientSession() as client:
                method = "GET" if body is None else "POST"
                call = client.request(method, self.url + path, params=params, **content)
                async with call as response:
                    return response.status, await response.json()

        return asyncio.run(asyncio.wait_for(send(), 60))

    @property
    def version_and_checksum(self):
        """Returns (version, checksum) of the weights, as the server reports them."""
        status, weights = self.request("/weights")
        assert status == 200
        return weights["version"], weights["checksum"]

    @property
    def bits(self):
        """Returns the bytes of all weights of the engine."""
        return bits(self.engine)


@contextlib.contextmanager
def serving(cfg=CFG, port=0, version=0, kind=Server, engine=None, clock=time.monotonic, **config):
    """Serves an engine over HTTP.

    kind: class of the server. clock: clock that ends a push without data.
    """
    engine = engine or make_engine(cfg, version=version)
    config = ServerConfig(port=port, model="tiny", **config)
    weights = params(0) if cfg.hidden_size == CFG.hidden_size else params(0, cfg)
    loader = models.make_weight_loader(glm5.Glm5(cfg, params=weights))
    server = kind(engine, TOKENIZER, config, loader, clock)
    with server.running() as url:
        yield ServedEngine(engine, url, server)


def bits(engine):
    """Returns the bytes of all weights that an engine computes with, by path."""
    return {
        path: np.asarray(array).tobytes()
        for path, leaf in flatten(engine.computation.params).items()
        for path, array in [(f"{path}/{i}", x) for i, x in enumerate(jax.tree.leaves(leaf))]
    }


def bits_after_update(weights, cfg=CFG):
    """Returns the bits of an engine that was updated with unchanged weights."""
    engine = make_engine(cfg)
    engine.update_weights(weights, 1)
    return bits(engine)


def perturb(weights, count=7, seed=0):
    """Returns the weights with `count` changed numbers in every third leaf."""
    rng = np.random.default_rng(seed)
    out = {}
    for i, (path, x) in enumerate(flatten(weights).items()):
        x = np.array(x)
        if i % 3 == 0:
            indices = rng.choice(x.size, min(count, x.size), replace=False)
            x.reshape(-1)[indices] += 0.5
        out[path] = jnp.asarray(x)
    return map_with_path(lambda path, _: out[path], weights)


@contextlib.contextmanager
def offering(weights, version, cfg=CFG):
    """Serves the weights of a trainer's process, and returns its URL."""
    offer, shards = make_offer(weights, cfg, version)
    library = ShardLibrary()
    library.versions[offer.checksum] = shards
    with ShardServer(offer, library, ListenConfig(port=0)).running() as url:
        yield url


def pull_message(source, name="a", **fields):
    """Returns the message that makes one engine pull from a trainer's process."""
    return {"push": name, "sources": [source], "peers": [[]]} | fields
