"""A rotated model is the same function, to 1e-9 in float64, and no fold or turn can be left out."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.inference.quantize import rotation
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
    """In float64; a norm's weights have factors of 2 among them."""
    draw = np.random.default_rng(0)
    flat = flatten(cases.params(dataclasses.replace(cfg, dtype="float32")))
    for path, w in flat.items():
        scale = draw.choice([0.5, 1.0, 2.0], w.shape) if path.endswith("norm") else 1.0
        flat[path] = np.asarray(w, np.float64) * scale
    return unflatten(flat)


@functools.partial(jax.jit, static_argnames="cfg")
def run(params, cfg):
    """Logits, hidden state and those of two MTP steps in a chain; the keys that every indexer selects."""
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
    """Of the model as it is; that of CFG by the program of the rotated one, which turns back what nothing turned."""
    flat = dict(flatten(params(cfg)))
    if cfg is CFG:
        for path in rotation.FINAL_NORMS:
            flat[path] = RotatedNorm(flat[path], np.eye(cfg.hidden_size))
    with jax.enable_x64(True):
        return jax.device_get(run(unflatten(flat), cfg))


def difference(rotated, cfg, want):
    """The largest difference of outputs, and of the selected keys."""
    with jax.enable_x64(True):
        (outputs, keys), (others, other_keys) = jax.device_get(run(rotated, cfg)), want
    differ = max(np.abs(x - y).max() for x, y in zip(outputs, others, strict=True))
    return differ, max(
        (np.abs(x - y).max() for x, y in zip(keys, other_keys, strict=True)), default=0
    )


def rotated(cfg, **patches):
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(rotation, name, value))
        return jax.device_get(rotation.rotate(params(cfg), cfg, seed=3)[0])


def test_a_tied_head_gets_its_own_weights():
    cfg = rotation.fold(params(TIED), TIED)[1]
    assert cfg == dataclasses.replace(TIED, tie_word_embeddings=False)
    assert difference(rotated(TIED), cfg, plain(TIED))[0] < 1e-9


def test_outputs_and_selected_keys_stay():
    got = rotated(CFG)
    assert len(plain(CFG)[1]) == 3  # one in the trunk, one for each MTP step
    differ, keys = difference(got, CFG, plain(CFG))
    assert differ < 1e-9 and keys == 0
    for path, w in flatten(got).items():
        if path.endswith("norm") and path not in (*rotation.FINAL_NORMS, "mtp/hnorm"):
            want = flatten(params(CFG))[path] if path.endswith("k_norm") else np.ones(w.shape)
            np.testing.assert_array_equal(w, want)


FOLDS = [(norm, reader) for norm, (_, readers) in rotation.READERS.items() for reader in readers]


@pytest.mark.parametrize(("norm", "reader"), FOLDS, ids=str)
def test_no_fold_can_be_left_out(norm, reader):
    letter, readers = rotation.READERS[norm]
    left = rotation.READERS | {norm: (letter, tuple(r for r in readers if r != reader))}
    differ, _ = difference(rotated(CFG, READERS=left), CFG, plain(CFG))
    assert differ > 1e-3


@pytest.mark.parametrize(
    "what", ["final_norm", "mtp/norm", "mtp/enorm", "mtp/eh_proj", "mtp/hnorm"]
)
def test_nor_what_belongs_to_the_hidden_state(what):
    got = rotated(CFG)
    flat, before = flatten(got), flatten(params(CFG))
    if what in rotation.FINAL_NORMS:
        assert isinstance(flat[what], RotatedNorm)
        back = flat[what].back
        np.testing.assert_allclose(back @ back.T, np.eye(CFG.hidden_size), atol=1e-12)
        flat[what] = RotatedNorm(flat[what].weight, np.eye(CFG.hidden_size))
    else:
        flat[what] = before[what] + (what == "mtp/hnorm")
    assert difference(unflatten(flat), CFG, plain(CFG))[0] > 1e-3


@pytest.mark.parametrize("space", rotation.SPACES)
def test_every_space_can_be_turned_alone_and_twice(space):
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
    beside = {"d": ("d", "dd"), "c": ("c", "cr")}.get(space, (space,))
    own = {p for p, x in names.items() if set(x.split()) & {*beside} and not p.endswith("norm")}
    own = own - {"lm_head/weight"} | ({*rotation.FINAL_NORMS} if space == "d" else set())
    assert changed == own
    if space == "d":  # its program is compiled already
        differ, keys = difference(got, CFG, plain(CFG))
        assert differ < 1e-9 and keys == 0


def test_the_same_seed_gives_the_same_bits_and_another_others():
    one, same, other = (rotation.bases(CFG, seed) for seed in (0, 0, 1))
    for space in rotation.SPACES:
        assert one[space].tobytes() == same[space].tobytes() != other[space].tobytes()
    assert np.any(rotation.orthogonal(8, [0]) != rotation.orthogonal(8, [1]))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 20, 24, 48, 96, 128, 768])
def test_hadamard_matrices_are_orthogonal_signs(size):
    h = rotation.hadamard(size)
    assert np.all(np.abs(h) == 1)
    np.testing.assert_array_equal(h @ h.T, size * np.eye(size))


@pytest.mark.parametrize("size", [3, 10, 36])
def test_other_sizes_get_a_random_basis(size):
    assert rotation.hadamard(size) is None
    r = rotation.orthogonal(size, [0])
    np.testing.assert_allclose(r @ r.T, np.eye(size), atol=1e-12)


def test_glm5_has_hadamard_matrices_everywhere():
    sizes = axes.sizes(presets.glm5())
    for space in rotation.SPACES:
        # Doubling is cheap; what is left is what must be known.
        size = sizes[space]
        assert rotation.hadamard(size // (size & -size) * min(size & -size, 4)) is not None


def test_one_large_channel_is_spread_over_all():
    x = np.zeros(128)
    x[5] = 100.0
    np.testing.assert_allclose(np.abs(x @ rotation.orthogonal(128, [0])), 100 / np.sqrt(128))


@pytest.mark.parametrize("kind", ["gqa", "gdn", "simple_gdn"])
def test_other_attention_is_refused(kind):
    cfg = presets.ablation(kind)
    with pytest.raises(ValueError, match="own attention .MLA. can be rotated, not projections"):
        rotation.fold(glm5.abstract_params(cfg), cfg)
