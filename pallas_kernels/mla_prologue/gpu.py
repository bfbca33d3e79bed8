"""MLA's projections before attention on Hopper: two products on tensor cores, with XLA between them.

The norms need whole rows of 2048 columns, which lie in as many as sixteen blocks: between the products they are
one pass of XLA over the latents, which are results anyway. For 8192 tokens of GLM-5 that pass moves 86 MB
beside 814 GFLOP, less than a fortieth of their time at datasheet rates; the queries, 268 MB, are rotated
before they are written. Few tokens read 32 MB of weights for the latents, and too few blocks of columns would
read it: there the width of the model is cut into parts, whose sums XLA adds in their order. The
cache's rows are written by XLA's scatter: it works in place where the cache is donated.

A projection's columns come in blocks of two warpgroups; the rotation is in the last 64 columns of a head,
de-interleaved by products with permutations, which are exact. Processors with neighbouring rows load
their common weights together; the emulator has no barrier for that and runs each processor alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, hopper
from pallas_kernels.pointwise import rms_norm, rotate

# Not measured; by registers, shared memory and the number of multiprocessors alone.
FEW_ROWS = 64  # with more, 128 rows by 128 columns for a warpgroup: 128 registers of sums
STEP = 64  # along the contraction: what 128 bytes of bfloat16 hold
READERS = 2  # warpgroups, with columns of their own
PIECE = 64  # columns that are written together; those at the end of a head hold what is rotated
BUDGET = hopper.SMEM_BYTES - 2048  # bytes of tiles: barriers and alignment take some
RING = 8  # steps in flight at most
BAND = 16  # blocks of rows whose blocks of columns are done one after another, for the second-level cache


def refuse(x, w, cache):
    """Why it cannot take x [b t d], these weights and a cache or None, or None."""
    q_a, q_b = w["q_a"], w["q_b"]
    d, q, head, c = q_a.shape[0], q_a.shape[1], q_b.shape[2], w["kv_a_norm"].shape[0]
    r = w["kv_a"].shape[1] - c
    if x.dtype not in (jnp.bfloat16, jnp.float32) or {v.dtype for v in w.values()} != {x.dtype}:
        return f"it takes inputs and weights all in bfloat16, not {x.dtype}"
    if x.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as the weights do"
    if any(size % STEP for size in (d, q, c)) or head % 128 or r > PIECE or r % 2:
        return (
            f"width {d}, query latent {q} and latent {c} must be multiples of {STEP}, head {head} "
            f"one of 128, and the rotated part {r} even and at most {PIECE}"
        )
    return None


def forward(static, x, w, cos, sin, cache, slots, *, interpret=False):
    """(c_q, q, latent, cache); see the package."""
    b, t, d = x.shape
    (q, n, head), c = w["q_b"].shape, w["kv_a_norm"].shape[0]
    downs = project(x.reshape(b * t, d), (w["q_a"], w["kv_a"]), interpret=interpret)
    c_q, kv = (y.reshape(b, t, -1) for y in downs)
    c_q, kv = c_q + w.get("q_a_bias", 0), kv + w.get("kv_a_bias", 0)
    c_q = rms_norm(c_q.astype(x.dtype), w["q_a_norm"], static.eps)
    c_kv, k_rope = jnp.split(kv.astype(x.dtype), [c], axis=-1)
    c_kv = rms_norm(c_kv, w["kv_a_norm"], static.eps)
    latent = jnp.concatenate([c_kv, rotate(k_rope, cos, sin)], axis=-1)
    turn = Turn(head, cos.reshape(b * t, -1), sin.reshape(b * t, -1))
    columns = w["q_b"].reshape(q, n * head)
    (queries,) = project(c_q.reshape(b * t, q), (columns,), turn, interpret=interpret)
    if cache is not None:
        row = jnp.where(slots < 0, cache.shape[0], slots).reshape(-1)
        rows = latent.reshape(-1, latent.shape[-1]).astype(cache.dtype)
        cache = cache.at[row].set(rows, mode="drop", unique_indices=True)
    return c_q, queries.reshape(b, t, n, head), latent, cache


class Turn(NamedTuple):
    """The rotation of the last columns of every `head` columns; cos, sin [m r/2]."""

    head: int
    cos: jax.Array
    sin: jax.Array

    def moves(self, dtype):
        """[2 PIECE PIECE], of which the first puts every number where it stays, the second its partner there.

        The last columns y become y moves[0] * cos + y moves[1] * sin, with those of `factors`.
        """
        half = self.cos.shape[1]
        column = np.arange(PIECE)
        pair = column - (PIECE - 2 * half)  # below zero: not rotated
        second = pair >= half
        even = column - pair + 2 * (pair - half * second)
        source = np.where(pair < 0, column, even + second)
        partner = np.where(pair < 0, column, even + ~second)
        sign = np.where(pair < 0, 0, np.where(second, 1, -1))
        rows = column[:, None]
        return np.stack([rows == source, (rows == partner) * sign]).astype(dtype)

    def factors(self, rows: int):
        """[2 rows PIECE], cosines and sines of every column, zeros in rows that are not there."""
        both = jnp.stack([self.cos, self.sin])
        m, half = both.shape[1:]
        both = jnp.concatenate([both, both], axis=2)
        both = jnp.pad(both, [(0, 0), (0, rows - m), (PIECE - 2 * half, 0)])
        # What is not rotated stays as it is.
        return both.at[0, :, : PIECE - 2 * half].set(1)


class Plan(NamedTuple):
    """Sizes of a product."""

    rows: int  # of a block
    width: int  # columns of a warpgroup
    row_blocks: int
    blocks: tuple  # of columns, of each of the weights
    parts: int  # of the contraction
    pair: int  # blocks of rows whose processors load their weights together
    head: int  # columns of which the last are turned, or 0

    @property
    def columns(self):
        """Columns of a block."""
        return READERS * self.width


def project(x, weights, turn: Turn | None = None, *, interpret):
    """x [m k] times each of weights [k n]: [m n] of its dtype, the last columns of every head turned."""
    (m, k), dtype = x.shape, x.dtype
    rows, width = (64, 64) if m <= FEW_ROWS else (128, 128)
    # Copies begin at multiples of 8 rows and 64 columns; the last block may begin within the one before.
    all_rows = max(-(-m // 8) * 8, rows)
    padded = [max(-(-w.shape[1] // 64) * 64, READERS * width) for w in weights]
    row_blocks = -(-all_rows // rows)
    blocks = tuple(-(-n // (READERS * width)) for n in padded)
    parts = 1
    if turn is None:
        most = max(1, hopper.MULTIPROCESSORS // (row_blocks * sum(blocks)))
        parts = next(p for p in range(most, 0, -1) if k // STEP % p == 0)
    # The emulator has no barrier of several processors.
    pair = 1 if interpret or row_blocks % 2 else 2
    plan = Plan(rows, width, row_blocks, blocks, parts, pair, turn.head if turn else 0)

    def pad(a, *shape):
        return jnp.pad(a, [(0, to - size) for size, to in zip(a.shape, shape)])

    tables = [] if turn is None else [turn.moves(dtype), turn.factors(all_rows)]
    out_dtype = jnp.float32 if parts > 1 else dtype
    outs = _call(plan, interpret)(
        pad(x, all_rows, k),
        [pad(w, k, n) for w, n in zip(weights, padded)],
        tables,
        [jax.ShapeDtypeStruct((parts, all_rows, n), out_dtype) for n in padded],
    )
    outs = [y[:, :m, : w.shape[1]] for y, w in zip(outs, weights)]
    return [y[0] if parts == 1 else jnp.sum(y, axis=0).astype(dtype) for y in outs]


def _call(plan: Plan, interpret):
    ops = hopper.Ops(interpret)
    rows, width, columns = plan.rows, plan.width, plan.columns

    def body(*refs, x_tiles, w_tiles, full, free, sums, moves=None, ready=None):
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
        here = pl.ds(jnp.minimum(row, x.shape[0] - rows), rows)
        ring = x_tiles.shape[0]
        steps = x.shape[1] // STEP // plan.parts

        def each_weight(act):
            """act(index, first column, first that no other block has) for this block's weights."""
            before = 0
            for i, (w, some) in enumerate(zip(weights, plan.blocks)):
                mine = (block >= before) & (block < before + some)
                begin = (block - before) * columns
                first = jnp.minimum(begin, w.shape[1] - columns)
                pl.when(mine)(lambda i=i, first=first, begin=begin: act(i, first, begin))
                before += some

        def load():
            plgpu.set_max_registers(40, action="decrease")
            for n in range(2 if tables else 0):
                plgpu.copy_gmem_to_smem(tables[0].at[n], moves.at[n], ready)

            def stream(i, first, _):
                @pl.loop(0, steps)
                def _(n):
                    slot = lax.rem(n, ring)
                    pl.when(n >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                    some = pl.ds((part * steps + n) * STEP, STEP)
                    plgpu.copy_gmem_to_smem(x.at[here, some], x_tiles.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        weights[i].at[some, pl.ds(first, columns)],
                        w_tiles.at[slot],
                        full.at[slot],
                        collective_axes="pair" if plan.pair > 1 else None,
                    )

            each_weight(stream)
            # Whoever reads there is done before this processor's memory is given to others.
            for n in range(max(0, steps - ring), steps):
                plgpu.barrier_wait(free.at[n % ring])

        def add():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(role * width, width)

            def step(n, acc):
                slot = lax.rem(n, ring)
                plgpu.barrier_wait(full.at[slot])
                acc = ops.dot(acc, x_tiles.at[slot], w_tiles.at[slot, :, mine])
                plgpu.barrier_arrive(free.at[slot])
                return acc

            y = lax.fori_loop(0, steps, step, ops.zeros((rows, width))).astype(sums.dtype)
            pieces = range(width // PIECE)
            for n in pieces:
                sums[role, n] = lax.slice(y, (0, n * PIECE), (rows, (n + 1) * PIECE))

            def turn():
                tail = lax.slice(y, (0, width - PIECE), (rows, width))
                turned = 0
                for n in range(2):
                    moved = ops.dot(ops.zeros((rows, PIECE)), tail, moves.at[n])
                    turned += moved * ops.load(tables[1].at[n, here]).astype(jnp.float32)
                sums[role, len(pieces) - 1] = turned.astype(sums.dtype)

            if tables:
                plgpu.barrier_wait(ready)
                first = jnp.minimum(block * columns, weights[0].shape[1] - columns)
                pl.when(lax.rem(first + (role + 1) * width, plan.head) == 0)(turn)
            plgpu.commit_smem()

            shared = plan.row_blocks * rows - x.shape[0]  # rows that the last two blocks have

            def send(i, first, begin):
                for n in pieces:
                    at = first + role * width + n * PIECE

                    def copy(own, i=i, n=n, at=at):
                        mine = pl.ds(here.start + own, rows - own)
                        to = outs[i].at[part, mine, pl.ds(at, PIECE)]
                        plgpu.copy_smem_to_gmem(sums.at[role, n, pl.ds(own, rows - own)], to)

                    last = (row + rows > x.shape[0]) & (shared > 0)
                    pl.when((at >= begin) & jnp.logical_not(last))(lambda copy=copy: copy(0))
                    if shared:
                        pl.when((at >= begin) & last)(lambda copy=copy: copy(shared))

            each_weight(send)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == READERS, load, add)

    def call(x, weights, tables, out_type):
        tiled, out_dtype = hopper.tiled(x.dtype), out_type[0].dtype
        taken = rows * columns * out_dtype.itemsize
        scratch = {}
        if tables:
            scratch["moves"] = plgpu.SMEM((2, PIECE, PIECE), x.dtype, transforms=tiled)
            scratch["ready"] = plgpu.Barrier(num_arrivals=2)
            taken += 2 * PIECE * PIECE * x.dtype.itemsize
        ring = (BUDGET - taken) // (STEP * (rows + columns) * x.dtype.itemsize)
        ring = min(max(ring, 2), RING)  # float32, which the emulator alone takes, may need more
        free = {"num_barriers": ring, "num_arrivals": READERS}
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
                    transforms=hopper.tiled(out_dtype),
                ),
            },
        )
        return kernel(x, *weights, *tables)

    return call
