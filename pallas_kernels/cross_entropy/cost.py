"""Cost of the output projection and its loss."""

from pallas_kernels.cost import Cost


def forward(m: int, d: int, v: int, item: int = 2) -> Cost:
    """Cost of one product of m rows with a vocabulary of v; the logits stay on the chip."""
    return Cost(2 * m * d * v, item * (m * d + d * v) + 12 * m, transcendentals=m * v)


def backward(m: int, d: int, v: int, item: int = 2) -> Cost:
    """Cost of the logits again and a gradient of each operand."""
    return Cost(6 * m * d * v, 2 * item * (m * d + d * v) + 16 * m, transcendentals=m * v)
