"""Engines behind HTTP that weights are pushed to, and what they have of them."""

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
from safetensors.numpy import save

from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import named_tensors
from glm5_jax.checkpoint.manifest import Manifest, transfer_dtypes
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.rl.weights.pusher import SyncConfig
from glm5_jax.rl.weights.weight_sync import split_tensor
from glm5_jax.text.tokenizer import Tokenizer
from tests.model.small import one_layer

TOKENIZER = Tokenizer.default()
CFG = dataclasses.replace(
    presets.tiny(), num_hidden_layers=2, index_topk=12, max_position_embeddings=64
)
OPTIONS = dict(page_size=16, num_pages=16, max_num_seqs=4, prefill_chunk=64, max_length=64)
# Of one dense layer, for replies whose weights change in the middle.
DENSE = one_layer(max_position_embeddings=64, model_type="glm4_moe_lite")
NARROW = dataclasses.replace(CFG, dtype="bfloat16")
SMALL = SyncConfig(bucket_bytes=2**16, timeout_s=20.0, load_timeout_s=60.0)
DELTA = dataclasses.replace(SMALL, delta=True)


@functools.cache
def params(seed=1, cfg=CFG):
    """As a trainer has them."""
    return glm5.params_of(glm5.Glm5(cfg, rngs=nnx.Rngs(seed)))


def made(cfg=CFG, weights=None, version=0, **options):
    weights = params(0) if weights is None else weights
    return Engine(
        glm5.Glm5(cfg, params=weights),
        TOKENIZER,
        EngineConfig(**OPTIONS | options),
        version=version,
    )


class Served:
    """An engine behind HTTP."""

    def __init__(self, engine, url, server=None):
        self.engine, self.url, self.server = engine, url, server

    def ask(self, path, body=None, **params):
        """(status, JSON)."""

        async def inner():
            told = {"data": body} if isinstance(body, bytes) else {"json": body}
            async with aiohttp.ClientSession() as client:
                method = "GET" if body is None else "POST"
                call = client.request(method, self.url + path, params=params, **told)
                async with call as response:
                    return response.status, await response.json()

        return asyncio.run(asyncio.wait_for(inner(), 60))

    @property
    def held(self):
        """(version, checksum) as it tells them."""
        status, told = self.ask("/weights")
        assert status == 200
        return told["version"], told["checksum"]

    @property
    def bits(self):
        return bits(self.engine)


@contextlib.contextmanager
def serving(cfg=CFG, port=0, version=0, kind=Server, engine=None, clock=time.monotonic, **config):
    """kind: class of the server; clock: by which a push that sends nothing ends."""
    engine = engine or made(cfg, version=version)
    config = ServerConfig(port=port, model="tiny", **config)
    weights = params(0, cfg) if cfg == DENSE else params(0)
    loader = models.make_weight_loader(glm5.Glm5(cfg, params=weights))
    server = kind(engine, TOKENIZER, config, loader, clock)
    with server.running() as url:
        yield Served(engine, url, server)


def bits(engine):
    """What an engine computes with, bit by bit."""
    return {
        path: np.asarray(x).tobytes()
        for path, leaf in flatten(engine.computation.params).items()
        for path, x in [(f"{path}/{i}", own) for i, own in enumerate(jax.tree.leaves(leaf))]
    }


def loaded(weights, cfg=CFG):
    """The bits of an engine that was given weights as they are."""
    engine = made(cfg)
    engine.update_weights(weights, 1)
    return bits(engine)


def moved(weights, count=7, seed=0):
    """The same but for a few numbers of one leaf in three."""
    rng = np.random.default_rng(seed)
    out = {}
    for i, (path, x) in enumerate(flatten(weights).items()):
        x = np.array(x)
        if i % 3 == 0:
            where = rng.choice(x.size, min(count, x.size), replace=False)
            x.reshape(-1)[where] += 0.5
        out[path] = jnp.asarray(x)
    return map_with_path(lambda path, _: out[path], weights)


def begun(version, name="a", cfg=CFG):
    """The first message of a push."""
    manifest = Manifest.of(cfg, version)
    tensors = {n: [own.dtype, own.shape] for n, own in manifest.tensors.items()}
    return {
        "push": name,
        "version": version,
        "tensors": tensors,
        "arithmetic": manifest.arithmetic,
    }


def sent(served, weights, name="a"):
    """All parts of a push; the checksums."""
    manifest = Manifest(1, {})
    for tensor, array in named_tensors(weights, CFG, transfer_dtypes(CFG)):
        manifest.add(tensor, array)
        for piece in split_tensor(tensor, array, None, 2**16):
            assert served.ask("/weights/part", save(piece), push=name)[0] == 200
    return [own.checksum for own in manifest.tensors.values()]
