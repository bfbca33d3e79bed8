"""Tests all orders of pause, resume, weight updates and requests: each call returns, and each request ends."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from glm5_jax.inference.request import Paused, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from tests.inference.test_engine import make_engine, model

SAMPLING = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = list(range(10))
ACTIONS = st.sampled_from(
    ["submit", "step", "step", "pause", "resume", "finish", "keep", "recompute", "cancel"]
)


class EngineModel:
    """Model of an engine: which requests have started, and whether it is paused."""

    def __init__(self, engine):
        self.engine, self.handles, self.version = engine, [], engine.version

    def act(self, action):
        engine = self.engine
        if action == "submit":
            self.handles.append(engine.submit(Request([*PROMPT, len(self.handles)], SAMPLING)))
        elif action == "step":
            engine.step()
        elif action == "cancel" and self.handles:
            self.handles[-1].cancel()
        elif action in ("pause", "resume"):
            getattr(engine, action)()
            assert engine.paused == (action == "pause")
        elif action in ("finish", "keep", "recompute"):
            self.update(action)

    def update(self, policy):
        engine = self.engine
        has_begun = any(
            handle.cached_tokens is not None and handle.finish_reason is None
            for handle in self.handles
        )
        try:
            engine.update_weights(dict(glm5.params_of(model())), self.version + 1, policy)
        except Paused:
            # Only this update cannot finish.
            assert policy == "finish" and engine.paused and has_begun
        else:
            assert not (policy == "finish" and engine.paused and has_begun)
            self.version += 1
        assert engine.version == self.version

    def end(self):
        """Resumes, and steps until all requests have ended."""
        engine = self.engine
        engine.resume()
        for _ in range(40 * (1 + len(self.handles))):
            if not engine.step():
                break
        assert all(handle.finish_reason in ("length", "cancelled") for handle in self.handles)
        assert engine.num_running == engine.num_waiting == 0
        assert engine.num_free_pages + engine.num_cached_pages == engine.description["num_pages"]


@pytest.fixture(scope="module")
def engine():
    """Returns one engine for all orders, with pages for three and a half requests."""
    return make_engine()


def play(engine, actions):
    engine_model = EngineModel(engine)
    for action in actions:
        engine_model.act(action)
    engine_model.end()


@pytest.mark.parametrize(
    "actions",
    [
        ["submit", "step", "pause", "recompute", "finish", "resume"],
        ["submit", "submit", "step", "step", "pause", "keep", "finish", "recompute", "finish"],
        ["pause", "submit", "finish", "resume", "step"],
        ["submit", "step", "pause", "finish", "cancel", "step", "finish"],
    ],
)
def test_ends_orders_that_once_hung(engine, actions):
    play(engine, actions)


@given(st.lists(ACTIONS, max_size=14))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_ends_any_order(engine, actions):
    play(engine, actions)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(st.lists(ACTIONS, max_size=40))
@settings(max_examples=200, deadline=None)
def test_ends_many_long_orders(engine, actions):
    play(engine, actions)
