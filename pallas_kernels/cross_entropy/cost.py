"""What the output projection's loss costs."""

from pallas_kernels.cost import Cost


def forward(m: int, d: int, v: int, item: int = 2) -> Cost:
    """One product of m rows with v words, whose logits stay on the chip."""
    return Cost(2 * m * d * v, item * (m * d + d * v) + 12 * m, transcendentals=m * v)


def backward(m: int, d: int, v: int, item: int = 2) -> Cost:
    """The logits again and a gradient of each operand."""
    return Cost(6 * m * d * v, 2 * item * (m * d + d * v) + 16 * m, transcendentals=m * v)
