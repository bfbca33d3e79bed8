"""What putting rows in their places costs."""

from pallas_kernels.cost import Cost


def write(m: int, w: int) -> Cost:
    """m rows of w words, each read and written once, and their places."""
    return Cost(0, 4 * (2 * m * w + m))
