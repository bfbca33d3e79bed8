"""Cost of the indexer's loss over selected keys."""

from pallas_kernels.cost import Cost


def queries(
    b: int, t: int, k: int, n: int, x: int, i: int, j: int, gradients: bool, item: int = 2
) -> Cost:
    """Cost of t queries with k gathered rows each.

    One product of n heads [x] for the target and one of i heads [j] for the indexer. gradients: two more
    products of the indexer, and gradients written for every row in float32.
    """
    products = 3 if gradients else 1
    moved = item * b * t * (k * (x + j) + n * x + i * j) + 4 * b * t * (k + n + i)
    moved += 4 * b * t * (k + i) * j * gradients
    flops = 2 * b * t * k * (n * x + products * i * j)
    return Cost(flops, moved, transcendentals=b * t * k * (n + 2))
