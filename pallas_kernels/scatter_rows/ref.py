"""Row scatter in XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def write(
    static, rows: Shaped[Array, "s ..."], new: Shaped[Array, "m ..."], places: Int[Array, " m"]
) -> Shaped[Array, "s ..."]:
    """Writes new [m ...] to rows [s ...] at places int32[m]; see the package."""
    del static
    # A negative number would count from the end.
    indices = jnp.where(places < 0, rows.shape[0], places)
    return rows.at[indices].set(new, mode="drop", unique_indices=True)
