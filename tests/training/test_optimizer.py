"""Tests of the optimizer: the groups of weights and their update rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.parallel import tree
from glm5_jax.training.muon import layout_of
from glm5_jax.training.optimizer import (
    OptimizerConfig,
    gradient_norms,
    groups_of,
    make_optimizer,
)
from tests.oracles import muon as oracle

RATE = 0.01
SMALL = {  # one weight of every kind, by its path
    "embed/weight": ("v d", (12, 6)),
    "final_norm": ("d", (6,)),
    "moe_layers/attn_norm": ("l d", (2, 6)),
    "moe_layers/attn/q_b": ("l q n hr", (2, 5, 3, 4)),
    "moe_layers/indexer/k": ("l d j", (2, 6, 4)),
    "moe_layers/indexer/k_norm_bias": ("l j", (2, 4)),
    "moe_layers/router/bias": ("l e", (2, 8)),
    "moe_layers/experts/down": ("l e f d", (2, 8, 3, 6)),
}
LETTERS = tree.unflatten({path: letters for path, (letters, _) in SMALL.items()})


def random_weights(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    flat = {p: scale * rng.standard_normal(shape) for p, (_, shape) in SMALL.items()}
    return tree.unflatten({p: jnp.asarray(x, jnp.float32) for p, x in flat.items()})


def run(config, gradients, rate=RATE, params=None):
    """Returns the flat parameters after one step per tree of gradients."""
    tx = make_optimizer(config, LETTERS)
    params = random_weights(0) if params is None else params
    state = tx.init(params)
    for g in gradients:
        updates, state = tx.update(g, state, params)
        params = jax.tree.map(lambda p, u: p + rate * u, params, updates)
    return tree.flatten(params)


def float32_config(**changes):
    return dataclasses.replace(OptimizerConfig(ns_dtype="float32"), **changes)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_patterns_cover_all_weights_of_presets(name):
    cfg = presets.get(name)
    letters = glm5.axis_letters(cfg)
    groups = tree.flatten(groups_of(OptimizerConfig(), letters))
    weights = tree.flatten(glm5.abstract_params(cfg))
    assert groups.keys() == weights.keys()
    for path, group in groups.items():
        letter = tree.flatten(letters)[path]
        if group == "muon":
            layout_of(path, letter)
        assert (group == "frozen") == path.endswith("router/bias")
        assert (group == "indexer") == ("indexer/" in path)
        if group == "adamw":
            assert path in ("embed/weight", "lm_head/weight") or len(letter.split()) <= 2


def test_groups_weights_by_pattern():
    tiny = presets.tiny()
    biased = dataclasses.replace(tiny, attention_bias=True)
    gqa = dataclasses.replace(presets.ablation("gqa"), layer_attention=("gdn",) * 4)
    mla = "router/weight attn/q_a attn/q_b attn/kv_a attn/k_b attn/v_b attn/o experts/up shared/up"
    gdn = "attn/q attn/k attn/v attn/o gdn/a gdn/b gdn/gate"
    for cfg, group, folder, names in (
        (tiny, "muon", "moe_layers/", mla),
        (tiny, "muon", "", "mtp/eh_proj dense_layers/mlp/down lm_head/weight"),
        (tiny, "adamw", "", "embed/weight final_norm mtp/enorm"),
        (tiny, "adamw", "moe_layers/attn/", "q_a_norm"),
        (tiny, "indexer", "mtp/block/indexer/", "weights"),
        (biased, "adamw", "moe_layers/attn/", "q_a_bias o_bias"),
        (gqa, "muon", "dense_layers/", gdn),
        (gqa, "muon", "moe_layers/", gdn),
        (gqa, "adamw", "moe_layers/gdn/", "conv_q conv_k conv_v a_log dt_bias norm"),
    ):
        letters = glm5.axis_letters(cfg)
        groups = tree.flatten(groups_of(OptimizerConfig(), letters))
        for path in (folder + name for name in names.split()):
            assert groups[path] == group, path
            if group == "muon":
                layout_of(path, tree.flatten(letters)[path])


def test_gives_lm_head_to_muon_unless_told_otherwise():
    letters = glm5.axis_letters(presets.tiny())
    groups = tree.flatten(groups_of(OptimizerConfig(), letters))
    assert groups["lm_head/weight"] == "muon" and groups["embed/weight"] == "adamw"
    groups = tree.flatten(groups_of(OptimizerConfig(lm_head="adamw"), letters))
    assert groups["lm_head/weight"] == "adamw"
    with pytest.raises(ValueError, match="lm_head is 'sgd'; use 'muon' or 'adamw'"):
        make_optimizer(OptimizerConfig(lm_head="sgd"), letters)


def test_rejects_weight_without_pattern():
    with pytest.raises(ValueError, match="no pattern covers moe_layers/attn/q_c"):
        groups_of(OptimizerConfig(), {"moe_layers": {"attn": {"q_c": "l d q"}}})


def test_rejects_frozen_pattern_without_weight():
    with pytest.raises(ValueError, match="frozen pattern 'indxer/' matches no weight"):
        groups_of(OptimizerConfig(frozen=("indxer/",)), LETTERS)


def test_steps_equal_oracle():
    """No constant has its default, and the gradients are such that each one matters."""
    constants = {"beta": 0.8, "nesterov": False, "rms": 0.3, "decay": 0.2, "steps": 4}
    constants["coefficients"] = (2.0, -1.5, 0.5)
    config = float32_config(
        muon_momentum=0.8,
        muon_nesterov=False,
        muon_rms=0.3,
        ns_coefficients=(2.0, -1.5, 0.5),
        ns_steps=4,
        weight_decay=0.2,
        adam_b1=0.8,
        adam_b2=0.9,
        adam_eps=1e-2,
        clip_norm=3.0,
    )
    gradients = [random_weights(1, 10.0), random_weights(2, 0.01), random_weights(3, 1.0)]
    got = run(config, gradients)

    want = {p: np.asarray(x, np.float64) for p, x in tree.flatten(random_weights(0)).items()}
    first = {p: np.zeros_like(x) for p, x in want.items()}
    second = {p: np.zeros_like(x) for p, x in want.items()}
    adamw = ["embed/weight", "final_norm", "moe_layers/attn_norm"]
    indexer = ["moe_layers/indexer/k", "moe_layers/indexer/k_norm_bias"]
    heads = [("moe_layers/attn/q_b", np.s_[layer, :, n]) for layer in range(2) for n in range(3)]
    experts = [("moe_layers/experts/down", np.s_[layer, e]) for layer in range(2) for e in range(8)]
    for count, g in enumerate(gradients, 1):
        g = {p: np.asarray(x, np.float64) for p, x in tree.flatten(g).items()}
        for group in (adamw, indexer):
            for path, clipped in zip(group, oracle.clip([g[p] for p in group], 3.0)):
                matrix = path in ("embed/weight", "moe_layers/indexer/k")
                want[path], first[path], second[path] = oracle.adamw_step(
                    want[path], first[path], second[path], count, clipped, RATE, 0.8, 0.9, 1e-2,
                    decay=0.2 if matrix else 0.0,
                )  # fmt: skip
        for path, at in heads + experts:
            want[path][at], first[path][at] = oracle.muon_step(
                want[path][at], first[path][at], g[path][at], RATE, **constants
            )
    assert want.keys() == got.keys()
    for path, x in got.items():
        np.testing.assert_allclose(x, want[path], atol=2e-6, err_msg=path)


def test_defaults_equal_paper():
    default = OptimizerConfig()
    assert (default.muon_momentum, default.muon_nesterov, default.muon_rms) == (0.95, True, 0.2)
    assert (default.split, default.ns_steps, default.weight_decay) == ("head", 5, 0.1)
    assert default.ns_coefficients == oracle.PUBLIC_COEFFICIENTS
    assert (default.adam_b1, default.adam_b2, default.adam_eps) == (0.9, 0.95, 1e-8)
    assert default.clip_norm == 1.0


def test_split_changes_up_projections_only():
    by_head, by_matrix = (
        run(float32_config(split=s), [random_weights(1)]) for s in ("head", "whole")
    )
    changed = {p for p in by_head if not np.array_equal(by_head[p], by_matrix[p])}
    assert changed == {"moe_layers/attn/q_b"}


def test_frozen_weights_have_no_state_and_do_not_change():
    config = float32_config(frozen=("^(?!.*indexer/)",))  # as in the indexer's warm-up
    after, before = (
        run(config, [random_weights(1), random_weights(2)]),
        tree.flatten(random_weights(0)),
    )
    for path in SMALL:
        assert np.array_equal(after[path], before[path]) == ("indexer/" not in path)
    state = make_optimizer(config, LETTERS).init(random_weights(0))
    assert all("indexer" in path or path.endswith("count") for path in tree.flatten(state))


def test_state_holds_float32_moments_and_counts():
    state = make_optimizer(OptimizerConfig(), LETTERS).init(random_weights(0))
    for path, x in tree.flatten(state).items():
        assert x.size > 0 and "router/bias" not in path  # Orbax rejects arrays of size zero
        if path.endswith("count"):
            assert (x.shape, x.dtype) == ((), jnp.int32)
        else:
            assert x.dtype == jnp.float32
    elements = {p: int(np.prod(shape)) for p, (_, shape) in SMALL.items()}
    muon = sum(elements[p] for p in ("moe_layers/attn/q_b", "moe_layers/experts/down"))
    rest = sum(elements.values()) - muon - elements["moe_layers/router/bias"]
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == muon + 2 * rest


def test_gradient_norms_are_per_group():
    gradients = random_weights(1)
    norms = gradient_norms(gradients, groups_of(OptimizerConfig(), LETTERS))
    flat = tree.flatten(gradients)
    want = {
        "adamw": ["embed/weight", "final_norm", "moe_layers/attn_norm"],
        "indexer": ["moe_layers/indexer/k", "moe_layers/indexer/k_norm_bias"],
        "muon": ["moe_layers/attn/q_b", "moe_layers/experts/down"],
    }
    assert list(norms) == sorted(want)
    for group, paths in want.items():
        vector = np.concatenate([np.ravel(flat[p]) for p in paths])
        assert norms[group] == pytest.approx(np.linalg.norm(vector), rel=1e-5)


def test_optimizer_rejects_invalid_values():
    for field, value in (
        ("muon_momentum", 1.0),
        ("adam_b1", -0.1),
        ("adam_b2", 1.0),
        ("muon_rms", 0.0),
        ("adam_eps", 0.0),
        ("clip_norm", 0.0),
        ("ns_steps", 0),
        ("weight_decay", -0.1),
        ("ns_coefficients", (1.0, 2.0)),
        ("ns_dtype", "int8"),
        ("ns_blocks", "some"),
        ("matrices", "sgd"),
    ):
        with pytest.raises(ValueError, match=f"{field} is"):
            make_optimizer(float32_config(**{field: value}), LETTERS)


def test_adamw_updates_matrices_on_request():
    """With `matrices="adamw"` matrices are clipped with the other weights, and no group uses Muon."""
    config = float32_config(matrices="adamw", clip_norm=1.0)
    groups = tree.flatten(groups_of(config, LETTERS))
    assert set(groups.values()) == {"adamw", "indexer", "frozen"}
    assert groups["moe_layers/attn/q_b"] == groups["moe_layers/experts/down"] == "adamw"
    g = {p: np.asarray(x, np.float64) for p, x in tree.flatten(random_weights(1)).items()}
    paths = [p for p, group in groups.items() if group == "adamw"]
    got, before = run(config, [random_weights(1)]), tree.flatten(random_weights(0))
    for path, clipped in zip(paths, oracle.clip([g[p] for p in paths], 1.0)):
        want, *_ = oracle.adamw_step(
            np.asarray(before[path], np.float64), 0.0, 0.0, 1, clipped, RATE, 0.9, 0.95, 1e-8,
            decay=0.1 if len(set(tree.flatten(LETTERS)[path].split()) - {"l"}) > 1 else 0.0,
        )  # fmt: skip
        np.testing.assert_allclose(got[path], want, atol=2e-6, err_msg=path)
