"""Output projection and cross-entropy on a TPU: logits are tiles on the chip, summed up as they come.

The backward is XLA's. It makes the gradient of the logits inside the product that recomputes them, so that
three products and one array of [m v] in the input's dtype remain; a kernel that kept that array on the
chip would have to recompute the logits for the second gradient, a fourth product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate
from pallas_kernels.cross_entropy import cost, ref

# Not measured. At d = 6144 in bfloat16 a block of rows is 12 MiB, which makes 1024 FLOPs of every byte of
# the head that streams by (v6e needs 560), and a block of words 6 MiB; both are there twice. The loop
# over pieces of a block keeps its code a quarter as long.
ROWS_BYTES, PIECE, PIECES = 12 << 20, 256, 4
WORDS_BYTES, WORDS = 6 << 20, 1024
VMEM_BYTES = 63 << 20  # v5p has 65,472 KiB for one program
# Rows of the backward at a time: at 154,880 words their array is 2.5 GB in bfloat16. The head's gradient
# summed over several pieces is 3.8 GB in float32, read and written for each.
BACKWARD_ROWS = 8192


def refuse(hidden, head):
    """Why it cannot take hidden [m d] and head [d v], or None."""
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 or float32, both alike, not {hidden.dtype} and {head.dtype}"
    if hidden.shape[1] * hidden.dtype.itemsize * PIECE > ROWS_BYTES:
        return f"{PIECE} rows of {hidden.shape[1]} {hidden.dtype} are more than the chip holds"
    return None


def forward(static, hidden, head, targets, *, interpret=False):
    """(nll, log partition), float32[m]."""
    m, d = hidden.shape
    v = head.shape[1]
    piece, pieces, words = tile_of(m, d, v, hidden.dtype.itemsize)
    rows = piece * pieces
    column = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    done = pl.pallas_call(
        functools.partial(_kernel, piece=piece, v=v),
        grid=(pl.cdiv(m, rows), pl.cdiv(v, words)),
        in_specs=[
            pl.BlockSpec((rows, d), lambda i, j: (i, 0)),
            pl.BlockSpec((d, words), lambda i, j: (0, j)),
            column,
        ],
        out_specs=[column, column],
        out_shape=[jax.ShapeDtypeStruct((m, 1), jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM((rows, 1), jnp.float32)] * 3,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=estimate(cost.forward(m, d, v, hidden.dtype.itemsize)),
        interpret=interpret,
        name="cross_entropy",
    )(hidden, head, targets[:, None])
    return tuple(x[:, 0] for x in done)


def backward(static, saved, dnll, dlogz, *, interpret=False):
    """(dhidden, dhead) for what `forward` took, the log partition that it gave, and both gradients."""
    static = static._replace(chunk=ref.rows_at_a_time(saved[0].shape[0], BACKWARD_ROWS))
    with jax.default_matmul_precision(_precision(saved[0].dtype).name.lower()):
        return ref.backward(static, saved, dnll, dlogz)


def tile_of(m: int, d: int, v: int, itemsize: int) -> tuple[int, int, int]:
    """(rows of a piece, pieces of a block, words) of a tile of logits, with few rows beyond the last."""
    pieces = pl.cdiv(m, PIECE)
    piece = pl.cdiv(pl.cdiv(m, pieces), 16) * 16
    most = max(1, min(PIECES, ROWS_BYTES // (d * itemsize * PIECE)))
    words = min(v, WORDS, max(1, WORDS_BYTES // (d * itemsize * 128)) * 128)
    return piece, pl.cdiv(pieces, pl.cdiv(pieces, most)), words


def _precision(dtype):
    # A product of float32 is one of bfloat16 on a TPU unless it is asked for.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _kernel(hidden, head, target, nll, logz, top, total, own, *, piece, v):
    """One tile; top, total and own [rows 1] go with a block of rows over all blocks of words."""
    j, words = pl.program_id(1), head.shape[1]

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        own[...] = jnp.zeros_like(own)

    def one(i, _):
        at = pl.ds(pl.multiple_of(i * piece, piece), piece), slice(None)
        logits = jnp.dot(
            hidden[at],
            head[...],
            precision=_precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        word = j * words + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        if v % words:
            logits = jnp.where(word < v, logits, -jnp.inf)
        own[at] += jnp.sum(jnp.where(word == target[at], logits, 0), axis=1, keepdims=True)
        higher = jnp.maximum(top[at], jnp.max(logits, axis=1, keepdims=True))
        tile = jnp.sum(jnp.exp(logits - higher), axis=1, keepdims=True)
        total[at] = total[at] * jnp.exp(top[at] - higher) + tile
        top[at] = higher

    lax.fori_loop(0, hidden.shape[0] // piece, one, None)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        logz[...] = top[...] + jnp.log(total[...])
        nll[...] = logz[...] - own[...]
