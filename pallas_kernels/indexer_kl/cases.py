"""GLM-5's dense warm-up of the indexer: blocks of queries over 32,768 keys; target of 64 heads of 256."""

import jax

from pallas_kernels.cases import Case
from pallas_kernels.cost import Cost
from pallas_kernels.head_probs import cases as target
from pallas_kernels.index_scores import cases as scores
from pallas_kernels.indexer_kl import indexer_kl

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


def cost(products: int):
    """The target's one product, and so many of the indexer's."""

    def of(sizes):
        b, t, s, i, j, n, x = (sizes[name] for name in "btsijnx")
        flops = 2 * b * t * s * (n * x + products * i * j)
        return Cost(flops, 2 * b * (t + s) * n * x + 2 * b * (t * i + s) * j * min(products, 2))

    return of


CASES = {
    "forward": Case(SIZES, inputs, forward, cost(1), SMALL),
    "backward": Case(SIZES, inputs, backward, cost(4), SMALL),
}
