"""Products of rows sorted by expert in XLA, dropless.

The first `span` rows of every expert are one batched matmul; what an expert has beyond them goes through
in blocks, one after another, as many as there are at run time. A skewed router costs time, never a token
and never memory.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import wide


def forward(static, x, w, group_sizes):
    """[m n] of x [m k], w [e k n]."""
    return _rows(static, x, group_sizes).map(lambda x, w: (product(x, w),), (x,), (w,))[0]


def backward(static, saved, dy):
    """(dx, dw) for what `forward` took and the gradient of its output."""
    x, w, group_sizes = saved
    inner = wide(w.dtype)

    def block(x, dy, w):
        return product(dy, w.swapaxes(-1, -2)), _over_rows(x, dy, inner)

    dx, (dw,) = _rows(static, x, group_sizes).map_and_sum(block, (x, dy), (w,))
    return dx, dw.astype(w.dtype)


def product(x, w):
    """x [... m k] w [... k n] in the dtype of x, summed wide."""
    return jnp.matmul(x, w, preferred_element_type=wide(x.dtype)).astype(x.dtype)


def _over_rows(a, b, inner):
    return jnp.matmul(a.swapaxes(-1, -2), b, preferred_element_type=inner)


def _rows(static, x, group_sizes):
    mean = -(-static.expected_rows // group_sizes.shape[0])
    return Rows(spans(mean), group_sizes, x.shape[0])


def spans(mean_rows: int) -> tuple[int, int]:
    """(rows of every expert that are computed together, rows of a later block) for a mean load.

    Three quarters of the mean leave few rows of the joint product empty; a block wastes half of
    itself on average.
    """
    together = max(mean_rows * 3 // 4 // 8 * 8, 8)
    return together, min(max(together // 4 // 8 * 8, 8), 64)


class Rows:
    """Where the sorted rows are: the first `span` of each expert, and the blocks of the rest."""

    def __init__(self, sizes, group_sizes, rows: int):
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

    def pad(self, x):
        """[e span d]: the first rows of every expert, zeros where it has fewer."""
        rank = jnp.arange(self._span, dtype=jnp.int32)
        block = jnp.take(x, self._starts[:, None] + rank, axis=0, mode="clip")
        return jnp.where((rank < self._sizes[:, None])[..., None], block, 0)

    def unpad(self, block):
        """[m + block d]: the rows of [e span d] at their places, the others zero. The rows beyond m
        are room for `store`."""
        mine = self._real & (self._rank < self._span)
        flat = block.reshape(-1, block.shape[-1])
        taken = jnp.take(flat, self._owner * self._span + self._rank, axis=0, mode="clip")
        return self.room(jnp.where(mine[:, None], taken, 0))

    def room(self, x):
        return jnp.pad(x, ((0, self._block), (0, 0)))

    def block(self, i):
        """(expert, first row, rows of it [block]) of the later block i."""
        expert = jnp.searchsorted(self._block_ends, i, side="right").astype(jnp.int32)
        rank = self._span + (i - self._block_starts[expert]) * self._block
        left = self._sizes[expert] - rank
        return expert, self._starts[expert] + rank, jnp.arange(self._block) < left

    def load(self, x, place):
        """[block d] of x [m + block d], zeros beyond the expert's rows."""
        _, first, filled = place
        part = lax.dynamic_slice_in_dim(x, first, self._block)
        return jnp.where(filled[:, None], part, 0)

    def store(self, x, new, place):
        _, first, filled = place
        part = lax.dynamic_slice_in_dim(x, first, self._block)
        part = jnp.where(filled[:, None], new, part)
        return lax.dynamic_update_slice_in_dim(x, part, first, 0)

    def map(self, function, arrays, weights):
        """Tuple of [m ...]: function(*blocks, *their expert's weights) of arrays [m ...], row by row."""
        done = tuple(self.unpad(a) for a in function(*map(self.pad, arrays), *weights))
        wider = [self.room(a) for a in arrays]

        def later(i, done):
            place = self.block(i)
            own = (w[place[0]] for w in weights)
            new = function(*(self.load(a, place) for a in wider), *own)
            return tuple(self.store(a, n, place) for a, n in zip(done, new))

        done = lax.fori_loop(0, self.num_blocks, later, done)
        return tuple(a[: self._count] for a in done)

    def map_and_sum(self, function, arrays, weights):
        """([m ...], list of [e ...]) of a function that gives (rows, *sums over its block's rows)."""
        first, *sums = function(*map(self.pad, arrays), *weights)
        wider = [self.room(a) for a in arrays]

        def later(i, carry):
            place = self.block(i)
            own = (w[place[0]] for w in weights)
            new, *parts = function(*(self.load(a, place) for a in wider), *own)
            sums = [total.at[place[0]].add(part) for total, part in zip(carry[1], parts)]
            return self.store(carry[0], new, place), sums

        done, sums = lax.fori_loop(0, self.num_blocks, later, (self.unpad(first), sums))
        return done[: self._count], sums


def swiglu(x, gate, up, down):
    """(y, gate product, up product) of rows x [... m d] in experts [... d f], [... d f], [... f d]."""
    g, u = jnp.matmul(x, gate), jnp.matmul(x, up)
    return jnp.matmul(jax.nn.silu(g) * u, down), g, u


def swiglu_forward(static, x, group_sizes, gate, up, down):
    """(y [m d], gate product [m f], up product [m f])."""
    return _rows(static, x, group_sizes).map(swiglu, (x,), (gate, up, down))


def swiglu_backward(static, saved, dy):
    """(dx, dgate, dup, ddown) for what `swiglu_forward` took, the two products, and the gradient of y."""
    x, group_sizes, gate, up, down, g, u = saved
    rows = _rows(static, x, group_sizes)
    dx, dw = rows.map_and_sum(_swiglu_gradients, (x, g, u, dy), (gate, up, down))
    return dx, *(d.astype(w.dtype) for d, w in zip(dw, (gate, up, down)))


def _swiglu_gradients(x, g, u, dy, gate, up, down):
    """(dx, dgate, dup, ddown) of blocks [... c d]; the weights' gradients are wide."""
    inner = wide(x.dtype)
    h, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, g, u)
    dg, du = pull(jnp.matmul(dy, down.swapaxes(-1, -2)))
    dx = jnp.matmul(dg, gate.swapaxes(-1, -2)) + jnp.matmul(du, up.swapaxes(-1, -2))
    return dx, _over_rows(x, dg, inner), _over_rows(x, du, inner), _over_rows(h, dy, inner)
