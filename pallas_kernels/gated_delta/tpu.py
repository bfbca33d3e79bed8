"""Gated delta rule on a TPU: chunks in order, the state of some heads stays in VMEM between them.

Grid: (batch, heads, chunk), the chunks innermost and in order. A step has one chunk of up to 8 heads (4 backward).

Blocks, for 8 heads of h = 192 and u = 256 in chunks of 64, double-buffered by the pipeline: q and k bfloat16[8 64 h]
(192 KiB each), v and out bfloat16[8 64 u] (256 KiB each), g and beta float32[8 1 64], and where the backward needs
them the states float32[8 h u] (1.5 MiB). Scratch VMEM: the states of the heads, float32[8 h u] (1.5 MiB).

Forward, per step:

1. Load the initial state at the first chunk.
2. Write the state out, if the backward needs it.
3. `chunk.run_chunk`: output and next state; write the final state at the last chunk.

Backward, from the last chunk to the first: the derivative of `chunk.run_chunk` at the stored state, with the
gradient of the state in VMEM in place of the state.

Padding: the package pads the sequence to full chunks with positions of zeros, which change nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.cost import estimate
from pallas_kernels.gated_delta import chunk, cost

# Not measured. Heads of a block; their chains of small products interleave. Per head the compilers' schedules are
# 12% shorter with 8 heads than with 4 forward, and 6% backward, where the program is twice as long. In the
# backward a dozen copies of a state exist, including those in flight.
FORWARD_HEADS, BACKWARD_HEADS = 8, 4
STATE_BYTES = 2 << 20
VMEM_BYTES = 63 << 20  # v5p has 65,472 KiB for one program
CHUNK = 128  # maximum; the code for all pairs of positions is unrolled


def unsupported_reason(
    q: Float[Array, "b n t h"],
    k: Float[Array, "b n t h"],
    v: Float[Array, "b n t u"],
    g: Float[Array, "b n t"],
    beta: Float[Array, "b n t"],
    state: Float[Array, "b n h u"],
    chunk: int,
) -> str | None:
    """Returns the reason why the arguments or the chunk size are not supported, or None."""
    if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype("bfloat16")}, {jnp.dtype("float32")}):
        return f"all must be bfloat16 or all float32, not {q.dtype}, {k.dtype} and {v.dtype}"
    if chunk % 16 or chunk > CHUNK:
        return f"a chunk of {chunk}; it takes multiples of 16 up to {CHUNK}"
    if 4 * state.shape[2] * state.shape[3] > STATE_BYTES:
        return f"a state of {state.shape[2:]} exceeds the chip's memory"
    return None


def forward(
    static,
    q: Float[Array, "b n t h"],
    k: Float[Array, "b n t h"],
    v: Float[Array, "b n t u"],
    g: Float[Array, "b n t"],
    beta: Float[Array, "b n t"],
    state: Float[Array, "b n h u"],
    *,
    keep: bool = False,
    interpret: object = False,
) -> tuple[Float[Array, "b n t u"], Float[Array, "b n h u"], Float[Array, "..."] | None]:
    """Returns (out, final state, states float32[b n c h u] before each chunk, or None)."""
    blocks = _Blocks(static, q, v, FORWARD_HEADS)
    out_specs = [blocks.row(v), blocks.state]
    out_shape = [
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    ]
    if keep:
        out_specs.append(blocks.states)
        out_shape.append(blocks.states_shape)
    out, final, *states = pl.pallas_call(
        _forward_kernel,
        grid=blocks.grid,
        in_specs=[*(blocks.row(x) for x in (q, k, v)), *[blocks.scalar] * 2, blocks.state],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[blocks.state_scratch],
        compiler_params=_compiler_params(),
        cost_estimate=estimate(cost.forward(**_cost_sizes(static, q, v), keep=keep)),
        interpret=interpret,
        name="gated_delta_forward",
    )(q, k, v, *(_chunk_rows(static, x) for x in (g, beta)), state)
    return out, final, states[0] if keep else None


def backward(
    static,
    saved: tuple,
    dout: Float[Array, "b n t u"],
    dstate: Float[Array, "b n h u"],
    *,
    interpret: object = False,
) -> tuple[Array, ...]:
    """Returns the gradients of the inputs of `forward`.

    saved holds these inputs without the state, and the stored states.
    """
    q, k, v, g, beta, states = saved
    g, beta = (_chunk_rows(static, x) for x in (g, beta))
    blocks = _Blocks(static, q, v, BACKWARD_HEADS, reverse=True)
    rows, scalars = [blocks.row(x) for x in (q, k, v)], [blocks.scalar] * 2
    *grads, dg, dbeta, dstate = pl.pallas_call(
        _backward_kernel,
        grid=blocks.grid,
        in_specs=[*rows, *scalars, blocks.states, blocks.row(v), blocks.state],
        out_specs=[*rows, *scalars, blocks.state],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, g, beta, dstate)],
        scratch_shapes=[blocks.state_scratch],
        compiler_params=_compiler_params(),
        cost_estimate=estimate(cost.backward(**_cost_sizes(static, q, v))),
        interpret=interpret,
        name="gated_delta_backward",
    )(q, k, v, g, beta, states, dout, dstate)
    shape = saved[3].shape
    return *grads, dg.reshape(shape), dbeta.reshape(shape), dstate


class _Blocks:
    """Block specs of a step, for some heads of one chunk.

    The grid runs over b, heads, and innermost the chunks.
    """

    def __init__(self, static, q, v, max_heads, reverse=False):
        b, n, t, h = q.shape
        u, chunks = v.shape[-1], t // static.chunk
        max_heads = min(max_heads, STATE_BYTES // (4 * h * u))
        heads = max(size for size in range(1, max_heads + 1) if n % size == 0)

        def chunk_of(j):
            return chunks - 1 - j if reverse else j

        self._size = heads, static.chunk
        self._at = lambda b, i, j: (b, i, chunk_of(j), 0)
        self.grid = b, n // heads, chunks
        self.scalar = pl.BlockSpec(
            (1, heads, 1, 1, static.chunk), lambda b, i, j: (b, i, chunk_of(j), 0, 0)
        )
        self.state = pl.BlockSpec((1, heads, h, u), lambda b, i, j: (b, i, 0, 0))
        self.state_scratch = pltpu.VMEM((heads, h, u), jnp.float32)
        self.states = pl.BlockSpec((1, heads, 1, h, u), lambda b, i, j: (b, i, chunk_of(j), 0, 0))
        self.states_shape = jax.ShapeDtypeStruct((b, n, chunks, h, u), jnp.float32)

    def row(self, x):
        """Returns the block spec of x [b n t .]."""
        return pl.BlockSpec((1, *self._size, x.shape[-1]), self._at)


def _chunk_rows(static, x):
    """Reshapes g or beta [b n t] to [b n c 1 t].

    A block must hold the last two dimensions fully.
    """
    b, n, t = x.shape
    return x.reshape(b, n, t // static.chunk, 1, static.chunk)


def _cost_sizes(static, q, v):
    """Returns the sizes of q [b n t h] and v [b n t u] by their names in cost.py."""
    b, n, t, h = q.shape
    sizes = {"b": b, "t": t, "n": n, "h": h, "u": v.shape[-1], "chunk": static.chunk}
    return sizes | {"item": q.dtype.itemsize}


def _compiler_params():
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
    )


def _operands(q, k, v, g, beta) -> tuple[Array, Array, Array, Array, Array]:
    """Returns the arguments of `chunk.run_chunk` without the state, from the refs of a step."""
    q, k, v = (x[0].astype(jnp.float32) for x in (q, k, v))
    return q, k, v, g[0, :, 0], beta[0, :, 0]


def _is_bf16(ref):
    return ref.dtype == jnp.bfloat16


def _forward_kernel(q, k, v, g, beta, initial, out, final, *rest):
    *states, state = rest
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _():
        state[...] = initial[0]

    for state_ref in states:
        state_ref[0, :, 0] = state[...]
    operands = (*_operands(q, k, v, g, beta), state[...])
    result, state[...] = chunk.run_chunk(_is_bf16(q), *operands)
    out[0] = result.astype(out.dtype)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        final[0] = state[...]


def _backward_kernel(
    q, k, v, g, beta, state, dout, dfinal, dq, dk, dv, dg, dbeta, dinitial, dstate
):
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _():
        dstate[...] = dfinal[0]

    pull = jax.vjp(
        functools.partial(chunk.run_chunk, _is_bf16(q)),
        *_operands(q, k, v, g, beta),
        state[0, :, 0],
    )[1]
    *grads, dg[0, :, 0], dbeta[0, :, 0], dstate[...] = pull(
        (dout[0].astype(jnp.float32), dstate[...])
    )
    for ref, grad in zip((dq, dk, dv), grads, strict=True):
        ref[0] = grad.astype(ref.dtype)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        dinitial[0] = dstate[...]
