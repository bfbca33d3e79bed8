"""Cost of index scores and their gradients, for t queries [b t i j] and s keys [b s j]."""

from pallas_kernels.cost import Cost


def forward(b: int, t: int, s: int, i: int, j: int, item: int = 2) -> Cost:
    """Cost of one product of every query with every key; the scores are written."""
    return Cost(2 * b * t * s * i * j, item * b * (t * i + s) * j + 4 * b * t * (i + s))


def gradients(
    b: int, t: int, s: int, i: int, j: int, pairs: float, arrays: int = 1, item: int = 2
) -> Cost:
    """Cost of the product again and a gradient of each operand, for `pairs` of a query and a key.

    arrays: number of float32 arrays [b s t] that are read.
    """
    moved = (item + 4) * b * (t * i + s) * j + 4 * b * (t * i + arrays * pairs)
    return Cost(6 * b * pairs * i * j, moved)
