"""Rows of latents as 32-bit words: what a cache holds in 8 bits, and what a TPU can copy one row at a time.

A row of GLM-5 in 8 bits has 656 bytes, as in DeepSeek's fp8 cache: 512 values c_kv in 8 bits, 64 numbers k_rope as
they are in bfloat16, and a float32 scale for each 128 values. In bfloat16 it has 1,536 on a TPU, of which 1,152 are
read: 288 words lie in whole lanes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.eight_bits import quantize_vectors

LANES = 128
GROUP = 128  # values that share a scale, at most: as in the fp8 cache of DeepSeek's FlashMLA
PLANES = 4  # bytes of a word


class Layout(NamedTuple):
    """What a row's words hold, one kind behind the other.

    values: columns in 8 bits of this dtype, int8 or float8_e4m3fn; byte p of word i is column p w + i, for w
    words. rest: the columns behind them, one float32 in a word or two bfloat16, columns i and w + i in word i. Then
    the scales. multiple: of words that a row has, zeros behind; a TPU copies rows of whole LANES alone, and would
    have all pages laid out anew at every call.
    """

    dtype: str | None
    values: int
    rest: int
    rest_dtype: str
    multiple: int = 1

    @classmethod
    def exact(cls, columns: int, dtype) -> "Layout":
        """Of rows that a TPU can copy, as they are: nothing of them is in 8 bits."""
        return cls(None, 0, columns, jnp.dtype(dtype).name, LANES)

    @property
    def group(self) -> int:
        """Values that share a scale: the largest divisor of all that is at most GROUP."""
        return next(n for n in range(min(GROUP, self.values), 0, -1) if self.values % n == 0)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Words of the values, of the rest and of the scales."""
        rest = -(-self.rest * jnp.dtype(self.rest_dtype).itemsize // PLANES)
        if not self.values:
            # Its second half begins with a lane of its own: nothing moves across lanes when it is read.
            return 0, self.multiple * -(-rest // self.multiple), 0
        return -(-self.values // PLANES), rest, self.values // self.group

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.multiple * -(-sum(self.parts) // self.multiple)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WordRows:
    """Rows [... x] as words int32[... 1 w]. It has the shape and dtype of the rows that `rows` gives.

    The dimension of size 1 keeps a row's words together in the memory of a TPU.
    """

    words: jax.Array
    layout: Layout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, rows, layout: Layout) -> "WordRows":
        """Of rows [... x], x = values + rest; a scale for each group of values, as of `quantize_vectors`."""
        count, (_, rest, _) = layout.values, layout.parts
        values, scales = _octets(rows[..., :count], layout) if count else ((), ())
        rest = _to_words(rows[..., count:].astype(layout.rest_dtype), rest)
        spare = jnp.zeros((*rows.shape[:-1], layout.width - sum(layout.parts)), jnp.int32)
        parts = [*values, rest, *scales, spare]
        return cls(jnp.concatenate(parts, axis=-1)[..., None, :], layout)

    def rows(self) -> jax.Array:
        """[... x], as near as 8 bits are."""
        return from_words(self.words[..., 0, :], self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-2], self.layout.values + self.layout.rest)

    @property
    def ndim(self) -> int:
        return self.words.ndim - 1

    @property
    def dtype(self):
        return jnp.dtype(self.layout.rest_dtype)


def from_words(words, layout: Layout):
    """Rows [... x] of their words int32[... w]; works inside a kernel as well."""
    values, rest, scales = layout.parts
    tail = _from_words(words[..., values : values + rest], layout)
    if not layout.values:
        return tail
    octets = words[..., :values]
    decode = _int8 if layout.dtype == "int8" else _float8
    planes = jnp.concatenate([decode(octets, 8 * p) for p in range(PLANES)], axis=-1)
    scale = lax.bitcast_convert_type(words[..., values + rest :][..., :scales], jnp.float32)
    each = (*words.shape[:-1], layout.group)
    # Not by a reshape: inside a kernel lanes stay where they are.
    scale = [jnp.broadcast_to(scale[..., g : g + 1], each) for g in range(scales)]
    found = planes[..., : layout.values] * jnp.concatenate(scale, axis=-1)
    return jnp.concatenate([found.astype(layout.rest_dtype), tail], axis=-1)


def _octets(rows, layout: Layout):
    """((words of the values,), (words of their scales,)) of rows [... values]."""
    *lead, count = rows.shape
    width = layout.parts[0]
    values, scale = quantize_vectors(rows.reshape(*lead, -1, layout.group), layout.dtype)
    octets = lax.bitcast_convert_type(values.reshape(*lead, count), jnp.uint8)
    octets = jnp.pad(octets, [(0, 0)] * len(lead) + [(0, PLANES * width - count)])
    octets = octets.reshape(*lead, PLANES, width).astype(jnp.uint32)
    words = sum(octets[..., p, :] << (8 * p) for p in range(PLANES))
    return tuple((lax.bitcast_convert_type(part, jnp.int32),) for part in (words, scale))


def _to_words(rest, width: int):
    """int32[... width] of rows [... x] in float32 or bfloat16; `_from_words` is the inverse."""
    if rest.dtype == jnp.float32:
        return lax.bitcast_convert_type(_padded(rest, width), jnp.int32)
    halves = (_padded(half, width) for half in (rest[..., :width], rest[..., width:]))
    low, high = (lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in halves)
    return lax.bitcast_convert_type(low | (high << 16), jnp.int32)


def _padded(x, width: int):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _from_words(words, layout: Layout):
    if layout.rest_dtype == "float32":
        return lax.bitcast_convert_type(words, jnp.float32)[..., : layout.rest]
    # A bfloat16 is the upper half of a float32: no rounding on the way.
    low = lax.bitcast_convert_type(words << 16, jnp.float32)
    high = lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)
    both = jnp.concatenate([low, high], axis=-1) if layout.rest > words.shape[-1] else low
    return both[..., : layout.rest].astype(jnp.bfloat16)


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
