"""Rows of random lengths: positive, at most the row's length, and with the cost of their documents."""

import dataclasses

import numpy as np
import pytest

from experiments.benchmarks import row_balance
from experiments.benchmarks.row_balance import LENGTH, LENGTHS, compute_waits, row_cost
from glm5_jax import presets
from glm5_jax.training import flops


@pytest.mark.parametrize("name", LENGTHS)
def test_rows_hold_documents_of_their_kind(name):
    rows = LENGTHS[name](20, np.random.default_rng(0))
    assert len(rows) == 20
    assert all(0 < sum(row) <= LENGTH and min(row) > 0 for row in rows)
    assert np.mean([sum(row) for row in rows]) > 0.7 * LENGTH
    lengths = sorted(tokens for row in rows for tokens in row)
    assert lengths[0] < lengths[-1]


def test_row_cost_is_sum_of_documents_and_padding():
    cfg = dataclasses.replace(presets.glm5(), attention="dense")
    full, halves = (row_cost(cfg, row, 3, False) for row in ([LENGTH], [LENGTH // 2] * 2))
    assert full == LENGTH * flops.train_flops(cfg, LENGTH, 3)
    assert halves == pytest.approx(LENGTH * flops.train_flops(cfg, LENGTH // 2, 3))
    empty = row_cost(cfg, [], 3, False)
    assert empty == pytest.approx(LENGTH * flops.train_flops(cfg, 1, 3)) and empty < halves < full


def test_balancing_over_all_ranks_waits_shortest():
    costs = np.random.default_rng(0).lognormal(0, 1, (2, 64))
    waits = compute_waits(costs, ranks=16, microbatches=4, host=4)
    assert 1 <= waits.balanced < waits.hosts < waits.unbalanced
    alike = compute_waits(np.ones((1, 64)), ranks=16, microbatches=4, host=4)
    assert alike == row_balance.WaitFactors(rows=1.0, unbalanced=1.0, hosts=1.0, balanced=1.0)


def test_rejects_invalid_number_of_batches(capsys):
    assert row_balance.main(["--batches=0"]) == 2
    assert "--batches is 0" in capsys.readouterr().err
