"""What the indexer's loss over selected keys costs."""

from pallas_kernels.cost import Cost


def queries(b, t, k, n, x, i, j, gradients: bool, item: int = 2) -> Cost:
    """Of t queries with k gathered rows each: the target's one product of n heads [x], the indexer's of i heads [j],
    and with `gradients` two more of those, which are written for every row in float32."""
    products = 3 if gradients else 1
    moved = item * b * t * (k * (x + j) + n * x + i * j) + 4 * b * t * (k + n + i)
    moved += 4 * b * t * (k + i) * j * gradients
    flops = 2 * b * t * k * (n * x + products * i * j)
    return Cost(flops, moved, transcendentals=b * t * k * (n + 2))
