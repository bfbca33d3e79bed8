"""Cost of the projections before attention."""

from pallas_kernels.cost import Cost


def forward(m: int, d: int, q: int, heads: int, latent: int, cached: bool, item: int = 2) -> Cost:
    """Cost of the projections of m tokens of width d.

    They go to a query latent of q, from it to `heads` columns of all heads, and to a key latent. Weights,
    inputs and outputs count once; of a cache only the new rows count.
    """
    weights = d * (q + latent) + q * heads
    rows = m * (d + q + heads + latent * (1 + cached))
    return Cost(2 * m * weights, item * (weights + rows))
