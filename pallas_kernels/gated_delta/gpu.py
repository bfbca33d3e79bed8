"""Gated delta rule on Hopper: one kernel over all chunks, one over heads with the state in registers.

The modules of the kernels have their outlines:

1. `gpu_chunks` computes for all chunks in parallel the terms that only depend on the chunk's own positions,
   above all the inverse of a triangular matrix.
2. `gpu_scan` goes from chunk to chunk: six products with a state that is stored transposed, values along the
   rows, and is an operand from registers. Values are independent of each other there: a head's 256 values are
   two blocks, and 64 heads give work to 128 multiprocessors.

The backward also keeps the sequential part in a kernel: the gradient of the state after every chunk. Given
these gradients and the states of the forward, the gradients of all chunks are one derivative of
`chunk.run_chunk` in XLA: a few dozen batched products in total, not per chunk.

bfloat16 operands are exact. float32 values (states, the inverse, written values) go to the tensor cores as two
bfloat16, as in `chunk`. Compared with float64, for 192 and 256 columns over 256 positions, the final state and
the gradients of g, beta and the initial state differ by 2e-6 to 4e-6 of their largest number. The others are
rounded to bfloat16, which is a thousand times more.

A tile has 64 positions: smaller chunks leave the rest of it empty.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import backends
from pallas_kernels.gated_delta import chunk as chunks
from pallas_kernels.gated_delta.gpu_chunks import TILE, prepare
from pallas_kernels.gated_delta.gpu_scan import GROUP, PIECE, scan, scan_back

MAX_WIDTH = 192  # columns of a key: 96 registers of each thread hold its part of the state
# Chunks that XLA differentiates per step: each float32 array [64, 256] of them takes 0.27 GB.
CHUNKS_PER_STEP = 4096


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
        return f"all must be bfloat16, not {q.dtype}, {k.dtype} and {v.dtype}"
    if q.dtype == jnp.float32 and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu":
        return "tensor cores take no float32 in the memory order of the values"
    if chunk % 16 or chunk > TILE:
        return f"a chunk of {chunk}; it takes multiples of 16 up to {TILE}"
    if q.shape[-1] > MAX_WIDTH:
        return f"keys of {q.shape[-1]} numbers; at most {MAX_WIDTH}"
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
    """Returns (out, final state, states float32[b n c u h] before each chunk, or None)."""
    tiles = _Tiles(static, q, v)
    q, k, v = tiles.tile_rows(q, PIECE), tiles.tile_rows(k, PIECE), tiles.tile_rows(v, GROUP)
    chunk_terms = prepare(
        q, k, tiles.tile_scalars(g), tiles.tile_scalars(beta), interpret=interpret
    )
    out, final, *states = scan(
        q, k, v, *chunk_terms, tiles.tile_state(state), keep=keep, interpret=interpret
    )
    states = tiles.untile_states(states[0]) if keep else None
    return tiles.untile_rows(out), tiles.untile_state(final), states


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
    tiles = _Tiles(static, q, v)
    rows = tiles.tile_rows(q, PIECE), tiles.tile_rows(k, PIECE)
    chunk_terms = prepare(
        *rows, tiles.tile_scalars(g), tiles.tile_scalars(beta), interpret=interpret
    )
    dinitial, dstates = scan_back(
        *rows,
        tiles.tile_rows(dout, GROUP),
        *chunk_terms,
        tiles.tile_state(dstate),
        interpret=interpret,
    )
    args = (q, k, v, g[..., None], beta[..., None], dout)
    args = (x.reshape(tiles.heads, -1, static.chunk, x.shape[-1]) for x in args)
    states = states.reshape(tiles.heads, -1, *states.shape[3:])
    dstates = dstates[..., : tiles.u, : tiles.h]
    gradients = functools.partial(_chunk_gradients, q.dtype)
    grads = _map_heads(gradients, *args, states, dstates, tiles.untile_inverse(chunk_terms[0]))
    return *(x.reshape(y.shape) for x, y in zip(grads, saved[:5])), tiles.untile_state(dinitial)


def _chunk_gradients(dtype, q, k, v, g, beta, dout, state, dstate, inverse):
    """Returns gradients of q, k, v, g and beta for all chunks [n c t .] of some heads.

    states [n c u h]; inverse [n c t t]: the inverse_matrix of `chunk.run_chunk`.
    """
    shape = q.shape[:2]

    def flat(x):
        return x.astype(jnp.float32).reshape(-1, *x.shape[2:])

    q, k, v, dout = map(flat, (q, k, v, dout))
    g, beta, state, dstate = (flat(x).swapaxes(1, 2) for x in (g, beta, state, dstate))
    inverse = flat(inverse)

    def run_with_state(q, k, v, g, beta):
        # The state is no argument here: its gradient is known already.
        is_bf16 = dtype == jnp.bfloat16
        return chunks.run_chunk(is_bf16, q, k, v, g, beta, state, inverse, split_bf16)

    pull = jax.vjp(run_with_state, q, k, v, g, beta)[1]
    *grads, dg, dbeta = pull((dout, dstate))
    grads = [x.astype(dtype).reshape(*shape, *x.shape[1:]) for x in grads]
    return *grads, dg.reshape(*shape, -1), dbeta.reshape(*shape, -1)


def split_bf16(x: Array, parts: int) -> list[Array]:
    """Splits like `chunk.split_bf16`, but with reduce_precision: XLA for GPUs drops casts to bfloat16 and back."""
    result = []
    for _ in range(parts):
        rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        result.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return result


def _map_heads(function, *args):
    """Applies function to arrays [n c ...], with up to CHUNKS_PER_STEP chunks per step."""
    n, c = args[0].shape[:2]
    size = max(x for x in range(1, n + 1) if n % x == 0 and (x == 1 or x * c <= CHUNKS_PER_STEP))
    pieces = [x.reshape(n // size, size, *x.shape[1:]) for x in args]
    if n == size:
        return function(*(x[0] for x in pieces))
    results = lax.map(lambda args: function(*args), tuple(pieces))
    return tuple(x.reshape(n, *x.shape[2:]) for x in results)


class _Tiles:
    """Conversion of chunks [b n t .] to full tiles of TILE rows and columns, padded with zeros, and back."""

    def __init__(self, static, q, v):
        self.chunk = static.chunk
        self.b, self.n, self.t, self.h = q.shape
        self.u = v.shape[-1]
        self.heads = self.b * self.n

    def tile_rows(self, x, columns: int):
        """Returns [b n t .] as [b * n, c * TILE, .], with a multiple of `columns` columns."""
        x = x.reshape(self.heads, -1, self.chunk, x.shape[-1])
        pad = [(0, 0), (0, 0), (0, TILE - self.chunk), (0, -x.shape[-1] % columns)]
        return jnp.pad(x, pad).reshape(self.heads, -1, x.shape[-1] + pad[-1][1])

    def tile_scalars(self, x):
        """Returns [b n t] as float32[b * n, c, TILE]."""
        x = x.astype(jnp.float32).reshape(self.heads, -1, self.chunk)
        return jnp.pad(x, [(0, 0), (0, 0), (0, TILE - self.chunk)])

    def tile_state(self, x):
        """Returns [b n h u] as [b * n, u, h], in full pieces."""
        x = x.reshape(self.heads, self.h, self.u).swapaxes(1, 2)
        return jnp.pad(x, [(0, 0), (0, -self.u % GROUP), (0, -self.h % PIECE)])

    def untile_inverse(self, matrices):
        """Returns the inverse float32[b * n, c, t, t] of the matrices of `prepare`."""
        parts = matrices.shape[2] // (2 * TILE)
        x = matrices.reshape(*matrices.shape[:2], 2, parts, TILE, TILE)
        x = jnp.sum(x[:, :, 0].astype(jnp.float32), axis=2)
        return x[..., : self.chunk, : self.chunk]

    def untile_rows(self, x):
        """Inverse of `tile_rows` for [b n t u]."""
        x = x.reshape(self.heads, -1, TILE, x.shape[-1])[:, :, : self.chunk, : self.u]
        return x.reshape(self.b, self.n, self.t, self.u)

    def untile_state(self, x):
        """Inverse of `tile_state`."""
        return x[:, : self.u, : self.h].swapaxes(1, 2).reshape(self.b, self.n, self.h, self.u)

    def untile_states(self, x):
        """Returns [b * n, c, u, h] of full pieces as [b n c u h]."""
        x = x[..., : self.u, : self.h]
        return x.reshape(self.b, self.n, *x.shape[1:])
