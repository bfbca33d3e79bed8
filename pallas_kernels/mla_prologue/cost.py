"""What the projections before attention cost."""

from pallas_kernels.cost import Cost


def forward(m, d, q, heads, latent, cached: bool, item: int = 2) -> Cost:
    """Of m tokens of width d to a latent of q, from it to `heads` columns of all heads, and to a latent of the keys;
    weights, inputs and outputs once, of a cache only the new rows."""
    weights = d * (q + latent) + q * heads
    rows = m * (d + q + heads + latent * (1 + cached))
    return Cost(2 * m * weights, item * (weights + rows))
