"""The gated delta rule on Hopper: a kernel over all chunks, one over heads with the state in registers.

What a chunk needs from its own positions alone, the inverse of a triangular matrix above all, is made for
all chunks at once (`gpu_chunks`). What is left goes from chunk to chunk (`gpu_scan`): six products with a
state that lies transposed, values along the rows, and is an operand from registers. Values are independent
of each other there, so that a head's 256 are two blocks, and 64 heads are work for 128 multiprocessors.

The backward keeps what is sequential in a kernel too: the gradient of the state behind every chunk. Given
that one and the states that the forward kept, gradients of all chunks are one derivative of `chunk.run` in
XLA, a few dozen batched products instead of as many for each chunk in turn.

bfloat16 operands are exact; what is float32 (states, the inverse, what is written) goes to the tensor cores
as two bfloat16, as in `chunk`. Beside float64, with 192 and 256 columns over 256 positions, the final state
and the gradients of g, beta and the initial state are off by 2e-6 to 4e-6 of their largest number; the
others are rounded to bfloat16, which is a thousand times more.

A tile has 64 positions: chunks of fewer leave the rest of it empty.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.gated_delta import chunk as chunks
from pallas_kernels.gated_delta.gpu_chunks import TILE, prepare
from pallas_kernels.gated_delta.gpu_scan import GROUP, PIECE, scan, scan_back

WIDEST = 192  # a key: 96 registers of each thread hold its part of the state
# Chunks of a head that XLA differentiates at a time: each array of [64, 256] float32 is 0.27 GB.
AT_ONCE = 4096


def refuse(q, k, v, g, beta, state, chunk):
    """Why it cannot take q, k [b n t h], v [b n t u], g, beta [b n t], state [b n h u] in such chunks, or
    None."""
    if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype("bfloat16")}, {jnp.dtype("float32")}):
        return f"it takes bfloat16, all alike, not {q.dtype}, {k.dtype} and {v.dtype}"
    if q.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as the values do"
    if chunk % 16 or chunk > TILE:
        return f"a chunk of {chunk}; it takes multiples of 16 up to {TILE}"
    if q.shape[-1] > WIDEST:
        return f"keys of {q.shape[-1]} numbers; {WIDEST} at most"
    return None


def forward(static, q, k, v, g, beta, state, *, keep=False, interpret=False):
    """(out [b n t u], final state float32[b n h u], states float32[b n c u h] before each chunk, or None)."""
    tiles = _Tiles(static, q, v)
    q, k, v = tiles.rows(q, PIECE), tiles.rows(k, PIECE), tiles.rows(v, GROUP)
    own = prepare(q, k, tiles.scalars(g), tiles.scalars(beta), interpret=interpret)
    out, final, *states = scan(q, k, v, *own, tiles.state(state), keep=keep, interpret=interpret)
    states = tiles.cut_states(states[0]) if keep else None
    return tiles.cut_rows(out), tiles.cut_state(final), states


def backward(static, saved, dout, dstate, *, interpret=False):
    """Gradients of what `forward` took, of which saved holds all but the state, and the states it kept."""
    q, k, v, g, beta, states = saved
    tiles = _Tiles(static, q, v)
    rows = tiles.rows(q, PIECE), tiles.rows(k, PIECE)
    own = prepare(*rows, tiles.scalars(g), tiles.scalars(beta), interpret=interpret)
    dinitial, dstates = scan_back(
        *rows, tiles.rows(dout, GROUP), *own, tiles.state(dstate), interpret=interpret
    )
    args = (q, k, v, g[..., None], beta[..., None], dout)
    args = (x.reshape(tiles.heads, -1, static.chunk, x.shape[-1]) for x in args)
    states = states.reshape(tiles.heads, -1, *states.shape[3:])
    dstates = dstates[..., : tiles.u, : tiles.h]
    gradients = functools.partial(_chunk_gradients, q.dtype)
    grads = _by_heads(gradients, *args, states, dstates, tiles.inverse(own[0]))
    return *(x.reshape(y.shape) for x, y in zip(grads, saved[:5])), tiles.cut_state(dinitial)


def _chunk_gradients(dtype, q, k, v, g, beta, dout, state, dstate, inverse):
    """Gradients of a chunk's q, k, v, g and beta for some heads of all chunks [n c t .]; states [n c u h];
    inverse [n c t t], which `chunk.run` calls inverted."""
    shape = q.shape[:2]

    def flat(x):
        return x.astype(jnp.float32).reshape(-1, *x.shape[2:])

    q, k, v, dout = map(flat, (q, k, v, dout))
    g, beta, state, dstate = (flat(x).swapaxes(1, 2) for x in (g, beta, state, dstate))
    inverse = flat(inverse)

    def run(*args):
        # The gradient of the state is there already; what would make it here is left out.
        return chunks.run(dtype == jnp.bfloat16, *args, state, inverse, split)

    pull = jax.vjp(run, q, k, v, g, beta)[1]
    *grads, dg, dbeta = pull((dout, dstate))
    grads = [x.astype(dtype).reshape(*shape, *x.shape[1:]) for x in grads]
    return *grads, dg.reshape(*shape, -1), dbeta.reshape(*shape, -1)


def split(x, parts: int):
    """As `chunk.split`, of which XLA for GPUs leaves the casts there and back out."""
    done = []
    for _ in range(parts):
        rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        done.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return done


def _by_heads(function, *args):
    """function over arrays [n c ...], as many n at a time as AT_ONCE lets."""
    n, c = args[0].shape[:2]
    size = max(x for x in range(1, n + 1) if n % x == 0 and (x == 1 or x * c <= AT_ONCE))
    pieces = [x.reshape(n // size, size, *x.shape[1:]) for x in args]
    if n == size:
        return function(*(x[0] for x in pieces))
    done = lax.map(lambda args: function(*args), tuple(pieces))
    return tuple(x.reshape(n, *x.shape[2:]) for x in done)


class _Tiles:
    """How chunks [b n t .] lie as whole tiles of TILE rows and columns, zeros beyond."""

    def __init__(self, static, q, v):
        self.chunk = static.chunk
        self.b, self.n, self.t, self.h = q.shape
        self.u = v.shape[-1]
        self.heads = self.b * self.n

    def rows(self, x, columns: int):
        """[b n t .] as [b * n, c * TILE, .], columns a multiple of so many."""
        x = x.reshape(self.heads, -1, self.chunk, x.shape[-1])
        pad = [(0, 0), (0, 0), (0, TILE - self.chunk), (0, -x.shape[-1] % columns)]
        return jnp.pad(x, pad).reshape(self.heads, -1, x.shape[-1] + pad[-1][1])

    def scalars(self, x):
        """[b n t] as float32[b * n, c, TILE]."""
        x = x.astype(jnp.float32).reshape(self.heads, -1, self.chunk)
        return jnp.pad(x, [(0, 0), (0, 0), (0, TILE - self.chunk)])

    def state(self, x):
        """[b n h u] as [b * n, u, h], whole pieces."""
        x = x.reshape(self.heads, self.h, self.u).swapaxes(1, 2)
        return jnp.pad(x, [(0, 0), (0, -self.u % GROUP), (0, -self.h % PIECE)])

    def inverse(self, matrices):
        """float32[b * n, c, t, t], of what `prepare` gives."""
        parts = matrices.shape[2] // (2 * TILE)
        x = matrices.reshape(*matrices.shape[:2], 2, parts, TILE, TILE)
        x = jnp.sum(x[:, :, 0].astype(jnp.float32), axis=2)
        return x[..., : self.chunk, : self.chunk]

    def cut_rows(self, x):
        """What `rows` made from [b n t u]."""
        x = x.reshape(self.heads, -1, TILE, x.shape[-1])[:, :, : self.chunk, : self.u]
        return x.reshape(self.b, self.n, self.t, self.u)

    def cut_state(self, x):
        """What `state` made."""
        return x[:, : self.u, : self.h].swapaxes(1, 2).reshape(self.b, self.n, self.h, self.u)

    def cut_states(self, x):
        """[b * n, c, u, h] of whole pieces as [b n c u h]."""
        x = x[..., : self.u, : self.h]
        return x.reshape(self.b, self.n, *x.shape[1:])
