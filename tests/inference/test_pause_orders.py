"""Orders of pause, resume, updates of weights and requests: each call returns, and each request comes to an end."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from glm5_jax.inference.request import Paused, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from tests.inference.test_engine import engine, model

SAMPLING = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = list(range(10))
ACTIONS = st.sampled_from(
    ["submit", "step", "step", "pause", "resume", "finish", "keep", "recompute", "cancel"]
)


class Model:
    """What an engine does, in a few lines: which requests have begun, and whether it is paused."""

    def __init__(self, made):
        self.made, self.handles, self.version = made, [], made.version

    def act(self, action):
        made = self.made
        if action == "submit":
            self.handles.append(made.submit(Request([*PROMPT, len(self.handles)], SAMPLING)))
        elif action == "step":
            made.step()
        elif action == "cancel" and self.handles:
            self.handles[-1].cancel()
        elif action in ("pause", "resume"):
            getattr(made, action)()
            assert made.paused == (action == "pause")
        elif action in ("finish", "keep", "recompute"):
            self.update(action)

    def update(self, policy):
        made = self.made
        has_begun = any(
            handle.cached_tokens is not None and handle.finish_reason is None
            for handle in self.handles
        )
        try:
            made.update_weights(dict(glm5.params_of(model())), self.version + 1, policy)
        except Paused:
            # Nothing would finish; everything else is possible at any time.
            assert policy == "finish" and made.paused and has_begun
        else:
            assert not (policy == "finish" and made.paused and has_begun)
            self.version += 1
        assert made.version == self.version

    def end(self):
        """Resumes, and takes steps until all has ended."""
        made = self.made
        made.resume()
        for _ in range(40 * (1 + len(self.handles))):
            if not made.step():
                break
        assert all(handle.finish_reason in ("length", "cancelled") for handle in self.handles)
        assert made.num_running == made.num_waiting == 0
        assert made.num_free_pages + made.num_cached_pages == made.description["num_pages"]


@pytest.fixture(scope="module")
def made():
    """One engine for all orders, with pages for three requests and a half."""
    return engine()


def play(made, actions):
    own = Model(made)
    for action in actions:
        own.act(action)
    own.end()


@pytest.mark.parametrize(
    "actions",
    [
        ["submit", "step", "pause", "recompute", "finish", "resume"],
        ["submit", "submit", "step", "step", "pause", "keep", "finish", "recompute", "finish"],
        ["pause", "submit", "finish", "resume", "step"],
        ["submit", "step", "pause", "finish", "cancel", "step", "finish"],
    ],
)
def test_orders_that_waited_for_ever(made, actions):
    play(made, actions)


@given(st.lists(ACTIONS, max_size=14))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_order_comes_to_an_end(made, actions):
    play(made, actions)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(st.lists(ACTIONS, max_size=40))
@settings(max_examples=200, deadline=None)
def test_many_orders_come_to_an_end(made, actions):
    play(made, actions)
