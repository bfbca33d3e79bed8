"""Cost of ragged products, for the filled or expected rows, not the buffer's m.

e experts have weights [k n] each; all of them are read.
"""

from pallas_kernels.cost import Cost


def matmul(filled: int, m: int, k: int, n: int, e: int, added: bool = False, item: int = 2) -> Cost:
    """Cost of rows of k times their experts' weights; m rows are written. added: the result is added to an array."""
    rows = filled * (k + n * added) + m * n
    return Cost(2 * filled * k * n, item * (e * k * n + rows))


def weight_gradient(filled: int, k: int, n: int, e: int, item: int = 2) -> Cost:
    """Cost of the weights' gradient: transposed rows of k times rows of n."""
    return Cost(2 * filled * k * n, item * (filled * (k + n) + e * k * n))


def row_by_row(filled: int, f: int, read: int, written: int, item: int = 2) -> Cost:
    """Cost of the elementwise part between products: `read` and `written` arrays, one sigmoid per element."""
    return Cost(0, item * filled * f * (read + written), transcendentals=filled * f)
