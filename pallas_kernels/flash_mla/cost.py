"""What attention over all visible keys costs, documents left out of account.

For n heads of t queries [b t n x] over m of s keys [b s m x] and values [b s m y]; `start` as of
`cost.visible_pairs`. With `shared`, keys and values are one array.
"""

from pallas_kernels.cost import Cost, visible_pairs


def forward(b, t, s, n, m, x, y, start: int | None, shared: bool = False, item: int = 2) -> Cost:
    """Logits and output; both statistics of a row are written."""
    pairs = b * n * visible_pairs(t, s, start)
    keys = m * s * (x if shared else x + y)
    moved = item * b * (n * t * (x + y) + keys) + 8 * b * n * t
    return Cost(2 * pairs * (x + y), moved, transcendentals=pairs)


def backward(b, t, s, n, m, x, y, start: int | None, item: int = 2) -> Cost:
    """Logits again and three gradients of theirs and the output's operands, from the gradient of the
    output and two statistics of a row."""
    pairs = b * n * visible_pairs(t, s, start)
    moved = item * b * (n * t * (2 * x + y) + 2 * m * s * (x + y)) + 8 * b * n * t
    return Cost(2 * pairs * (3 * x + 2 * y), moved, transcendentals=pairs)
