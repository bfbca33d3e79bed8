"""Int8 rows times int4 weights, with a scale per row and one per group of weights and column."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing; group: rows of weights that share a scale; expected_rows: how many rows are likely to
    be filled."""

    choice: dispatch.Choice
    group: int
    expected_rows: int
    out_dtype: jnp.dtype


def w4a8_matmul(x, x_scale, w, w_scale, *, out_dtype=jnp.bfloat16, implementation="auto"):
    """[m n] of out_dtype: rows x int8[m k] times packed weights w int8[k/2 n] (see `quantize`).

        x_scale[m] * sum over groups g of w_scale[g, n] * (x[m] . w[n] over the rows of g)

    x_scale float32[m], w_scale float32[k/group n], for any group that divides k. The products in a
    group are exact integers; the groups are summed in float32 in their order. Not differentiated.

    ValueError if the shapes do not fit. implementation: see `dispatch.choose`.
    """
    return _run(x, x_scale, w, w_scale, None, x.shape[0], out_dtype, implementation)


def w4a8_grouped_matmul(
    x,
    x_scale,
    w,
    w_scale,
    group_sizes,
    *,
    expected_rows: int | None = None,
    out_dtype=jnp.bfloat16,
    implementation="auto",
):
    """`w4a8_matmul` of rows sorted by expert, int32[e] of them for each, with its own weights.

    w int8[e k/2 n], w_scale float32[e k/group n]. Rows beyond the sum of group_sizes come out as zero.
    expected_rows (default m) is how many rows are likely to be filled; it sets block sizes and no result.
    """
    expected_rows = expected_rows or x.shape[0]
    return _run(x, x_scale, w, w_scale, group_sizes, expected_rows, out_dtype, implementation)


def _run(x, x_scale, w, w_scale, group_sizes, expected_rows, out_dtype, implementation):
    lead = () if group_sizes is None else group_sizes.shape
    m, k = x.shape
    num_groups, n = w_scale.shape[-2:]
    fits = x_scale.shape == (m,) and num_groups and not k % num_groups
    if not fits or w.shape != (*lead, k // 2, n) or w_scale.shape[:-2] != lead:
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
    choice = dispatch.choose("w4a8_matmul", implementation, x, w, w_scale)
    static = Static(choice, k // num_groups, expected_rows, jnp.dtype(out_dtype))
    return choice.function("forward")(static, x, x_scale, w, w_scale, group_sizes)
