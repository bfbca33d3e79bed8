"""Cost of attention over selected rows.

t queries [b t n x] have k rows [x] each; the first y columns of a row are its values. Queries at a sequence's
beginning, which have fewer rows, are counted with k.
"""

from pallas_kernels.cost import Cost

SHARING = 8  # expected number of queries that share a gather


def forward(
    b: int, t: int, n: int, k: int, x: int, y: int, row: float | None = None, item: int = 2
) -> Cost:
    """Cost of logits and output. row: bytes of a gathered row; None: those of x numbers."""
    row = item * x if row is None else row
    moved = item * b * t * n * (x + y) + 4 * b * t * (k + 2 * n) + gathers(b, t, k) * row
    return Cost(2 * b * t * k * n * (x + y), moved, transcendentals=b * t * k * n)


def backward(
    b: int, t: int, n: int, k: int, x: int, y: int, row: float | None = None, item: int = 2
) -> Cost:
    """Cost of the logits again and the gradients of logits and output.

    Per gathered row a float32 sum is read and written.
    """
    row = item * x if row is None else row
    moved = item * b * t * n * (2 * x + y) + 4 * b * t * (k + 2 * n)
    moved += gathers(b, t, k) * (row + 8 * x)
    return Cost(2 * b * t * k * n * (3 * x + 2 * y), moved, transcendentals=b * t * k * n)


def gathers(b: int, t: int, k: int) -> float:
    """Returns the number of rows that pass through memory.

    A query's rows count once for all queries that can share them.
    """
    return b * k * t / min(t, SHARING)
