"""What index scores and their gradients cost: of t queries [b t i j] with s keys [b s j]."""

from pallas_kernels.cost import Cost


def forward(b, t, s, i, j, item: int = 2) -> Cost:
    """One product of every query with every key; the scores are written."""
    return Cost(2 * b * t * s * i * j, item * b * (t * i + s) * j + 4 * b * t * (i + s))


def gradients(b, t, s, i, j, pairs: float, arrays: int = 1, item: int = 2) -> Cost:
    """The product again and a gradient of each operand, for `pairs` of a query and a key, from so many float32
    arrays [b s t] of them."""
    moved = (item + 4) * b * (t * i + s) * j + 4 * b * (t * i + arrays * pairs)
    return Cost(6 * b * pairs * i * j, moved)
