"""What the gated delta rule costs, as the recurrence that it is.

Per position and head three products with the state [h u]: what the key recalls, what is written, what the query
reads. That a chunk's positions are multiplied with each other is an implementation's choice.
"""

from pallas_kernels.cost import Cost


def forward(b, t, n, h, u, chunk: int, keep: bool = False, item: int = 2) -> Cost:
    """Operands and output once, the first and the last state, and with `keep` the state of every chunk."""
    states = 2 + (t / chunk if keep else 0)
    moved = b * n * (t * (item * (2 * h + 2 * u) + 8) + 4 * h * u * states)
    return Cost(6 * b * t * n * h * u, moved, transcendentals=b * t * n * chunk)


def backward(b, t, n, h, u, chunk: int, item: int = 2) -> Cost:
    """The forward of every chunk again, and two gradients of each of its products."""
    moved = b * n * (t * (item * (4 * h + 3 * u) + 16) + 4 * h * u * (2 + t / chunk))
    return Cost(18 * b * t * n * h * u, moved, transcendentals=b * t * n * chunk)
