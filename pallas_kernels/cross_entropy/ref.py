"""Output projection and cross-entropy in XLA, in chunks of rows."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import wide

TILE = 128  # rows


def rows_at_a_time(m: int, most: int) -> int:
    """A chunk for m rows: about `most`, about as many in each, in whole tiles. Of 13 chunks of 7,799 rows XLA:TPU (libtpu
    0.0.42) makes copies row by row, whose code takes minutes and gigabytes to compile."""
    tile, chunks = min(TILE, most), -(-m // most)
    return -(-m // (chunks * tile)) * tile


def _chunks(chunk: int, *arrays):
    """Arrays [m ...] as [c chunk ...], zeros behind the last row."""
    rows = arrays[0].shape[0]
    chunk = min(chunk, rows)

    def cut(x):
        pad = [(0, -rows % chunk)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pad).reshape(-1, chunk, *x.shape[1:])

    return tuple(cut(x) for x in arrays)


def _join(chunks, rows: int):
    return chunks.reshape(-1, *chunks.shape[2:])[:rows]


def forward(static, hidden, head, targets):
    """(nll, log partition), wide[m]."""

    def one(args):
        hidden, targets = args
        logits = jnp.matmul(hidden, head, preferred_element_type=wide(hidden.dtype))
        logz = jax.nn.logsumexp(logits, axis=-1)
        return logz - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], logz

    done = lax.map(one, _chunks(static.chunk, hidden, targets))
    return tuple(_join(x, hidden.shape[0]) for x in done)


def backward(static, saved, dnll, dlogz):
    """(dhidden, dhead) for what `forward` took, the log partition that it gave, and both gradients."""
    hidden, head, targets, logz = saved
    inner = wide(hidden.dtype)

    # The head's gradient is summed wide over the chunks; bfloat16 would lose hundreds of terms.
    def one(dhead, args):
        hidden, targets, logz, dnll, dlogz = args
        logits = jnp.matmul(hidden, head, preferred_element_type=inner)
        p = jnp.exp(logits - logz[:, None]) * (dnll + dlogz)[:, None]
        hit = targets[:, None] == jnp.arange(head.shape[1], dtype=targets.dtype)
        dlogits = (p - jnp.where(hit, dnll[:, None], 0)).astype(hidden.dtype)
        dhead = dhead + jnp.einsum("md,mv->dv", hidden, dlogits, preferred_element_type=inner)
        return dhead, jnp.einsum("mv,dv->md", dlogits, head)

    chunks = _chunks(static.chunk, hidden, targets, logz, dnll, dlogz)
    dhead, dhidden = lax.scan(one, jnp.zeros(head.shape, inner), chunks)
    return _join(dhidden, hidden.shape[0]), dhead.astype(head.dtype)
