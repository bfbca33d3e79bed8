"""Arithmetic of the quantisation benchmark: bytes, slices, planted outliers, differences."""

import numpy as np
import pytest

from experiments.benchmarks import quantised
from glm5_jax import presets
from glm5_jax.parallel.tree import flatten
from tests.mesh import cases

CFG = cases.config(num_hidden_layers=2, indexer_types=None)


def test_bytes_of_glm5_equal_those_of_its_weights():
    cfg, parts = presets.glm5(), quantised.num_bytes(presets.glm5())
    biases = 76 * 256
    total = sum(part["bf16"] for part in parts.values())
    assert total == 2 * cfg.num_stored_parameters + 2 * biases  # biases are float32
    experts = 75 * 256 * 3 * 6144 * 2048
    assert parts["routed experts"]["bf16"] == 2 * experts
    assert parts["routed experts"]["W4A8"] == experts // 2 + 4 * experts // 128
    scales = 75 * 256 * (2 * 2048 + 6144)
    assert parts["routed experts"]["W8A8"] == experts + 4 * scales
    dense = 3 * 3 * 6144 * 12288
    assert parts["dense feed-forwards"]["W4A8"] == dense + 4 * 3 * (2 * 12288 + 6144)
    assert parts["embedding, head"]["W4A8"] == parts["embedding, head"]["bf16"]
    assert parts[quantised.TURN_BACK]["W4A8"] == 2 * 2 * 6144**2


@pytest.mark.parametrize(
    ("size", "chip", "chips"),
    [(1, 16, 1), (14.4e9, 16, 1), (14.5e9, 16, 2), (414e9, 128, 4), (461e9, 128, 8)],
)
def test_leaves_tenth_of_slice_free(size, chip, chips):
    assert quantised.num_chips(size, chip) == chips


@pytest.mark.slow
def test_planted_outliers_change_no_output():
    params, batch = cases.params(CFG), cases.batch()
    want = quantised.log_probs(params, batch, CFG)
    planted = quantised.with_outliers(params, CFG)
    np.testing.assert_allclose(quantised.log_probs(planted, batch, CFG), want, atol=2e-3)
    before = flatten(params)
    factors = {p: np.abs(w / before[p]) for p, w in flatten(planted).items()}
    for norm in ("dense_layers/attn_norm", "moe_layers/mlp_norm", "mtp/block/attn/q_a_norm"):
        assert (
            np.sum(np.isclose(factors[norm][..., :], quantised.OUTLIER, rtol=1e-3))
            == quantised.CHANNELS
        )
    for path, count in (("moe_layers/attn/v_b", 2), ("moe_layers/experts/up", 4)):
        large = np.isclose(factors[path], quantised.OUTLIER, rtol=1e-3)
        assert large.any((0, 1, 2)).sum() == large[0, 0, 0].sum() == count
    small = np.isclose(factors["moe_layers/experts/down"], 1 / quantised.OUTLIER, rtol=1e-3)
    assert small.all((0, 1, 3)).sum() == 4
    only = flatten(quantised.with_outliers(params, CFG, ("values",)))
    assert {p for p, w in only.items() if np.any(w != before[p])} == {
        f"{block}/attn/{w}"
        for block in ("dense_layers", "moe_layers", "mtp/block")
        for w in ("v_b", "o")
    }


def test_differences_use_counted_tokens():
    """Two tokens count. The first loses ln 2 and keeps its best token, the second gains ln 2 and changes it."""
    before = np.log([[[0.5, 0.25, 0.25], [0.4, 0.3, 0.3], [1, 1, 1], [1, 1, 1]]]).astype(np.float32)
    after = np.log([[[0.5, 0.375, 0.125], [0.2, 0.2, 0.6], [1, 1, 1], [1, 1, 1]]])
    batch = {"token_ids": np.array([[0, 2, 2, 0]]), "loss_mask": np.array([[0, 1, 1, 0]])}
    metrics = quantised.QuantisationMetrics.of(
        lambda batch: after.astype(np.float32), [batch], [before]
    )
    assert metrics.perplexity == pytest.approx(0, abs=1e-6) and metrics.agreement == 0.5
    assert metrics.error == pytest.approx(np.log(2) / 2**0.5)
    first, second = (
        sum(p * np.log(p / q) for p, q in zip(*np.exp([before[0, i], after[0, i]]))) for i in (0, 1)
    )
    assert metrics.divergence == pytest.approx((first + second) / 2, rel=1e-5)


@pytest.mark.parametrize("words", [["a", "x"], ["a", "0"], ["a", "32", "b"], ["nowhere"]])
def test_reports_wrong_command_in_one_line(words, capsys, monkeypatch):
    monkeypatch.setattr(quantised, "show_bytes", lambda cfg: None)
    monkeypatch.setattr(quantised, "pin", lambda: None)
    with pytest.raises(SystemExit) as left:
        quantised.main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
