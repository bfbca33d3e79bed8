"""What attention over selected rows costs: of t queries [b t n x], each with all of k rows [x], whose first y
columns are its values. (Those at a sequence's beginning have fewer to choose from.)"""

from pallas_kernels.cost import Cost

SHARING = 8  # queries that can be expected to share a gather


def forward(b, t, n, k, x, y, row: float | None = None, item: int = 2) -> Cost:
    """Logits and output; row: bytes of a gathered one, if not those of x numbers."""
    row = item * x if row is None else row
    moved = item * b * t * n * (x + y) + 4 * b * t * (k + 2 * n) + gathers(b, t, k) * row
    return Cost(2 * b * t * k * n * (x + y), moved, transcendentals=b * t * k * n)


def backward(b, t, n, k, x, y, row: float | None = None, item: int = 2) -> Cost:
    """Logits again and their and the output's gradients; of a gathered row a sum in float32 is read and written."""
    row = item * x if row is None else row
    moved = item * b * t * n * (2 * x + y) + 4 * b * t * (k + 2 * n)
    moved += gathers(b, t, k) * (row + 8 * x)
    return Cost(2 * b * t * k * n * (3 * x + 2 * y), moved, transcendentals=b * t * k * n)


def gathers(b, t, k) -> float:
    """Rows that pass memory: those of a query once for all that can share them."""
    return b * k * t / min(t, SHARING)
