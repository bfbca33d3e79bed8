"""Int8 rows times int4 weights, with one scale per row and one per weight group and column."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels import backends


class Static(NamedTuple):
    """Static arguments.

    Attributes:
      group: weight rows that share a scale.
      expected_rows: expected number of filled rows.
    """

    backend: backends.Backend
    group: int
    expected_rows: int
    out_dtype: jnp.dtype


def w4a8_matmul(
    x: Int8[Array, "m k"],
    x_scale: Float[Array, " m"],
    w: Int8[Array, "k/2 n"],
    w_scale: Float[Array, "groups n"],
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | backends.Implementation = "auto",
) -> Float[Array, "m n"]:
    """Returns [m n] in out_dtype: int8 rows x times packed int4 weights w (see `quantize`).

        x_scale[m] * sum over groups g of w_scale[g, n] * (x[m] . w[n] over the rows of g)

    A group may be any divisor of k. The products in a group are exact integers; the groups are summed in
    float32 in their order. Not differentiable.

    implementation: see `backends.select_backend`. Raises ValueError if the shapes or dtypes do not match.
    """
    return _run(x, x_scale, w, w_scale, None, x.shape[0], out_dtype, implementation)


def w4a8_grouped_matmul(
    x: Int8[Array, "m k"],
    x_scale: Float[Array, " m"],
    w: Int8[Array, "e k/2 n"],
    w_scale: Float[Array, "e groups n"],
    group_sizes: Int[Array, " e"],
    *,
    expected_rows: int | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | backends.Implementation = "auto",
) -> Float[Array, "m n"]:
    """`w4a8_matmul` of rows sorted by expert, each with its expert's weights.

    group_sizes: rows per expert. Rows beyond their sum give zero. expected_rows: expected number of filled
    rows; None: m. It sets block sizes and does not change the result.
    """
    expected_rows = expected_rows or x.shape[0]
    return _run(x, x_scale, w, w_scale, group_sizes, expected_rows, out_dtype, implementation)


def _run(x, x_scale, w, w_scale, group_sizes, expected_rows, out_dtype, implementation):
    batch_shape = () if group_sizes is None else group_sizes.shape
    m, k = x.shape
    num_groups, n = w_scale.shape[-2:]
    scales_match = x_scale.shape == (m,) and num_groups and not k % num_groups
    if (
        not scales_match
        or w.shape != (*batch_shape, k // 2, n)
        or w_scale.shape[:-2] != batch_shape
    ):
        raise ValueError(
            f"w4a8_matmul: rows {x.shape} with scales {x_scale.shape}, packed weights {w.shape} with "
            f"scales {w_scale.shape}; it takes [m k], [m], [k/2 n] and [k/group n], the weights with "
            "a leading e where there are group sizes int32[e]"
        )
    if not x.dtype == w.dtype == jnp.int8:
        raise ValueError(
            f"w4a8_matmul: rows {x.dtype} and weights {w.dtype}; both are int8 (see quantize_a8, "
            "quantize_w4)"
        )
    backend = backends.select_backend("w4a8_matmul", implementation, x, w, w_scale)
    static = Static(
        backend=backend,
        group=k // num_groups,
        expected_rows=expected_rows,
        out_dtype=jnp.dtype(out_dtype),
    )
    return backend.function("forward")(static, x, x_scale, w, w_scale, group_sizes)
