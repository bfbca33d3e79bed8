"""bfloat16 rows as 32-bit words: what a TPU can copy of memory one row at a time."""

import jax.numpy as jnp
from jax import lax

LANES = 128


def pack_rows(rows):
    """int32[... 1 w] of bfloat16 rows [... x]: word i holds column i in its lower half, column w + i above.

    w is half of x rounded up to whole lanes of a TPU, columns beyond x are zeros, and the dimension of size
    1 keeps a row's words together in memory. `unpack_rows` is the inverse.
    """
    return to_words(rows, LANES * -(-rows.shape[-1] // (2 * LANES)))[..., None, :]


def to_words(rows, width: int):
    """int32[... width] of bfloat16 rows [... x], of at most two columns a word; `from_words` is the inverse."""
    low, high = (_bits(part, width) for part in (rows[..., :width], rows[..., width:]))
    return lax.bitcast_convert_type(low | (high << 16), jnp.int32)


def _bits(part, width: int):
    part = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width - part.shape[-1])])
    return lax.bitcast_convert_type(part, jnp.uint16).astype(jnp.uint32)


def unpack_rows(packed, x: int):
    """bfloat16[... x] of rows that `pack_rows` gives."""
    return from_words(packed[..., 0, :], x)


def from_words(words, x: int):
    """bfloat16[... x] of the words int32[... w] of packed rows; works inside a kernel as well."""
    # A bfloat16 is the upper half of a float32: no rounding on the way.
    low = lax.bitcast_convert_type(words << 16, jnp.float32)
    high = lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)
    both = jnp.concatenate([low, high], axis=-1) if x > words.shape[-1] else low
    return both[..., :x].astype(jnp.bfloat16)
