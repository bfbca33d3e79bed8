"""Dropless products of rows sorted by expert, in XLA.

The first `span` rows of every expert are one batched matmul. An expert's further rows are processed in blocks, one
after the other, as many as there are at run time. A skewed router costs time, but no tokens and no memory.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.numerics import accum_dtype


def forward(
    static, x: Float[Array, "m k"], w: Float[Array, "e k n"], group_sizes: Int[Array, " e"]
) -> Float[Array, "m n"]:
    """Returns [m n] of x [m k], w [e k n]."""
    return _rows(static, x, group_sizes).map(lambda x, w: (matmul(x, w),), (x,), (w,))[0]


def backward(
    static, saved: tuple, dy: Float[Array, "m n"]
) -> tuple[Float[Array, "m k"], Float[Array, "e k n"]]:
    """Returns (dx, dw) for the inputs of `forward` and the gradient of its output."""
    x, w, group_sizes = saved
    dtype = accum_dtype(w.dtype)

    def block(x, dy, w):
        return matmul(dy, w.swapaxes(-1, -2)), _over_rows(x, dy, dtype)

    dx, (dw,) = _rows(static, x, group_sizes).map_and_sum(block, (x, dy), (w,))
    return dx, dw.astype(w.dtype)


def matmul(x: Float[Array, "... m k"], w: Float[Array, "... k n"]) -> Float[Array, "... m n"]:
    """Returns x [... m k] times w [... k n] in the dtype of x, summed in the accumulation dtype."""
    return jnp.matmul(x, w, preferred_element_type=accum_dtype(x.dtype)).astype(x.dtype)


def _over_rows(a, b, dtype):
    return jnp.matmul(a.swapaxes(-1, -2), b, preferred_element_type=dtype)


def _rows(static, x, group_sizes):
    mean = -(-static.expected_rows // group_sizes.shape[0])
    return ExpertRows(spans(mean), group_sizes, x.shape[0])


def spans(mean_rows: int) -> tuple[int, int]:
    """Returns (rows of every expert in the joint product, rows of a later block) for a mean load.

    Three quarters of the mean leave few rows of the joint product empty. A block is half empty on average.
    """
    joint_rows = max(mean_rows * 3 // 4 // 8 * 8, 8)
    return joint_rows, min(max(joint_rows // 4 // 8 * 8, 8), 64)


class ExpertRows:
    """Positions of the sorted rows: the first `span` of each expert, and the blocks of the rest."""

    def __init__(self, sizes: tuple[int, int], group_sizes: Int[Array, " e"], rows: int):
        self._count = rows
        self._span, self._block = sizes
        self._sizes = group_sizes
        ends = jnp.cumsum(group_sizes)
        self._starts = ends - group_sizes
        row = jnp.arange(rows, dtype=jnp.int32)
        self._owner = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
        self._rank = row - jnp.take(self._starts, self._owner, mode="clip")
        self._real = self._owner < group_sizes.shape[0]
        blocks = -(-jnp.maximum(group_sizes - self._span, 0) // self._block)
        self._block_ends = jnp.cumsum(blocks)
        self._block_starts = self._block_ends - blocks
        self.num_blocks = self._block_ends[-1]

    def pad(self, x: Shaped[Array, "m d"]) -> Shaped[Array, "e span d"]:
        """Returns the first rows of every expert, zeros where it has fewer."""
        rank = jnp.arange(self._span, dtype=jnp.int32)
        block = jnp.take(x, self._starts[:, None] + rank, axis=0, mode="clip")
        return jnp.where((rank < self._sizes[:, None])[..., None], block, 0)

    def unpad(self, block: Shaped[Array, "e span d"]) -> Shaped[Array, "m+block d"]:
        """Returns the rows of experts at their positions, zeros elsewhere.

        The rows beyond m are room for `store`.
        """
        is_joint = self._real & (self._rank < self._span)
        flat = block.reshape(-1, block.shape[-1])
        rows = jnp.take(flat, self._owner * self._span + self._rank, axis=0, mode="clip")
        return self.append_room(jnp.where(is_joint[:, None], rows, 0))

    def append_room(self, x: Shaped[Array, "m d"]) -> Shaped[Array, "m+block d"]:
        """Appends a block of zero rows."""
        return jnp.pad(x, ((0, self._block), (0, 0)))

    def block(self, i: Int[Array, ""]) -> tuple[Array, Array, Bool[Array, " block"]]:
        """Returns (expert, first row, which of its rows are filled) of the later block i."""
        expert = jnp.searchsorted(self._block_ends, i, side="right").astype(jnp.int32)
        rank = self._span + (i - self._block_starts[expert]) * self._block
        remaining = self._sizes[expert] - rank
        return expert, self._starts[expert] + rank, jnp.arange(self._block) < remaining

    def load(self, x: Shaped[Array, "m+block d"], position: tuple) -> Shaped[Array, "block d"]:
        """Returns the rows of a block of x, zeros beyond the expert's rows."""
        _, first, filled = position
        part = lax.dynamic_slice_in_dim(x, first, self._block)
        return jnp.where(filled[:, None], part, 0)

    def store(
        self, x: Shaped[Array, "m+block d"], block_rows: Shaped[Array, "block d"], position: tuple
    ) -> Shaped[Array, "m+block d"]:
        """Writes the filled rows of a block to x."""
        _, first, filled = position
        part = lax.dynamic_slice_in_dim(x, first, self._block)
        part = jnp.where(filled[:, None], block_rows, part)
        return lax.dynamic_update_slice_in_dim(x, part, first, 0)

    def map(
        self, function: Callable, arrays: tuple[Array, ...], weights: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """Returns a tuple of [m ...]: function(*blocks, *their expert's weights) of arrays [m ...], row by row."""
        outputs = tuple(self.unpad(a) for a in function(*map(self.pad, arrays), *weights))
        padded = [self.append_room(a) for a in arrays]

        def run_block(i, outputs):
            position = self.block(i)
            expert_weights = (w[position[0]] for w in weights)
            block_rows = function(*(self.load(a, position) for a in padded), *expert_weights)
            return tuple(self.store(a, n, position) for a, n in zip(outputs, block_rows))

        outputs = lax.fori_loop(0, self.num_blocks, run_block, outputs)
        return tuple(a[: self._count] for a in outputs)

    def map_and_sum(
        self, function: Callable, arrays: tuple[Array, ...], weights: tuple[Array, ...]
    ) -> tuple[Array, list[Array]]:
        """Returns ([m ...], list of [e ...]) for a function that returns (rows, *sums over its block's rows)."""
        first, *sums = function(*map(self.pad, arrays), *weights)
        padded = [self.append_room(a) for a in arrays]

        def run_block(i, carry):
            position = self.block(i)
            expert_weights = (w[position[0]] for w in weights)
            block_rows, *parts = function(
                *(self.load(a, position) for a in padded), *expert_weights
            )
            sums = [total.at[position[0]].add(part) for total, part in zip(carry[1], parts)]
            return self.store(carry[0], block_rows, position), sums

        outputs, sums = lax.fori_loop(0, self.num_blocks, run_block, (self.unpad(first), sums))
        return outputs[: self._count], sums


def swiglu(
    x: Float[Array, "... m d"],
    gate: Float[Array, "... d f"],
    up: Float[Array, "... d f"],
    down: Float[Array, "... f d"],
) -> tuple[Float[Array, "... m d"], Float[Array, "... m f"], Float[Array, "... m f"]]:
    """Returns (y, gate product, up product) of rows x [... m d] in experts [... d f], [... d f], [... f d]."""
    g, u = jnp.matmul(x, gate), jnp.matmul(x, up)
    return jnp.matmul(jax.nn.silu(g) * u, down), g, u


def swiglu_forward(
    static,
    x: Float[Array, "m d"],
    group_sizes: Int[Array, " e"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
) -> tuple[Float[Array, "m d"], Float[Array, "m f"], Float[Array, "m f"]]:
    """Returns (y [m d], gate product [m f], up product [m f])."""
    y, g, u = _rows(static, x, group_sizes).map(swiglu, (x,), (gate, up, down))
    return y, g, u


def swiglu_backward(
    static, saved: tuple, dy: Float[Array, "m d"]
) -> tuple[
    Float[Array, "m d"], Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]
]:
    """Returns (dx, dgate, dup, ddown) for the inputs of `swiglu_forward`, the two products, and the gradient of y."""
    x, group_sizes, gate, up, down, g, u = saved
    rows = _rows(static, x, group_sizes)
    dx, dw = rows.map_and_sum(_swiglu_gradients, (x, g, u, dy), (gate, up, down))
    dgate, dup, ddown = (d.astype(w.dtype) for d, w in zip(dw, (gate, up, down)))
    return dx, dgate, dup, ddown


def _swiglu_gradients(x, g, u, dy, gate, up, down):
    """Returns (dx, dgate, dup, ddown) of blocks [... c d]; the weights' gradients have the accumulation dtype."""
    dtype = accum_dtype(x.dtype)
    h, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, g, u)
    dg, du = pull(jnp.matmul(dy, down.swapaxes(-1, -2)))
    dx = jnp.matmul(dg, gate.swapaxes(-1, -2)) + jnp.matmul(du, up.swapaxes(-1, -2))
    return dx, _over_rows(x, dg, dtype), _over_rows(x, du, dtype), _over_rows(h, dy, dtype)
