"""GLM-5's dense warm-up of the indexer: blocks of queries over 32,768 keys; target of 64 heads of 256."""

import jax

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs, visible_pairs
from pallas_kernels.index_scores import cases as scores, cost as scores_cost
from pallas_kernels.indexer_kl import cost, indexer_kl
from pallas_kernels.summed_attention_probs import cases as target

SIZES = target.SIZES | scores.SIZES | {"t": 1024}
SMALL = target.SMALL | scores.SMALL


def inputs(sizes, key):
    """Returns the inputs of the target and of the scores."""
    keys = jax.random.split(key)
    return target.inputs(sizes, keys[0]) | scores.inputs(sizes, keys[1])


def forward(inputs, sizes, implementation):
    """Returns (loss, kl) of the last t queries of s tokens."""
    options = {"scale": sizes["x"] ** -0.5, "start": sizes["s"] - sizes["t"]}
    return indexer_kl(**inputs, **options, implementation=implementation)


def backward(inputs, sizes, implementation):
    """Returns (loss, kl) and the gradients of the indexer's three inputs."""

    def loss(trained):
        return forward(inputs | trained, sizes, implementation)

    trained = {name: inputs[name] for name in ("idx_q", "idx_w", "idx_k")}
    return jax.value_and_grad(loss, has_aux=True)(trained)


def forward_cost(sizes):
    """Cost of target and comparison; the arrays between them need not go through memory."""
    b, t, s, i, j, n, x = (sizes[name] for name in "btsijnx")
    compared = cost.compare(b, t, s, i, j, visible_pairs(t, s, s - t))
    moved = 2 * b * ((t + s) * n * x + (t * i + s) * j)
    return sum_costs(target.cost(sizes), compared, bytes=moved)


def backward_cost(sizes):
    """Cost of value and gradients."""
    b, t, s, i, j = (sizes[name] for name in "btsij")
    forward = forward_cost(sizes)
    gradients = scores_cost.gradients(b, t, s, i, j, visible_pairs(t, s, s - t), arrays=2)
    return sum_costs(forward, gradients, bytes=forward.bytes + 2 * b * (t * i + s) * j)


CASES = {
    "forward": Case(SIZES, inputs, forward, forward_cost, SMALL),
    "backward": Case(SIZES, inputs, backward, backward_cost, SMALL),
}
