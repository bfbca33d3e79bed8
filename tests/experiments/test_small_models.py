"""The measurements of the notebooks' small models."""

import jax
import numpy as np

from experiments.notebooks.small_models import lowest_losses


def test_no_hidden_state_gives_less_than_lowest_loss():
    norm, head, states = (
        jax.random.normal(jax.random.key(seed), shape)
        for seed, shape in enumerate([(4,), (4, 8), (20_000, 4)])
    )
    params = {"final_norm": norm, "lm_head": {"weight": 0.5 * head}}
    tokens = np.arange(8)

    lowest = lowest_losses(params, tokens, steps=500)

    states = states / np.sqrt(np.mean(np.square(states), axis=1, keepdims=True))
    losses = -jax.nn.log_softmax(states * norm @ params["lm_head"]["weight"])
    best = losses.min(axis=0)
    assert np.all(lowest > 0)
    np.testing.assert_array_less(lowest, best + 1e-5)
    np.testing.assert_allclose(lowest, best, atol=0.05)
