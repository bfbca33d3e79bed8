"""Cost of a product with int4 weights."""

from pallas_kernels.cost import Cost


def matmul(filled: int, m: int, k: int, n: int, e: int, group: int, out: int = 2) -> Cost:
    """Cost of `filled` of m int8 rows times their experts' weights [e k n].

    A weight takes half a byte and a share of a scale. out: bytes of a written number.
    """
    weights = e * k * n / 2 + 4 * e * (k // group) * n
    return Cost(2 * filled * k * n, weights + filled * (k + 4) + out * m * n, "int8")
