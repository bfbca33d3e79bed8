"""Terms of a chunk that depend only on its positions, for all chunks of the gated delta rule in parallel.

Grid: (chunk, head), one warpgroup per block. Shared memory holds the chunk's queries and keys bfloat16[64 192] (24 KiB
each), and three groups of TILE x TILE work tiles, in one or two parts of the operands' dtype (48 KiB). Two blocks fit
a multiprocessor.

1. Factors: decay from the start and to the end of the chunk.
2. Decay between all pairs of positions, as the exponential of a sum over tensor cores.
3. A and the decayed products of queries and keys.
4. (1 + A)^-1 by joining blocks of doubling size (`chunk.inverse`).
5. Copy the inverse and the decayed products to memory: 32 KiB per chunk and head.

Padding: a position of zeros changes nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels import hopper

FACTORS = 3
TILE = 64  # positions: the size of a tensor core instruction
# Layouts of one number per row and per column.
ROW, COLUMN = hopper.ROW_OF, hopper.COLUMN_OF


def num_parts(dtype: DTypeLike) -> int:
    """Returns how many numbers of q's dtype represent one float32."""
    return 2 if dtype == jnp.bfloat16 else 1


def split_parts(x: Float[Array, "r c"], dtype: DTypeLike, parts: int) -> list[Float[Array, "r c"]]:
    """Splits x into a sum of `parts` arrays of dtype, the largest first."""
    result = []
    for _ in range(parts):
        result.append(x.astype(dtype))
        x = x - result[-1].astype(x.dtype)
    return result


def product_pairs(a: list, b: list) -> list[tuple]:
    """Returns the pairs of parts of a and b that add precision to their product, the smallest first.

    Products below the last part of either operand are left out.
    """
    indices = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < max(len(a), len(b))]
    return [(a[i], b[j]) for i, j in sorted(indices, key=sum, reverse=True)]


def broadcast_to_tile(
    x: Shaped[Array, " n"], axis: int, columns: int = TILE
) -> Shaped[Array, "tile columns"]:
    """Broadcasts x, one number per row (axis 0) or column (1), to a tile."""
    return lax.broadcast_in_dim(x, (TILE, columns), [axis])


def prepare(
    q: Float[Array, "n rows h"],
    k: Float[Array, "n rows h"],
    g: Float[Array, "n c tile"],
    beta: Float[Array, "n c tile"],
    *,
    interpret: object,
) -> tuple[Float[Array, "n c x tile"], Float[Array, "n c 3 tile"]]:
    """Returns (matrices [n c 2p TILE, TILE] of q's dtype, factors float32[n c 3 TILE]).

    Inputs: q, k [n, c TILE, h], g and beta float32[n c TILE].
    matrices: p parts of (1 + A)^-1 as in `chunk`, and p parts of decay q k^T, which reads the written values.
    factors: remaining share of the state at a position, remaining share of its write at the end, and beta.
    """
    n, rows, h = q.shape
    c = rows // TILE
    parts = num_parts(q.dtype)
    sums = 3 if parts == 2 else 1  # parts of g: a sum of 64 is then as exact as float32
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, g_ref, beta_ref, matrices_ref, factors_ref, q_tile, k_tile, work, rows_in
    ):
        head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
        chunk_rows = pl.ds(chunk * TILE, TILE)
        # Load the chunk.
        plgpu.copy_gmem_to_smem(q_ref.at[head, chunk_rows], q_tile, rows_in)
        plgpu.copy_gmem_to_smem(k_ref.at[head, chunk_rows], k_tile, rows_in)
        shape = TILE, TILE
        row_number = ops.cast(lax.iota(jnp.int32, TILE), ROW)
        column_number = ops.cast(lax.iota(jnp.int32, TILE), COLUMN)
        row, column = broadcast_to_tile(row_number, 0), broadcast_to_tile(column_number, 1)
        g_row = broadcast_to_tile(ops.load(g_ref, (head, chunk), ROW), 0)
        g_column = broadcast_to_tile(ops.load(g_ref, (head, chunk), COLUMN), 1)
        beta = ops.load(beta_ref, (head, chunk), ROW)

        def store_tiles(first, values):
            """Stores values in tiles of work from `first` on, and returns these tiles."""
            tiles = [work.at[pl.ds((first + i) * TILE, TILE)] for i in range(len(values))]
            for tile, value in zip(tiles, values):
                tile[...] = value
            plgpu.commit_smem()
            return tiles

        # Factors of the chunk.
        since = jnp.exp(jnp.sum(jnp.where(column <= row, g_column, 0.0), axis=1))
        to_end = jnp.exp(jnp.sum(jnp.where(column > row, g_column, 0.0), axis=1))
        factors_ref[head, chunk, 0, :] = since
        factors_ref[head, chunk, 1, :] = to_end
        factors_ref[head, chunk, 2, :] = beta

        # Sums of g over (s, t] are added directly: see `chunk.run_chunk`.
        later = store_tiles(0, split_parts(jnp.where(row > column, g_row, 0.0), q.dtype, sums))
        ones = jnp.where(row >= column, 1.0, 0.0).astype(q.dtype)
        decay = ops.dots(ops.zeros(shape), product_pairs([ones], later))
        decay = jnp.where(row >= column, jnp.exp(decay), 0.0)

        # A and the decayed products of queries and keys.
        plgpu.barrier_wait(rows_in)
        kk = ops.dot(ops.zeros(shape), k_tile, k_tile, b_transposed=True)
        a = jnp.where(row > column, broadcast_to_tile(beta, 0) * decay * kk, 0.0)
        qk = ops.dot(ops.zeros(shape), q_tile, k_tile, b_transposed=True)
        # Before a tile is written, no warp may still read it for a product: hence a barrier.
        plgpu.commit_smem()
        store_tiles(parts, split_parts(decay * qk, q.dtype, parts))
        # As `chunk.inverse`.
        inverse = jnp.where(row == column, 1.0, 0.0) - jnp.where(row ^ column == 1, a, 0.0)

        def join(bit, inverse):
            between = broadcast_to_tile(row_number >> bit, 0) ^ broadcast_to_tile(
                column_number >> bit, 1
            )
            between = split_parts(jnp.where(between == 1, a, 0.0), q.dtype, parts)
            factor = split_parts(inverse, q.dtype, parts)
            carried = ops.dots(ops.zeros(shape), product_pairs(between, store_tiles(0, factor)))
            carried = store_tiles(2 * parts, split_parts(carried, q.dtype, parts))
            return inverse - ops.dots(ops.zeros(shape), product_pairs(factor, carried))

        inverse = lax.fori_loop(1, (TILE - 1).bit_length(), join, inverse)
        store_tiles(0, split_parts(inverse, q.dtype, parts))
        finished = pl.ds(0, 2 * parts * TILE)
        plgpu.copy_smem_to_gmem(work.at[finished], matrices_ref.at[head, chunk])
        plgpu.wait_smem_to_gmem(0)

    tiled = hopper.tile_transforms(q.dtype)
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
