"""Cost of scattering rows."""

from pallas_kernels.cost import Cost


def write(m: int, w: int) -> Cost:
    """Cost of m rows of w words, each read and written once, and of their places."""
    return Cost(0, 4 * (2 * m * w + m))
