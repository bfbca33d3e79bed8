"""Tests of oracles that no golden covers: ties, packing, MTP over documents, losses."""

import pathlib

import numpy as np
import pytest

from tests.oracles import attention, cross_entropy, experts, glm5, indexer

GOLDENS = pathlib.Path(__file__).parent / "goldens"
ALL_VISIBLE = np.ones((1, 1, 5), bool)


def select(scores, k, visible=ALL_VISIBLE):
    return indexer.select(np.array([[scores]], np.float64), visible, k)[0, 0].tolist()


def test_oracle_selects_keys_of_handwritten_rows():
    some, nan = np.array([[[False, True, False, True, False]]]), np.nan
    for name, scores, k, visible, expected in (
        ("indices ascend", [3, 9, 1, 7, 5], 3, ALL_VISIBLE, [1, 3, 4]),
        ("ties go to the lower index", [1, 2, 2, 2, 0], 2, ALL_VISIBLE, [1, 2]),
        ("-0 is not less than 0", [-0.0, 0.0, -0.0, 0.0, -1.0], 2, ALL_VISIBLE, [0, 1]),
        ("0 is not more than -0", [0.0, -0.0, 5.0, -0.0, 0.0], 3, ALL_VISIBLE, [0, 1, 2]),
        ("few visible keys", [9, 1, 9, 2, 9], 4, some, [1, 3, -1, -1]),
        ("NaN is last", [nan, 1, -5, nan, 2], 3, ALL_VISIBLE, [1, 2, 4]),
        ("the first NaN is before the next", [nan, 1, -5, nan, 2], 4, ALL_VISIBLE, [0, 1, 2, 4]),
        ("no wider than the keys", [3, 9, 1, 7, 5], 64, ALL_VISIBLE, [0, 1, 2, 3, 4]),
    ):
        assert select(scores, k, visible) == expected, name


def test_selection_mask_ignores_minus_one():
    mask = indexer.selection_mask(np.array([[[0, 3, -1, -1]]]), 5)
    assert mask[0, 0].tolist() == [True, False, False, True, False]


def test_rotation_preserves_norm_and_depends_on_distance():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 8))
    frequencies, _ = attention.rope_frequencies({"rope_theta": 100.0}, 8, 64)

    def dot(i, j):
        at = [attention.rope_turns(frequencies, 1.0, np.array([[p]])) for p in (i, j)]
        rotated = [attention.rope_interleaved(x, a) for x, a in zip((q, k), at, strict=True)]
        return np.sum(rotated[0] * rotated[1]), np.linalg.norm(rotated[0])

    assert dot(9, 4)[0] == pytest.approx(dot(25, 20)[0])
    assert dot(9, 4)[0] != pytest.approx(dot(9, 5)[0])
    assert dot(9, 4)[1] == pytest.approx(np.linalg.norm(q))


def test_query_without_keys_has_zero_output():
    ones = np.ones((1, 2, 1, 3))
    out = attention.attend(ones, ones, ones, np.array([[[False, False], [True, True]]]), 1.0)
    assert out[0, 0].tolist() == [[0.0, 0.0, 0.0]]
    np.testing.assert_allclose(out[0, 1], 1.0)


def test_routes_handwritten_logits():
    # p = sigmoid: 0.5, 0.25, 0.75, 0.9. The bias ranks expert 1 above expert 0; weights stay p.
    logits = np.log(np.array([1.0, 1 / 3, 3.0, 9.0]))
    ids, weights = experts.route(logits, np.array([0.0, 0.3, 0.0, -0.9]), 2, scale=2.0)
    assert ids.tolist() == [2, 1]
    np.testing.assert_allclose(weights, [1.5, 0.5])
    _, raw = experts.route(logits, np.zeros(4), 2, normalise=False, scale=2.0)
    np.testing.assert_allclose(raw, [1.8, 1.5])


def test_oracle_routes_within_best_group():
    """One strong expert (3) is not enough for its group; negative scores do not select other groups."""
    for p, bias in (((0.6, 0.6, 0.1, 0.9, 0.1, 0.1), 0.0), ((0.5, 0.4, 0.3, 0.2), -2.0)):
        logits = np.log(np.array(p) / (1 - np.array(p)))
        ids, _ = experts.route(logits, np.full(len(p), bias), 2, n_group=2, topk_group=1)
        assert sorted(ids.tolist()) == [0, 1], p


def test_balance_loss_is_one_if_balanced():
    everyone = np.array([[[0, 1], [2, 3]]])
    counted = np.ones((1, 2), bool)
    assert experts.balance_loss(np.zeros((1, 2, 4)), everyone, counted) == pytest.approx(1.0)
    # Every token on experts 0 and 1, whose normalised scores are 0.4 each: 2 * 0.4 + 2 * 0.4.
    p = np.array([0.8, 0.8, 0.2, 0.2])
    skewed = np.broadcast_to(np.log(p / (1 - p)), (1, 2, 4))
    same = np.array([[[0, 1], [0, 1]]])
    assert experts.balance_loss(skewed, same, counted) == pytest.approx(1.6)


def test_balance_loss_ignores_padding():
    rng = np.random.default_rng(1)
    logits, ids = rng.normal(size=(1, 6, 4)), rng.integers(0, 4, (1, 6, 2))
    counted = np.array([[True, True, True, False, False, False]])
    short = experts.balance_loss(logits[:, :3], ids[:, :3], counted[:, :3])
    assert experts.balance_loss(logits, ids, counted) == pytest.approx(short)


def test_balance_step_follows_load():
    moved = experts.moved_bias(np.zeros(3), np.array([1.0, 2.0, 3.0]), 0.5)
    assert moved.tolist() == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("z_weight", [0.0, 0.3])
def test_cross_entropy_gradients_equal_finite_differences(z_weight):
    rng = np.random.default_rng(2)
    hidden, weight = rng.normal(size=(4, 3)), rng.normal(size=(3, 7))
    targets, ce_weight = rng.integers(0, 7, 4), np.array([1.0, 0.0, 0.5, 2.0])
    exact = cross_entropy.linear_cross_entropy(hidden, weight, targets, ce_weight, z_weight)
    for name, x in (("d_hidden", hidden), ("d_weight", weight)):
        for at in np.ndindex(x.shape):
            value, losses = x[at], []
            for step in (1e-5, -1e-5):
                x[at] = value + step
                out = cross_entropy.linear_cross_entropy(
                    hidden, weight, targets, ce_weight, z_weight
                )
                losses.append(out["loss"])
            x[at] = value
            assert exact[name][at] == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-8)
    assert not exact["d_hidden"][1].any()


def test_linear_cross_entropy_equals_mean_cross_entropy():
    rng = np.random.default_rng(3)
    hidden, weight, targets = rng.normal(size=(4, 3)), rng.normal(size=(3, 7)), np.arange(4)
    out = cross_entropy.linear_cross_entropy(hidden, weight, targets, np.full(4, 0.25))
    mean = glm5.mean_cross_entropy((hidden @ weight)[None], targets[None])
    assert out["loss"] == pytest.approx(mean)


@pytest.mark.parametrize("name", ["hf_tiny_b", "hf_tiny_c", "hf_tiny_d"])
def test_oracle_isolates_packed_documents(name):
    config, weights = glm5.load(GOLDENS / name)
    ids = np.load(GOLDENS / name / "arrays.npz")["input_ids"][:1, :29]
    segments = np.array([[1] * 16 + [2] * 11 + [0] * 2])
    assert glm5.positions_of(segments)[0, 14:].tolist() == [14, 15, *range(11), 0, 0]
    packed = glm5.forward(weights, config, ids, segment_ids=segments)["logits"]
    for part in (slice(0, 16), slice(16, 27)):
        unpacked = glm5.forward(weights, config, ids[:, part])["logits"]
        np.testing.assert_allclose(packed[:, part], unpacked, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b", "hf_tiny_c"])
def test_oracle_is_dense_up_to_index_topk(name):
    config, weights = glm5.load(GOLDENS / name)
    ids = np.load(GOLDENS / name / "arrays.npz")["input_ids"]
    k = config["index_topk"]
    sparse = glm5.forward(weights, config, ids)["logits"]
    dense = glm5.forward(weights, config, ids, attention_kind="dense")["logits"]
    np.testing.assert_allclose(sparse[:, :k], dense[:, :k], atol=1e-10, rtol=0)
    assert np.max(np.abs(sparse[:, k:] - dense[:, k:])) > 0.1


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_d"])
def test_oracle_mtp_isolates_packed_documents(name):
    """Valid positions of a packed row equal those of each document, in every step."""
    config, weights = glm5.load(GOLDENS / name)
    ids = np.load(GOLDENS / name / "arrays.npz")["input_ids"][:1, :27]
    segments = np.array([[1] * 16 + [2] * 11])
    final = glm5.forward(weights, config, ids, segment_ids=segments)["final_hidden"]
    packed = glm5.mtp(weights, config, ids, final, segment_ids=segments, steps=3)
    for start, stop in ((0, 16), (16, 27)):
        unpacked = glm5.mtp(weights, config, ids[:, start:stop], final[:, start:stop], steps=3)
        for k, (ours, theirs) in enumerate(zip(packed, unpacked, strict=True), start=1):
            part = slice(start, stop - k)
            assert ours["valid"][:, part].all()
            assert not ours["valid"][:, stop - k : stop].any()
            np.testing.assert_allclose(ours["logits"][:, part], theirs["logits"], atol=1e-10)


def test_mtp_chain_uses_normed_hidden_state():
    config, weights = glm5.load(GOLDENS / "hf_tiny_a")
    ids = np.load(GOLDENS / "hf_tiny_a" / "arrays.npz")["input_ids"]
    final = glm5.forward(weights, config, ids)["final_hidden"]
    first, second = glm5.mtp(weights, config, ids, final, steps=2)
    again = glm5.mtp(weights, config, ids[:, 1:], first["hidden"], steps=1)[0]
    np.testing.assert_allclose(second["logits"], again["logits"], atol=1e-10)
