"""Rows of latents as 32-bit words, for 8-bit caches and for row copies on a TPU.

A row of GLM-5 in 8 bits has 656 bytes, as in DeepSeek's fp8 cache: 512 values c_kv in 8 bits, 64 numbers k_rope
in bfloat16, and a float32 scale per 128 values. In bfloat16 it has 1,536 bytes on a TPU and uses 1,152 of
them, because 288 words are padded to full lanes. A TPU can only copy single rows in this form.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.quantized_vectors import quantize_vectors

LANES = 128
GROUP = 128  # maximum values per scale, as in the fp8 cache of DeepSeek's FlashMLA
PLANES = 4  # bytes of a word


class RowLayout(NamedTuple):
    """Layout of a row's words: values, then the rest, then scales, then padding.

    Attributes:
      dtype: int8 or float8_e4m3fn of the 8-bit values; None: no 8-bit values.
      values: number of columns in 8 bits. For w words, byte p of word i is column p w + i.
      rest: number of the following columns: one float32 per word, or two bfloat16, columns i and w + i in word i.
      rest_dtype: dtype of the rest.
      multiple: the words of a row are padded to it with zeros. A TPU copies only rows of full LANES, and would
        otherwise convert the layout of all pages at every call.
    """

    dtype: str | None
    values: int
    rest: int
    rest_dtype: str
    multiple: int = 1

    @classmethod
    def exact(cls, columns: int, dtype) -> "RowLayout":
        """Returns the layout of unquantized rows that a TPU can copy."""
        return cls(None, 0, columns, jnp.dtype(dtype).name, LANES)

    @property
    def group(self) -> int:
        """Values that share a scale: the largest divisor of all values that is at most GROUP."""
        return next(n for n in range(min(GROUP, self.values), 0, -1) if self.values % n == 0)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Words of the values, of the rest and of the scales."""
        rest = -(-self.rest * jnp.dtype(self.rest_dtype).itemsize // PLANES)
        if not self.values:
            # The second half begins at a full lane, so that reading it moves nothing across lanes.
            return 0, self.multiple * -(-rest // self.multiple), 0
        return -(-self.values // PLANES), rest, self.values // self.group

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.multiple * -(-sum(self.parts) // self.multiple)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WordRows:
    """Rows [... x] as words int32[... 1 w], with the shape and dtype of the rows that `rows` returns.

    The dimension of size 1 keeps a row's words contiguous in the memory of a TPU.
    """

    words: jax.Array
    layout: RowLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def encode(cls, rows: Float[Array, "... x"], layout: RowLayout) -> "WordRows":
        """Encodes rows [... x], x = values + rest, with a scale per group of values as in `quantize_vectors`."""
        count, (_, rest, _) = layout.values, layout.parts
        values, scales = _octets(rows[..., :count], layout) if count else ((), ())
        rest = _to_words(rows[..., count:].astype(layout.rest_dtype), rest)
        padding = jnp.zeros((*rows.shape[:-1], layout.width - sum(layout.parts)), jnp.int32)
        parts = [*values, rest, *scales, padding]
        return cls(jnp.concatenate(parts, axis=-1)[..., None, :], layout)

    def rows(self) -> jax.Array:
        """Decodes the rows [... x], up to the 8-bit rounding."""
        return from_words(self.words[..., 0, :], self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded rows."""
        return (*self.words.shape[:-2], self.layout.values + self.layout.rest)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the decoded rows."""
        return self.words.ndim - 1

    @property
    def dtype(self):
        """Dtype of the decoded rows."""
        return jnp.dtype(self.layout.rest_dtype)


def from_words(words: Int32[Array, "... w"], layout: RowLayout) -> Float[Array, "... x"]:
    """Decodes rows [... x] from words int32[... w]; also works inside a kernel."""
    values, rest, scales = layout.parts
    tail = _from_words(words[..., values : values + rest], layout)
    if not layout.values:
        return tail
    octets = words[..., :values]
    decode = _int8 if layout.dtype == "int8" else _float8
    planes = jnp.concatenate([decode(octets, 8 * p) for p in range(PLANES)], axis=-1)
    scale = lax.bitcast_convert_type(words[..., values + rest :][..., :scales], jnp.float32)
    group_shape = (*words.shape[:-1], layout.group)
    # Not by a reshape: inside a kernel numbers must stay in their lanes.
    scale = [jnp.broadcast_to(scale[..., g : g + 1], group_shape) for g in range(scales)]
    values_out = planes[..., : layout.values] * jnp.concatenate(scale, axis=-1)
    return jnp.concatenate([values_out.astype(layout.rest_dtype), tail], axis=-1)


def _octets(rows, layout: RowLayout):
    """Returns ((words of the values,), (words of their scales,)) of rows [... values]."""
    *lead, count = rows.shape
    width = layout.parts[0]
    values, scale = quantize_vectors(rows.reshape(*lead, -1, layout.group), layout.dtype)
    octets = lax.bitcast_convert_type(values.reshape(*lead, count), jnp.uint8)
    octets = jnp.pad(octets, [(0, 0)] * len(lead) + [(0, PLANES * width - count)])
    octets = octets.reshape(*lead, PLANES, width).astype(jnp.uint32)
    words = sum(octets[..., p, :] << (8 * p) for p in range(PLANES))
    return tuple((lax.bitcast_convert_type(part, jnp.int32),) for part in (words, scale))


def _to_words(rest, width: int):
    """Returns int32[... width] of rows [... x] in float32 or bfloat16; `_from_words` is the inverse."""
    if rest.dtype == jnp.float32:
        return lax.bitcast_convert_type(_pad_words(rest, width), jnp.int32)
    halves = (_pad_words(half, width) for half in (rest[..., :width], rest[..., width:]))
    low, high = (lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32) for half in halves)
    return lax.bitcast_convert_type(low | (high << 16), jnp.int32)


def _pad_words(x, width: int):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _from_words(words, layout: RowLayout):
    if layout.rest_dtype == "float32":
        return lax.bitcast_convert_type(words, jnp.float32)[..., : layout.rest]
    # A bfloat16 is the upper half of a float32, so nothing is rounded.
    low = lax.bitcast_convert_type(words << 16, jnp.float32)
    high = lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)
    numbers = jnp.concatenate([low, high], axis=-1) if layout.rest > words.shape[-1] else low
    return numbers[..., : layout.rest].astype(jnp.bfloat16)


def _int8(words, shift: int):
    """Returns float32 of the int8 that begins at bit `shift` of the words."""
    return ((words << (24 - shift)) >> 24).astype(jnp.float32)


def _float8(words, shift: int):
    """Returns float32 of the float8_e4m3fn that begins at bit `shift` of the words, decoded by its bits.

    Most chips have no float8 type. NaN becomes an ordinary number: a NaN value comes with a scale that is not
    finite.
    """
    octet = words >> shift
    exponent_and_mantissa, sign = octet & 0x7F, (octet & 0x80) << 24
    normal = lax.bitcast_convert_type((exponent_and_mantissa << 20) + (120 << 23), jnp.float32)
    # Subnormal float8 numbers are multiples of one step; chips flush float32 subnormals to zero.
    magnitude = jnp.where(
        exponent_and_mantissa < 8, exponent_and_mantissa.astype(jnp.float32) * 2.0**-9, normal
    )
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(magnitude, jnp.int32) | sign, jnp.float32
    )
