"""Muon and AdamW steps of one array, in NumPy float64."""

import numpy as np

PUBLIC_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(g, coefficients=PUBLIC_COEFFICIENTS, steps=5):
    """Orthogonalizes a matrix [r c]: applies an odd quintic to every singular value of g / ||g||."""
    left, values, right = np.linalg.svd(np.asarray(g, np.float64), full_matrices=False)
    values = values / np.sqrt(np.sum(values**2))
    a, b, c = coefficients
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


def muon_step(
    w, momentum, g, rate, beta=0.95, nesterov=True, rms=0.2, decay=0.1,
    coefficients=PUBLIC_COEFFICIENTS, steps=5,
):  # fmt: skip
    """(w, momentum) after one step on one block [r c] (paper GLM-4.5 2.4)."""
    momentum = beta * momentum + g
    direction = g + beta * momentum if nesterov else momentum
    update = rms * np.sqrt(max(g.shape)) * newton_schulz(direction, coefficients, steps)
    return w - rate * (update + decay * w), momentum


def adamw_step(w, first, second, count, g, rate, b1=0.9, b2=0.95, eps=1e-8, decay=0.1):
    """(w, first moment, second moment) after step `count` (from 1), Loshchilov and Hutter 2019."""
    first = b1 * first + (1 - b1) * g
    second = b2 * second + (1 - b2) * g**2
    direction = first / (1 - b1**count) / (np.sqrt(second / (1 - b2**count)) + eps)
    return w - rate * (direction + decay * w), first, second


def clip(gradients, limit):
    """Scales all gradients down if their global norm exceeds the limit."""
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients))
    return [g * min(1.0, limit / norm) for g in gradients]
