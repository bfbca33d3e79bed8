"""What a product with int4 weights costs."""

from pallas_kernels.cost import Cost


def product(filled, m, k, n, e, group, out: int = 2) -> Cost:
    """Of so many filled int8 rows of m with their experts' weights [e k n], half a byte and a share of a scale each;
    out: bytes of a number that is written."""
    weights = e * k * n / 2 + 4 * e * (k // group) * n
    return Cost(2 * filled * k * n, weights + filled * (k + 4) + out * m * n, "int8")
