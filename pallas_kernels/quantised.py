"""Weights that stand as several arrays in a parameter tree, and the product that takes a weight of either kind.

    Int8    a weight times int8 rows, a scale per output channel (W8A8)
    Int4    the routed experts' weights times int8 rows, a scale per group and output channel (W4A8)

Rows of activations are quantised as they come, with a scale for each token (`quantize_a8`).
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp

from pallas_kernels.w4a8_matmul.quantize import quantize_a8


class Compound:
    """A leaf of a parameter tree that is made of several arrays, with the shape of the weight that it stands
    for, by default that of the first of them. In a stack of layers each of them has the leading `l`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return jax.tree.leaves(self)[0].shape

    @property
    def dtype(self):
        """Of the first array: no dtype that a plain weight has, if the weight is quantised."""
        return jax.tree.leaves(self)[0].dtype

    def astype(self, dtype):
        """Itself: what is quantised keeps its dtypes, whatever the rest computes in."""
        del dtype
        return self

    def each(self, function: Callable, letters: str, shape: tuple[int, ...]) -> Self:
        """One of this class, with function(letters, sizes) for each array.

        letters and shape: of the dimensions of the whole weight, of which this may be a part ("l d f"; a stack
        begins with l). letters and sizes: of the array's, sizes in units that a cut must leave whole.
        """
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Int8(Compound):
    """A weight [... in out] as integers int8 of its shape times scale float32[... out]; in and out may be several
    dimensions each."""

    q: jax.Array
    scale: jax.Array

    def each(self, function, letters, shape) -> Self:
        names = letters.split()
        lead = int(names[0] == "l")
        outputs = lead + len(self.q.shape) - len(self.scale.shape)
        rest = " ".join(names[:lead] + names[outputs:]), shape[:lead] + shape[outputs:]
        return Int8(function(letters, shape), function(*rest))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Int4(Compound):
    """Weights [... k n] as `w4a8_matmul` takes them: packed int8[... k/2 n], scale float32[... k/group n]."""

    packed: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, half, n = self.packed.shape
        return (*lead, 2 * half, n)

    @property
    def group(self) -> int:
        """Rows of weights that share a scale."""
        return self.shape[-2] // self.scale.shape[-2]

    def each(self, function, letters, shape) -> Self:
        sizes = (*shape[:-2], shape[-2] // self.group, shape[-1])
        return Int4(function(letters, sizes), function(letters, sizes))


def product(equation: str, x, w, cut: tuple[str, ...] = ()):
    """jnp.einsum(equation, x, w) of x [... in] and a weight w [in out], either of which may be several
    dimensions, in their order; w may be `Int8`. cut: mesh axes whose devices have parts of `in`;
    the sum over them is left to the caller.

    Then x becomes int8 with a scale for each of its rows [in], and the integers' exact sums are scaled in
    float32:  y[.. o] = (q_x . q_w[:, o]) scale_x scale_w[o], in the dtype of x.
    """
    if not isinstance(w, Int8):
        return jnp.einsum(equation, x, w)
    lead = x.shape[: x.ndim - (w.q.ndim - w.scale.ndim)]
    rows, row_scale = quantize_a8(x.reshape(*lead, -1), cut)
    sums = jnp.matmul(
        rows, w.q.reshape(rows.shape[-1], -1), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    y = sums * row_scale[..., None] * w.scale.reshape(-1)
    return y.astype(x.dtype).reshape(*lead, *w.scale.shape)
