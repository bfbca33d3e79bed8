"""Tests of the assignment of rows to ranks and microbatches by cost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.training.flops import token_train_flops
from glm5_jax.training.row_balancing import assign_rows, balance_rows, step_cost
from tests.mesh import cases


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def waiting_cost(costs, ranks, microbatches):
    """Returns the sum over microbatches of the slowest rank's cost.

    A rank has a contiguous part of the rows, whose row r belongs to microbatch r % microbatches.
    """
    slots = np.zeros((ranks, microbatches))
    for place, cost in enumerate(costs):
        slots[place // (len(costs) // ranks), place % microbatches] += cost
    return slots.max(0).sum()


@pytest.mark.parametrize(
    ("ranks", "microbatches", "rounds"),
    [(4, 2, 1), *slow((2, 3, 5), (4, 1, 2), (8, 4, 3), (3, 1, 1))],
)
def test_assignment_is_permutation_and_never_slower(ranks, microbatches, rounds):
    for seed in range(5):
        draw = np.random.default_rng(seed)
        costs = draw.lognormal(0, 1, ranks * microbatches * rounds).astype(np.float32)
        order = np.asarray(assign_rows(jnp.asarray(costs), ranks, microbatches))
        assert sorted(order) == list(range(len(costs)))
        before, after = (waiting_cost(c, ranks, microbatches) for c in (costs, costs[order]))
        assert after <= before * (1 + 1e-6)
        got = step_cost(jnp.asarray(costs[order]), ranks, microbatches)
        np.testing.assert_allclose(got, after, rtol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "rounds"), [(2, 2, 1), *slow((2, 1, 2), (3, 1, 2))]
)
def test_assignment_of_few_rows_is_optimal(ranks, microbatches, rounds):
    rows = ranks * microbatches * rounds
    for seed in range(4):
        costs = np.random.default_rng(seed).lognormal(0, 1, rows).astype(np.float32)
        orders = map(list, itertools.permutations(range(rows)))
        best = min(waiting_cost(costs[order], ranks, microbatches) for order in orders)
        got = costs[np.asarray(assign_rows(jnp.asarray(costs), ranks, microbatches))]
        assert waiting_cost(got, ranks, microbatches) <= best * (1 + 1e-6)


def test_rows_of_equal_cost_do_not_move():
    np.testing.assert_array_equal(assign_rows(jnp.ones(12), 2, 3), np.arange(12))


def test_combines_costly_with_cheap_and_similar_rows():
    # Unchanged, one rank would have 9 + 8, and each microbatch a costly and a cheap row.
    np.testing.assert_array_equal(assign_rows(jnp.array([9.0, 8, 1, 2]), 2, 1), [0, 2, 1, 3])
    np.testing.assert_array_equal(assign_rows(jnp.array([9.0, 1, 1, 8]), 2, 2), [0, 1, 3, 2])


def uneven():
    """Returns a batch whose row r has documents of LENGTH // (1 + r) tokens."""
    documents = cases.LENGTH // (1 + np.arange(cases.ROWS, dtype=np.int32)[:, None])
    return cases.batch() | {"positions": np.arange(cases.LENGTH, dtype=np.int32) % documents}


UNEVEN = uneven()


@pytest.mark.parametrize(
    ("axes", "microbatches", "batch"),
    [
        ({"fsdp": 2, "expert": 2, "context": 2}, 2, UNEVEN),
        *slow(
            ({"fsdp": 2, "expert": 2, "context": 2}, 2, cases.batch()),
            ({"data": 2, "fsdp": 2, "tensor": 2}, 1, cases.batch()),
            ({"data": 2, "fsdp": 2, "tensor": 2}, 1, UNEVEN),
            ({"fsdp": 2, "context": 2, "tensor": 2}, 2, cases.batch()),
            ({"fsdp": 2, "context": 2, "tensor": 2}, 2, UNEVEN),
        ),
    ],
)
def test_moves_rows_on_mesh(axes, microbatches, batch):
    cfg, mesh = cases.config("dense"), make_mesh(axes)
    got = jax.jit(lambda b: balance_rows(b, cfg, mesh, microbatches))(batch)
    costs = np.asarray(token_train_flops(cfg, batch["positions"]).sum(1))
    ranks = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    order = np.asarray(assign_rows(jnp.asarray(costs), ranks, microbatches))
    if ranks == 2 or batch is UNEVEN:  # otherwise the given order is optimal
        assert order.tolist() != list(range(cases.ROWS))
    for name, values in batch.items():
        np.testing.assert_array_equal(got[name], values[order], err_msg=name)
        assert got[name].dtype == values.dtype


def test_one_rank_does_not_move_rows():
    batch = cases.batch()
    assert balance_rows(batch, cases.config("dense"), make_mesh(context=8), 1) is batch
    assert balance_rows(batch, cases.config("dense"), None, 2) is batch


def test_rejects_batch_that_does_not_divide():
    with pytest.raises(
        ValueError, match="8 rows cannot be assigned to 8 ranks in 2 .* multiple of 16"
    ):
        balance_rows(cases.batch(), presets.tiny(), make_mesh(fsdp=8), 2)
