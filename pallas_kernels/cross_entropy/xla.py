"""Output projection and cross-entropy in XLA, in chunks of rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.numerics import accum_dtype

TILE = 128  # rows


def rows_per_chunk(m: int, max_rows: int) -> int:
    """Returns the chunk size for m rows: about `max_rows`, nearly equal chunks, in full tiles.

    For 13 chunks of 7,799 rows XLA:TPU (libtpu 0.0.42) copies row by row; compiling that takes minutes and
    gigabytes.
    """
    tile, chunks = min(TILE, max_rows), -(-m // max_rows)
    return -(-m // (chunks * tile)) * tile


def _chunks(chunk: int, *arrays):
    """Reshapes arrays [m ...] to [c chunk ...], with zeros after the last row."""
    rows = arrays[0].shape[0]
    chunk = min(chunk, rows)

    def cut(x):
        pad = [(0, -rows % chunk)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pad).reshape(-1, chunk, *x.shape[1:])

    return tuple(cut(x) for x in arrays)


def _join(chunks, rows: int):
    return chunks.reshape(-1, *chunks.shape[2:])[:rows]


def forward(
    static, hidden: Float[Array, "m d"], head: Float[Array, "d v"], targets: Int[Array, " m"]
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Returns (nll, log partition), [m], in the accumulation dtype."""

    def loss_of_chunk(args):
        hidden, targets = args
        logits = jnp.matmul(hidden, head, preferred_element_type=accum_dtype(hidden.dtype))
        logz = jax.nn.logsumexp(logits, axis=-1)
        return logz - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], logz

    results = lax.map(loss_of_chunk, _chunks(static.chunk, hidden, targets))
    return tuple(_join(x, hidden.shape[0]) for x in results)


def backward(
    static, saved: tuple, dnll: Float[Array, " m"], dlogz: Float[Array, " m"]
) -> tuple[Float[Array, "m d"], Float[Array, "d v"]]:
    """Returns (dhidden, dhead) for the inputs of `forward`, its log partition, and the gradients of both results."""
    hidden, head, targets, logz = saved
    dtype = accum_dtype(hidden.dtype)

    # The head's gradient is summed over the chunks in the accumulation dtype; bfloat16 would lose hundreds of terms.
    def add_chunk(dhead, args):
        hidden, targets, logz, dnll, dlogz = args
        logits = jnp.matmul(hidden, head, preferred_element_type=dtype)
        p = jnp.exp(logits - logz[:, None]) * (dnll + dlogz)[:, None]
        is_target = targets[:, None] == jnp.arange(head.shape[1], dtype=targets.dtype)
        dlogits = (p - jnp.where(is_target, dnll[:, None], 0)).astype(hidden.dtype)
        dhead = dhead + jnp.einsum("md,mv->dv", hidden, dlogits, preferred_element_type=dtype)
        return dhead, jnp.einsum("mv,dv->md", dlogits, head)

    chunks = _chunks(static.chunk, hidden, targets, logz, dnll, dlogz)
    dhead, dhidden = lax.scan(add_chunk, jnp.zeros(head.shape, dtype), chunks)
    return _join(dhidden, hidden.shape[0]), dhead.astype(head.dtype)
