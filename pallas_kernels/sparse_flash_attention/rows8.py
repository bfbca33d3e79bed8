"""Latents in 8 bits, a row of them as 32-bit words: what a cache holds, and what a kernel copies row by row.

A row of GLM-5 has 656 bytes, as in DeepSeek's fp8 cache: 512 values c_kv in 8 bits, 64 numbers k_rope as they are
in bfloat16, and a float32 scale for each 128 values.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.eight_bits import quantize_vectors
from pallas_kernels.sparse_flash_attention.rows import from_words, to_words

GROUP = 128  # values that share a scale, at most: as in the fp8 cache of DeepSeek's FlashMLA
PLANES = 4  # bytes of a word


class Layout(NamedTuple):
    """What a row's words hold, one kind behind the other.

    values: columns in 8 bits of this dtype, int8 or float8_e4m3fn; byte p of word i is column p w + i, for w
    words. rest: the columns behind them, two bfloat16 (as `to_words`) or one float32 in a word. Then the scales.
    multiple: of words that a row has, zeros behind; a TPU copies rows of whole LANES alone, and would have all
    pages laid out anew at every call.
    """

    dtype: str
    values: int
    rest: int
    rest_dtype: str
    multiple: int = 1

    @property
    def group(self) -> int:
        """Values that share a scale: the largest divisor of all that is at most GROUP."""
        return next(n for n in range(min(GROUP, self.values), 0, -1) if self.values % n == 0)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Words of the values, of the rest and of the scales."""
        rest = self.rest * jnp.dtype(self.rest_dtype).itemsize
        return -(-self.values // PLANES), -(-rest // 4), self.values // self.group

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.multiple * -(-sum(self.parts) // self.multiple)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows8:
    """Rows [... x] as words int32[... 1 w]. It has the shape and dtype of the rows that `rows` gives."""

    words: jax.Array
    layout: Layout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, rows, layout: Layout) -> "Rows8":
        """Of rows [... x], x = values + rest; a scale for each group of values, as of `quantize_vectors`."""
        lead, count = rows.shape[:-1], layout.values
        grouped = rows[..., :count].reshape(*lead, -1, layout.group)
        values, scale = quantize_vectors(grouped, layout.dtype)
        width = layout.parts[0]
        octets = lax.bitcast_convert_type(values.reshape(*lead, count), jnp.uint8)
        octets = jnp.pad(octets, [(0, 0)] * len(lead) + [(0, PLANES * width - count)])
        octets = octets.reshape(*lead, PLANES, width).astype(jnp.uint32)
        words = sum(octets[..., p, :] << (8 * p) for p in range(PLANES))
        rest = rows[..., count:].astype(layout.rest_dtype)
        if rest.dtype == jnp.bfloat16:
            rest = to_words(rest, layout.parts[1])
        spare = jnp.zeros((*lead, layout.width - sum(layout.parts)), jnp.int32)
        parts = [lax.bitcast_convert_type(part, jnp.int32) for part in (words, rest, scale)]
        return cls(jnp.concatenate([*parts, spare], axis=-1)[..., None, :], layout)

    def rows(self) -> jax.Array:
        """[... x], as near as 8 bits are."""
        return from_words8(self.words[..., 0, :], self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-2], self.layout.values + self.layout.rest)

    @property
    def ndim(self) -> int:
        return self.words.ndim - 1

    @property
    def dtype(self):
        return jnp.dtype(self.layout.rest_dtype)


def from_words8(words, layout: Layout):
    """Rows [... x] of their words int32[... w]; works inside a kernel as well."""
    values, rest, scales = layout.parts
    octets = words[..., :values]
    decode = _int8 if layout.dtype == "int8" else _float8
    planes = jnp.concatenate([decode(octets, 8 * p) for p in range(PLANES)], axis=-1)
    scale = lax.bitcast_convert_type(words[..., values + rest :][..., :scales], jnp.float32)
    each = (*words.shape[:-1], layout.group)
    # Not by a reshape: inside a kernel lanes stay where they are.
    scale = [jnp.broadcast_to(scale[..., g : g + 1], each) for g in range(scales)]
    found = planes[..., : layout.values] * jnp.concatenate(scale, axis=-1)
    tail = words[..., values : values + rest]
    if layout.rest_dtype == "bfloat16":
        tail = from_words(tail, layout.rest)
    else:
        tail = lax.bitcast_convert_type(tail, jnp.float32)
    return jnp.concatenate([found.astype(layout.rest_dtype), tail], axis=-1)


def _int8(words, shift: int):
    """float32 of the int8 from a bit of the words on."""
    return ((words << (24 - shift)) >> 24).astype(jnp.float32)


def _float8(words, shift: int):
    """float32 of the float8_e4m3fn from a bit of the words on, by its bits: most chips have no such type.

    Of NaN too something is made: whoever writes it has written a scale that is not finite.
    """
    octet = words >> shift
    size, sign = octet & 0x7F, (octet & 0x80) << 24
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    # Below the smallest exponent numbers are multiples of one step; chips flush float32's own such numbers.
    found = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(found, jnp.int32) | sign, jnp.float32)
