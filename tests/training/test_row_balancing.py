"""Rows dealt to ranks and microbatches: the same rows, and never more to wait for."""

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


def waits(costs, ranks, microbatches):
    """Row by row: contiguous parts are ranks', row r of one belongs to microbatch r % microbatches."""
    slots = np.zeros((ranks, microbatches))
    for place, cost in enumerate(costs):
        slots[place // (len(costs) // ranks), place % microbatches] += cost
    return slots.max(0).sum()


@pytest.mark.parametrize(
    ("ranks", "microbatches", "rounds"),
    [(4, 2, 1), *slow((2, 3, 5), (4, 1, 2), (8, 4, 3), (3, 1, 1))],
)
def test_dealt_rows_are_all_rows_and_wait_no_longer(ranks, microbatches, rounds):
    for seed in range(5):
        draw = np.random.default_rng(seed)
        costs = draw.lognormal(0, 1, ranks * microbatches * rounds).astype(np.float32)
        order = np.asarray(assign_rows(jnp.asarray(costs), ranks, microbatches))
        assert sorted(order) == list(range(len(costs)))
        before, after = (waits(c, ranks, microbatches) for c in (costs, costs[order]))
        assert after <= before * (1 + 1e-6)
        got = step_cost(jnp.asarray(costs[order]), ranks, microbatches)
        np.testing.assert_allclose(got, after, rtol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "rounds"), [(2, 2, 1), *slow((2, 1, 2), (3, 1, 2))]
)
def test_few_rows_are_dealt_as_well_as_can_be(ranks, microbatches, rounds):
    rows = ranks * microbatches * rounds
    for seed in range(4):
        costs = np.random.default_rng(seed).lognormal(0, 1, rows).astype(np.float32)
        ways = map(list, itertools.permutations(range(rows)))
        best = min(waits(costs[way], ranks, microbatches) for way in ways)
        got = costs[np.asarray(assign_rows(jnp.asarray(costs), ranks, microbatches))]
        assert waits(got, ranks, microbatches) <= best * (1 + 1e-6)


def test_rows_that_cost_the_same_stay_where_they_are():
    np.testing.assert_array_equal(assign_rows(jnp.ones(12), 2, 3), np.arange(12))


def test_a_costly_row_goes_with_cheap_ones_and_alike_rows_wait_together():
    # One rank would have 9 + 8; and one microbatch a 9 and a 1, the other an 8 and a 1.
    np.testing.assert_array_equal(assign_rows(jnp.array([9.0, 8, 1, 2]), 2, 1), [0, 2, 1, 3])
    np.testing.assert_array_equal(assign_rows(jnp.array([9.0, 1, 1, 8]), 2, 2), [0, 1, 3, 2])


def uneven():
    """Row r has documents of LENGTH // (1 + r) tokens."""
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
def test_on_a_mesh_whole_rows_move_to_their_places(axes, microbatches, batch):
    cfg, mesh = cases.config("dense"), make_mesh(axes)
    got = jax.jit(lambda b: balance_rows(b, cfg, mesh, microbatches))(batch)
    costs = np.asarray(token_train_flops(cfg, batch["positions"]).sum(1))
    ranks = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    order = np.asarray(assign_rows(jnp.asarray(costs), ranks, microbatches))
    if ranks == 2 or batch is UNEVEN:  # of the others, no order of rows is better
        assert order.tolist() != list(range(cases.ROWS))
    for name, values in batch.items():
        np.testing.assert_array_equal(got[name], values[order], err_msg=name)
        assert got[name].dtype == values.dtype


def test_one_rank_has_nothing_to_deal():
    batch = cases.batch()
    assert balance_rows(batch, cases.config("dense"), make_mesh(context=8), 1) is batch
    assert balance_rows(batch, cases.config("dense"), None, 2) is batch


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(
        ValueError, match="8 rows cannot be assigned to 8 ranks in 2 .* multiple of 16"
    ):
        balance_rows(cases.batch(), presets.tiny(), make_mesh(fsdp=8), 2)
