"""Tests of the NumPy oracle against the goldens of transformers."""

import json
import pathlib

import numpy as np
import pytest

from tests.oracles import attention, glm5, indexer

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
EVERY_LAYER = ["logits", "hidden_states", "final_hidden", "attn_out", "mlp_out"]
EVERY_LAYER += ["router_logits", "router_weights"]

# Some arrays exist in some goldens only.
indexed = pytest.mark.parametrize("golden", ["hf_tiny_a", "hf_tiny_b", "hf_tiny_c"], indirect=True)
padded = pytest.mark.parametrize("golden", ["hf_tiny_b", "hf_tiny_c", "hf_tiny_d"], indirect=True)
with_mtp = pytest.mark.parametrize("golden", ["hf_tiny_a", "hf_tiny_d"], indirect=True)


@pytest.fixture(scope="module", params=["hf_tiny_a", "hf_tiny_b", "hf_tiny_c", "hf_tiny_d"])
def golden(request):
    folder = GOLDENS / request.param
    config, weights = glm5.load(folder)
    arrays = dict(np.load(folder / "arrays.npz"))
    meta = json.loads((folder / "meta.json").read_text())
    return config, weights, arrays, meta


@pytest.fixture(scope="module")
def out(golden):
    config, weights, arrays, _ = golden
    return glm5.forward(weights, config, arrays["input_ids"])


def assert_near(actual, arrays, meta, name):
    """Checks to ten times the float32 rounding of transformers, or 1e-4 where that was not recorded."""
    rounding = meta["float32_vs_float64"].get(name, {"max_abs": 1e-5})["max_abs"]
    np.testing.assert_allclose(actual, arrays[name], atol=10 * rounding + 1e-6, rtol=0)


def test_oracle_equals_float64_golden(golden, out):
    _, _, arrays, _ = golden
    np.testing.assert_allclose(out["logits"], arrays["logits_f64"], atol=1e-9, rtol=0)
    np.testing.assert_allclose(out["final_hidden"], arrays["final_hidden_f64"], atol=1e-9, rtol=0)
    loss = glm5.mean_cross_entropy(out["logits"][:, :-1], arrays["input_ids"][:, 1:])
    np.testing.assert_allclose(loss, arrays["loss_f64"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_oracle_is_near_float32_golden(golden, out, name):
    _, _, arrays, meta = golden
    assert_near(out[name], arrays, meta, name)


@indexed
def test_oracle_selects_same_keys(golden, out):
    _, _, arrays, meta = golden
    np.testing.assert_array_equal(out["selected"], arrays["selected"])
    finite = np.isfinite(arrays["index_scores"])
    np.testing.assert_array_equal(np.isfinite(out["index_scores"]), finite)
    rounding = meta["float32_vs_float64"]["index_scores"]["max_abs"]
    np.testing.assert_allclose(
        out["index_scores"][finite],
        arrays["index_scores"][finite],
        atol=10 * rounding,
        rtol=0,
    )
    theirs = np.sort(np.where(_visible(arrays), arrays["topk_indices"], 2**30), axis=-1)
    ours = np.sort(np.where(out["topk"] < 0, 2**30, out["topk"]), axis=-1)
    np.testing.assert_array_equal(ours, theirs)


def _visible(arrays):
    """Returns True for the indices of transformers that are not in the future."""
    queries = np.arange(arrays["topk_indices"].shape[2])[:, None]
    return arrays["topk_indices"] <= queries


def test_oracle_selects_same_experts(golden, out):
    _, _, arrays, _ = golden
    np.testing.assert_array_equal(out["router_weights"] != 0, arrays["router_weights"] != 0)


@pytest.mark.parametrize(
    "golden",
    [
        *(pytest.param(f"hf_tiny_{x}", marks=pytest.mark.slow) for x in "ab"),
        "hf_tiny_c",
        "hf_tiny_d",
    ],
    indirect=True,
)
def test_oracle_continues_greedily_like_golden(golden):
    config, weights, arrays, _ = golden
    for kind in ("long", "short"):
        theirs = arrays[f"gen_{kind}_ids"]
        new = arrays[f"gen_{kind}_logits"].shape[1]
        ours = glm5.greedy(weights, config, theirs[:, :-new], new)
        np.testing.assert_array_equal(ours, theirs)


@padded
def test_oracle_handles_left_padding(golden):
    config, weights, arrays, meta = golden
    mask = arrays["pad_attention_mask"]
    assert (mask == 0).any()
    real = mask == 1
    np.testing.assert_array_equal(glm5.positions_of(mask)[real], arrays["pad_position_ids"][real])
    out = glm5.forward(weights, config, arrays["pad_input_ids"], segment_ids=mask)
    rounding = meta["float32_vs_float64"]["logits"]["max_abs"]
    np.testing.assert_allclose(
        out["logits"][real], arrays["pad_logits"][real], atol=10 * rounding, rtol=0
    )
    new = arrays["pad_gen_ids"].shape[1] - mask.shape[1]
    ours = glm5.greedy(weights, config, arrays["pad_input_ids"], new, attention_mask=mask)
    np.testing.assert_array_equal(ours, arrays["pad_gen_ids"])


@with_mtp
def test_oracle_mtp_chain_equals_golden(golden, out):
    config, weights, arrays, meta = golden
    steps = 3 if "mtp_logits_3" in arrays else 1
    rounding = meta["float32_vs_float64"]["mtp_logits"]["max_abs"]
    results = glm5.mtp(weights, config, arrays["input_ids"], out["final_hidden"], steps=steps)
    for suffix, step in zip(["", "_2", "_3"][:steps], results, strict=True):
        for name in ("logits", "hidden"):
            theirs = arrays[f"mtp_{name}{suffix}"]
            np.testing.assert_allclose(step[name], theirs, atol=10 * rounding, rtol=0)


def half_split(x, turns):
    """Rotates pairs (i, i + r/2), which GLM does not use."""
    half = x.shape[-1] // 2
    mixed = np.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)
    return ROPE(mixed, turns)


ROPE = attention.rope_interleaved
MISTAKES = {
    "latent eps": ("hf_tiny_b", lambda m, c, w: m.setattr(glm5, "LATENT_NORM_EPS", 1e-5)),
    "index eps": ("hf_tiny_b", lambda m, c, w: m.setattr(glm5, "INDEX_NORM_EPS", 1e-5)),
    "half-split rope": (
        "hf_tiny_a",
        lambda m, c, w: m.setattr(attention, "rope_interleaved", half_split),
    ),
    "no ReLU": ("hf_tiny_a", lambda m, c, w: m.setattr(indexer, "relu", lambda x: x)),
    "no index key bias": ("hf_tiny_a", lambda m, c, w: scale_all(w, "k_norm.bias", 0)),
    "more keys": ("hf_tiny_a", lambda m, c, w: c.update(index_topk=10**6)),
    "no groups": ("hf_tiny_b", lambda m, c, w: c.update(n_group=1, topk_group=1)),
    "one group more": ("hf_tiny_c", lambda m, c, w: c.update(topk_group=3)),
    "no correction bias": ("hf_tiny_c", lambda m, c, w: scale_all(w, "correction_bias", 0)),
    "normalized": ("hf_tiny_c", lambda m, c, w: c.update(norm_topk_prob=True)),
    "not normalized": ("hf_tiny_a", lambda m, c, w: c.update(norm_topk_prob=False)),
    "unscaled": ("hf_tiny_d", lambda m, c, w: c.update(routed_scaling_factor=1.0)),
    "no shared expert": ("hf_tiny_c", lambda m, c, w: c.update(n_shared_experts=0)),
    "block eps": ("hf_tiny_b", lambda m, c, w: c.update(rms_norm_eps=1e-6)),
    "no attention bias": ("hf_tiny_c", lambda m, c, w: scale_all(w, "proj.bias", 0)),
    "no output bias": ("hf_tiny_c", lambda m, c, w: scale_all(w, "o_proj.bias", 0)),
    "rope base": ("hf_tiny_d", lambda m, c, w: change_rope(c, rope_theta=10_000.0)),
    "no YaRN": ("hf_tiny_c", lambda m, c, w: change_rope(c, rope_type="default")),
    "YaRN factor": ("hf_tiny_c", lambda m, c, w: change_rope(c, factor=3.9)),
    "YaRN length": (
        "hf_tiny_c",
        lambda m, c, w: change_rope(c, original_max_position_embeddings=96),
    ),
    "YaRN fast": ("hf_tiny_c", lambda m, c, w: change_rope(c, beta_fast=0.5)),
    "YaRN slow": ("hf_tiny_c", lambda m, c, w: change_rope(c, beta_slow=1.0)),
    "YaRN truncation": ("hf_tiny_c", lambda m, c, w: change_rope(c, truncate=False)),
    "YaRN magnitude": ("hf_tiny_c", lambda m, c, w: change_rope(c, attention_factor=1.0)),
    "YaRN scale": ("hf_tiny_c", lambda m, c, w: m.setattr(attention, "softmax_scale", plain_scale)),
    "tied embeddings": ("hf_tiny_c", lambda m, c, w: untie(w)),
}


def scale_all(weights, ending, factor):
    for name in [name for name in weights if name.endswith(ending)]:
        weights[name] = weights[name] * factor


def change_rope(config, **rope):
    config["rope_parameters"] = config["rope_parameters"] | rope


def plain_scale(rope, qk_head_dim, max_positions):
    return qk_head_dim**-0.5


def untie(weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_goldens_detect_mistakes(mistake, monkeypatch):
    name, make = MISTAKES[mistake]
    config, weights = glm5.load(GOLDENS / name)
    arrays = np.load(GOLDENS / name / "arrays.npz")
    make(monkeypatch, config, weights)
    with np.errstate(all="ignore"):
        wrong = glm5.forward(weights, config, arrays["input_ids"])["logits"]
    assert np.max(np.abs(wrong - arrays["logits_f64"])) > 1e-3
