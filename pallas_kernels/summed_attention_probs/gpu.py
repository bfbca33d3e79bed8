"""Attention probabilities summed over heads on Hopper: the sum stays in registers over the loop over heads.

Grid: (batch, key tile, query tile). A block is 128 queries, 64 per compute warpgroup, by 256 keys; its float32 sums
take half of the registers, two halves [64 128] per warpgroup. Per head a block reads 128 rows of queries and 256 of
keys: 85 FLOP per byte from the L2 cache. Blocks of the same keys run at the same time, so that memory delivers these
keys once.

Shared memory, for heads of 256 columns in bfloat16: the queries of two heads [2 128 256] (128 KiB), and a ring of three
tiles of 128 keys by 128 columns (96 KiB).

Phases of a program:

- Loader warpgroup: queries and keys of each head.
- Two compute warpgroups: logits of each half, and the sum of their exponentials. They take turns: the exponentials of
  one run during the products of the other. After the last head: mask, and store once.

Padding: queries to 128, keys to 256 and columns to 64, with zeros in segment 0. A hidden tile has no heads and is zero.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import backends, hopper
from pallas_kernels.numerics import LOG2E
from pallas_kernels.summed_attention_probs.tiles import (
    find_visible_tiles,
    pad_to_multiple,
    segments_or_ones,
)

# Only these sizes are timed, on an H200 (2026-11-26, experiments/kernels_h200.jsonl). They follow from shared memory
# and registers: 128 KB for the queries of two heads of 256 columns, 96 KB for tiles of keys.
QUERIES = 128
KEYS = 256
HALF = KEYS // 2  # columns of one product
RING = 3  # tiles of HALF keys and `width` columns in flight
MAX_WIDTH = 256


def unsupported_reason(q: Float[Array, "b t n x"], k: Float[Array, "b s m x"]) -> str | None:
    """Returns the reason why q over k is not supported, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}; use bfloat16"
    if q.dtype != k.dtype:
        return f"q is {q.dtype} and k {k.dtype}"
    if q.dtype == jnp.float32 and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu":
        return "tensor cores take no float32 in the memory order of q and k"
    if q.shape[-1] > MAX_WIDTH:
        return f"heads of {q.shape[-1]} columns; at most {MAX_WIDTH}"
    return None


def forward(
    static,
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    interpret: object = False,
) -> Float[Array, "b t s"]:
    """Returns the sum over heads."""
    q_ids, k_ids = segments_or_ones(q, q_segments), segments_or_ones(k, k_segments)
    keys = pad_to_tiles(k, KEYS), pad_to_multiple(k_ids, 1, KEYS)
    return sum_heads(static.scale, start, q, lse, q_ids, *keys, interpret)[..., : k.shape[1]]


def pad_to_tiles(x: Float[Array, "b rows n x"], rows: int) -> Float[Array, "b rows n x"]:
    """Pads q or k with zeros to a multiple of `rows` and of 64 columns."""
    return pad_to_multiple(pad_to_multiple(x, 1, rows), 3, 64)


def sum_heads(
    scale: float,
    start: int | Int[Array, ""],
    q: Float[Array, "b t n x"],
    lse: Float[Array, "b t n"],
    q_ids: Int32[Array, "b t"],
    k: Float[Array, "b s m x"],
    k_ids: Int32[Array, "b s"],
    interpret: object,
) -> Float[Array, "b t s"]:
    """Returns float32[b t s], 0 where not visible.

    k is in `pad_to_tiles`. start: key index of query 0. q_ids and k_ids: segments.
    """
    # Pad to tiles.
    num_queries = q.shape[1]
    q, lse, q_ids = (
        pad_to_tiles(q, QUERIES),
        pad_to_multiple(lse, 1, QUERIES),
        pad_to_multiple(q_ids, 1, QUERIES),
    )
    (b, t, n, x), (_, s, m, _) = q.shape, k.shape
    width = 128 if x % 128 == 0 else 64  # columns of one product's contraction
    pieces = x // width
    start_array = jnp.asarray(start, jnp.int32).reshape(1)
    tile_is_visible = find_visible_tiles(start_array[0], q_ids, k_ids, QUERIES, KEYS).astype(
        jnp.int32
    )
    lse = LOG2E * lse.astype(jnp.float32).swapaxes(1, 2)
    row_of, column_of = hopper.ROW_OF, hopper.COLUMN_OF
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, lse_ref, start_ref, visible_ref, q_ids_ref, k_ids_ref, out_ref,
        q_ring, k_ring, q_full, q_free, full, free, turn,
    ):  # fmt: skip
        batch, column, tile = (lax.axis_index(name) for name in ("batch", "column", "tile"))
        role = lax.axis_index("role")
        heads = n * visible_ref[batch, tile, column]

        # Loader warpgroup: queries and keys of each head.
        def load():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, heads)
            def _(head):
                slot_of_queries = lax.rem(head, 2)
                pl.when(head >= 2)(lambda: plgpu.barrier_wait(q_free.at[slot_of_queries]))
                source = q_ref.at[batch, pl.ds(tile * QUERIES, QUERIES), head]
                plgpu.copy_gmem_to_smem(
                    source, q_ring.at[slot_of_queries], q_full.at[slot_of_queries]
                )

                @pl.loop(0, 2 * pieces)
                def _(piece):
                    step = 2 * pieces * head + piece
                    slot = lax.rem(step, RING)
                    pl.when(step >= RING)(lambda: plgpu.barrier_wait(free.at[slot]))
                    rows = pl.ds(column * KEYS + lax.div(piece, pieces) * HALF, HALF)
                    columns = pl.ds(lax.rem(piece, pieces) * width, width)
                    source = k_ref.at[batch, rows, lax.div(head, n // m), columns]
                    plgpu.copy_gmem_to_smem(source, k_ring.at[slot], full.at[slot])

            copied = 2 * pieces * heads
            pl.loop(0, jnp.minimum(heads, 2))(
                lambda slot_of_queries: plgpu.barrier_wait(q_free.at[slot_of_queries])
            )
            pl.loop(0, jnp.minimum(copied, RING))(lambda slot: plgpu.barrier_wait(free.at[slot]))

        # Compute warpgroups: probabilities, summed over heads.
        def add():
            plgpu.set_max_registers(240, action="increase")
            row_slice = pl.ds(role * 64, 64)
            rows = pl.ds(tile * QUERIES + role * 64, 64)
            shape = 64, HALF
            # The warpgroups take turns: the exponentials of one run during the products of the other.
            pl.when(role == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def yield_turn():
                plgpu.barrier_arrive(turn.at[1 - role])

            # Probabilities of one head, in two halves of the keys.
            def step(head, totals):
                slot_of_queries = lax.rem(head, 2)
                norm = hopper.broadcast_rows(
                    ops.load(lse_ref.at[batch, head, rows], (), row_of), shape
                )
                plgpu.barrier_wait(q_full.at[slot_of_queries])
                new_totals = []
                for half, total in enumerate(totals):
                    plgpu.barrier_wait(turn.at[role])
                    logits = ops.zeros(shape)
                    for piece in range(pieces):
                        slot = lax.rem((2 * head + half) * pieces + piece, RING)
                        plgpu.barrier_wait(full.at[slot])
                        on_issued = yield_turn if piece == pieces - 1 else lambda: None
                        queries = q_ring.at[slot_of_queries, row_slice, pl.ds(piece * width, width)]
                        keys = k_ring.at[slot]
                        logits = ops.dot(
                            logits, queries, keys, b_transposed=True, on_issued=on_issued
                        )
                        plgpu.barrier_arrive(free.at[slot])
                    if half == 1:
                        plgpu.barrier_arrive(q_free.at[slot_of_queries])
                    new_totals.append(total + jnp.exp2(logits * (scale * LOG2E) - norm))
                return new_totals

            totals = lax.fori_loop(0, heads, step, [ops.zeros(shape)] * 2)
            pl.when(role == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
            # Mask once, after the sum, and store.
            query = ops.cast(lax.iota(jnp.int32, 64), row_of)
            query = hopper.broadcast_rows(
                query + (start_ref[0] + tile * QUERIES + role * 64), shape
            )
            q_ids = hopper.broadcast_rows(ops.load(q_ids_ref.at[batch, rows], (), row_of), shape)
            for half, total in enumerate(totals):
                begin = column * KEYS + half * HALF
                columns = pl.ds(begin, HALF)
                key = ops.cast(lax.iota(jnp.int32, HALF), column_of) + begin
                key_ids = ops.load(k_ids_ref.at[batch, columns], (), column_of)
                key, key_ids = (hopper.broadcast_columns(a, shape) for a in (key, key_ids))
                mask = (key <= query) & (q_ids == key_ids) & (q_ids != 0)
                out_ref[batch, rows, columns] = jnp.where(mask, total, 0.0)

        lax.cond(role == 2, load, add)

    # Build and call the kernel.
    tiled = hopper.tile_transforms(q.dtype)
    total = hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="summed_attention_probs",
        out_type=jax.ShapeDtypeStruct((b, t, s), jnp.float32),
        grid=(b, s // KEYS, t // QUERIES),
        grid_names=("batch", "column", "tile"),
        num_threads=3,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True),
        scratch_types=[
            plgpu.SMEM((2, QUERIES, x), q.dtype, transforms=tiled),
            plgpu.SMEM((RING, HALF, width), q.dtype, transforms=tiled),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
            plgpu.Barrier(num_barriers=RING),
            plgpu.Barrier(num_barriers=RING, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(q, k, lse, start_array, tile_is_visible, q_ids, k_ids)
    return total[:, :num_queries]
