"""Cost of attention over all visible keys; documents are ignored.

n heads of t queries [b t n x] over m heads of s keys [b s m x] and values [b s m y]. `start` as in
`cost.visible_pairs`. `shared`: keys and values are one array.
"""

from pallas_kernels.cost import Cost, visible_pairs


def forward(
    b: int,
    t: int,
    s: int,
    n: int,
    m: int,
    x: int,
    y: int,
    start: int | None,
    shared: bool = False,
    item: int = 2,
) -> Cost:
    """Cost of logits and output; both statistics of a row are written."""
    pairs = b * n * visible_pairs(t, s, start)
    keys = m * s * (x if shared else x + y)
    moved = item * b * (n * t * (x + y) + keys) + 8 * b * n * t
    return Cost(2 * pairs * (x + y), moved, transcendentals=pairs)


def backward(
    b: int, t: int, s: int, n: int, m: int, x: int, y: int, start: int | None, item: int = 2
) -> Cost:
    """Cost of the logits again and of the gradients of their operands and of the output's operands.

    It reads the gradient of the output and two statistics per row.
    """
    pairs = b * n * visible_pairs(t, s, start)
    moved = item * b * (n * t * (2 * x + y) + 2 * m * s * (x + y)) + 8 * b * n * t
    return Cost(2 * pairs * (3 * x + 2 * y), moved, transcendentals=pairs)
