"""Weights of the routed experts, and SwiGLU on rows sorted by expert or, in decoding, on few rows."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from glm5_jax.model import mlp
from glm5_jax.parallel.params import Declare
from pallas_kernels.backends import Implementation
from pallas_kernels.fp8_blocks import fp8_grouped_matmul
from pallas_kernels.grouped_matmul import grouped_swiglu
from pallas_kernels.grouped_matmul.xla import swiglu
from pallas_kernels.quantized_weights import Fp8, Int4
from pallas_kernels.w4a8_matmul import ref as w4a8, w4a8_grouped_matmul
from pallas_kernels.w4a8_matmul.quantize import quantize_a8


class Experts(nnx.Module):
    """Gate, up and down matrices of every routed expert."""

    def __init__(self, declare: Declare):
        self.gate = declare.normal("gate", "e d f")
        self.up = declare.normal("up", "e d f")
        self.down = declare.normal("down", "e f d")


NAMES = ("gate", "up", "down")

# Without a kernel, the product of sorted rows reads all experts. Up to this many rows per expert it is
# cheaper to fetch each row's expert (measured on CPU).
FETCH_SHARE = 0.5


def fetched_swiglu(
    x: Float[Array, "m d"],
    expert_ids: Int[Array, "m a"],
    w: PyTree,
    sum_axes: tuple[str, ...] = (),
) -> Float[Array, "m a d"]:
    """Applies SwiGLU to x in each of its experts, which are fetched row by row.

    sum_axes: mesh axes whose devices hold parts of f, and over which the caller sums the results.
    """
    m, a = expert_ids.shape

    def one(_, args):
        # One row at a time, so that the copied expert is still in the CPU's cache when it is multiplied.
        row, expert = args
        gate, up, down = (
            jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, expert, keepdims=False), w[name])
            for name in NAMES
        )
        if isinstance(gate, Fp8):
            return None, mlp.swiglu({"gate": gate, "up": up, "down": down}, row)
        if not isinstance(gate, Int4):
            return None, swiglu(row, gate, up, down)[0]

        def multiply(x, x_scale, w):
            return w4a8.matmul(x, x_scale[..., None], w.packed, w.scale, row.dtype)

        return None, _w4a8_swiglu(row, gate, up, down, multiply, sum_axes)

    rows = jnp.repeat(x, a, axis=0)[:, None]
    _, y = lax.scan(one, None, (rows, expert_ids.reshape(-1)))
    return y.reshape(m, a, -1)


def sorted_swiglu(
    x: Float[Array, "m d"],
    group_sizes: Int[Array, " e"],
    w: PyTree,
    expected_rows: int | None = None,
    kernels: str | Implementation = "auto",
    sum_axes: tuple[str, ...] = (),
) -> Float[Array, "m d"]:
    """Applies SwiGLU to rows that are sorted by expert, group_sizes rows each; see `grouped_swiglu`.

    sum_axes: as for `fetched_swiglu`.
    """
    gate, up, down = (w[name] for name in NAMES)
    if isinstance(gate, Fp8):

        def multiply_fp8(rows, w):
            return fp8_grouped_matmul(
                rows, w.values, w.scale, group_sizes, expected_rows=expected_rows
            )

        hidden = jax.nn.silu(multiply_fp8(x, gate)) * multiply_fp8(x, up)
        return multiply_fp8(hidden, down)
    if isinstance(gate, Int4):

        def multiply(rows, scale, w):
            return w4a8_grouped_matmul(
                rows,
                scale,
                w.packed,
                w.scale,
                group_sizes,
                expected_rows=expected_rows,
                out_dtype=x.dtype,
                implementation=kernels,
            )

        return _w4a8_swiglu(x, gate, up, down, multiply, sum_axes)
    return grouped_swiglu(
        x, group_sizes, gate, up, down, expected_rows=expected_rows, implementation=kernels
    )


def _w4a8_swiglu(x, gate, up, down, multiply, sum_axes):
    """Applies SwiGLU with int8 rows before both products; multiply(integers, their scales, weight)."""
    rows = quantize_a8(x)
    hidden = jax.nn.silu(multiply(*rows, gate)) * multiply(*rows, up)
    return multiply(*quantize_a8(hidden, sum_axes), down)
