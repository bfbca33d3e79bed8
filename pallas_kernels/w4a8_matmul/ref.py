"""Int8 rows times int4 weights in XLA: exact integers within a group, float32 over the groups."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.grouped_matmul.xla import ExpertRows, spans
from pallas_kernels.w4a8_matmul.quantize import unpack_int4


def forward(
    static,
    x: Int8[Array, "m k"],
    x_scale: Float[Array, " m"],
    w: Int8[Array, "..."],
    w_scale: Float[Array, "..."],
    group_sizes: Int[Array, " e"] | None,
) -> Float[Array, "m n"]:
    """Returns [m n]; group_sizes None: weights without a leading expert axis."""

    def block(x, x_scale, w, w_scale):
        return (matmul(x, x_scale, w, w_scale, static.out_dtype),)

    arrays, weights = (x, x_scale[:, None]), (w, w_scale)
    if group_sizes is None:
        return block(*arrays, *weights)[0]
    rows = ExpertRows(spans(-(-x.shape[0] // w.shape[0])), group_sizes, x.shape[0])
    return rows.map(block, arrays, weights)[0]


def matmul(
    x: Int8[Array, "... m k"],
    x_scale: Float[Array, "... m 1"],
    w: Int8[Array, "... k/2 n"],
    w_scale: Float[Array, "... groups n"],
    out_dtype: DTypeLike,
) -> Float[Array, "... m n"]:
    """Returns int8 rows times packed int4 weights, in out_dtype."""
    groups = w_scale.shape[-2]
    group = x.shape[-1] // groups

    def add(g, total):
        rows = lax.dynamic_slice_in_dim(x, g * group, group, axis=-1)
        packed = lax.dynamic_slice_in_dim(w, g * (group // 2), group // 2, axis=-2)
        weights = unpack_int4(packed, group)
        sums = jnp.matmul(rows, weights, preferred_element_type=jnp.int32)
        return total + sums.astype(jnp.float32) * lax.dynamic_slice_in_dim(w_scale, g, 1, axis=-2)

    total = lax.fori_loop(0, groups, add, jnp.zeros((*x.shape[:-1], w.shape[-1]), jnp.float32))
    return (total * x_scale).astype(out_dtype)
