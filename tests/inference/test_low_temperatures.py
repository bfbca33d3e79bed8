"""Tests temperatures near zero: sampling takes the likeliest token, and log-probs are finite."""

import numpy as np
import pytest

from glm5_jax.inference.sampling import MIN_TEMPERATURE, Sampling, draw, param_rows
from tests.inference.test_server import post

V = 16


def sample(logits, temperature, num_top=3):
    row = param_rows(
        [Sampling(temperature=temperature)] * len(logits), range(len(logits)), [5] * len(logits)
    )
    return draw(np.asarray(logits, np.float32), row, truncate=False, num_top=num_top)


@pytest.mark.parametrize("largest", [0.01, 3.0, 33.0, 100.0, 3e4])
def test_takes_likeliest_token_at_low_temperatures(largest):
    rng = np.random.default_rng(0)
    logits = rng.uniform(-largest, largest * 0.5, (8, V)).astype(np.float32)
    best = rng.integers(0, V, 8)
    logits[np.arange(8), best] = largest
    for temperature in (0.0, 1e-45, 1e-30, 1e-10, 1e-9, 1e-8, MIN_TEMPERATURE * 0.99):
        output = sample(logits, temperature)
        assert (np.asarray(output.tokens) == best).all(), temperature
        assert np.isfinite(output.logprobs).all() and np.isfinite(output.top_logprobs).all()


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1e-3, 0.1, 1.0, 100.0])
def test_logprobs_of_large_logits_match_float64(temperature):
    """The logits are far from zero and close to each other."""
    logits = np.float32(3000) + np.arange(V, dtype=np.float32)[None] * np.float32(2**-12)
    wide = (logits.astype(np.float64) - logits.max()) / temperature
    want = wide - np.log(np.exp(wide).sum())
    output = sample(logits, temperature, num_top=V)
    order = np.asarray(output.top_ids)[0]
    np.testing.assert_allclose(output.top_logprobs[0], want[0][order], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_returns_finite_logprobs(healthy):
    body = {"prompt": "hi there", "max_tokens": 2, "logprobs": 3, "ignore_eos": True}
    greedy = post(healthy, "/v1/completions", body | {"temperature": 0})[1]["choices"][0]
    for temperature in (1e-300, 1e-30, 1e-9):
        [choice] = post(healthy, "/v1/completions", body | {"temperature": temperature})[1][
            "choices"
        ]
        assert choice["text"] == greedy["text"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            greedy["logprobs"]["token_logprobs"]
        )
