"""An engine that sleeps leaves the memory of its pages to others, and goes on as before when it wakes up."""

import functools

import jax
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.steps import empty_state
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import GREEDY, light_model

PROMPT = [list(range(3, 30))]


def make_engine():
    config = EngineConfig(page_size=4, num_pages=64, max_num_seqs=4, prefill_chunk=32)
    return Engine(light_model(), Tokenizer.default(), config)


def num_bytes():
    """Returns the bytes of all live arrays on the devices."""
    return sum(array.nbytes for array in jax.live_arrays())


def test_sleep_frees_pages_and_keeps_replies():
    engine = make_engine()
    before = engine.generate(PROMPT, GREEDY)[0]
    pages = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages_of(engine)))
    awake = num_bytes()
    engine.sleep()
    engine.sleep()
    assert awake - num_bytes() >= 0.9 * pages > 0 and engine.num_cached_pages == 0
    with pytest.raises(ValueError, match="the engine is asleep; call wake_up"):
        engine.submit(Request(PROMPT[0], GREEDY))
    # New weights may arrive meanwhile.
    engine.update_weights(glm5.params_of(light_model()), 1)
    engine.wake_up()
    engine.wake_up()
    after = engine.generate(PROMPT, GREEDY)[0]
    assert (after.ids, after.logprobs) == (before.ids, before.logprobs)
    assert set(after.versions) == {1} and awake - num_bytes() < 0.1 * pages


def pages_of(engine):
    """Returns an engine's pages as shapes."""
    cfg, shape = engine.computation.cfg, engine.computation.shape
    return jax.eval_shape(functools.partial(empty_state, cfg, shape, engine.dp_size, cfg.dtype))


def test_busy_engine_does_not_sleep():
    engine = make_engine()
    handle = engine.submit(Request(PROMPT[0], Sampling(max_tokens=2)))
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        engine.sleep()
    handle.cancel()
    while engine.step():
        pass
    engine.sleep()
