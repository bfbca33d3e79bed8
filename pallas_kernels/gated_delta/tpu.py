"""The gated delta rule on a TPU: chunks in order, the state of some heads kept on the chip between them."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate
from pallas_kernels.gated_delta import chunk, cost

# Not measured. Heads of a block, whose chains of small products interleave: the compilers' schedules are
# 12% shorter a head with 8 than with 4 forward, 6% backward, where the program is twice as long. A state
# is there a dozen times in the backward, with the copies in flight.
FORWARD_HEADS, BACKWARD_HEADS = 8, 4
STATE_BYTES = 2 << 20
VMEM_BYTES = 63 << 20  # v5p has 65,472 KiB for one program
CHUNK = 128  # the longest: what is made of every pair of positions is spread out in the program


def refuse(q, k, v, g, beta, state, chunk):
    """Why it cannot take q, k [b n t h], v [b n t u], g, beta [b n t], state [b n h u] in such chunks, or
    None."""
    if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype("bfloat16")}, {jnp.dtype("float32")}):
        return f"it takes bfloat16 or float32, all alike, not {q.dtype}, {k.dtype} and {v.dtype}"
    if chunk % 16 or chunk > CHUNK:
        return f"a chunk of {chunk}; it takes multiples of 16 up to {CHUNK}"
    if 4 * state.shape[2] * state.shape[3] > STATE_BYTES:
        return f"a state of {state.shape[2:]} is more than the chip holds"
    return None


def forward(static, q, k, v, g, beta, state, *, keep=False, interpret=False):
    """(out [b n t u], final state float32[b n h u], states [b n c h u] before each chunk, or None)."""
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
        scratch_shapes=[pltpu.VMEM(blocks.state.block_shape[1:], jnp.float32)],
        compiler_params=_params(),
        cost_estimate=estimate(cost.forward(**_sizes(static, q, v), keep=keep)),
        interpret=interpret,
        name="gated_delta_forward",
    )(q, k, v, *(_rows(static, x) for x in (g, beta)), state)
    return out, final, *(states or [None])


def backward(static, saved, dout, dstate, *, interpret=False):
    """Gradients of what `forward` took, of which saved holds all but the state, and the states it kept."""
    q, k, v, g, beta, states = saved
    g, beta = (_rows(static, x) for x in (g, beta))
    blocks = _Blocks(static, q, v, BACKWARD_HEADS, reverse=True)
    rows, scalars = [blocks.row(x) for x in (q, k, v)], [blocks.scalar] * 2
    *grads, dg, dbeta, dstate = pl.pallas_call(
        _backward_kernel,
        grid=blocks.grid,
        in_specs=[*rows, *scalars, blocks.states, blocks.row(v), blocks.state],
        out_specs=[*rows, *scalars, blocks.state],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, g, beta, dstate)],
        scratch_shapes=[pltpu.VMEM(blocks.state.block_shape[1:], jnp.float32)],
        compiler_params=_params(),
        cost_estimate=estimate(cost.backward(**_sizes(static, q, v))),
        interpret=interpret,
        name="gated_delta_backward",
    )(q, k, v, g, beta, states, dout, dstate)
    shape = saved[3].shape
    return *grads, dg.reshape(shape), dbeta.reshape(shape), dstate


class _Blocks:
    """The blocks of a step, some heads of one chunk; the grid runs over b, heads and last the chunks."""

    def __init__(self, static, q, v, most, reverse=False):
        b, n, t, h = q.shape
        u, chunks = v.shape[-1], t // static.chunk
        most = min(most, STATE_BYTES // (4 * h * u))
        heads = max(size for size in range(1, most + 1) if n % size == 0)

        def chunk_of(j):
            return chunks - 1 - j if reverse else j

        self._size = heads, static.chunk
        self._at = lambda b, i, j: (b, i, chunk_of(j), 0)
        self.grid = b, n // heads, chunks
        self.scalar = pl.BlockSpec(
            (1, heads, 1, 1, static.chunk), lambda b, i, j: (b, i, chunk_of(j), 0, 0)
        )
        self.state = pl.BlockSpec((1, heads, h, u), lambda b, i, j: (b, i, 0, 0))
        self.states = pl.BlockSpec((1, heads, 1, h, u), lambda b, i, j: (b, i, chunk_of(j), 0, 0))
        self.states_shape = jax.ShapeDtypeStruct((b, n, chunks, h, u), jnp.float32)

    def row(self, x):
        """The block of x [b n t .]."""
        return pl.BlockSpec((1, *self._size, x.shape[-1]), self._at)


def _rows(static, x):
    """g or beta [b n t] as [b n c 1 t]: a block's last two dimensions must be whole."""
    b, n, t = x.shape
    return x.reshape(b, n, t // static.chunk, 1, static.chunk)


def _sizes(static, q, v):
    """Of q [b n t h] and v [b n t u], as cost.py names them."""
    b, n, t, h = q.shape
    sizes = {"b": b, "t": t, "n": n, "h": h, "u": v.shape[-1], "chunk": static.chunk}
    return sizes | {"item": q.dtype.itemsize}


def _params():
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
    )


def _operands(q, k, v, g, beta):
    """What `chunk.run` takes but the state, from the refs of a step."""
    wide = [x[0].astype(jnp.float32) for x in (q, k, v)]
    return *wide, g[0, :, 0], beta[0, :, 0]


def _narrow(ref):
    return ref.dtype == jnp.bfloat16


def _forward_kernel(q, k, v, g, beta, initial, out, final, *rest):
    *states, state = rest
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _():
        state[...] = initial[0]

    for kept in states:
        kept[0, :, 0] = state[...]
    done, state[...] = chunk.run(_narrow(q), *_operands(q, k, v, g, beta), state[...])
    out[0] = done.astype(out.dtype)

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

    _, pull = jax.vjp(
        functools.partial(chunk.run, _narrow(q)), *_operands(q, k, v, g, beta), state[0, :, 0]
    )
    *grads, dg[0, :, 0], dbeta[0, :, 0], dstate[...] = pull(
        (dout[0].astype(jnp.float32), dstate[...])
    )
    for ref, grad in zip((dq, dk, dv), grads, strict=True):
        ref[0] = grad.astype(ref.dtype)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        dinitial[0] = dstate[...]
