"""What ragged products cost: of the rows that are filled, or likely to be, not of the buffer's m.

Of e experts with weights [k n] each; all of them are read.
"""

from pallas_kernels.cost import Cost


def product(
    filled: int, m: int, k: int, n: int, e: int, added: bool = False, item: int = 2
) -> Cost:
    """Rows of k times their experts' weights; m rows are written. added: to what lies there."""
    rows = filled * (k + n * added) + m * n
    return Cost(2 * filled * k * n, item * (e * k * n + rows))


def of_weights(filled: int, k: int, n: int, e: int, item: int = 2) -> Cost:
    """The weights' gradient: rows of k, turned, times rows of n."""
    return Cost(2 * filled * k * n, item * (filled * (k + n) + e * k * n))


def row_by_row(filled: int, f: int, read: int, written: int, item: int = 2) -> Cost:
    """What lies between the products: so many arrays read and written, one sigmoid for each place."""
    return Cost(0, item * filled * f * (read + written), transcendentals=filled * f)
