"""Weights of small experts, and one expert's SwiGLU with its gradients in float64."""

import functools

import numpy as np

from tests.oracles import experts as oracle

D, F, E = 10, 6, 5


@functools.cache
def weights():
    rng = np.random.default_rng(0)
    shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def gradients(x, dy, gate, up, down):
    """Returns (y, dx, dgate, dup, ddown) of one expert's SwiGLU, in float64 by the chain rule."""
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    g, u = x @ gate, x @ up
    s = oracle.sigmoid(g)
    h, dh = g * s * u, dy @ down.T
    dg, du = dh * u * s * (1 + g * (1 - s)), dh * g * s
    return h @ down, dg @ gate.T + du @ up.T, x.T @ dg, x.T @ du, h.T @ dy
