"""Tests of the parts of the training objective and its gradients against the NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.training.gradients import Rates, loss_function
from glm5_jax.training.loss import shift
from glm5_jax.training.step_config import StepConfig
from tests.model import golden as goldens
from tests.oracles import glm5 as oracle

STEPS = 2  # MTP steps


def batch_of(tokens, segments, loss_mask=None, ce_weight=None):
    ones = np.ones(tokens.shape, np.float32)
    return {
        "token_ids": tokens.astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "positions": oracle.positions_of(segments).astype(np.int32),
        "loss_mask": ones if loss_mask is None else loss_mask.astype(np.float32),
        "ce_weight": ones if ce_weight is None else ce_weight.astype(np.float32),
    }


def test_targets_are_next_tokens_of_document():
    tokens = np.array([[10, 11, 12, 13, 14, 15, 0, 0]])
    segments = np.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    mask = np.array([[0, 1, 1, 0, 1, 1, 1, 1]])
    weight = np.array([[9, 1, 0.5, 9, 3, 4, 9, 9]])
    got = shift({k: jnp.asarray(v) for k, v in batch_of(tokens, segments, mask, weight).items()}, 2)
    assert got.targets[:, 0].tolist() == [
        [11, 12, 13, 14, 15, 0, 0, 0],
        [12, 13, 14, 15, 0, 0, 0, 0],
        [13, 14, 15, 0, 0, 0, 0, 0],
    ]
    assert got.weights[:, 0].tolist() == [
        [1, 0.5, 0, 3, 4, 0, 0, 0],
        [0.5, 0, 0, 4, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_short_row_has_no_far_targets():
    got = shift({k: jnp.asarray(v) for k, v in batch_of(*np.ones((2, 1, 2))).items()}, 3)
    assert got.targets.shape == (4, 1, 2)
    assert got.weights.sum((1, 2)).tolist() == [1, 0, 0, 0]


def packed(golden):
    """Returns a batch of two packed documents and padding, with uneven weights."""
    tokens = golden.tokens
    segments = np.ones_like(tokens)
    segments[0, 17:] = 2
    segments[1, :6] = 0
    segments[1, 25:] = 3
    rng = np.random.default_rng(0)
    mask = (oracle.positions_of(segments) > 0) & (segments > 0) & (rng.random(tokens.shape) > 0.1)
    return batch_of(tokens, segments, mask, 0.5 + rng.random(tokens.shape))


def mean_nll(logits, targets, weights):
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    nll = lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return np.sum(weights * nll) / weights.sum(), np.sum(weights * lse**2) / weights.sum()


@pytest.fixture(scope="module")
def objective():
    """Returns (golden, batch, params, f(params) -> ((objective, parts), gradients)) in float64."""
    golden = goldens.load("hf_tiny_d")
    config = StepConfig(mtp_steps=STEPS, balance_weight=0.02, z_weight=0.01, remat="none")
    batch = packed(golden)
    batch = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in batch.items()}
    rates = Rates(np.float64(0.3), np.float64(0))
    cfg, params = golden.to_float64()
    compiled = jax.jit(jax.value_and_grad(loss_function(cfg, config), has_aux=True))

    def run(params):
        with jax.enable_x64(True):
            return jax.device_get(compiled(params, batch, rates))

    return golden, batch, params, run


def test_loss_parts_equal_oracle(objective):
    golden, batch, params, run = objective
    (total, parts), _ = run(params)
    config, weights = oracle.load(goldens.FOLDER / golden.name)
    tokens, segments = batch["token_ids"], batch["segment_ids"]
    weight = batch["loss_mask"] * batch["ce_weight"]
    out = oracle.forward(weights, config, tokens, segment_ids=segments)
    same_document = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    ce, z = mean_nll(out["logits"][:, :-1], tokens[:, 1:], weight[:, 1:] * same_document)
    np.testing.assert_allclose(parts.ce, ce, rtol=1e-9)
    np.testing.assert_allclose(parts.z, z, rtol=1e-9)
    steps = oracle.mtp(weights, config, tokens, out["final_hidden"], segments, steps=STEPS)
    mtp_losses = []
    for k, step in enumerate(steps, 1):
        ahead = (segments[:, k + 1 :] == segments[:, : -k - 1]) & (segments[:, k + 1 :] != 0)
        logits = step["logits"][:, :-1]
        mtp_losses.append(mean_nll(logits, tokens[:, k + 1 :], weight[:, k + 1 :] * ahead)[0])
    np.testing.assert_allclose(parts.mtp, np.mean(mtp_losses), rtol=1e-9)
    expected = parts.ce + 0.3 * parts.mtp + 0.02 * parts.balance + 0.01 * parts.z
    np.testing.assert_allclose(total, expected, rtol=1e-12)
    counts = (out["router_weights"] != 0)[:, segments != 0].sum(1)
    np.testing.assert_array_equal(parts.load[:-1], counts)
    mtp_choices = STEPS * golden.cfg.num_experts_per_tok * (segments != 0).sum()
    assert parts.load[-1].sum() == mtp_choices


def test_gradient_equals_finite_difference(objective):
    """The direction is random and covers all weights that have a gradient."""
    _, _, params, run = objective
    rng = np.random.default_rng(1)
    direction = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            0 * x
            if any(name in str(path) for name in ("indexer", "bias"))
            else rng.standard_normal(x.shape) * np.abs(x).mean()
        ),
        params,
    )

    def loss_at(scale):
        return run(jax.tree.map(lambda x, d: x + scale * d, params, direction))[0][0]

    step = 1e-6
    _, grads = run(params)
    slope = sum(np.sum(g * d) for g, d in zip(*map(jax.tree.leaves, (grads, direction))))
    np.testing.assert_allclose((loss_at(step) - loss_at(-step)) / (2 * step), slope, rtol=1e-5)
