"""Output projection and cross-entropy on Hopper: tiles of logits in registers, summed up as they come.

A block keeps 128 rows and walks a stretch of the words, one warpgroup fetching, two multiplying: 87 FLOPs of
every byte that comes to a multiprocessor. Blocks in a row take few groups of rows and several stretches, so
that what they read together fits the second-level cache: at GLM-5's sizes 25 MB of hidden states, which
stay for the whole of a stretch, and 25 MB of the head, which is read four times in all.

The backward is XLA's, as on a TPU: three products, 47 TFLOP for 8192 rows of GLM-5, which take 59 ms at the
788 TFLOP/s that an H200 has. XLA for GPUs writes the logits in float32 and reads them again to make their
gradient, which it writes in bfloat16 and reads twice: 14 bytes of each logit, 18 GB or 3.7 ms. The kernel
below with another ending could write the gradient itself and save 8 of the 14, 2 ms of 63. One that kept
the gradient on the chip would make the logits anew for the second product, 20 ms more.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.cross_entropy import ref
from pallas_kernels.lightning_indexer.gpu import LEFT, RIGHT, in_parts
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E

# Timed on an H200 (2026-11-26, experiments/kernels_h200.jsonl), other sizes were not; chosen by shared memory
# and registers. A tile of logits is 64 rows by WORDS for each of two
# warpgroups, 128 registers of a thread; a stage of the ring is 48 KB.
ROWS, WORDS, DEPTH, STAGES = 128, 256, 64, 4
GROUP = 16  # blocks of rows that share a stretch of words while it is in the cache
STRETCH = 8  # tiles of a block at most: the last blocks to run are 3% of GLM-5's time
BLOCKS = 8 * hopper.MULTIPROCESSORS  # wanted at least
# Rows of the backward at a time. Their logits are 2.5 GB in float32 and half as much again in bfloat16; the
# head's gradient in float32, 3.8 GB, is read and written for each piece.
BACKWARD_ROWS = 4096


def refuse(hidden, head):
    """Why it cannot take hidden [m d] and head [d v], or None."""
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 or float32, both alike, not {hidden.dtype} and {head.dtype}"
    return None


def forward(static, hidden, head, targets, *, interpret=False):
    """(nll, log partition), float32[m]."""
    m, v = hidden.shape[0], head.shape[1]
    if hidden.dtype == jnp.float32:
        hidden, head = in_parts(hidden, LEFT), in_parts(head.T, RIGHT).T
    hidden, head = _padded(hidden, ROWS, DEPTH), _padded(head, DEPTH, WORDS)
    targets = jnp.pad(targets.astype(jnp.int32), (0, -m % ROWS))
    top, total, own = _partial(hidden, head, targets, v, interpret)
    most = jnp.max(top, axis=0)
    logz = most + jnp.log(jnp.sum(total * jnp.exp(top - most), axis=0))
    return (logz - jnp.sum(own, axis=0))[:m], logz[:m]


def backward(static, saved, dnll, dlogz, *, interpret=False):
    """(dhidden, dhead) for what `forward` took, the log partition that it gave, and both gradients."""
    static = static._replace(chunk=ref.rows_at_a_time(saved[0].shape[0], BACKWARD_ROWS))
    # Otherwise products of float32 may be of 11 bits.
    with jax.default_matmul_precision("highest" if saved[0].dtype == jnp.float32 else "default"):
        return ref.backward(static, saved, dnll, dlogz)


class _Plan(NamedTuple):
    """How blocks divide tiles: row_blocks x stretches of them."""

    row_blocks: int
    stretches: int
    tiles: int  # of words
    stretch: int  # tiles of one, the last one's fewer

    def of(self, block):
        """(block of rows, stretch) of a block of the grid: groups of rows, in each stretch by stretch."""
        group = lax.div(block, GROUP * self.stretches)
        within = lax.rem(block, GROUP * self.stretches)
        rows = jnp.minimum(self.row_blocks - group * GROUP, GROUP)
        return group * GROUP + lax.rem(within, rows), lax.div(within, rows)


def plan_of(m: int, v: int) -> _Plan:
    """Returns how tiles of logits of m rows and v words are shared out among blocks."""
    row_blocks, tiles = m // ROWS, v // WORDS
    stretch = max(1, min(STRETCH, row_blocks * tiles // BLOCKS))
    return _Plan(row_blocks, pl.cdiv(tiles, stretch), tiles, stretch)


def _padded(x, rows: int, columns: int):
    """x with zeros up to a multiple of both."""
    return jnp.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])


def _partial(hidden, head, targets, v: int, interpret):
    """(largest logit, sum of exponentials under it, target's logit or 0), float32[stretches m]."""
    m = hidden.shape[0]
    plan = plan_of(m, head.shape[1])
    tiled = hopper.tiled(hidden.dtype)
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
            plgpu.SMEM((STAGES, DEPTH, WORDS), hidden.dtype, transforms=tiled),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
        ],
    )(hidden, head, targets)


def _body(
    ops, plan, v, hidden, head, targets, tops, totals, owns, rows_ring, words_ring, full, free
):
    role = lax.axis_index("role")
    row, stretch = plan.of(lax.axis_index("block"))
    first = stretch * plan.stretch
    tiles = jnp.minimum(plan.tiles - first, plan.stretch)
    steps = hidden.shape[1] // DEPTH

    def load():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, tiles * steps)
        def _(n):
            stage = lax.rem(n, jnp.int32(STAGES))
            pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(free.at[stage]))
            depth = pl.ds(lax.rem(n, jnp.int32(steps)) * DEPTH, DEPTH)
            words = pl.ds((first + lax.div(n, jnp.int32(steps))) * WORDS, WORDS)
            rows = pl.ds(row * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(hidden.at[rows, depth], rows_ring.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(head.at[depth, words], words_ring.at[stage], full.at[stage])

        # Who waits for a barrier must see all of it.
        for stage in range(STAGES):
            pl.when(stage < tiles * steps)(lambda s=stage: plgpu.barrier_wait(free.at[s]))

    def add():
        plgpu.set_max_registers(232, action="increase")
        own_rows = pl.ds(role * (ROWS // 2), ROWS // 2)
        place = pl.ds(row * ROWS + role * (ROWS // 2), ROWS // 2)
        shape = ROWS // 2, WORDS
        row_of, column_of = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)
        target = ops.load(targets, (place,), layout=row_of)

        def logits_of(tile, acc):
            @pl.loop(0, steps)
            def _(step):
                n = tile * steps + step
                stage = lax.rem(n, jnp.int32(STAGES))
                plgpu.barrier_wait(full.at[stage])
                plgpu.wgmma(acc, rows_ring.at[stage, own_rows], words_ring.at[stage])
                # One product stays under way; the stage of the one before is free.
                plgpu.wgmma_wait(1)
                before = lax.rem(n + (STAGES - 1), jnp.int32(STAGES))
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[lax.rem(tile * steps + (steps - 1), jnp.int32(STAGES))])
            return acc[...]

        def step(tile, carry):
            top, total, own = carry
            logits = pl.run_scoped(
                functools.partial(logits_of, tile), plgpu.ACC(shape, jnp.float32)
            )
            begin = (first + tile) * WORDS
            word = ops.cast(lax.iota(jnp.int32, WORDS), column_of)
            word = hopper.over_columns(word, shape)
            if v % WORDS:
                logits = jnp.where(word < v - begin, logits, HIDDEN)
            is_target = word == hopper.over_rows(target - begin, shape)
            own = own + jnp.sum(jnp.where(is_target, logits, 0.0), axis=1)
            higher = jnp.maximum(top, jnp.max(logits, axis=1))
            p = jnp.exp2((logits - hopper.over_rows(higher, shape)) * LOG2E)
            total = total * jnp.exp2((top - higher) * LOG2E) + jnp.sum(p, axis=1)
            return higher, total, own

        zeros = ops.zeros((ROWS // 2,), layout=row_of)
        start = ops.full((ROWS // 2,), HIDDEN, layout=row_of), zeros, zeros
        for ref_, x in zip((tops, totals, owns), lax.fori_loop(0, tiles, step, start)):
            ref_[stretch, place] = x

    lax.cond(role == 2, load, add)
