"""The k largest of long rows in XLA."""

import jax.numpy as jnp

from pallas_kernels.lightning_indexer import ref


def select(static, scores):
    """int32[m k]: places of the k largest of each row of scores [m s], ascending."""
    return ref.select(scores[None], jnp.ones((1, 1, scores.shape[-1]), bool), static.k)[0]
