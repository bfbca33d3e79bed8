"""Cost of attention probabilities summed over heads."""

from pallas_kernels.cost import Cost


def forward(b: int, t: int, s: int, n: int, m: int, x: int, pairs: float, item: int = 2) -> Cost:
    """Cost of one product of n heads of t queries with s keys, for `pairs` visible pairs.

    Queries [b t n x], keys [b s m x]. Every sum is written, also of hidden pairs.
    """
    moved = item * b * (t * n + s * m) * x + 4 * b * t * (n + s)
    return Cost(2 * b * pairs * n * x, moved, transcendentals=b * pairs * n)
