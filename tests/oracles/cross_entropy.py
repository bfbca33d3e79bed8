"""Output projection and cross-entropy with their gradients, in NumPy float64."""

import numpy as np


def linear_cross_entropy(hidden, weight, targets, ce_weight, z_weight=0.0):
    """Loss sum and gradients of  sum_m ce_weight_m (lse_m - logit_m[target] + z_weight lse_m^2).

    hidden [m d], weight [d v], targets int [m] (ignored where ce_weight is 0), ce_weight [m].
    Returns a dict: loss, logp [m] (log-probability of the target), d_hidden [m d], d_weight [d v].
    """
    rows = np.arange(len(targets))
    logits = hidden @ weight
    top = np.max(logits, axis=-1, keepdims=True)
    lse = np.log(np.sum(np.exp(logits - top), axis=-1)) + top[:, 0]
    logp = logits[rows, targets] - lse
    loss = np.sum(ce_weight * (z_weight * lse**2 - logp))
    d_logits = np.exp(logits - lse[:, None]) * (1.0 + 2.0 * z_weight * lse)[:, None]
    d_logits[rows, targets] -= 1.0
    d_logits *= ce_weight[:, None]
    return {
        "loss": loss,
        "logp": logp,
        "d_hidden": d_logits @ weight.T,
        "d_weight": hidden.T @ d_logits,
    }
