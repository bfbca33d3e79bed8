"""What engines make of the weights that they are given."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.inference import runner
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
    loaded,
    made,
    params,
    serving,
)


@pytest.mark.slow
def test_a_quantised_engine_quantises_what_is_pushed_as_it_was(tmp_path):
    held, cfg = table.quantise(params(0), CFG, 32)
    engine = Engine(glm5.Glm5(cfg, params=held), TOKENIZER, EngineConfig(**OPTIONS))
    want = Engine(
        glm5.Glm5(cfg, params=table.quantise(params(1), CFG, 32)[0]), config=EngineConfig(**OPTIONS)
    )
    worker = Worker(engine)
    worker.start()
    ReshardPusher([worker], SMALL).push(params(1), 1)
    worker.stop()
    assert bits(engine) == bits(want) != bits(made(cfg, held))
    turned, cfg = table.quantise(*rotation.rotate(params(0), CFG), 32)
    engine = Engine(glm5.Glm5(cfg, params=turned), TOKENIZER, EngineConfig(**OPTIONS))
    with pytest.raises(ValueError, match="weights are rotated, those that came are not"):
        engine.update_weights(params(1), 1)
    with pytest.raises(ValueError, match="quantised otherwise than the engine's"):
        made().update_weights(held, 1)
    assert engine.version == 0


def test_a_part_at_a_time_is_made_and_lets_go_of_what_it_replaces(monkeypatch):
    monkeypatch.setattr(runner, "MAX_LOAD_BYTES", 2**16)
    want, engine = loaded(params()), made(weights=jax.tree.map(jnp.copy, params(0)))
    seen = []

    def lazy(path, x):
        def make():
            seen.append(path)
            return jnp.asarray(np.array(x))

        return Lazy(x.shape, x.dtype, make)

    engine.update_weights(map_with_path(lazy, params()), 1)
    assert bits(engine) == want and sorted(seen) == sorted(flatten(params()))
    assert engine.version == 1


def test_weights_that_break_off_half_way_end_the_engine(monkeypatch):
    """Nothing can be computed with a mixture; before the first is replaced, nothing has happened."""
    monkeypatch.setattr(runner, "MAX_LOAD_BYTES", 2**16)

    def breaking(at):
        count = iter(range(1000))

        def lazy(path, x):
            def make():
                if next(count) == at:
                    raise RuntimeError("no memory")
                return x

            return Lazy(x.shape, x.dtype, make)

        return map_with_path(lazy, params())

    with serving() as one:
        before, worker = one.bits, one.server.worker
        first = worker.call(lambda own: own.update_weights(breaking(0), 1))
        with pytest.raises(RuntimeError, match="no memory"):
            first.result(60)
        assert one.bits == before and one.held == (0, None)
        later = worker.call(lambda own: own.update_weights(breaking(9), 1))
        with pytest.raises(runner.WeightsLost, match="broke off at .*: RuntimeError no memory"):
            later.result(60)
        for _ in range(200):
            status, told = one.ask("/health")
            if status == 503:
                break
            time.sleep(0.05)
        assert told == {"status": "failed"}
        with pytest.raises(PushFailed, match="the engine has ended"):
            NetworkPusher(CFG, [one.url], SMALL).push(params(), 2)


@pytest.mark.slow
def test_a_push_is_no_other_program_to_an_engine_of_narrow_weights():
    """As of a HuggingFace folder in bfloat16, whose routers are, too; its programs stay those that it has compiled."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(0))
    engine = made(NARROW, narrow)

    def kinds():
        leaves = jax.tree.leaves(engine.computation.params)
        return [(x.dtype, x.committed, x.weak_type) for x in leaves]

    before = kinds()
    for number, way in enumerate((ReshardPusher([engine]).push, engine.update_weights), 1):
        way(params(), number)
        assert kinds() == before


def test_the_learner_may_write_over_its_weights_after_a_push():
    weights = jax.tree.map(jnp.copy, params())
    engine = made()
    ReshardPusher([engine]).push(weights, 1)
    for leaf in jax.tree.leaves(weights):
        leaf.delete()
    assert bits(engine) == loaded(params())
    assert engine.version == 1
