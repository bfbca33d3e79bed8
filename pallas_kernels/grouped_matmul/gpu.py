"""Ragged products of sorted rows on Hopper (Mosaic GPU).

Rows times weights, forward and for the gradient of rows, are one kernel (`gpu_rows`), the weights' gradient
another (`gpu_weights`); the modules have their outlines. Both keep 128 x 256 sums in registers for 48 KB of operands
per step, 85 FLOP per byte.

SwiGLU uses both. Gate and up share the tile of rows. Elementwise operations apply to the sums before they are
written, so that no product is written and read again by a separate pass. Both gradients of x are one sum. In a
worst-case buffer only tiles that hold rows are computed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.grouped_matmul.gpu_rows import ALIGNED, multiply, schedule_row_tiles
from pallas_kernels.grouped_matmul.gpu_weights import sum_products

WIDTH = 64  # the kernels take multiples of it, for rows and weights; others are padded


def unsupported_reason(x: Float[Array, "m k"], w: Float[Array, "e k n"]) -> str | None:
    """Returns the reason why these rows and weights are not supported, or None."""
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows {x.dtype} and weights {w.dtype}; both must be bfloat16"
    if x.dtype == jnp.float32 and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu":
        return "tensor cores take no float32 in the memory order of the rows"
    return None


def forward(
    static,
    x: Float[Array, "m k"],
    w: Float[Array, "e k n"],
    group_sizes: Int[Array, " e"],
    *,
    interpret: object = False,
) -> Float[Array, "m n"]:
    """Returns [m n] of x [m k], w [e k n]."""

    @jax.custom_batching.sequential_vmap
    def run(x, w, group_sizes):
        sizes = x.shape[0], w.shape[2]
        x, w = _padded(x), _padded(w)
        tiles = schedule_row_tiles(group_sizes, x.shape[0])
        (y,) = multiply(tiles, [(x, w)], fill=True, interpret=interpret)
        return _cut(y, *sizes)

    return run(x, w, group_sizes)


def backward(
    static, saved: tuple, dy: Float[Array, "m n"], *, interpret: object = False
) -> tuple[Float[Array, "m k"], Float[Array, "e k n"]]:
    """Returns (dx, dw) for the inputs of `forward` and the gradient of its output."""

    @jax.custom_batching.sequential_vmap
    def run(x, w, group_sizes, dy):
        (m, k), n = x.shape, w.shape[2]
        x, w, dy = _padded(x), _padded(w), _padded(dy)
        tiles = schedule_row_tiles(group_sizes, x.shape[0])
        (dx,) = multiply(tiles, [(dy, w)], fill=True, transposed=True, interpret=interpret)
        dw = sum_products(x, dy, group_sizes, interpret=interpret)
        return _cut(dx, m, k), _cut(dw, k, n)

    return run(*saved, dy)


def swiglu_forward(
    static,
    x: Float[Array, "m d"],
    group_sizes: Int[Array, " e"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "m d"], Float[Array, "m f"], Float[Array, "m f"]]:
    """Returns (y, gate product, up product); rows of the products without an expert are undefined."""

    @jax.custom_batching.sequential_vmap
    def run(x, group_sizes, gate, up, down):
        (m, d), f = x.shape, gate.shape[2]
        x, gate, up, down = (_padded(a) for a in (x, gate, up, down))

        def activate(sums):
            # Uses the products as stored, so that the gradients match this computation.
            g, u = (s.astype(x.dtype) for s in sums)
            return g, u, _activate(g.astype(jnp.float32), u.astype(jnp.float32))

        tiles = schedule_row_tiles(group_sizes, x.shape[0])
        g, u, h = multiply(
            tiles, [(x, gate), (x, up)], activate, 3, joint=True, interpret=interpret
        )
        (y,) = multiply(tiles, [(h, down)], fill=True, interpret=interpret)
        return _cut(y, m, d), _cut(g, m, f), _cut(u, m, f)

    return run(x, group_sizes, gate, up, down)


def swiglu_backward(
    static, saved: tuple, dy: Float[Array, "m d"], *, interpret: object = False
) -> tuple[
    Float[Array, "m d"], Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]
]:
    """Returns (dx, dgate, dup, ddown) for the inputs of `swiglu_forward`, the two products, and the gradient of y."""

    @jax.custom_batching.sequential_vmap
    def run(x, group_sizes, gate, up, down, g, u, dy):
        (m, d), f = x.shape, gate.shape[2]
        x, gate, up, down, g, u, dy = (_padded(a) for a in (x, gate, up, down, g, u, dy))
        tiles = schedule_row_tiles(group_sizes, x.shape[0])
        h, du, dg = multiply(
            tiles,
            [(dy, down)],
            _gradients,
            3,
            inputs=(g, u),
            transposed=True,
            interpret=interpret,
        )
        pairs = [(dg, gate), (du, up)]
        (dx,) = multiply(tiles, pairs, fill=True, transposed=True, interpret=interpret)
        dgate, dup, ddown = (
            sum_products(a, b, group_sizes, interpret=interpret)
            for a, b in ((x, dg), (x, du), (h, dy))
        )
        return _cut(dx, m, d), _cut(dgate, d, f), _cut(dup, d, f), _cut(ddown, f, d)

    return run(*saved, dy)


def _activate(g, u):
    return g * _sigmoid(g) * u


def _gradients(sums, g, u):
    """Yields h = silu(g) u and the gradients of u and g one after the other, because registers are few."""
    (dh,) = sums
    g, u = g.astype(jnp.float32), u.astype(jnp.float32)
    s = _sigmoid(g)
    yield g * s * u
    yield dh * g * s
    yield dh * u * s * (1 + g * (1 - s))


def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def _padded(x):
    """Pads x with zeros to full tiles.

    Rows [m k] are padded to multiples of ALIGNED; the width, and both sides of weights, to multiples of WIDTH.
    """
    *_, rows, width = x.shape
    rows = -rows % (ALIGNED if x.ndim == 2 else WIDTH)
    pad = [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, -width % WIDTH)]
    return jnp.pad(x, pad) if any(n for _, n in pad) else x


def _cut(x, rows: int, width: int):
    return x[..., :rows, :width]
