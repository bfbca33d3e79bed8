"""Kernel of `gpu.forward` for latents of up to 576 columns: the sums of 64 rows are spread over several warpgroups.

Grid: (batch, head, block), the blocks with the most keys first. A block is 64 rows against its range of key tiles. With
576 columns of bfloat16 that are key and value, shared memory holds the queries [64 576] (72 KiB), a ring of two tiles
of 64 keys (144 KiB), one tile of weights [64 64] (8 KiB) and a factor per row. If values are other numbers than keys, a
tile has 32 keys.

- A weight warpgroup copies tiles, computes logits and the online softmax, and writes weights and rescaling factors.
- Two or three sum warpgroups have up to 256 columns of the values each, in registers.

The output passes through the queries' buffer. A row that sees nothing gives 0 and an infinite log-sum-exp.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.flash_mla.gpu_forward import (
    KEYS,
    ROW_OF,
    ROWS,
    STAGES,
    KeyRange,
    KeyVisibility,
    mask_hidden,
    out_type,
    ring,
    softmax_end,
    softmax_step,
)
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_flash_attention.gpu_forward import PIECE

SEPARATE_KEYS = 32  # keys of a tile of `attend_wide`, if the values are not the keys
# Registers (of a thread that computes weights, of one that sums) by the number of summing warpgroups. Together they
# are all registers that a block starts with, 168 or 128 per thread.
REGISTERS = {2: (104, 200), 3: (104, 136)}


def num_parts(width: int) -> int:
    """Returns how many warpgroups share the sums of `width` columns; 64 columns are one piece of a tile."""
    return max(2, -(-width // 256))


def attend_wide(
    q: Float[Array, "b h o x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"] | None,
    visibility: KeyVisibility,
    *,
    scale: float,
    interpret: object,
) -> tuple[Float[Array, "b h r y"], Float[Array, "b h r"], Float[Array, "b h r"]]:
    """Runs `attend` for blocks of 64 rows. v: None if the values are the keys with all of their columns.

    One warpgroup copies tiles into a ring of two and computes their weights. The others each sum some columns
    of the values.
    Products of one tile run during the softmax of the next.
    """
    (b, h, rows, x), m = q.shape, k.shape[1]
    shared = v is None
    y = x if shared else v.shape[-1]
    blocks = visibility.ranges.shape[1]
    cuts, group = blocks * ROWS // rows, h // m
    parts = num_parts(y)
    part = y // parts
    weight_registers, sum_registers = REGISTERS[parts]
    length = KEYS if shared else SEPARATE_KEYS
    swizzle = 2 * length  # bytes of a row of weights, over which the values are contracted
    ops = hopper.Ops(interpret)

    def body(
        *refs, queries, queries_in, keys, values: Any, weights, factors, weights_ready, weights_free
    ):
        q_ref, k_ref, *refs = refs
        v_ref: Any = None
        if not shared:
            v_ref, *refs = refs
        ranges_ref, last_ref, *segments, out_ref, lse_ref, top_ref = refs
        b, h, role = (lax.axis_index(name) for name in ("batch", "head", "role"))
        block = blocks - 1 - lax.axis_index("block")
        key_range = KeyRange.load(ranges_ref, b, block)
        count = key_range.end - key_range.begin
        out_rows = pl.ds(block * ROWS, ROWS)

        # Copies tile i of the range.
        def load(i):
            @pl.when(i < count)
            def _():
                head = lax.div(h, jnp.int32(group))
                key_slice = pl.ds((key_range.begin + i) * length, length)
                keys.copy(i, k_ref.at[b, head, key_slice])
                if not shared:
                    values.copy(i, v_ref.at[b, head, key_slice])

        # Weight warpgroup: load tiles, compute logits and the online softmax.
        def compute_weights():
            plgpu.set_max_registers(weight_registers, action="decrease")
            # The first tiles, the rows, and what they see.
            for i in range(STAGES):
                load(jnp.int32(i))
            row_slice = pl.ds(lax.div(block, jnp.int32(cuts)) * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[b, h, row_slice], queries, queries_in)
            last = ops.load(last_ref, (row_slice,), layout=ROW_OF)
            q_ids = ops.load(segments[0], (b, row_slice), layout=ROW_OF) if segments else None
            plgpu.barrier_wait(queries_in)

            def mask(tile, logits):
                return mask_hidden(
                    ops, logits, tile * length, last, q_ids, segments and segments[1], b
                )

            # Weights of one tile. They are computed before the wait for the readers of the previous weights.
            def step(i, carry):
                top, total = carry
                tile = keys.wait(i)
                logits = ops.dot(ops.zeros((ROWS, length)), queries, tile, b_transposed=True)
                logits = logits * (scale * LOG2E)
                number = key_range.begin + i
                logits = key_range.masked(number, logits, lambda logits: mask(number, logits))
                p, factor, top, total = softmax_step(logits, top, total)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(weights_free)
                    load(i - 1 + STAGES)  # all readers of this stage have finished

                weights[...] = p.astype(weights.dtype)
                factors[...] = factor
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_ready)
                return top, total

            start = ops.full((ROWS,), HIDDEN, layout=ROW_OF), ops.zeros((ROWS,), layout=ROW_OF)
            top, total = lax.fori_loop(0, count, step, start)

            # The last factor normalises the sums.
            @pl.when(count > 0)
            def _():
                plgpu.barrier_wait(weights_free)

            normaliser, lse, top = softmax_end(top, total)
            factors[...] = normaliser
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready)
            lse_ref[b, h, out_rows] = lse
            top_ref[b, h, out_rows] = top

        # Sum warpgroups: each sums some columns of the values.
        def add():
            plgpu.set_max_registers(sum_registers, action="increase")
            columns = pl.ds(role * part, part)

            def rescale(acc):
                return acc * hopper.broadcast_rows(ops.load(factors, layout=ROW_OF), acc.shape)

            def step(i, acc):
                tile = (keys if shared else values).wait(i).at[:, columns]
                plgpu.barrier_wait(weights_ready)
                acc = ops.dot(rescale(acc), weights, tile, max_columns=PIECE)
                plgpu.barrier_arrive(weights_free)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((ROWS, part)))
            plgpu.barrier_wait(weights_ready)
            # All logits are computed, so the queries' buffer can hold the output on its way to memory.
            hopper.store_via_smem(rescale(acc), queries, out_ref.at[b, h, out_rows], columns)

        lax.cond(role == parts, compute_weights, add)

    tiled = hopper.tile_transforms(q.dtype, swizzle)
    # Build and call the kernel.
    kernel = hopper.kernel(
        body,
        kernel_name="flash_mla_attend_wide",
        interpret=interpret,
        out_type=out_type(b, h, blocks * ROWS, y, q.dtype),
        grid=(b, h, blocks),
        grid_names=("batch", "head", "block"),
        num_threads=parts + 1,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((ROWS, x), q.dtype, transforms=tiled),
            "queries_in": plgpu.Barrier(),
            "keys": ring((length, x), k.dtype, swizzle=swizzle),
            "values": None if shared else ring((length, y), v.dtype, swizzle=swizzle),
            "weights": plgpu.SMEM((ROWS, length), q.dtype, transforms=tiled),
            "factors": plgpu.SMEM((ROWS,), jnp.float32),
            "weights_ready": plgpu.Barrier(),
            "weights_free": plgpu.Barrier(num_arrivals=parts),
        },
    )
    arrays = (q, k) if shared else (q, k, v)
    return kernel(*arrays, visibility.ranges, visibility.last, *visibility.segments)
