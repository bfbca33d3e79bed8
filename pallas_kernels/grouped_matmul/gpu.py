"""Ragged products of sorted rows on Hopper (Mosaic GPU).

Rows times weights, forwards and for the gradient of rows, are one kernel (`gpu_rows`), the weights' gradient
another (`gpu_weights`); both keep 128 x 256 sums in registers for 48 KB of operands a step, 85 FLOP a byte.

SwiGLU is made of them: gate and up share the tile of rows, and what is elementwise happens to the sums before
they leave, so that no product is written to be read again by a pass of its own; both of its gradients
of x are one sum. In a buffer for the worst case only tiles that hold rows are computed.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul.gpu_rows import ALIGNED, multiply, work_of
from pallas_kernels.grouped_matmul.gpu_weights import sum_products

WIDTH = 64  # of what the kernels take, rows' numbers and weights': others are padded


def refuse(x, w) -> str | None:
    """Why these rows and weights cannot be taken, or None."""
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows {x.dtype} and weights {w.dtype}; it takes both in bfloat16"
    if x.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as the rows do"
    return None


def forward(static, x, w, group_sizes, *, interpret=False):
    """[m n] of x [m k], w [e k n]."""

    @jax.custom_batching.sequential_vmap
    def run(x, w, group_sizes):
        sizes = x.shape[0], w.shape[2]
        x, w = _padded(x), _padded(w)
        work = work_of(group_sizes, x.shape[0])
        (y,) = multiply(work, [(x, w)], fill=True, interpret=interpret)
        return _cut(y, *sizes)

    return run(x, w, group_sizes)


def backward(static, saved, dy, *, interpret=False):
    """(dx, dw) for what `forward` took and the gradient of its output."""

    @jax.custom_batching.sequential_vmap
    def run(x, w, group_sizes, dy):
        (m, k), n = x.shape, w.shape[2]
        x, w, dy = _padded(x), _padded(w), _padded(dy)
        work = work_of(group_sizes, x.shape[0])
        (dx,) = multiply(work, [(dy, w)], fill=True, transposed=True, interpret=interpret)
        dw = sum_products(x, dy, group_sizes, interpret=interpret)
        return _cut(dx, m, k), _cut(dw, k, n)

    return run(*saved, dy)


def swiglu_forward(static, x, group_sizes, gate, up, down, *, interpret=False):
    """(y [m d], gate product [m f], up product [m f]); the products' rows without an owner are anything."""

    @jax.custom_batching.sequential_vmap
    def run(x, group_sizes, gate, up, down):
        (m, d), f = x.shape, gate.shape[2]
        x, gate, up, down = (_padded(a) for a in (x, gate, up, down))

        def activate(sums):
            # Of the products as they are kept: the gradients are those of what is computed here.
            g, u = (s.astype(x.dtype) for s in sums)
            return g, u, _activate(g.astype(jnp.float32), u.astype(jnp.float32))

        work = work_of(group_sizes, x.shape[0])
        g, u, h = multiply(work, [(x, gate), (x, up)], activate, 3, joint=True, interpret=interpret)
        (y,) = multiply(work, [(h, down)], fill=True, interpret=interpret)
        return _cut(y, m, d), _cut(g, m, f), _cut(u, m, f)

    return run(x, group_sizes, gate, up, down)


def swiglu_backward(static, saved, dy, *, interpret=False):
    """(dx, dgate, dup, ddown) for what `swiglu_forward` took, the two products, and the gradient of y."""

    @jax.custom_batching.sequential_vmap
    def run(x, group_sizes, gate, up, down, g, u, dy):
        (m, d), f = x.shape, gate.shape[2]
        x, gate, up, down, g, u, dy = (_padded(a) for a in (x, gate, up, down, g, u, dy))
        work = work_of(group_sizes, x.shape[0])
        h, du, dg = multiply(
            work,
            [(dy, down)],
            _gradients,
            3,
            inputs=(g, u),
            transposed=True,
            interpret=interpret,
        )
        pairs = [(dg, gate), (du, up)]
        (dx,) = multiply(work, pairs, fill=True, transposed=True, interpret=interpret)
        dgate, dup, ddown = (
            sum_products(a, b, group_sizes, interpret=interpret)
            for a, b in ((x, dg), (x, du), (h, dy))
        )
        return _cut(dx, m, d), _cut(dgate, d, f), _cut(dup, d, f), _cut(ddown, f, d)

    return run(*saved, dy)


def _activate(g, u):
    return g * _sigmoid(g) * u


def _gradients(sums, g, u):
    """h = silu(g) u and the gradients of u and g, one after the other: registers are few."""
    (dh,) = sums
    g, u = g.astype(jnp.float32), u.astype(jnp.float32)
    s = _sigmoid(g)
    yield g * s * u
    yield dh * g * s
    yield dh * u * s * (1 + g * (1 - s))


def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def _padded(x):
    """x with zeros up to whole tiles: rows [m k] to multiples of ALIGNED, the width, or both of weights', to WIDTH."""
    *_, rows, width = x.shape
    rows = -rows % (ALIGNED if x.ndim == 2 else WIDTH)
    pad = [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, -width % WIDTH)]
    return jnp.pad(x, pad) if any(n for _, n in pad) else x


def _cut(x, rows: int, width: int):
    return x[..., :rows, :width]
