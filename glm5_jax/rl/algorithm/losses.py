"""Losses of sampled tokens, one number each: what their log-probs under the policy that learns are worth.

    icepop        GLM-5 3.2, Eq. 1: pop(rho) min(r A, clip(r, 1 - low, 1 + high) A), with r = p / p_old of the trainer and
                  rho = p_old / p_rollout, engine against trainer; pop(rho) = rho in [1 / beta, beta], else 0
    double_sided  GLM-5 4.1.2, Eq. 3-5: f(r) A log p, with r = p / p_rollout, f(r) = r inside (1 - low, 1 + high), else 0;
                  f takes no gradient, and nobody computes p_old
    ppo           min(r A, clip(r) A) on r = p / p_rollout: what Eq. 3 is compared with
    unclipped     r A on the same ratio: importance sampling without a mask

Distillation between stages is the same loss with the advantage of Eq. 2, log p_teacher - log p, of each token. It
may stand beside a reward's: pulled towards where it began, a policy pays its KL divergence.
"""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CORRECTIONS = ("icepop", "double_sided", "ppo", "unclipped")
MOST = 20.0  # nats that a ratio's logarithm counts at most: the loss of a token that far off stays finite


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """How sampled tokens are learnt from. Construction refuses values out of range (ValueError).

    Attributes:
      correction: see above.
      beta: of icepop's window [1 / beta, beta].
      clip_low, clip_high: r is cut to [1 - clip_low, 1 + clip_high], of icepop and ppo.
      window_low, window_high: of double_sided's window (1 - window_low, 1 + window_high).
      temperature: that tokens were sampled at; log-probs are those of logits / temperature.
      rl, ref_kl, ce: coefficients of the parts of the objective, each of which is a mean.
    """

    correction: str = "icepop"
    beta: float = 2.0  # GLM-5 3.2
    clip_low: float = 0.2  # GLM-5 3.2
    clip_high: float = 0.28  # GLM-5 3.2
    window_low: float = 0.5  # not disclosed
    window_high: float = 1.0  # not disclosed
    temperature: float = 1.0  # of evaluations in GLM-5 6.1; that of rollouts is not printed
    rl: float = 1.0
    ref_kl: float = (
        1.0  # of tokens with a weight for it; GLM-5 3.2 has no KL term: there none has one
    )
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


class Corrected(NamedTuple):
    """loss: of each token; ratio: that its window is about; below, above: whether it fell out of it there, where its
    gradient is zero."""

    loss: jax.Array
    ratio: jax.Array
    below: jax.Array
    above: jax.Array


def corrected(config: PolicyConfig, logp, old_logp, rollout_logp, advantage) -> Corrected:
    """The loss of tokens by their log-probs, arrays of one shape: logp of the policy that learns, old_logp of the
    trainer's as the batch began (logp itself, without a gradient, if it has one step), rollout_logp of the engine's."""
    if config.correction == "icepop":
        return icepop(logp, old_logp, rollout_logp, advantage, config)
    off = logp - rollout_logp
    ratio = _exp(off)
    if config.correction == "double_sided":
        ratio = lax.stop_gradient(ratio)
        below, above = ratio <= 1 - config.window_low, ratio >= 1 + config.window_high
        weight = jnp.where(below | above, 0, ratio)
        return Corrected(-weight * advantage * logp, ratio, below, above)
    if config.correction == "unclipped":
        never = jnp.zeros(ratio.shape, bool)
        return Corrected(-ratio * advantage, ratio, never, never)
    loss, below, above = _clipped(ratio, advantage, config)
    return Corrected(loss, ratio, below, above)


def icepop(logp, old_logp, rollout_logp, advantage, config: PolicyConfig) -> Corrected:
    """Eq. 1; the window is that of the engine's ratio, closed."""
    off = old_logp - rollout_logp
    # In float32 the exponential may put a token that is on the edge beyond it.
    edge = math.log(config.beta) + 1e-6
    below, above = off < -edge, off > edge
    rho = jnp.where(below | above, 0, _exp(off))
    loss, _, _ = _clipped(_exp(logp - old_logp), advantage, config)
    return Corrected(rho * loss, _exp(off), below, above)


def _clipped(ratio, advantage, config: PolicyConfig):
    """(-min(r A, clip(r) A), whether the lower, the upper bound took the gradient)."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, low, high) * advantage)
    return loss, (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)


def _exp(off):
    return jnp.exp(jnp.clip(off, -MOST, MOST))


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """What the learner asks about sampled tokens (`training.loss.TokenLoss`). streams: of the batch, that it reads."""

    streams: ClassVar = ("rollout_logp", "advantage", "rl_weight", "ref_kl_weight", "ref_logp")
    config: PolicyConfig

    @property
    def temperature(self) -> float:
        return self.config.temperature

    @property
    def coefficients(self) -> dict[str, float]:
        return {"ce": self.config.ce, "rl": self.config.rl, "ref_kl": self.config.ref_kl}

    def __call__(self, logp, streams) -> tuple[dict, dict]:
        """({part: loss of each token}, {name: number of each sampled token, whose mean is told}), arrays [b t].

        logp: of the tokens; streams: by their names, and "old_logp" if the batch has more steps than one.
        """
        old = streams.get("old_logp", lax.stop_gradient(logp))
        rollout = streams["rollout_logp"]
        # Where a token has no such log-prob the number is 0, and its weight too.
        rl = corrected(self.config, logp, old, rollout, streams["advantage"])
        towards = lax.stop_gradient(streams["ref_logp"] - logp)
        ref_kl = corrected(self.config, logp, old, rollout, towards)
        still = lax.stop_gradient(logp)
        off = jnp.clip(still - rollout, -MOST, MOST)
        stats = {
            # An estimate of KL(rollout || learner) that is never negative (Schulman's k3).
            "mismatch_kl": jnp.exp(off) - 1 - off,
            "mismatch": jnp.abs(off),
            "ratio": rl.ratio,
            "below": rl.below,
            "above": rl.above,
            "entropy": -still,  # on average, of what was sampled from all tokens
        }
        return {"rl": rl.loss, "ref_kl": ref_kl.loss}, jax.tree.map(
            lambda x: lax.stop_gradient(x).astype(logp.dtype), stats
        )
