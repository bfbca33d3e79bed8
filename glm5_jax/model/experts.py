"""The routed experts' weights, and their use on rows sorted by expert or, as in decoding, on few rows."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels.grouped_matmul import grouped_swiglu
from pallas_kernels.grouped_matmul.ref import swiglu
from pallas_kernels.quantised import Int4
from pallas_kernels.w4a8_matmul import ref as w4a8, w4a8_grouped_matmul
from pallas_kernels.w4a8_matmul.quantize import quantize_a8


class Experts(nnx.Module):
    """Gate, up and down matrices of every routed expert."""

    def __init__(self, declare):
        self.gate = declare.normal("gate", "e d f")
        self.up = declare.normal("up", "e d f")
        self.down = declare.normal("down", "e f d")


NAMES = ("gate", "up", "down")

# Without a kernel the sorted rows' product reads all experts: up to this many rows per expert it is cheaper
# to fetch each row's own (measured on CPU).
FETCH_SHARE = 0.5


def fetched_swiglu(x, expert_ids, w, cut: tuple[str, ...] = ()):
    """SwiGLU of x [m d] in each of its experts int32[m a] -> [m a d]. cut: mesh axes whose devices have parts of f,
    and whose results are to be summed."""
    m, a = expert_ids.shape

    def one(_, args):
        # One row at a time, so that the copy of its expert is still in the cache when it is multiplied.
        row, expert = args
        own = [
            jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, expert, keepdims=False), w[name])
            for name in NAMES
        ]
        if not isinstance(own[0], Int4):
            return None, swiglu(row, *own)[0]

        def multiply(x, x_scale, w):
            return w4a8.product(x, x_scale[..., None], w.packed, w.scale, row.dtype)

        return None, _w4a8_swiglu(row, *own, multiply, cut)

    rows = jnp.repeat(x, a, axis=0)[:, None]
    _, y = lax.scan(one, None, (rows, expert_ids.reshape(-1)))
    return y.reshape(m, a, -1)


def sorted_swiglu(
    x, group_sizes, w, expected_rows: int | None = None, kernels="auto", cut: tuple[str, ...] = ()
):
    """SwiGLU of rows x [m d] sorted by expert, int32[e] rows each; see `grouped_swiglu`. cut: as `fetched_swiglu`."""
    own = [w[name] for name in NAMES]
    if isinstance(own[0], Int4):

        def multiply(rows, scale, w):
            return w4a8_grouped_matmul(
                *(rows, scale, w.packed, w.scale, group_sizes),
                expected_rows=expected_rows,
                out_dtype=x.dtype,
                implementation=kernels,
            )

        return _w4a8_swiglu(x, *own, multiply, cut)
    return grouped_swiglu(x, group_sizes, *own, expected_rows=expected_rows, implementation=kernels)


def _w4a8_swiglu(x, gate, up, down, multiply, cut):
    """With int8 rows before both products; multiply(integers, their scales, weight)."""
    rows = quantize_a8(x)
    hidden = jax.nn.silu(multiply(*rows, gate)) * multiply(*rows, up)
    return multiply(*quantize_a8(hidden, cut), down)
