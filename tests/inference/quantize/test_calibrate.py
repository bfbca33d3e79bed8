"""Tests that smoothing keeps outputs, and finds the channels that text makes large."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.inference.quantize import calibrate, table
from glm5_jax.model import block, glm5
from glm5_jax.parallel.tree import flatten, unflatten
from tests.mesh import cases

GROUP = 4
CFG = cases.config("dense", num_hidden_layers=2, indexer_types=None, index_topk=None)
TOKENS = cases.batch()["token_ids"][:4]
LARGE = 40.0


@functools.cache
def planted():
    """Returns parameters of the same function with a few large channels between up and down."""
    flat = flatten(cases.params(CFG))
    for path, w in flatten(cases.params(CFG)).items():
        if path.endswith("/up") and not path.startswith("mtp"):
            scale = np.ones(w.shape[-1], np.float32)
            scale[[1, 6]] = LARGE
            flat[path] = w * scale
            down = path.removesuffix("up") + "down"
            flat[down] = flat[down] / scale[:, None]
    return unflatten(flat)


@functools.cache
def smoothed():
    return calibrate.smooth(planted(), CFG, TOKENS, GROUP)


@jax.jit
def logits(params):
    return glm5.forward(params, TOKENS, CFG).logits


def error(params, group=GROUP):
    """Returns the mean squared change of the logits by quantisation."""
    return float(jnp.mean((logits(table.quantise(params, CFG, group)[0]) - logits(planted())) ** 2))


def test_smoothing_keeps_outputs_and_changes_only_up_and_down():
    want = logits(planted())
    np.testing.assert_allclose(logits(smoothed()), want, rtol=0, atol=1e-4 * np.abs(want).max())
    before = flatten(planted())
    changed = {p for p, w in flatten(smoothed()).items() if np.any(np.asarray(w) != before[p])}
    assert changed == {
        f"{part}/{w}"
        for part in ("dense_layers/mlp", "moe_layers/shared", "moe_layers/experts")
        for w in ("up", "down")
    }


def test_smoothing_shrinks_large_channels_and_error():
    assert error(smoothed()) < 0.5 * error(planted())
    before, after = (flatten(p)["dense_layers/mlp/up"][0] for p in (planted(), smoothed()))
    factor = np.abs(after).max(0) / np.abs(before).max(0)
    others = np.delete(factor, [1, 6])
    assert factor[[1, 6]].max() < 0.25 * np.median(others)


@pytest.mark.parametrize("group", [None, 4])
def test_scale_has_smallest_error_of_candidates(group):
    """The oracle tries no scale, and every exponent."""
    draw = np.random.default_rng(0)
    gate, up, down, x = (
        draw.standard_normal(shape).astype(np.float32)
        for shape in ((8, 16), (8, 16), (16, 8), (40, 8))
    )
    up[:, 3] *= LARGE
    used = draw.random(40) < 0.7
    got = np.asarray(calibrate.scales(gate, up, down, used, x, group))
    x = x[used].astype(np.float64)
    hidden = x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)
    rms, max_abs = np.sqrt(np.sum(hidden**2, 0) / 40), np.abs(down).max(1)

    def loss(scale):
        rows, w = hidden / scale, down * scale[:, None]
        row_step = np.abs(rows).max(1, keepdims=True) / 127
        grouped = w.reshape(-1, group or 16, 8)
        step = np.abs(grouped).max(1, keepdims=True) / (7 if group else 127)
        w = (np.rint(grouped / step) * step).reshape(w.shape)
        return np.sum((np.rint(rows / row_step) * row_step @ w - hidden @ down) ** 2)

    candidates = [np.ones(16)] + [rms**a / max_abs ** (1 - a) for a in calibrate.EXPONENTS]
    candidates = [s / np.exp(np.mean(np.log(s))) for s in candidates]
    best = candidates[int(np.argmin([loss(s) for s in candidates]))]
    np.testing.assert_allclose(got, best, rtol=1e-4)


def test_keeps_scale_of_unused_expert():
    draw = np.random.default_rng(0)
    gate, up, down, x = (
        draw.standard_normal(shape).astype(np.float32)
        for shape in ((8, 16), (8, 16), (16, 8), (40, 8))
    )
    got = calibrate.scales(gate, up, down, np.zeros(40, bool), x, 4)
    np.testing.assert_array_equal(got, np.ones(16))


def test_calibration_inputs_equal_those_of_forward():
    """Compares with the inputs of the feed-forward parts of all blocks."""
    params = glm5.unstack(cases.params(CFG), CFG)
    want, norm = [], block.rms_norm

    def record(x, weight, eps):
        want.append(norm(x, weight, eps))
        return want[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "rms_norm", record)
        hidden = jax.jit(lambda p: (glm5.forward(p, TOKENS, CFG).hidden, want[:]))(params)[1]
    parts = list(calibrate.feed_forwards(cases.params(CFG), CFG, TOKENS))
    got = [one.x for one in parts if one.path.endswith(("/mlp", "/shared"))]
    # Each token has as many experts as the router chooses.
    used = np.sum([one.used for one in parts if one.path.endswith("/experts")], 0)
    np.testing.assert_array_equal(used, CFG.num_experts_per_tok)
    assert len(hidden) == 2 * len(got) == 2 * CFG.num_hidden_layers
    for x, y in zip(got, hidden[1::2]):
        np.testing.assert_allclose(x, y.reshape(x.shape), rtol=0, atol=1e-5 * np.abs(y).max())
