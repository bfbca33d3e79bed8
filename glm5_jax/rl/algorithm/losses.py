"""Computes the loss of each sampled token from its log-probs under learner, old weights and engine.

    icepop        GLM-5 3.2, Eq. 1: pop(rho) min(r A, clip(r, 1 - low, 1 + high) A), with r = p / p_old of the trainer and
                  rho = p_old / p_rollout, engine against trainer; pop(rho) = rho in [1 / beta, beta], else 0
    double_sided  GLM-5 4.1.2, Eq. 3-5: f(r) A log p, with r = p / p_rollout, f(r) = r inside (1 - low, 1 + high), else 0;
                  f takes no gradient, and p_old is not computed
    ppo           min(r A, clip(r) A) on r = p / p_rollout: the baseline of Eq. 3
    unclipped     r A on the same ratio: importance sampling without a mask

Distillation between stages is the same loss with a per-token advantage, Eq. 2: log p_teacher - log p. It can be added
to the loss of rewards. The policy then pays the KL divergence from a reference, such as its initial weights.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CORRECTIONS = ("icepop", "double_sided", "ppo", "unclipped")
MAX_LOG_RATIO = 20.0  # nats; bounds the logarithm of a ratio, so that losses stay finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Loss of sampled tokens. Raises ValueError if a value is out of range.

    Attributes:
      correction: name of the importance correction; the module's docstring has their formulas.
      beta: bound of icepop's window [1 / beta, beta].
      clip_low, clip_high: icepop and ppo clip r to [1 - clip_low, 1 + clip_high].
      window_low, window_high: bounds of double_sided's window (1 - window_low, 1 + window_high).
      temperature: sampling temperature of the rollouts; log-probs are those of logits / temperature.
      rl, ref_kl, ce: coefficients of the parts of the objective. Each part is a mean over its weighted tokens.
    """

    correction: str = "icepop"
    beta: float = 2.0  # GLM-5 3.2
    clip_low: float = 0.2  # GLM-5 3.2
    clip_high: float = 0.28  # GLM-5 3.2
    window_low: float = 0.5  # not disclosed
    window_high: float = 1.0  # not disclosed
    temperature: float = 1.0  # of evaluations in GLM-5 6.1; that of rollouts is not printed
    rl: float = 1.0
    # Applies to tokens with a ref_kl_weight. GLM-5 3.2 has no KL term, so its tokens have none.
    ref_kl: float = 1.0
    ce: float = 1.0

    def __post_init__(self):
        if self.correction not in CORRECTIONS:
            raise ValueError(
                f"correction is {self.correction!r}; use one of {', '.join(CORRECTIONS)}"
            )
        if not self.beta >= 1:
            raise ValueError(f"beta is {self.beta}; it must be at least 1")
        for name in ("clip_low", "window_low"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in (0, 1]")
        for name in ("clip_high", "window_high", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("rl", "ref_kl", "ce"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


class CorrectedLoss(NamedTuple):
    """Losses of tokens, with the ratios that decide which tokens are clipped.

    Attributes:
      loss: loss of each token.
      ratio: importance ratio that the window is about.
      below, above: True where the ratio is outside the window on that side, so that the gradient is zero.
    """

    loss: jax.Array
    ratio: jax.Array
    below: jax.Array
    above: jax.Array


def compute_corrected_loss(
    config: PolicyConfig,
    logp: jax.Array,
    old_logp: jax.Array,
    rollout_logp: jax.Array,
    advantage: jax.Array,
) -> CorrectedLoss:
    """Returns the losses of tokens for the correction of config. All arrays have one shape.

    Args:
      logp: log-probs under the learner.
      old_logp: log-probs under the trainer's weights at the start of the batch. For a batch with a single step
        these are logp without a gradient.
      rollout_logp: log-probs that the engine reported when it sampled.
      advantage: advantage of each token.
    """
    if config.correction == "icepop":
        return icepop_loss(logp, old_logp, rollout_logp, advantage, config)
    off = logp - rollout_logp
    ratio = _exp(off)
    if config.correction == "double_sided":
        ratio = lax.stop_gradient(ratio)
        below, above = ratio <= 1 - config.window_low, ratio >= 1 + config.window_high
        weight = jnp.where(below | above, 0, ratio)
        return CorrectedLoss(-weight * advantage * logp, ratio, below, above)
    if config.correction == "unclipped":
        never = jnp.zeros(ratio.shape, bool)
        return CorrectedLoss(-ratio * advantage, ratio, never, never)
    loss, below, above = _clip_loss(ratio, advantage, config)
    return CorrectedLoss(loss, ratio, below, above)


def icepop_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    rollout_logp: jax.Array,
    advantage: jax.Array,
    config: PolicyConfig,
) -> CorrectedLoss:
    """Computes Eq. 1. Its window is closed, and applies to the ratio of trainer and engine."""
    off = old_logp - rollout_logp
    # The slack keeps tokens on the edge inside, because float32's exponential may round them outside.
    edge = math.log(config.beta) + 1e-6
    below, above = off < -edge, off > edge
    rho = jnp.where(below | above, 0, _exp(off))
    loss, _, _ = _clip_loss(_exp(logp - old_logp), advantage, config)
    return CorrectedLoss(rho * loss, _exp(off), below, above)


def _clip_loss(
    ratio: jax.Array, advantage: jax.Array, config: PolicyConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (-min(r A, clip(r) A), is_low, is_high); the flags mark tokens without a gradient, by the bound."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, low, high) * advantage)
    return loss, (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)


def _exp(log_ratio: jax.Array) -> jax.Array:
    """Returns the ratio, finite for any logarithm."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Loss of sampled tokens in the training step, a `training.loss.TokenLoss`.

    Attributes:
      streams: names of the batch's streams that the loss reads.
    """

    streams: ClassVar = ("rollout_logp", "advantage", "rl_weight", "ref_kl_weight", "ref_logp")
    config: PolicyConfig

    @property
    def temperature(self) -> float:
        return self.config.temperature

    @property
    def coefficients(self) -> dict[str, float]:
        return {"ce": self.config.ce, "rl": self.config.rl, "ref_kl": self.config.ref_kl}

    def __call__(
        self, logp: jax.Array, streams: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns ({part: loss of each token}, {metric: value for each token}), all [b t].

        Metrics are averaged over sampled tokens.

        Args:
          logp: log-probs of the tokens under the learner, [b t].
          streams: the streams of the batch by name, and "old_logp" if the batch is used for several steps. Where
            a token lacks a log-prob the stream holds 0, and the token's weight is 0.
        """
        old = streams.get("old_logp", lax.stop_gradient(logp))
        rollout = streams["rollout_logp"]
        rl = compute_corrected_loss(self.config, logp, old, rollout, streams["advantage"])
        # Distillation: the teacher's log-ratio is the advantage (Eq. 2).
        teacher_advantage = lax.stop_gradient(streams["ref_logp"] - logp)
        ref_kl = compute_corrected_loss(self.config, logp, old, rollout, teacher_advantage)
        current = lax.stop_gradient(logp)
        off = jnp.clip(current - rollout, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        metrics = {
            # An estimate of KL(rollout || learner) that is never negative (Schulman's k3).
            "mismatch_kl": jnp.exp(off) - 1 - off,
            "abs_logratio": jnp.abs(off),
            "ratio": rl.ratio,
            "clip_frac_low": rl.below,
            "clip_frac_high": rl.above,
            # The mean over sampled tokens estimates the entropy over the vocabulary.
            "entropy": -current,
        }
        return {"rl": rl.loss, "ref_kl": ref_kl.loss}, jax.tree.map(
            lambda x: lax.stop_gradient(x).astype(logp.dtype), metrics
        )
