"""Weights that stand as several arrays in a parameter tree, and the product that takes a weight of either kind.

    Int8    a weight times int8 rows, a scale per output channel (W8A8)
    Int4    the routed experts' weights times int8 rows, a scale per group and output channel (W4A8)

Rows of activations are quantised as they come, with a scale for each token (`quantize_a8`).
"""

import dataclasses

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Int8(Compound):
    """A weight [... in out] as integers int8 of its shape times scale float32[... out]; in and out may be several
    dimensions each."""

    q: jax.Array
    scale: jax.Array


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


def product(equation: str, x, w):
    """jnp.einsum(equation, x, w) of x [... in] and a weight w [in out], either of which may be several
    dimensions, in their order; w may be `Int8`.

    Then x becomes int8 with a scale for each of its rows [in], and the integers' exact sums are scaled in
    float32:  y[.. o] = (q_x . q_w[:, o]) scale_x scale_w[o], in the dtype of x.
    """
    if not isinstance(w, Int8):
        return jnp.einsum(equation, x, w)
    lead = x.shape[: x.ndim - (w.q.ndim - w.scale.ndim)]
    rows, row_scale = quantize_a8(x.reshape(*lead, -1))
    sums = jnp.matmul(
        rows, w.q.reshape(rows.shape[-1], -1), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    y = sums * row_scale[..., None] * w.scale.reshape(-1)
    return y.astype(x.dtype).reshape(*lead, *w.scale.shape)
