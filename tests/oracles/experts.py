"""Router, experts and their balance in NumPy float64 (DeepSeek-V3, arXiv 2412.19437, 2.1.2)."""

import numpy as np


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def swiglu(x, gate, up, down):
    """down (silu(gate x) * up x), weights [out, in]."""
    g = x @ gate.T
    return (g * sigmoid(g) * (x @ up.T)) @ down.T


def best(values, k):
    """Indices of the k largest in the last dimension, the lower index first among equals."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def route(
    router_logits,
    router_bias,
    top_k,
    n_group=1,
    topk_group=1,
    normalise=True,
    scale=1.0,
):
    """(expert_ids [... a], combine_weights [... a]) of router_logits [... e].

    The bias affects the selection only. A group's score is the sum of its two best biased scores. Experts of
    other groups are never selected, even if all biased scores are negative.
    """
    scores = sigmoid(router_logits)
    biased = scores + router_bias
    grouped = biased.reshape(*biased.shape[:-1], n_group, -1)
    if n_group > 1:
        group_score = np.sum(np.sort(grouped, axis=-1)[..., -2:], axis=-1)
        groups = best(group_score, topk_group)
        mask = (groups[..., None] == np.arange(n_group)).any(axis=-2)
        biased = np.where(mask[..., None], grouped, -np.inf).reshape(biased.shape)
    expert_ids = best(biased, top_k)
    weights = np.take_along_axis(scores, expert_ids, axis=-1)
    if normalise:
        weights = weights / (np.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return expert_ids, weights * scale


def scatter_weights(expert_ids, combine_weights, num_experts):
    """[... e]: the combine weight of every expert, 0 if it was not selected."""
    hit = expert_ids[..., None] == np.arange(num_experts)
    return np.sum(np.where(hit, combine_weights[..., None], 0.0), axis=-2)


def balance_loss(router_logits, expert_ids, counted):
    """Sequence balance loss, mean over sequences: sum_e f_e P_e (weight it with 1e-4).

    router_logits [b t e], expert_ids [b t a], counted bool [b t]. In each sequence, f_e is the share
    of choices of expert e, times the number of experts (1 when balanced), and P_e the mean of the sigmoid
    scores normalized over experts. A sequence without a counted token adds 0.
    """
    b, _, num_experts = router_logits.shape
    total = 0.0
    for row in range(b):
        used = np.flatnonzero(counted[row])
        if not len(used):
            continue
        scores = sigmoid(router_logits[row, used])
        p = np.mean(scores / np.sum(scores, axis=-1, keepdims=True), axis=0)
        choices = expert_ids[row, used]
        counts = np.array([np.sum(choices == e) for e in range(num_experts)])
        total += np.sum(counts * num_experts / choices.size * p)
    return total / b


def moved_bias(router_bias, load, step):
    """Loss-free balancing: +step for experts below the mean load, -step above, 0 at it."""
    return router_bias + step * np.sign(np.mean(load) - load)
