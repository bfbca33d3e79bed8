"""Output projection and cross-entropy on Hopper: tiles of logits stay in registers and are reduced there.

Grid: (block,): one per 128 rows and stretch of up to 8 tiles of 256 words. Consecutive blocks cover few groups of
rows and several stretches, so that their joint input fits the L2 cache. At GLM-5's sizes this is 25 MB of hidden
states, which stay for the full stretch, and 25 MB of the head, which is read four times in total.

Shared memory: a ring of four stages of hidden states [128 64] and head [64 256], 192 KiB in bfloat16. Registers: logits
float32[64 256] of each compute warpgroup, 128 per thread. 87 FLOP per byte that reaches a multiprocessor.

Phases of a program:

- Loader warpgroup: fills the ring along the width of the model, tile after tile of the stretch.
- Two compute warpgroups, 64 rows each: per tile the product, then an online log-sum-exp and the target's logit.

Each stretch writes its maximum, its sum and the target's logit (0 if it is elsewhere); XLA merges the stretches.
Padding: rows to 128, width to 64, words to 256; words after the last are HIDDEN.

The backward is XLA's, as on a TPU: three products, 47 TFLOP for 8192 rows of GLM-5, or 59 ms at the 788 TFLOP/s
that an H200 reaches. XLA for GPUs writes the logits in float32, reads them to compute their gradient, writes
that in bfloat16 and reads it twice: 14 bytes per logit, 18 GB or 3.7 ms. With another epilogue this kernel
could write the gradient itself and save 8 of the 14 bytes, 2 of 63 ms. A kernel that keeps the gradient on the
chip would recompute the logits for the second product, 20 ms more.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.cross_entropy import xla
from pallas_kernels.lightning_indexer.gpu import LEFT_PARTS, RIGHT_PARTS, split_float32
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E

# Only these sizes are timed, on an H200 (2026-11-26, experiments/kernels_h200.jsonl). They follow from shared memory
# and registers. A tile of logits is 64 rows by VOCAB_TILE for each of two warpgroups, 128 registers per thread; a
# stage of the ring is 48 KB.
ROWS, VOCAB_TILE, DEPTH, STAGES = 128, 256, 64, 4
GROUP = 16  # blocks of rows that share a stretch of the vocabulary while it is in the cache
STRETCH = 8  # maximum tiles of a block: the last blocks to run take 3% of GLM-5's time
MIN_BLOCKS = 8 * hopper.MULTIPROCESSORS  # target number of blocks
# Rows per step of the backward. Their logits take 2.5 GB in float32 and half as much in bfloat16. The head's
# gradient, 3.8 GB in float32, is read and written at each step.
BACKWARD_ROWS = 4096


def unsupported_reason(hidden: Float[Array, "m d"], head: Float[Array, "d v"]) -> str | None:
    """Returns the reason why hidden [m d] and head [d v] are not supported, or None."""
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.bfloat16, jnp.float32):
        return f"both must be bfloat16 or both float32, not {hidden.dtype} and {head.dtype}"
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
    m, v = hidden.shape[0], head.shape[1]
    if hidden.dtype == jnp.float32:
        hidden, head = split_float32(hidden, LEFT_PARTS), split_float32(head.T, RIGHT_PARTS).T
    hidden, head = _padded(hidden, ROWS, DEPTH), _padded(head, DEPTH, VOCAB_TILE)
    targets = jnp.pad(targets.astype(jnp.int32), (0, -m % ROWS))
    top, total, target_logit = _partial(hidden, head, targets, v, interpret)
    max_logit = jnp.max(top, axis=0)
    logz = max_logit + jnp.log(jnp.sum(total * jnp.exp(top - max_logit), axis=0))
    return (logz - jnp.sum(target_logit, axis=0))[:m], logz[:m]


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
    # By default products of float32 may have 11 bits.
    with jax.default_matmul_precision("highest" if saved[0].dtype == jnp.float32 else "default"):
        return xla.backward(static, saved, dnll, dlogz)


class _Plan(NamedTuple):
    """Distribution of tiles over row_blocks x stretches blocks."""

    row_blocks: int
    stretches: int
    tiles: int  # of the vocabulary
    stretch: int  # tiles per stretch; the last stretch may have fewer

    def locate(self, block: Array) -> tuple[Array, Array]:
        """Returns (block of rows, stretch) of a grid block.

        Grid blocks go through groups of row blocks, and in each group stretch by stretch.
        """
        group = lax.div(block, GROUP * self.stretches)
        within = lax.rem(block, GROUP * self.stretches)
        rows = jnp.minimum(self.row_blocks - group * GROUP, GROUP)
        return group * GROUP + lax.rem(within, rows), lax.div(within, rows)


def make_plan(m: int, v: int) -> _Plan:
    """Returns the distribution of tiles of logits of m rows and a vocabulary of v over blocks."""
    row_blocks, tiles = m // ROWS, v // VOCAB_TILE
    stretch = max(1, min(STRETCH, row_blocks * tiles // MIN_BLOCKS))
    return _Plan(
        row_blocks=row_blocks, stretches=pl.cdiv(tiles, stretch), tiles=tiles, stretch=stretch
    )


def _padded(x, rows: int, columns: int):
    """Pads x with zeros to a multiple of both."""
    return jnp.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])


def _partial(hidden, head, targets, v: int, interpret):
    """Returns (largest logit, sum of exponentials relative to it, target's logit or 0), float32[stretches m]."""
    m = hidden.shape[0]
    plan = make_plan(m, head.shape[1])
    tiled = hopper.tile_transforms(hidden.dtype)
    return hopper.kernel(
        functools.partial(_body, hopper.Ops(interpret), plan, v),
        kernel_name="cross_entropy",
        interpret=interpret,
        out_type=[jax.ShapeDtypeStruct((plan.stretches, m), jnp.float32)] * 3,
        grid=(plan.row_blocks * plan.stretches,),
        grid_names=("block",),
        num_threads=3,
        thread_name="role",
        # Sums over a row stay within a warp: no scratch between warps.
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), hidden.dtype, transforms=tiled),
            plgpu.SMEM((STAGES, DEPTH, VOCAB_TILE), hidden.dtype, transforms=tiled),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
        ],
    )(hidden, head, targets)


def _body(
    ops,
    plan,
    v,
    hidden,
    head,
    targets,
    tops,
    totals,
    target_logits,
    rows_ring,
    head_ring,
    full,
    free,
):
    role = lax.axis_index("role")
    row, stretch = plan.locate(lax.axis_index("block"))
    first = stretch * plan.stretch
    tiles = jnp.minimum(plan.tiles - first, plan.stretch)
    steps = hidden.shape[1] // DEPTH

    # Loader warpgroup: fill the ring with tiles of hidden states and of the head.
    def load():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, tiles * steps)
        def _(n):
            stage = lax.rem(n, jnp.int32(STAGES))
            pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(free.at[stage]))
            depth = pl.ds(lax.rem(n, jnp.int32(steps)) * DEPTH, DEPTH)
            vocab_slice = pl.ds((first + lax.div(n, jnp.int32(steps))) * VOCAB_TILE, VOCAB_TILE)
            rows = pl.ds(row * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(hidden.at[rows, depth], rows_ring.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(
                head.at[depth, vocab_slice], head_ring.at[stage], full.at[stage]
            )

        # A warpgroup that waits for a barrier must wait for all of its arrivals.
        for stage in range(STAGES):
            pl.when(stage < tiles * steps)(lambda s=stage: plgpu.barrier_wait(free.at[s]))

    # Compute warpgroups: online log-sum-exp over the tiles of the stretch.
    def add():
        plgpu.set_max_registers(232, action="increase")
        row_slice = pl.ds(role * (ROWS // 2), ROWS // 2)
        target_rows = pl.ds(row * ROWS + role * (ROWS // 2), ROWS // 2)
        shape = ROWS // 2, VOCAB_TILE
        row_of, column_of = hopper.ROW_OF, hopper.COLUMN_OF
        target = ops.load(targets, (target_rows,), layout=row_of)

        # Product of one tile: stages are released one step late, so that tensor cores never wait for an arrival.
        def logits_of(tile, acc):
            @pl.loop(0, steps)
            def _(step):
                n = tile * steps + step
                stage = lax.rem(n, jnp.int32(STAGES))
                plgpu.barrier_wait(full.at[stage])
                plgpu.wgmma(acc, rows_ring.at[stage, row_slice], head_ring.at[stage])
                # One product stays in flight; the stage of the previous one is free.
                plgpu.wgmma_wait(1)
                before = lax.rem(n + (STAGES - 1), jnp.int32(STAGES))
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[lax.rem(tile * steps + (steps - 1), jnp.int32(STAGES))])
            return acc[...]

        # Online statistics of one tile; the target's logit is in exactly one of them.
        def step(tile, carry):
            top, total, target_logit = carry
            logits = pl.run_scoped(
                functools.partial(logits_of, tile), hopper.Accumulator(shape, jnp.float32)
            )
            begin = (first + tile) * VOCAB_TILE
            token_id = ops.cast(lax.iota(jnp.int32, VOCAB_TILE), column_of)
            token_id = hopper.broadcast_columns(token_id, shape)
            if v % VOCAB_TILE:
                logits = jnp.where(token_id < v - begin, logits, HIDDEN)
            is_target = token_id == hopper.broadcast_rows(target - begin, shape)
            target_logit = target_logit + jnp.sum(jnp.where(is_target, logits, 0.0), axis=1)
            higher = jnp.maximum(top, jnp.max(logits, axis=1))
            p = jnp.exp2((logits - hopper.broadcast_rows(higher, shape)) * LOG2E)
            total = total * jnp.exp2((top - higher) * LOG2E) + jnp.sum(p, axis=1)
            return higher, total, target_logit

        zeros = ops.zeros((ROWS // 2,), layout=row_of)
        start = ops.full((ROWS // 2,), HIDDEN, layout=row_of), zeros, zeros
        for ref_, x in zip((tops, totals, target_logits), lax.fori_loop(0, tiles, step, start)):
            ref_[stretch, target_rows] = x

    # Each warpgroup runs its role.
    lax.cond(role == 2, load, add)
