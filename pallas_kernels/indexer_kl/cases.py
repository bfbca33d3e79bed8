"""GLM-5's dense warm-up of the indexer: blocks of queries over 32,768 keys; target of 64 heads of 256."""

import jax

from pallas_kernels.cases import Case
from pallas_kernels.cost import together, visible_pairs
from pallas_kernels.head_probs import cases as target
from pallas_kernels.index_scores import cases as scores, cost as scores_cost
from pallas_kernels.indexer_kl import cost, indexer_kl

SIZES = target.SIZES | scores.SIZES | {"t": 1024}
SMALL = target.SMALL | scores.SMALL


def inputs(sizes, key):
    """What the target and the scores are made of."""
    keys = jax.random.split(key)
    return target.inputs(sizes, keys[0]) | scores.inputs(sizes, keys[1])


def forward(inputs, sizes, implementation):
    """(loss, kl) of the last t queries of s tokens."""
    place = {"scale": sizes["x"] ** -0.5, "start": sizes["s"] - sizes["t"]}
    return indexer_kl(**inputs, **place, implementation=implementation)


def backward(inputs, sizes, implementation):
    """(loss, kl) and the gradients of the indexer's three inputs."""

    def loss(trained):
        return forward(inputs | trained, sizes, implementation)

    trained = {name: inputs[name] for name in ("idx_q", "idx_w", "idx_k")}
    return jax.value_and_grad(loss, has_aux=True)(trained)


def forward_cost(sizes):
    """Target and comparison, between which nothing need move."""
    b, t, s, i, j, n, x = (sizes[name] for name in "btsijnx")
    compared = cost.compare(b, t, s, i, j, visible_pairs(t, s, s - t))
    moved = 2 * b * ((t + s) * n * x + (t * i + s) * j)
    return together(target.cost(sizes), compared, bytes=moved)


def backward_cost(sizes):
    """With the value."""
    b, t, s, i, j = (sizes[name] for name in "btsij")
    forward = forward_cost(sizes)
    gradients = scores_cost.gradients(b, t, s, i, j, visible_pairs(t, s, s - t), arrays=2)
    return together(forward, gradients, bytes=forward.bytes + 2 * b * (t * i + s) * j)


CASES = {
    "forward": Case(SIZES, inputs, forward, forward_cost, SMALL),
    "backward": Case(SIZES, inputs, backward, backward_cost, SMALL),
}
