"""Output projection and cross-entropy on a TPU: logits are tiles in VMEM and are reduced there.

Grid: (block of rows, block of the vocabulary), the blocks of the vocabulary innermost and in order.

Blocks, for d = 6144 in bfloat16, double-buffered by the pipeline: hidden states [1024 d] (12 MiB), head [d 512]
(6 MiB), targets and results [1024 1]. Scratch VMEM: running maximum, sum of exponentials and target's logit
float32[1024 1] each. The logits of 256 rows at a time, float32[256 512] (512 KiB), are the only ones that exist.

Phases of a program:

1. First block of the vocabulary: reset the three statistics.
2. For each piece of 256 rows: logits, online log-sum-exp, and the logit of the target where it is in this block.
3. Last block of the vocabulary: write log partition and negative log-likelihood.

Padding: none in memory. Words after the last are masked; rows after the last are computed from undefined numbers and
not written.

The backward is XLA's. It computes the gradient of the logits inside the product that recomputes them, so that three
products and one array [m v] in the input's dtype remain. A kernel that keeps that array on the chip would have to
recompute the logits for the second gradient, a fourth product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.cost import estimate
from pallas_kernels.cross_entropy import cost, xla

# Not measured. At d = 6144 in bfloat16 a block of rows is 12 MiB, which gives 1024 FLOP per byte of the
# streamed head (v6e needs 560), and a block of the vocabulary 6 MiB; both are double-buffered. The loop
# over pieces of a block shortens the code to a quarter.
ROWS_BYTES, PIECE, PIECES = 12 << 20, 256, 4
VOCAB_BYTES, VOCAB_TILE = 6 << 20, 1024
VMEM_BYTES = 63 << 20  # v5p has 65,472 KiB for one program
# Rows per step of the backward: with a vocabulary of 154,880 their array takes 2.5 GB in bfloat16. With several
# steps, the head's gradient takes 3.8 GB in float32, and each step reads and writes it.
BACKWARD_ROWS = 8192


def unsupported_reason(hidden: Float[Array, "m d"], head: Float[Array, "d v"]) -> str | None:
    """Returns the reason why hidden [m d] and head [d v] are not supported, or None."""
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.bfloat16, jnp.float32):
        return f"both must be bfloat16 or both float32, not {hidden.dtype} and {head.dtype}"
    if hidden.shape[1] * hidden.dtype.itemsize * PIECE > ROWS_BYTES:
        return f"{PIECE} rows of {hidden.shape[1]} {hidden.dtype} exceed the chip's memory"
    return None


def forward(
    static,
    hidden: Float[Array, "m d"],
    head: Float[Array, "d v"],
    targets: Int[Array, " m"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Returns (nll, log partition), float32[m]."""
    m, d = hidden.shape
    v = head.shape[1]
    piece, pieces, vocab_tile = choose_tile(m, d, v, hidden.dtype.itemsize)
    rows = piece * pieces
    column = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    results = pl.pallas_call(
        functools.partial(_kernel, piece=piece, v=v),
        grid=(pl.cdiv(m, rows), pl.cdiv(v, vocab_tile)),
        in_specs=[
            pl.BlockSpec((rows, d), lambda i, j: (i, 0)),
            pl.BlockSpec((d, vocab_tile), lambda i, j: (0, j)),
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
    return tuple(x[:, 0] for x in results)


def backward(
    static,
    saved: tuple,
    dnll: Float[Array, " m"],
    dlogz: Float[Array, " m"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "m d"], Float[Array, "d v"]]:
    """Returns (dhidden, dhead) for the inputs of `forward`, its log partition, and the gradients of both results."""
    static = static._replace(chunk=xla.rows_per_chunk(saved[0].shape[0], BACKWARD_ROWS))
    with jax.default_matmul_precision(_precision(saved[0].dtype).name.lower()):
        return xla.backward(static, saved, dnll, dlogz)


def choose_tile(m: int, d: int, v: int, itemsize: int) -> tuple[int, int, int]:
    """Returns (rows of a piece, pieces of a block, vocabulary tile) of a tile of logits, with little row padding."""
    pieces = pl.cdiv(m, PIECE)
    piece = pl.cdiv(pl.cdiv(m, pieces), 16) * 16
    max_pieces = max(1, min(PIECES, ROWS_BYTES // (d * itemsize * PIECE)))
    vocab_tile = min(v, VOCAB_TILE, max(1, VOCAB_BYTES // (d * itemsize * 128)) * 128)
    return piece, pl.cdiv(pieces, pl.cdiv(pieces, max_pieces)), vocab_tile


def _precision(dtype):
    # By default a TPU multiplies float32 as bfloat16.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _kernel(hidden, head, target, nll, logz, top, total, target_logit, *, piece, v):
    """One tile. top, total and target_logit [rows 1] live over all vocabulary blocks of a block of rows."""
    j, vocab_tile = pl.program_id(1), head.shape[1]

    # First vocabulary block: reset the running statistics.
    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        target_logit[...] = jnp.zeros_like(target_logit)

    # Online log-sum-exp of one piece of rows.
    def add_piece(i, _):
        window = pl.ds(pl.multiple_of(i * piece, piece), piece), slice(None)
        logits = jnp.dot(
            hidden[window],
            head[...],
            precision=_precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        token_id = j * vocab_tile + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        if v % vocab_tile:
            logits = jnp.where(token_id < v, logits, -jnp.inf)
        target_logit[window] += jnp.sum(
            jnp.where(token_id == target[window], logits, 0), axis=1, keepdims=True
        )
        higher = jnp.maximum(top[window], jnp.max(logits, axis=1, keepdims=True))
        tile = jnp.sum(jnp.exp(logits - higher), axis=1, keepdims=True)
        total[window] = total[window] * jnp.exp(top[window] - higher) + tile
        top[window] = higher

    lax.fori_loop(0, hidden.shape[0] // piece, add_piece, None)

    # Last vocabulary block: write the results.
    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        logz[...] = top[...] + jnp.log(total[...])
        nll[...] = logz[...] - target_logit[...]
