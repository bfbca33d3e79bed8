"""What a chunk of the gated delta rule needs from its own positions alone, for all chunks at once."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper

FACTORS = 3
TILE = 64  # positions: what a tensor core instruction takes
ROW, COLUMN = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)  # a number per row, per column


def parts_of(dtype) -> int:
    """How many numbers of q's dtype stand for one of float32."""
    return 2 if dtype == jnp.bfloat16 else 1


def split(x, dtype, parts: int):
    """x as a sum of so many arrays of dtype, the largest first."""
    done = []
    for _ in range(parts):
        done.append(x.astype(dtype))
        x = x - done[-1].astype(x.dtype)
    return done


def pairs(a, b):
    """Pairs of parts of a and of b whose product is not below the last part of either; the least first."""
    both = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < max(len(a), len(b))]
    return [(a[i], b[j]) for i, j in sorted(both, key=sum, reverse=True)]


def across(x, axis: int, columns: int = TILE):
    """x, a number per row (axis 0) or column (1), over a tile."""
    return lax.broadcast_in_dim(x, (TILE, columns), [axis])


def prepare(q, k, g, beta, *, interpret):
    """(matrices [n c 2p TILE, TILE] of q's dtype, factors float32[n c 3 TILE]) of q, k [n, c TILE, h],
    g and beta float32[n c TILE].

    matrices: p parts of (1 + A)^-1 as `chunk` has it, and p parts of decay q k^T, which reads what is
    written. factors: what is left of the state at a position, what of its own writing is left at the end,
    and beta.
    """
    n, rows, h = q.shape
    c = rows // TILE
    parts = parts_of(q.dtype)
    sums = 3 if parts == 2 else 1  # parts of g: a sum of 64 is then as exact as float32
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, g_ref, beta_ref, matrices_ref, factors_ref, q_tile, k_tile, work, rows_in
    ):
        head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
        place = pl.ds(chunk * TILE, TILE)
        plgpu.copy_gmem_to_smem(q_ref.at[head, place], q_tile, rows_in)
        plgpu.copy_gmem_to_smem(k_ref.at[head, place], k_tile, rows_in)
        shape = TILE, TILE
        of_row = ops.cast(lax.iota(jnp.int32, TILE), ROW)
        of_column = ops.cast(lax.iota(jnp.int32, TILE), COLUMN)
        row, column = across(of_row, 0), across(of_column, 1)
        g_row = across(ops.load(g_ref, (head, chunk), ROW), 0)
        g_column = across(ops.load(g_ref, (head, chunk), COLUMN), 1)
        beta = ops.load(beta_ref, (head, chunk), ROW)

        def keep(first, values):
            """Tiles of work from `first` on with these values."""
            tiles = [work.at[pl.ds((first + i) * TILE, TILE)] for i in range(len(values))]
            for tile, value in zip(tiles, values):
                tile[...] = value
            plgpu.commit_smem()
            return tiles

        since = jnp.exp(jnp.sum(jnp.where(column <= row, g_column, 0.0), axis=1))
        to_end = jnp.exp(jnp.sum(jnp.where(column > row, g_column, 0.0), axis=1))
        factors_ref[head, chunk, 0, :] = since
        factors_ref[head, chunk, 1, :] = to_end
        factors_ref[head, chunk, 2, :] = beta

        # Sums of g over (s, t] one by one: see `chunk.run`.
        later = keep(0, split(jnp.where(row > column, g_row, 0.0), q.dtype, sums))
        ones = jnp.where(row >= column, 1.0, 0.0).astype(q.dtype)
        decay = ops.dots(ops.zeros(shape), pairs([ones], later))
        decay = jnp.where(row >= column, jnp.exp(decay), 0.0)

        plgpu.barrier_wait(rows_in)
        kk = ops.dot(ops.zeros(shape), k_tile, k_tile, b_transposed=True)
        a = jnp.where(row > column, across(beta, 0) * decay * kk, 0.0)
        qk = ops.dot(ops.zeros(shape), q_tile, k_tile, b_transposed=True)
        # Whoever writes a tile must know that no warp still reads it for a product: one barrier between.
        plgpu.commit_smem()
        keep(parts, split(decay * qk, q.dtype, parts))
        # As `chunk.inverse`.
        inverse = jnp.where(row == column, 1.0, 0.0) - jnp.where(row ^ column == 1, a, 0.0)

        def join(bit, inverse):
            between = across(of_row >> bit, 0) ^ across(of_column >> bit, 1)
            between = split(jnp.where(between == 1, a, 0.0), q.dtype, parts)
            factor = split(inverse, q.dtype, parts)
            carried = ops.dots(ops.zeros(shape), pairs(between, keep(0, factor)))
            carried = keep(2 * parts, split(carried, q.dtype, parts))
            return inverse - ops.dots(ops.zeros(shape), pairs(factor, carried))

        inverse = lax.fori_loop(1, (TILE - 1).bit_length(), join, inverse)
        keep(0, split(inverse, q.dtype, parts))
        done = pl.ds(0, 2 * parts * TILE)
        plgpu.copy_smem_to_gmem(work.at[done], matrices_ref.at[head, chunk])
        plgpu.wait_smem_to_gmem(0)

    tiled = hopper.tiled(q.dtype)
    tile = plgpu.SMEM((TILE, h), q.dtype, transforms=tiled)
    return hopper.kernel(
        body,
        kernel_name="gated_delta_chunks",
        interpret=interpret,
        out_type=[
            jax.ShapeDtypeStruct((n, c, 2 * parts * TILE, TILE), q.dtype),
            jax.ShapeDtypeStruct((n, c, FACTORS, TILE), jnp.float32),
        ],
        grid=(c, n),
        grid_names=("chunk", "head"),
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types=[
            tile,
            tile,
            plgpu.SMEM((3 * parts * TILE, TILE), q.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(q, k, g, beta)
