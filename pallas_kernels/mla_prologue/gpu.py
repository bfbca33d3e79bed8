"""MLA's projections before attention on Hopper: two products on tensor cores, with XLA between them.

The norms need full rows of 2048 columns, which are spread over up to sixteen blocks. Between the products they
are one XLA pass over the latents, which are results anyway. For 8192 tokens of GLM-5 that pass moves 86 MB,
compared with 814 GFLOP: less than a fortieth of their time at datasheet rates. The queries, 268 MB, are rotated
before they are written. The cache's rows are written by XLA's scatter, in place if the cache is donated.

Grid of the product: (block of rows and columns, part of the contraction), in clusters of two blocks with neighbouring
rows, which load their common weights together; the emulator has no barrier for that and runs each processor separately.
A block is 128 rows by 256 columns. Few tokens (up to 64) read 32 MB of weights for the latents, and there are too few
blocks of columns to load them fast; then a block is 64 by 128, and the model width is split into parts, whose sums XLA
adds in order.

Shared memory, in bfloat16: a ring of three stages of rows [128 64] and weights [64 256] (144 KiB; eight of 24 KiB for
few tokens), results [2 2 128 64] (64 KiB), and for the rotation two permutations [64 64] (16 KiB). Registers: sums
float32[128 128] of each compute warpgroup, 128 per thread.

- A loader warpgroup fills the ring along the contraction.
- Two compute warpgroups, half of the columns each: multiply; rotate the last 64 columns of a head, which are
  de-interleaved by exact products with permutations; store 64 columns at a time.

Padding: rows to multiples of 8 and columns to multiples of 64; the last block begins within the one before it, and
stores only what that one does not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import backends, hopper
from pallas_kernels.pointwise import rms_norm, rotate

# Not measured; chosen by registers, shared memory and the number of multiprocessors.
FEW_ROWS = 64  # with more, a warpgroup has 128 rows by 128 columns: 128 registers of sums
STEP = 64  # along the contraction: 128 bytes of bfloat16
READERS = 2  # warpgroups, each with separate columns
PIECE = 64  # columns that are written together; the last piece of a head holds the rotated columns
BUDGET = hopper.SMEM_BYTES - 2048  # bytes of tiles, without barriers and alignment
RING = 8  # maximum number of steps in flight
BAND = 16  # blocks of rows whose blocks of columns are processed together, for the L2 cache


def unsupported_reason(
    x: Float[Array, "b t d"], w: dict[str, Array], cache: Float[Array, "rows c+r"] | None
) -> str | None:
    """Returns the reason why x [b t d], these weights and a cache or None are not supported, or None."""
    q_a, q_b = w["q_a"], w["q_b"]
    d, q, head, c = q_a.shape[0], q_a.shape[1], q_b.shape[2], w["kv_a_norm"].shape[0]
    r = w["kv_a"].shape[1] - c
    if x.dtype not in (jnp.bfloat16, jnp.float32) or {v.dtype for v in w.values()} != {x.dtype}:
        return f"inputs and weights must all be bfloat16, not {x.dtype}"
    if x.dtype == jnp.float32 and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu":
        return "tensor cores take no float32 in the memory order of the weights"
    if any(size % STEP for size in (d, q, c)) or head % 128 or r > PIECE or r % 2:
        return (
            f"width {d}, query latent {q} and latent {c} must be multiples of {STEP}, head {head} "
            f"one of 128, and the rotated part {r} even and at most {PIECE}"
        )
    return None


def forward(
    static,
    x: Float[Array, "b t d"],
    w: dict[str, Array],
    cos: Float[Array, "b t r/2"],
    sin: Float[Array, "b t r/2"],
    cache: Float[Array, "rows c+r"] | None,
    slots: Int[Array, "b t"] | None,
    *,
    interpret: object = False,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns (c_q, q, latent, cache); see the package."""
    b, t, d = x.shape
    (q, n, head), c = w["q_b"].shape, w["kv_a_norm"].shape[0]
    downs = project(x.reshape(b * t, d), (w["q_a"], w["kv_a"]), interpret=interpret)
    c_q, kv = (y.reshape(b, t, -1) for y in downs)
    c_q, kv = c_q + w.get("q_a_bias", 0), kv + w.get("kv_a_bias", 0)
    c_q = rms_norm(c_q.astype(x.dtype), w["q_a_norm"], static.eps)
    c_kv, k_rope = jnp.split(kv.astype(x.dtype), [c], axis=-1)
    c_kv = rms_norm(c_kv, w["kv_a_norm"], static.eps)
    latent = jnp.concatenate([c_kv, rotate(k_rope, cos, sin)], axis=-1)
    rotation = HeadRotation(head, cos.reshape(b * t, -1), sin.reshape(b * t, -1))
    columns = w["q_b"].reshape(q, n * head)
    (queries,) = project(c_q.reshape(b * t, q), (columns,), rotation, interpret=interpret)
    if cache is not None and slots is not None:
        row = jnp.where(slots < 0, cache.shape[0], slots).reshape(-1)
        rows = latent.reshape(-1, latent.shape[-1]).astype(cache.dtype)
        cache = cache.at[row].set(rows, mode="drop", unique_indices=True)
    return c_q, queries.reshape(b, t, n, head), latent, cache


class HeadRotation(NamedTuple):
    """Rotation of the last columns of every `head` columns; cos, sin [m r/2]."""

    head: int
    cos: jax.Array
    sin: jax.Array

    def permutations(self, dtype) -> np.ndarray:
        """Returns [2 PIECE PIECE]: the first keeps every number in its place, the second moves its partner there.

        The last columns y become y permutations[0] * cos + y permutations[1] * sin, with cos and sin of `factors`.
        """
        half = self.cos.shape[1]
        column = np.arange(PIECE)
        pair = column - (PIECE - 2 * half)  # below zero: not rotated
        is_second = pair >= half
        even = column - pair + 2 * (pair - half * is_second)
        source = np.where(pair < 0, column, even + is_second)
        partner = np.where(pair < 0, column, even + ~is_second)
        partner_sign = np.where(pair < 0, 0, np.where(is_second, 1, -1))
        rows = column[:, None]
        return np.stack([rows == source, (rows == partner) * partner_sign]).astype(dtype)

    def factors(self, rows: int) -> Array:
        """Returns [2 rows PIECE]: cosines and sines of every column, zeros in padding rows."""
        tables = jnp.stack([self.cos, self.sin])
        m, half = tables.shape[1:]
        tables = jnp.concatenate([tables, tables], axis=2)
        tables = jnp.pad(tables, [(0, 0), (0, rows - m), (PIECE - 2 * half, 0)])
        # Columns that are not rotated stay unchanged.
        return tables.at[0, :, : PIECE - 2 * half].set(1)


class ProjectionPlan(NamedTuple):
    """Sizes of a product."""

    rows: int  # rows of a block
    width: int  # columns of a warpgroup
    row_blocks: int
    blocks: tuple  # blocks of columns, per weight
    parts: int  # parts of the contraction
    pair: int  # blocks of rows whose processors load their weights together
    head: int  # columns of a head, the last of which are rotated; 0: none

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return READERS * self.width


def project(
    x: Float[Array, "m k"],
    weights: tuple[Array, ...],
    rotation: HeadRotation | None = None,
    *,
    interpret: object,
) -> list[Array]:
    """Returns x times each of the weights [k n], with the last columns of every head rotated.

    Results [m n] have the dtype of x.
    """
    # Tile sizes.
    (m, k), dtype = x.shape, x.dtype
    rows, width = (64, 64) if m <= FEW_ROWS else (128, 128)
    # Copies begin at multiples of 8 rows and 64 columns; the last block may begin within the one before.
    all_rows = max(-(-m // 8) * 8, rows)
    padded = [max(-(-w.shape[1] // 64) * 64, READERS * width) for w in weights]
    row_blocks = -(-all_rows // rows)
    blocks = tuple(-(-n // (READERS * width)) for n in padded)
    parts = 1
    if rotation is None:
        max_parts = max(1, hopper.MULTIPROCESSORS // (row_blocks * sum(blocks)))
        parts = next(p for p in range(max_parts, 0, -1) if k // STEP % p == 0)
    # The emulator has no barrier of several processors.
    pair = 1 if interpret or row_blocks % 2 else 2
    # Pad the operands and run the kernel.
    plan = ProjectionPlan(
        rows=rows,
        width=width,
        row_blocks=row_blocks,
        blocks=blocks,
        parts=parts,
        pair=pair,
        head=rotation.head if rotation else 0,
    )

    def pad(a, *shape):
        return jnp.pad(a, [(0, to - size) for size, to in zip(a.shape, shape)])

    tables = [] if rotation is None else [rotation.permutations(dtype), rotation.factors(all_rows)]
    out_dtype = jnp.float32 if parts > 1 else dtype
    outs = _call(plan, interpret)(
        pad(x, all_rows, k),
        [pad(w, k, n) for w, n in zip(weights, padded)],
        tables,
        [jax.ShapeDtypeStruct((parts, all_rows, n), out_dtype) for n in padded],
    )
    # Undo the padding and sum the parts.
    outs = [y[:, :m, : w.shape[1]] for y, w in zip(outs, weights)]
    return [y[0] if parts == 1 else jnp.sum(y, axis=0).astype(dtype) for y in outs]


def _call(plan: ProjectionPlan, interpret):
    ops = hopper.Ops(interpret)
    rows, width, columns = plan.rows, plan.width, plan.columns

    def body(
        *refs, x_tiles, w_tiles, full, free, sums, permutations: Any = None, ready: Any = None
    ):
        count = len(plan.blocks)
        x, weights, tables, outs = (
            refs[0],
            refs[1 : 1 + count],
            refs[1 + count : -count],
            refs[-count:],
        )
        role, part = lax.axis_index("role"), lax.axis_index("part")
        row_block, block = plgpu.planar_snake(
            lax.axis_index("block"),
            (plan.row_blocks // plan.pair, sum(plan.blocks)),
            0,
            BAND // plan.pair,
        )
        row = (row_block * plan.pair + lax.axis_index("pair")) * rows
        row_slice = pl.ds(jnp.minimum(row, x.shape[0] - rows), rows)
        ring = x_tiles.shape[0]
        steps = x.shape[1] // STEP // plan.parts

        # The block belongs to one of the weights.
        def for_each_weight(action):
            """Calls action(index, first column, first column that no other block has) for this block's weights."""
            first_block = 0
            for i, (w, depth_slice) in enumerate(zip(weights, plan.blocks)):
                my_columns = (block >= first_block) & (block < first_block + depth_slice)
                begin = (block - first_block) * columns
                first = jnp.minimum(begin, w.shape[1] - columns)
                pl.when(my_columns)(lambda i=i, first=first, begin=begin: action(i, first, begin))
                first_block += depth_slice

        # Loader warpgroup: inputs and weights along the contraction.
        def load():
            plgpu.set_max_registers(40, action="decrease")
            for n in range(2 if tables else 0):
                plgpu.copy_gmem_to_smem(tables[0].at[n], permutations.at[n], ready)

            def stream(i, first, _):
                @pl.loop(0, steps)
                def _(n):
                    slot = lax.rem(n, ring)
                    pl.when(n >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                    depth_slice = pl.ds((part * steps + n) * STEP, STEP)
                    plgpu.copy_gmem_to_smem(
                        x.at[row_slice, depth_slice], x_tiles.at[slot], full.at[slot]
                    )
                    plgpu.copy_gmem_to_smem(
                        weights[i].at[depth_slice, pl.ds(first, columns)],
                        w_tiles.at[slot],
                        full.at[slot],
                        collective_axes="pair" if plan.pair > 1 else None,
                    )

            for_each_weight(stream)
            # All reads must finish before this processor's memory is reused.
            for n in range(max(0, steps - ring), steps):
                plgpu.barrier_wait(free.at[n % ring])

        # Compute warpgroups: multiply, rotate and store.
        def add():
            plgpu.set_max_registers(232, action="increase")
            my_columns = pl.ds(role * width, width)

            # Multiply, and put the result into shared memory for rotation and store.
            def step(n, acc):
                slot = lax.rem(n, ring)
                plgpu.barrier_wait(full.at[slot])
                acc = ops.dot(acc, x_tiles.at[slot], w_tiles.at[slot, :, my_columns])
                plgpu.barrier_arrive(free.at[slot])
                return acc

            y = lax.fori_loop(0, steps, step, ops.zeros((rows, width))).astype(sums.dtype)
            pieces = range(width // PIECE)
            for n in pieces:
                sums[role, n] = lax.slice(y, (0, n * PIECE), (rows, (n + 1) * PIECE))

            # Rotates the last columns of a head.
            def rotate_tail():
                tail = lax.slice(y, (0, width - PIECE), (rows, width))
                rotated: Any = 0
                for n in range(2):
                    permuted = ops.dot(ops.zeros((rows, PIECE)), tail, permutations.at[n])
                    rotated += permuted * ops.load(tables[1].at[n, row_slice]).astype(jnp.float32)
                sums[role, len(pieces) - 1] = rotated.astype(sums.dtype)

            if tables:
                plgpu.barrier_wait(ready)
                first = jnp.minimum(block * columns, weights[0].shape[1] - columns)
                pl.when(lax.rem(first + (role + 1) * width, plan.head) == 0)(rotate_tail)
            plgpu.commit_smem()

            # Store, except for columns and rows that another block stores.
            shared = plan.row_blocks * rows - x.shape[0]  # rows that the last two blocks share

            def send(i, first, begin):
                for n in pieces:
                    column = first + role * width + n * PIECE

                    def copy(skipped, i=i, n=n, column=column):
                        my_columns = pl.ds(row_slice.start + skipped, rows - skipped)
                        target = outs[i].at[part, my_columns, pl.ds(column, PIECE)]
                        plgpu.copy_smem_to_gmem(
                            sums.at[role, n, pl.ds(skipped, rows - skipped)], target
                        )

                    last = (row + rows > x.shape[0]) & (shared > 0)
                    pl.when((column >= begin) & jnp.logical_not(last))(lambda copy=copy: copy(0))
                    if shared:
                        pl.when((column >= begin) & last)(lambda copy=copy: copy(shared))

            for_each_weight(send)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == READERS, load, add)

    # Scratch memory and call.
    def call(x, weights, tables, out_type):
        # The ring takes the shared memory that results and permutations leave.
        tiled, out_dtype = hopper.tile_transforms(x.dtype), out_type[0].dtype
        used_bytes = rows * columns * out_dtype.itemsize
        scratch = {}
        if tables:
            scratch["permutations"] = plgpu.SMEM((2, PIECE, PIECE), x.dtype, transforms=tiled)
            scratch["ready"] = plgpu.Barrier(num_arrivals=2)
            used_bytes += 2 * PIECE * PIECE * x.dtype.itemsize
        ring = (BUDGET - used_bytes) // (STEP * (rows + columns) * x.dtype.itemsize)
        ring = min(max(ring, 2), RING)  # float32, which only the emulator takes, may need more
        # With common weights, a stage is free when the readers of both processors have finished.
        free: Any = {"num_barriers": ring, "num_arrivals": READERS}
        if plan.pair > 1:
            free = plgpu.ClusterBarrier(collective_axes=("pair",), **free)
        else:
            free = plgpu.Barrier(**free)
        kernel = hopper.kernel(
            body,
            kernel_name="mla_project",
            interpret=interpret,
            out_type=tuple(out_type),
            grid=(plan.row_blocks // plan.pair * sum(plan.blocks), plan.parts),
            grid_names=("block", "part"),
            cluster=(plan.pair,),
            cluster_names=("pair",),
            num_threads=READERS + 1,
            thread_name="role",
            scratch_types=scratch
            | {
                "x_tiles": plgpu.SMEM((ring, rows, STEP), x.dtype, transforms=tiled),
                "w_tiles": plgpu.SMEM((ring, STEP, columns), x.dtype, transforms=tiled),
                "full": plgpu.Barrier(num_barriers=ring, num_arrivals=2),
                "free": free,
                "sums": plgpu.SMEM(
                    (READERS, width // PIECE, rows, PIECE),
                    out_dtype,
                    transforms=hopper.tile_transforms(out_dtype),
                ),
            },
        )
        return kernel(x, *weights, *tables)

    return call
