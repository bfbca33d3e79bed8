"""Engines that load pushed weights: quantised, in parts, interrupted or in another dtype."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.inference import engine_weights
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.worker import Worker
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import Lazy, flatten, map_with_path
from glm5_jax.rl.weights.pusher import PushFailed
from glm5_jax.rl.weights.reshard import ReshardPusher
from glm5_jax.rl.weights.weight_sync import NetworkPusher
from tests.rl.pushing import (
    CFG,
    NARROW,
    OPTIONS,
    SMALL,
    TOKENIZER,
    bits,
    bits_after_update,
    make_engine,
    params,
    serving,
)


@pytest.mark.slow
def test_quantised_engine_quantises_pushed_weights(tmp_path):
    quantised, cfg = table.quantise(params(0), CFG, 32)
    engine = Engine(glm5.Glm5(cfg, params=quantised), TOKENIZER, EngineConfig(**OPTIONS))
    expected = Engine(
        glm5.Glm5(cfg, params=table.quantise(params(1), CFG, 32)[0]), config=EngineConfig(**OPTIONS)
    )
    worker = Worker(engine)
    worker.start()
    ReshardPusher([worker], SMALL).push(params(1), 1)
    worker.stop()
    assert bits(engine) == bits(expected) != bits(make_engine(cfg, quantised))
    rotated, cfg = table.quantise(*rotation.rotate(params(0), CFG), 32)
    engine = Engine(glm5.Glm5(cfg, params=rotated), TOKENIZER, EngineConfig(**OPTIONS))
    with pytest.raises(ValueError, match="the engine.s weights are rotated, the new ones are not"):
        engine.update_weights(params(1), 1)
    with pytest.raises(ValueError, match="quantised otherwise than the engine's"):
        make_engine().update_weights(quantised, 1)
    assert engine.version == 0


def test_loads_weights_in_parts(monkeypatch):
    monkeypatch.setattr(engine_weights, "MAX_LOAD_BYTES", 2**16)
    expected, engine = (
        bits_after_update(params()),
        make_engine(weights=jax.tree.map(jnp.copy, params(0))),
    )
    loaded_paths = []

    def lazy(path, x):
        def load():
            loaded_paths.append(path)
            return jnp.asarray(np.array(x))

        return Lazy(x.shape, x.dtype, load)

    engine.update_weights(map_with_path(lazy, params()), 1)
    assert bits(engine) == expected and sorted(loaded_paths) == sorted(flatten(params()))
    assert engine.version == 1


def test_weights_that_fail_halfway_end_engine(monkeypatch):
    """A mixture of weights cannot compute anything; a failure before the first replacement is harmless."""
    monkeypatch.setattr(engine_weights, "MAX_LOAD_BYTES", 2**16)

    def failing_weights(index):
        count = iter(range(1000))

        def lazy(path, x):
            def load():
                if next(count) == index:
                    raise RuntimeError("no memory")
                return x

            return Lazy(x.shape, x.dtype, load)

        return map_with_path(lazy, params())

    with serving() as engine:
        before, worker = engine.bits, engine.server.worker
        first = worker.call(lambda e: e.update_weights(failing_weights(0), 1))
        with pytest.raises(RuntimeError, match="no memory"):
            first.result(60)
        assert engine.bits == before and engine.version_and_checksum == (0, None)
        later = worker.call(lambda e: e.update_weights(failing_weights(9), 1))
        with pytest.raises(
            engine_weights.WeightsLost, match="broke off at .*: RuntimeError no memory"
        ):
            later.result(60)
        for _ in range(200):
            status, health = engine.request("/health")
            if status == 503:
                break
            time.sleep(0.05)
        assert health == {"status": "failed"}
        with pytest.raises(PushFailed, match="the engine has ended"):
            NetworkPusher(CFG, [engine.url], SMALL).push(params(), 2)


@pytest.mark.slow
def test_push_keeps_programs_of_engine_with_bfloat16_weights():
    """Weights as from a HuggingFace folder in bfloat16, routers included. The compiled programs stay valid."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(0))
    engine = make_engine(NARROW, narrow)

    def signatures():
        leaves = jax.tree.leaves(engine.computation.params)
        return [(x.dtype, x.committed, x.weak_type) for x in leaves]

    before = signatures()
    for number, update in enumerate((ReshardPusher([engine]).push, engine.update_weights), 1):
        update(params(), number)
        assert signatures() == before


def test_trainer_may_delete_its_weights_after_push():
    weights = jax.tree.map(jnp.copy, params())
    engine = make_engine()
    ReshardPusher([engine]).push(weights, 1)
    for leaf in jax.tree.leaves(weights):
        leaf.delete()
    assert bits(engine) == bits_after_update(params())
    assert engine.version == 1
