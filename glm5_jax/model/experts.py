"""The routed experts: rows sorted by expert, each through its own SwiGLU, dropless.

This is the portable form of the grouped matmul. Every expert gets a block of `capacity` rows and all
blocks are one batched matmul; rounds of it run until the fullest expert is through. The number of
rounds is a run-time value, so a skewed router costs time, never a token and never memory.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from glm5_jax.core.numerics import wide


class Experts(nnx.Module):
    def __init__(self, declare):
        self.gate = declare.normal("gate", "e d f")
        self.up = declare.normal("up", "e d f")
        self.down = declare.normal("down", "e f d")


def grouped_swiglu(x, group_sizes, w, expected_rows: int | None = None):
    """SwiGLU of rows x [m d] sorted by expert, int32[e] rows each, with w's gate, up and down.

    Rows beyond the sum of group_sizes come out as zero. expected_rows (default m) is how many rows
    are likely to be filled; it sets the block size and no result.
    """
    num_experts = w["gate"].shape[0]
    mean = -(-(expected_rows or x.shape[0]) // num_experts)
    return _grouped(capacity_for(mean), x, group_sizes, w["gate"], w["up"], w["down"])


def capacity_for(mean_rows: int) -> int:
    """Rows of a block: half the mean load wastes little, 32 to 512 rows keep the matmul efficient."""
    return min(max(-(-mean_rows // 2), 32), 512)


def _layout(group_sizes, rows: int, capacity: int):
    """Where rows go: (rounds, slots(r) -> (row of slot, filled) [e c], places(r) -> (slot, mine) [m])."""
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    rounds = -(-jnp.max(group_sizes) // capacity)
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    rank = row - jnp.take(starts, owner, mode="clip")

    def slots(r):
        offset = r * capacity + jnp.arange(capacity, dtype=jnp.int32)
        return starts[:, None] + offset, offset < group_sizes[:, None]

    def places(r):
        local = rank - r * capacity
        mine = (local >= 0) & (local < capacity) & (owner < group_sizes.shape[0])
        return owner * capacity + local, mine

    return rounds, slots, places


def _pad(x, slots):
    row, filled = slots
    return jnp.where(filled[..., None], jnp.take(x, row, axis=0, mode="clip"), 0)


def _unpad(blocks, places, previous):
    slot, mine = places
    flat = blocks.reshape(-1, blocks.shape[-1])
    return jnp.where(mine[:, None], jnp.take(flat, slot, axis=0, mode="clip"), previous)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(capacity, x, group_sizes, gate, up, down):
    return _forward(capacity, x, group_sizes, gate, up, down)[0]


def _forward(capacity, x, group_sizes, gate, up, down):
    rounds, slots, places = _layout(group_sizes, x.shape[0], capacity)

    def one_round(r, carry):
        y, g_rows, u_rows = carry
        block = _pad(x, slots(r))
        g = jnp.einsum("ecd,edf->ecf", block, gate)
        u = jnp.einsum("ecd,edf->ecf", block, up)
        out = jnp.einsum("ecf,efd->ecd", jax.nn.silu(g) * u, down)
        where = places(r)
        return _unpad(out, where, y), _unpad(g, where, g_rows), _unpad(u, where, u_rows)

    hidden = jnp.zeros((x.shape[0], gate.shape[-1]), x.dtype)
    return lax.fori_loop(0, rounds, one_round, (jnp.zeros_like(x), hidden, hidden))


def _forward_saving(capacity, x, group_sizes, gate, up, down):
    y, g, u = _forward(capacity, x, group_sizes, gate, up, down)
    return y, (x, group_sizes, gate, up, down, g, u)


def _backward(capacity, saved, dy):
    x, group_sizes, gate, up, down, g_rows, u_rows = saved
    rounds, slots, places = _layout(group_sizes, x.shape[0], capacity)
    inner = wide(x.dtype)

    def weight_gradient(rows, cotangent):
        return jnp.einsum("ecx,ecy->exy", rows, cotangent, preferred_element_type=inner)

    def one_round(r, carry):
        dx, dgate, dup, ddown = carry
        slot = slots(r)
        block, g, u, d = (_pad(a, slot) for a in (x, g_rows, u_rows, dy))
        h, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, g, u)
        dg, du = pull(jnp.einsum("ecd,efd->ecf", d, down))
        dblock = jnp.einsum("ecf,edf->ecd", dg, gate) + jnp.einsum("ecf,edf->ecd", du, up)
        return (
            _unpad(dblock, places(r), dx),
            dgate + weight_gradient(block, dg),
            dup + weight_gradient(block, du),
            ddown + weight_gradient(h, d),
        )

    zeros = (jnp.zeros(w.shape, inner) for w in (gate, up, down))
    dx, *dw = lax.fori_loop(0, rounds, one_round, (jnp.zeros_like(x), *zeros))
    return (dx, None, *(d.astype(w.dtype) for d, w in zip(dw, (gate, up, down))))


_grouped.defvjp(_forward_saving, _backward)
