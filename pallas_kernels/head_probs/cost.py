"""What the sum over heads of the attention's probabilities costs."""

from pallas_kernels.cost import Cost


def forward(b, t, s, n, m, x, pairs: float, item: int = 2) -> Cost:
    """One product of n heads of t queries [b t n x] with s keys [b s m x], for `pairs` of a query and a key;
    every sum is written."""
    moved = item * b * (t * n + s * m) * x + 4 * b * t * (n + s)
    return Cost(2 * b * pairs * n * x, moved, transcendentals=b * pairs * n)
