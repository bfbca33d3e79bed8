"""Tests that loss, statistics and gradients on eight devices equal those of one, for all mesh axes."""

import dataclasses

import jax
import numpy as np
import pytest

from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten
from glm5_jax.training.gradients import gradient_function
from tests.mesh import cases

LAYOUTS = [
    ("sparse", {"fsdp": 2, "expert": 2, "context": 2}),
    ("sparse", {"expert": 2, "context": 2, "tensor": 2}),
    ("dense", {"data": 2, "fsdp": 2, "context": 2}),
    ("sparse", {"fsdp": 2, "expert": 4}),
    ("sparse", {"data": 8}),
    ("sparse", {"fsdp": 8}),
    ("sparse", {"expert": 8}),
    ("sparse", {"context": 8}),
    ("sparse", {"tensor": 8}),
    ("sparse", {"data": 2, "expert": 2, "tensor": 2}),
    ("dense", {"fsdp": 4, "tensor": 2}),
    ("dense", {"expert": 4, "context": 2}),
    ("dense", {"context": 2, "tensor": 4}),
]


def name(value):
    return value if isinstance(value, str) else "-".join(f"{a}{n}" for a, n in value.items())


@pytest.fixture(scope="module")
def small():
    """Returns (config, mesh, results on the mesh) of one layer without remat, with a vocabulary in parts."""
    cfg, mesh = cases.small("sparse"), make_mesh(fsdp=2, expert=2, context=2)
    cases.reference(cfg)
    step = dataclasses.replace(cases.STEP, remat="none", vocab_block=16)
    return cfg, mesh, compute(cfg, step, mesh)


def test_small_model_on_mesh_equals_one_device(small):
    cfg, _, results = small
    compare_results(results, cases.reference(cfg))


def test_gradients_are_sharded_like_weights(small):
    _, mesh, (_, _, gradients) = small
    for path, leaf in flatten(gradients).items():
        assert_shards(path, leaf, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "axes"), LAYOUTS, ids=name)
def test_loss_and_gradients_on_mesh_equal_one_device(attention, axes):
    cfg, mesh = cases.config(attention), make_mesh(axes)
    compare(cfg, cases.STEP, mesh)


def compare(cfg, step, mesh, frozen=()):
    """Checks loss, statistics, gradients and their shards on a mesh against one device."""
    results = compute(cfg, step, mesh, frozen)
    compare_results(results, cases.reference(cfg, step.mtp_steps), frozen)
    for path, leaf in flatten(results[2]).items():
        assert_shards(path, leaf, mesh)


def compute(cfg, step, mesh, frozen=()):
    """Returns (objective, LossParts, gradients) of a mesh; frozen: paths without a gradient."""
    shardings = glm5.param_shardings(cfg, mesh)
    params = jax.device_put(cases.params(cfg), shardings)
    run = jax.jit(gradient_function(cfg, step, mesh, frozen), out_shardings=(None, None, shardings))
    return run(params, cases.batch(), cases.RATES)


def compare_results(results, expected, frozen=()):
    """Checks (objective, LossParts, gradients) against those of one device."""
    objective, parts, gradients = results
    want_objective, want_parts, want = expected
    np.testing.assert_allclose(objective, want_objective, rtol=1e-5)
    assert [value is None for value in parts] == [value is None for value in want_parts]
    for (key, value), theirs in zip(
        jax.tree.leaves_with_path(parts), jax.tree.leaves(want_parts), strict=True
    ):
        np.testing.assert_allclose(value, theirs, rtol=1e-5, err_msg=jax.tree_util.keystr(key))
    want = flatten(want)
    for path, got in flatten(gradients).items():
        if path in frozen:
            assert not np.any(got), path
            continue
        close(path, got, want[path])
        assert bool(np.any(want[path])) == (not path.endswith("router/bias")), path


def close(path, got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=path)


def assert_shards(path, leaf, mesh):
    """Checks that each device holds 1/n of the leaf, where n is the product of its spec's axes."""
    names = [a for entry in leaf.sharding.spec if entry for a in np.atleast_1d(entry)]
    assert len(names) == len(set(names)), path
    parts = np.prod([mesh.shape[a] for a in names], dtype=int)
    sizes = {shard.data.size for shard in leaf.addressable_shards}
    assert sizes == {leaf.size // parts}, path


@pytest.mark.slow
def test_execution_options_do_not_change_gradients():
    """The options are gradient accumulation, chunks of tokens, and remat that stores matmul results."""
    step = dataclasses.replace(cases.STEP, rows_per_device=1, token_chunk=8, remat="dots")
    compare(cases.config("sparse"), step, make_mesh(fsdp=2, expert=2, tensor=2))


LEVELS = [
    ({"expert": 8}, 2),
    ({"expert": 8}, 4),
    ({"fsdp": 2, "expert": 4}, 2),
    ({"expert": 4, "context": 2}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "slices"), LEVELS, ids=["2x4", "4x2", "2x2", "2x2 with context"])
def test_expert_slices_do_not_change_gradients(axes, slices):
    step = dataclasses.replace(cases.STEP, expert_slices=slices)
    compare(cases.config("sparse"), step, make_mesh(axes, expert_slices=slices))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_row_balancing_does_not_change_gradients(attention):
    """tests/training/test_row_balancing.py checks that rows do move."""
    step = dataclasses.replace(cases.STEP, balance_rows=True, rows_per_device=2)
    compare(cases.config(attention), step, make_mesh(fsdp=2, context=2, tensor=2))


@pytest.mark.slow
def test_vocab_block_does_not_change_gradients():
    cfg, mesh = cases.config("dense"), make_mesh(fsdp=2, expert=2, context=2)
    compare(cfg, dataclasses.replace(cases.STEP, vocab_block=16), mesh)
