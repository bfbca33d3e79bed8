"""Losses of sampled tokens and their derivatives by the trained log-prob, per token, in float64."""

import math


def token(kind, logp, old, rollout, advantage, *, beta=2.0, low=0.2, high=0.28, window=(0.5, 1.0)):
    """Returns (loss, its derivative by logp) of one token; old: None for logp without a gradient."""
    if kind == "icepop":
        old = logp if old is None else old
        rho = math.exp(old - rollout)
        # A closed interval, to the precision of float32.
        is_in_range = 1 / beta * (1 - 1e-6) <= rho <= beta * (1 + 1e-6)
        loss, slope = clipped(math.exp(logp - old), advantage, low, high)
        return (rho * loss, rho * slope) if is_in_range else (0.0, 0.0)
    ratio = math.exp(logp - rollout)
    if kind == "double_sided":
        inside = 1 - window[0] < ratio < 1 + window[1]
        weight = ratio if inside else 0.0
        return -weight * advantage * logp, -weight * advantage
    if kind == "unclipped":
        return -ratio * advantage, -ratio * advantage
    assert kind == "ppo"
    return clipped(ratio, advantage, low, high)


def clipped(ratio, advantage, low, high):
    """-min(r A, clip(r) A) and its derivative by log r."""
    unclipped, limited = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    return (-unclipped, -unclipped) if unclipped <= limited else (-limited, 0.0)
