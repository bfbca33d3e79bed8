"""Advantages of groups, by hand."""

import numpy as np
import pytest

from glm5_jax.rl.algorithm.advantage import BASELINES, compute_advantages


def test_by_hand():
    rewards = [1, 0, 0, 1, 1]
    away = np.array([0.4, -0.6, -0.6, 0.4, 0.4])
    np.testing.assert_allclose(compute_advantages(rewards, "centred"), away, atol=1e-12)
    std = np.sqrt((3 * 0.16 + 2 * 0.36) / 4)  # of a sample: divided by one less
    np.testing.assert_allclose(compute_advantages(rewards), away / (std + 1e-6), rtol=1e-12)
    alone = [1 - 0.5, -0.75, -0.75, 0.5, 0.5]
    np.testing.assert_allclose(compute_advantages(rewards, "leave_one_out"), alone, rtol=1e-12)
    np.testing.assert_allclose(compute_advantages(rewards, "none"), rewards)


@pytest.mark.parametrize("baseline", BASELINES)
def test_failures_of_the_environment_are_left_out(baseline):
    got = compute_advantages([2, None, 0, 5, None], baseline)
    np.testing.assert_allclose(got[[0, 2, 3]], compute_advantages([2, 0, 5], baseline))
    assert got[1] == got[4] == 0
    assert not compute_advantages([None, None], baseline).any()


@pytest.mark.parametrize("baseline", ["zscore", "centred", "leave_one_out"])
def test_a_group_that_tells_nothing_is_zero(baseline):
    # The mean of 0.1s is not 0.1 to the last bit.
    for rewards in ([0.1] * 7, [3.0], [1, None], []):
        got = compute_advantages(rewards, baseline)
        assert got.shape == (len(rewards),) and not got.any()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="baseline is 'mean'; use one of zscore, centred"):
        compute_advantages([1], "mean")
    with pytest.raises(ValueError, match="they must be finite, or None"):
        compute_advantages([1, float("nan")])
