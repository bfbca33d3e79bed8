"""Intervals contain the truth in about 95% of repetitions, also at the borders."""

import numpy as np
import pytest

from glm5_jax.evals.intervals import Z, paired_difference, wilson


def scores(successes, n):
    return np.arange(n) < successes


@pytest.mark.parametrize("k,n", [(0, 10), (3, 10), (81, 263), (200, 200)])
def test_wilson_limits_solve_equation(k, n):
    """|p - limit| = z sqrt(limit (1 - limit) / n): the definition, not the solved form."""
    p = k / n
    for limit in wilson(scores(k, n)):
        assert abs(p - limit) == pytest.approx(Z * np.sqrt(limit * (1 - limit) / n), abs=1e-8)


def test_wilson_takes_mean_of_shares():
    assert wilson(np.array([0.5, 0.5, 1.0, 0.0])) == wilson(scores(2, 4))


def newcombe(both, first, second, neither):
    """Returns method 10 written out for a 2x2 table of agreements (Newcombe 1998, section 3)."""
    n = both + first + second + neither
    l1, u1 = wilson(scores(both + first, n))
    l2, u2 = wilson(scores(both + second, n))
    p1, p2 = (both + first) / n, (both + second) / n
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    top = both * neither - first * second
    if top > 0:
        top = max(top - n / 2, 0)
    phi = top / np.sqrt(product) if product else 0.0
    low = np.sqrt((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2)
    high = np.sqrt((p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2)
    return p1 - p2, p1 - p2 - low, p1 - p2 + high


@pytest.mark.parametrize(
    "cells", [(36, 12, 2, 0), (20, 3, 9, 30), (50, 0, 0, 50), (5, 20, 20, 5), (40, 0, 0, 0), (0, 9, 0, 0)]
)  # fmt: skip
def test_paired_difference_equals_newcombe(cells):
    a = np.repeat([1, 1, 0, 0], cells)
    b = np.repeat([1, 0, 1, 0], cells)
    np.testing.assert_allclose(paired_difference(a, b), newcombe(*cells), atol=1e-12)


@pytest.mark.parametrize("right,change", [(0.97, 0.01), (0.5, 0.1), (0.8, 0.0)])
def test_interval_covers_true_difference_in_95_percent(right, change):
    """Two models that agree but for a few samples, which the second loses or wins at random."""
    rng, inside, n = np.random.default_rng(0), 0, 200
    lose, win = change + 0.02, 0.02
    truth = right * lose - (1 - right) * win
    for _ in range(2000):
        a = rng.random(n) < right
        b = np.where(a, rng.random(n) >= lose, rng.random(n) < win)
        _, low, high = paired_difference(a, b)
        inside += low <= truth <= high
    assert 0.935 < inside / 2000 < 0.985


def test_pairing_separates_overlapping_intervals():
    a = scores(900, 1000)
    b = a & (np.arange(1000) % 100 != 0)  # loses 9 of the 900
    difference, low, high = paired_difference(a, b)
    assert difference == pytest.approx(0.009) and low > 0
    assert wilson(b)[1] > wilson(a)[0]  # apart, they overlap


def test_interval_of_equal_scores_has_width():
    same = scores(190, 200)
    difference, low, high = paired_difference(same, same)
    assert difference == 0 and -0.03 < low < -1e-3 and 1e-3 < high < 0.03
    assert paired_difference(scores(200, 200), scores(200, 200))[1] < -0.01


def test_rejects_unpaired_scores():
    with pytest.raises(ValueError, match="pair them"):
        paired_difference(np.ones(3), np.ones(4))
