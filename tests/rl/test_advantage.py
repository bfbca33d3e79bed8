"""Advantages of groups, compared with values computed by hand."""

import numpy as np
import pytest

from glm5_jax.rl.algorithm.advantage import BASELINES, compute_advantages


def test_advantages_equal_values_by_hand():
    rewards = [1, 0, 0, 1, 1]
    centred = np.array([0.4, -0.6, -0.6, 0.4, 0.4])
    np.testing.assert_allclose(compute_advantages(rewards, "centred"), centred, atol=1e-12)
    std = np.sqrt((3 * 0.16 + 2 * 0.36) / 4)  # of a sample: the divisor is n - 1
    np.testing.assert_allclose(compute_advantages(rewards), centred / (std + 1e-6), rtol=1e-12)
    leave_one_out = [1 - 0.5, -0.75, -0.75, 0.5, 0.5]
    np.testing.assert_allclose(
        compute_advantages(rewards, "leave_one_out"), leave_one_out, rtol=1e-12
    )
    np.testing.assert_allclose(compute_advantages(rewards, "none"), rewards)


@pytest.mark.parametrize("baseline", BASELINES)
def test_leaves_out_failures_of_environment(baseline):
    advantages = compute_advantages([2, None, 0, 5, None], baseline)
    np.testing.assert_allclose(advantages[[0, 2, 3]], compute_advantages([2, 0, 5], baseline))
    assert advantages[1] == advantages[4] == 0
    assert not compute_advantages([None, None], baseline).any()


@pytest.mark.parametrize("baseline", ["zscore", "centred", "leave_one_out"])
def test_advantages_of_equal_rewards_are_zero(baseline):
    # The mean of 0.1s is not 0.1 to the last bit.
    for rewards in ([0.1] * 7, [3.0], [1, None], []):
        advantages = compute_advantages(rewards, baseline)
        assert advantages.shape == (len(rewards),) and not advantages.any()


def test_rejects_bad_input():
    with pytest.raises(ValueError, match="baseline is 'mean'; use one of zscore, centred"):
        compute_advantages([1], "mean")
    with pytest.raises(ValueError, match="they must be finite, or None"):
        compute_advantages([1, float("nan")])
