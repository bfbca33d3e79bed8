"""Computes confidence intervals of a mean of scores in [0, 1], and of the difference of two paired means.

Both are valid at the borders, where normal and bootstrap intervals shrink to zero width: a model that solved all of
100 tasks does not necessarily solve every task.
"""

import math

import numpy as np

Z = 1.959964  # two-sided 95%


def wilson(scores: np.ndarray, z: float = Z) -> tuple[float, float]:
    """Returns Wilson's score interval (1927) of the mean of scores [n], n >= 1.

    It is meant for scores of 0 or 1. For values in between it is too wide, because their variance is below p (1 - p),
    but never too narrow.
    """
    n, p = len(scores), float(np.mean(scores))
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(a: np.ndarray, b: np.ndarray, z: float = Z) -> tuple[float, float, float]:
    """Returns mean(a) - mean(b) and its interval (low, high), for scores [n] of two models on the same samples.

    Method 10 of Newcombe (1998, Statistics in Medicine 17:2635): it combines the Wilson limits of both means by their
    correlation, with his continuity correction. Equal pairs narrow the interval, so it resolves far smaller
    differences than two separate intervals. Raises ValueError unless both have the same length, at least 1.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or not len(a):
        raise ValueError(f"scores have shapes {a.shape} and {b.shape}; pair them, at least one")
    p, q = a.mean(), b.mean()
    (a_low, a_high), (b_low, b_high) = wilson(a, z), wilson(b, z)
    covariance = np.mean(a * b) - p * q
    if covariance > 0:
        covariance = max(0.0, covariance - 1 / (2 * len(a)))
    spread = math.sqrt(p * (1 - p) * q * (1 - q))
    r = covariance / spread if spread else 0.0

    def combine(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * r * x * y + y * y))

    return p - q, p - q - combine(p - a_low, b_high - q), p - q + combine(a_high - p, q - b_low)
