"""Cost of the gated delta rule, as a recurrence.

Per position and head there are three products with the state [h u]: recall by the key, write, and read by the
query.
Products of the positions of a chunk with each other are an implementation's choice and not counted.
"""

from pallas_kernels.cost import Cost


def forward(
    b: int, t: int, n: int, h: int, u: int, chunk: int, keep: bool = False, item: int = 2
) -> Cost:
    """Cost of operands and output once, the first and the last state, and with `keep` the state of every chunk."""
    states = 2 + (t / chunk if keep else 0)
    moved = b * n * (t * (item * (2 * h + 2 * u) + 8) + 4 * h * u * states)
    return Cost(6 * b * t * n * h * u, moved, transcendentals=b * t * n * chunk)


def backward(b: int, t: int, n: int, h: int, u: int, chunk: int, item: int = 2) -> Cost:
    """Cost of the forward of every chunk again, and two gradients of each of its products."""
    moved = b * n * (t * (item * (4 * h + 3 * u) + 16) + 4 * h * u * (2 + t / chunk))
    return Cost(18 * b * t * n * h * u, moved, transcendentals=b * t * n * chunk)
