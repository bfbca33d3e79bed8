"""Losses of sampled tokens: values and gradients computed by hand, and an oracle on random inputs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.rl.algorithm.losses import (
    CORRECTIONS,
    PolicyConfig,
    PolicyLoss,
    compute_corrected_loss,
)
from tests.oracles import policy as oracle

PLAIN = PolicyConfig()


def evaluate(config, logp, old, rollout, advantage):
    """Returns (losses, derivatives by logp, below, above) in float64. old: None in a batch of one step."""
    with jax.enable_x64(True):
        logp, rollout, advantage = (
            jnp.asarray(np.asarray(x, np.float64)) for x in (logp, rollout, advantage)
        )

        def loss(logp):
            old_logp = jax.lax.stop_gradient(logp) if old is None else jnp.asarray(old)
            result = compute_corrected_loss(config, logp, old_logp, rollout, advantage)
            return result.loss.sum(), result

        grad, result = jax.grad(loss, has_aux=True)(logp)
        return tuple(np.asarray(x) for x in (result.loss, grad, result.below, result.above))


def test_icepop_equals_values_by_hand():
    """GLM-5 Eq. 1: rho = (1, 0.5, 2.5), so that the last token is masked and the second counts half."""
    rollout, old = np.log([0.5, 0.5, 0.1]), np.log([0.5, 0.25, 0.25])
    logp = old + np.log([1, 1.4, 1])
    loss, grad, below, above = evaluate(PLAIN, logp, old, rollout, [1, 1, 1])
    np.testing.assert_allclose(loss, [-1, -0.5 * 1.28, 0], rtol=1e-12)
    np.testing.assert_allclose(grad, [-1, 0, 0], atol=1e-12)
    assert loss.mean() == pytest.approx(-0.546667, abs=1e-6)
    loss, grad, *_ = evaluate(PLAIN, logp, old, rollout, [-1, -1, -1])
    np.testing.assert_allclose(loss, [1, 0.7, 0], rtol=1e-12)
    np.testing.assert_allclose(grad, [1, 0.7, 0], atol=1e-12)
    assert loss.mean() == pytest.approx(0.566667, abs=1e-6)
    assert below.tolist() == [False] * 3 and above.tolist() == [False, False, True]


def test_icepop_window_is_closed_in_float32():
    rollout = np.float32(np.log(np.linspace(0.001, 0.4, 999)))
    for factor in (0.5, 2.0):
        old = np.float32(rollout + np.float32(np.log(factor)))
        result = compute_corrected_loss(
            PLAIN, jnp.asarray(old), jnp.asarray(old), jnp.asarray(rollout), 1.0
        )
        assert not (result.below | result.above).any()
        np.testing.assert_allclose(result.loss, -factor, rtol=1e-5)
    for factor, side in ((0.4999, "below"), (2.0001, "above")):
        old = rollout + np.float32(np.log(factor))
        result = compute_corrected_loss(
            PLAIN, jnp.asarray(old), jnp.asarray(old), jnp.asarray(rollout), 1.0
        )
        assert getattr(result, side).all() and not result.loss.any()


def test_double_sided_equals_values_by_hand():
    """GLM-5 Eq. 3-5: the window is open, and f has no gradient."""
    config = PolicyConfig(correction="double_sided")
    logp = np.log([0.3, 0.25, 0.2, 0.5, 0.01])
    # Ratios of 1/2 and 2 to the last bit.
    rollout = np.append(logp[:4] - np.log([1, 0.5, 1.99, 2]), np.log(0.9))
    logp[1], rollout[1], logp[3], rollout[3] = np.log(2) * np.array([-2, -1, -1, -2])
    advantage = np.array([1, 1, -1, -1, 1.0])
    loss, grad, below, above = evaluate(config, logp, None, rollout, advantage)
    f = np.array([1, 0, 1.99, 0, 0])
    np.testing.assert_allclose(loss, -f * advantage * logp, rtol=1e-12)
    np.testing.assert_allclose(grad, -f * advantage, rtol=1e-12)
    assert below.tolist() == [False, True, False, False, True]
    assert above.tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("has_several_steps", [False, True])
def test_values_and_gradients_equal_oracle(kind, has_several_steps):
    rng = np.random.default_rng(0)
    logp, rollout, old = (np.log(rng.uniform(0.02, 0.98, 400)) for _ in range(3))
    rollout[:200] = logp[:200] + 0.3 * rng.standard_normal(200)
    old[:300] = logp[:300] + 0.2 * rng.standard_normal(300)
    advantage = rng.standard_normal(400)
    old_or_none = old if has_several_steps else None
    loss, grad, below, above = evaluate(
        PolicyConfig(correction=kind), logp, old_or_none, rollout, advantage
    )
    expected = [
        oracle.token(kind, a, None if old_or_none is None else b, c, d)
        for a, b, c, d in zip(logp, old, rollout, advantage)
    ]
    np.testing.assert_allclose(loss, [x for x, _ in expected], atol=1e-12)
    np.testing.assert_allclose(grad, [x for _, x in expected], atol=1e-12)
    # Both branches occur: tokens that are masked or clipped, and others.
    assert kind == "unclipped" or 20 < (grad == 0).sum() < 380
    # In icepop the clip of r also removes gradients, and is not reported.
    assert ((grad == 0) == (below | above)).all() or kind == "icepop" and has_several_steps


def test_icepop_with_ratio_one_equals_clipped_grpo():
    rng = np.random.default_rng(1)
    logp, old = (np.log(rng.uniform(0.1, 0.9, 100)) for _ in range(2))
    advantage = rng.standard_normal(100)
    loss, grad, *_ = evaluate(PLAIN, logp, old, old, advantage)
    plain = [oracle.clipped(np.exp(a - b), c, 0.2, 0.28) for a, b, c in zip(logp, old, advantage)]
    np.testing.assert_allclose(np.stack([loss, grad], 1), plain, atol=1e-12)


def test_icepop_with_unbounded_window_equals_importance_sampling():
    rng = np.random.default_rng(2)
    logp, rollout = (np.log(rng.uniform(0.01, 0.9, 100)) for _ in range(2))
    advantage = rng.standard_normal(100)
    unbounded = evaluate(dataclasses.replace(PLAIN, beta=1e9), logp, None, rollout, advantage)
    unclipped = evaluate(PolicyConfig(correction="unclipped"), logp, None, rollout, advantage)
    np.testing.assert_allclose(unbounded[0], unclipped[0], rtol=1e-12)
    np.testing.assert_allclose(unbounded[1], unclipped[1], rtol=1e-12)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_corrections_equal_reinforce_on_policy(kind):
    logp = np.log([0.2, 0.9, 0.5])
    _, grad, *_ = evaluate(PolicyConfig(correction=kind), logp, None, logp, [1.5, -2, 0])
    np.testing.assert_allclose(grad, [-1.5, 2, 0], atol=1e-12)


def test_importance_sampling_is_unbiased():
    """Over a vocabulary of three, each weighted by its probability under the rollout policy."""
    theta, rollout_theta = np.array([0.3, -0.2, 0.5]), np.array([0.1, -0.1, 0.4])
    reward = np.array([1.0, -0.5, 0.25])
    p, q = (np.exp(x) / np.exp(x).sum() for x in (theta, rollout_theta))
    exact = p * (reward - p @ reward)  # gradient of the expected reward by the logits

    def estimate(theta, kind):
        logp = jax.nn.log_softmax(theta)
        result = compute_corrected_loss(
            PolicyConfig(correction=kind),
            logp,
            jax.lax.stop_gradient(logp),
            jnp.log(q),
            jnp.asarray(reward),
        )
        return -(jnp.asarray(q) * result.loss).sum()

    with jax.enable_x64(True):
        for kind in CORRECTIONS:
            gradient = jax.grad(estimate)(jnp.asarray(theta), kind)
            np.testing.assert_allclose(gradient, exact, atol=1e-12, err_msg=kind)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_loss_of_extreme_log_probs_is_finite(kind):
    logp = np.array([-80.0, -1e-3, -1e4])
    loss, grad, *_ = evaluate(
        PolicyConfig(correction=kind), logp, None, [-1e-3, -1e4, -1.0], [-1, -1, 1]
    )
    assert np.isfinite(loss).all() and np.isfinite(grad).all()


def streams_of(logp, **streams):
    """Returns the streams of the loss; those that are missing are zeros."""
    zeros = np.zeros(logp.shape)
    return {name: jnp.asarray(streams.get(name, zeros)) for name in PolicyLoss.streams}


def test_distillation_uses_log_ratio_of_teacher_as_advantage():
    """GLM-5 Eq. 2 in Eq. 1: zero for a student that equals its teacher, and no gradient through the advantage."""
    student, teacher = np.log([0.25, 0.5, 0.1]), np.log([0.5, 0.5, 0.02])
    loss = PolicyLoss(PolicyConfig())

    def total(logp, **streams):
        return loss(logp, streams_of(student, rollout_logp=student, **streams))[0]["ref_kl"].sum()

    with jax.enable_x64(True):
        gradient = jax.grad(total)(jnp.asarray(student), ref_logp=teacher)
        np.testing.assert_allclose(gradient, -(teacher - student), rtol=1e-12)
        assert total(jnp.asarray(student), ref_logp=student) == 0
        assert not jax.grad(total)(jnp.asarray(student), ref_logp=student).any()


def test_expected_distillation_loss_is_reverse_kl():
    p, teacher = np.array([0.7, 0.2, 0.1]), np.array([0.1, 0.3, 0.6])
    theta = np.log(p)

    def expected(theta):
        logp = jax.nn.log_softmax(theta)
        streams = streams_of(theta, rollout_logp=np.log(p), ref_logp=np.log(teacher))
        return (jnp.asarray(p) * PolicyLoss(PolicyConfig())(logp, streams)[0]["ref_kl"]).sum()

    def divergence(theta):
        logp = jax.nn.log_softmax(theta)
        return (jnp.exp(logp) * (logp - jnp.log(teacher))).sum()

    with jax.enable_x64(True):
        theta = jnp.asarray(theta)
        assert float(expected(theta)) == pytest.approx(float(divergence(theta)))
        np.testing.assert_allclose(
            jax.grad(expected)(theta), jax.grad(divergence)(theta), atol=1e-12
        )


def test_steps_of_batch_share_old_log_probs():
    """All steps use the log-probs of the first one, if the batch has them."""
    logp, old, rollout = np.log([[0.5, 0.3, 0.2], [0.4, 0.2, 0.3], [0.5, 0.2, 0.1]])
    with jax.enable_x64(True):
        streams = streams_of(logp, rollout_logp=rollout, advantage=np.ones(3))
        streams["old_logp"] = jnp.asarray(old)
        loss = PolicyLoss(PolicyConfig())(jnp.asarray(logp), streams)[0]["rl"]
    expected = [oracle.token("icepop", *values, 1.0)[0] for values in zip(logp, old, rollout)]
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


def test_reports_statistics_of_samples():
    logp, rollout = np.log([0.5, 0.2, 0.3]), np.log([0.5, 0.5, 0.1])
    with jax.enable_x64(True):
        streams = streams_of(logp, rollout_logp=rollout, advantage=np.ones(3))
        _, stats = PolicyLoss(PolicyConfig())(jnp.asarray(logp), streams)
    ratio = np.array([1, 0.4, 3])
    expected = {
        "ratio": ratio,
        "abs_logratio": np.abs(np.log(ratio)),
        "mismatch_kl": ratio - 1 - np.log(ratio),
        "clip_frac_low": [0, 1, 0],
        "clip_frac_high": [0, 0, 1],
        "entropy": -logp,
    }
    assert set(stats) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": "trpo"}, "correction is 'trpo'; use one of icepop, double_sided"),
        ({"beta": 0.5}, "beta is 0.5; it must be at least 1"),
        ({"clip_low": 0}, "clip_low is 0; it must be in"),
        ({"window_low": 1.5}, "window_low is 1.5"),
        ({"temperature": 0}, "temperature is 0; it must be positive"),
        ({"ref_kl": -1}, "ref_kl is -1; it must not be negative"),
        ({"clip_high": float("nan")}, "clip_high is nan"),
    ],
)
def test_rejects_options_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**changes)
