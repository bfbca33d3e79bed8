"""Tests that a rotated model is the same function, to 1e-9 in float64, and that each fold and rotation is necessary."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.inference.quantize import rotation
from glm5_jax.inference.quantize.hadamard import hadamard
from glm5_jax.model import attention, glm5
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel import axes
from glm5_jax.parallel.tree import flatten, unflatten
from tests.mesh import cases

# A dense layer, a MoE layer with a shared selection, the MTP layer, biases.
CFG = cases.config(
    attention_bias=True, dtype="float64", num_hidden_layers=2, indexer_types=("full", "shared")
)
TIED = cases.config(
    "dense", dtype="float64", tie_word_embeddings=True, num_hidden_layers=1, index_topk=None,
    indexer_types=None, num_nextn_predict_layers=0, first_k_dense_replace=1,
)  # fmt: skip
TOKENS = cases.batch()["token_ids"][:2]


@functools.cache
def params(cfg):
    """Returns weights in float64, with factors of 2 among the weights of norms."""
    draw = np.random.default_rng(0)
    flat = flatten(cases.params(dataclasses.replace(cfg, dtype="float32")))
    for path, w in flat.items():
        scale = draw.choice([0.5, 1.0, 2.0], w.shape) if path.endswith("norm") else 1.0
        flat[path] = np.asarray(w, np.float64) * scale
    return unflatten(flat)


@functools.partial(jax.jit, static_argnames="cfg")
def run(params, cfg):
    """Returns the logits, the hidden state, those of two chained MTP steps, and the keys that every indexer selects."""
    selected, select = [], attention.lightning_indexer

    def indexer(*args, **options):
        selected.append(select(*args, **options))
        return selected[-1]

    with mock.patch.object(attention, "lightning_indexer", indexer):
        out = [glm5.forward(glm5.unstack(params, cfg), TOKENS, cfg)]
        for _ in range(2 if cfg.num_nextn_predict_layers else 0):
            out.append(glm5.forward_mtp(params, out[-1].hidden, TOKENS, cfg))
    return [x for o in out for x in (o.logits, o.hidden)], selected


@functools.cache
def plain(cfg):
    """Runs the model without rotation. For CFG it uses the program of the rotated model, with identity rotations."""
    flat = dict(flatten(params(cfg)))
    if cfg is CFG:
        for path in rotation.FINAL_NORMS:
            flat[path] = RotatedNorm(flat[path], np.eye(cfg.hidden_size))
    with jax.enable_x64(True):
        return jax.device_get(run(unflatten(flat), cfg))


def difference(rotated, cfg, want):
    """Returns the maximum difference of outputs, and of selected keys."""
    with jax.enable_x64(True):
        (outputs, keys), (others, other_keys) = jax.device_get(run(rotated, cfg)), want
    max_difference = max(np.abs(x - y).max() for x, y in zip(outputs, others, strict=True))
    return max_difference, max(
        (np.abs(x - y).max() for x, y in zip(keys, other_keys, strict=True)), default=0
    )


def rotated(cfg, **patches):
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(rotation, name, value))
        return jax.device_get(rotation.rotate(params(cfg), cfg, seed=3)[0])


def test_unties_head_before_rotation():
    cfg = rotation.fold(params(TIED), TIED)[1]
    assert cfg == dataclasses.replace(TIED, tie_word_embeddings=False)
    assert difference(rotated(TIED), cfg, plain(TIED))[0] < 1e-9


def test_rotation_keeps_outputs_and_selected_keys():
    got = rotated(CFG)
    assert len(plain(CFG)[1]) == 3  # one of the trunk, one of each MTP step
    max_difference, keys = difference(got, CFG, plain(CFG))
    assert max_difference < 1e-9 and keys == 0
    for path, w in flatten(got).items():
        if path.endswith("norm") and path not in (*rotation.FINAL_NORMS, "mtp/hnorm"):
            want = flatten(params(CFG))[path] if path.endswith("k_norm") else np.ones(w.shape)
            np.testing.assert_array_equal(w, want)


FOLDS = [(norm, reader) for norm, (_, readers) in rotation.READERS.items() for reader in readers]


@pytest.mark.parametrize(("norm", "reader"), FOLDS, ids=str)
def test_every_fold_is_necessary(norm, reader):
    letter, readers = rotation.READERS[norm]
    partial = rotation.READERS | {norm: (letter, tuple(r for r in readers if r != reader))}
    max_difference, _ = difference(rotated(CFG, READERS=partial), CFG, plain(CFG))
    assert max_difference > 1e-3


@pytest.mark.parametrize(
    "leaf", ["final_norm", "mtp/norm", "mtp/enorm", "mtp/eh_proj", "mtp/hnorm"]
)
def test_every_rotation_of_hidden_state_is_necessary(leaf):
    got = rotated(CFG)
    flat, before = flatten(got), flatten(params(CFG))
    if leaf in rotation.FINAL_NORMS:
        assert isinstance(flat[leaf], RotatedNorm)
        back = flat[leaf].back
        np.testing.assert_allclose(back @ back.T, np.eye(CFG.hidden_size), atol=1e-12)
        flat[leaf] = RotatedNorm(flat[leaf].weight, np.eye(CFG.hidden_size))
    else:
        flat[leaf] = before[leaf] + (leaf == "mtp/hnorm")
    assert difference(unflatten(flat), CFG, plain(CFG))[0] > 1e-3


@pytest.mark.parametrize("space", rotation.SPACES)
def test_rotates_single_space_repeatedly(space):
    with jax.enable_x64(True):
        folded, _ = rotation.fold(params(CFG), CFG)
        got = folded
        for seed in (0, 1):
            got = rotation.turn(got, CFG, {space: rotation.bases(CFG, seed)[space]})
        folded, got = jax.device_get((folded, got))
    before = flatten(folded)
    changed = {
        path
        for path, w in flatten(got).items()
        if isinstance(w, RotatedNorm) or np.any(w != before[path])
    }
    names = flatten(glm5.axis_letters(CFG))
    axes_of_space = {"d": ("d", "dd"), "c": ("c", "cr")}.get(space, (space,))
    expected = {
        p for p, x in names.items() if set(x.split()) & {*axes_of_space} and not p.endswith("norm")
    }
    expected = expected - {"lm_head/weight"} | ({*rotation.FINAL_NORMS} if space == "d" else set())
    assert changed == expected
    if space == "d":  # its program is already compiled
        max_difference, keys = difference(got, CFG, plain(CFG))
        assert max_difference < 1e-9 and keys == 0


def test_bases_depend_on_seed():
    one, same, other = (rotation.bases(CFG, seed) for seed in (0, 0, 1))
    for space in rotation.SPACES:
        same_bytes, other_bytes = (bases[space].matrix.tobytes() for bases in (same, other))
        assert one[space].matrix.tobytes() == same_bytes != other_bytes


def test_glm5_has_hadamard_matrix_for_every_space():
    sizes = axes.sizes(presets.glm5())
    for space in rotation.SPACES:
        # Doubling is cheap, so only the odd factor needs a known matrix.
        size = sizes[space]
        assert hadamard(size // (size & -size) * min(size & -size, 4)) is not None


@pytest.mark.parametrize("kind", ["gqa", "gdn", "simple_gdn"])
def test_rejects_other_attention(kind):
    cfg = presets.ablation(kind)
    with pytest.raises(ValueError, match="own attention .MLA. can be rotated, not projections"):
        rotation.fold(glm5.abstract_params(cfg), cfg)
