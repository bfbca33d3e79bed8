"""Losses of sampled tokens and their derivatives by the log-prob that learns, token by token, in float64."""

import math


def token(kind, logp, old, rollout, advantage, *, beta=2.0, low=0.2, high=0.28, window=(0.5, 1.0)):
    """(loss, its derivative by logp) of one token; old None: the trainer's log-prob is logp, held still."""
    if kind == "icepop":
        old = logp if old is None else old
        rho = math.exp(old - rollout)
        # Closed, to the last digit of a float32.
        kept = 1 / beta * (1 - 1e-6) <= rho <= beta * (1 + 1e-6)
        loss, slope = clipped(math.exp(logp - old), advantage, low, high)
        return (rho * loss, rho * slope) if kept else (0.0, 0.0)
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
    free, cut = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    return (-free, -free) if free <= cut else (-cut, 0.0)
