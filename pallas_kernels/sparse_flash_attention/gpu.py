"""Attention over selected latents on Hopper: gathered tiles in shared memory, products on tensor cores.

A block of 64 rows, GLM-5's 64 heads of one query, is what one multiprocessor can work on: its 64 x 512 sums
in float32 take half of the registers. A model with fewer heads puts several neighbouring queries into the
64 rows, which then share the union of their latents and mask by membership. So each row of 1152 bytes that
is gathered feeds 139 kFLOP (121 per byte), whatever the blocking; neighbouring queries run at the same time
on all multiprocessors, and it is the second-level cache that fetches their shared rows once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, hopper
from pallas_kernels.mask import HIDDEN
from pallas_kernels.sparse_flash_attention import ref
from pallas_kernels.sparse_flash_attention.gather import gather
from pallas_kernels.sparse_flash_attention.union import MOST_QUERIES, unite

ROWS = 64  # queries x heads of a block: the least that a tensor core instruction takes
TILE = 64  # latents at a time: two tiles of 72 KB beside 72 KB of queries
AHEAD = 2  # tiles whose row numbers are fetched before they are needed
LOG2E = 1.4426950408889634


def refuse(q, latents, topk, value_dim) -> str | None:
    """Why this form cannot take these arguments, or None."""
    if q.dtype != latents.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q {q.dtype}, latents {latents.dtype}; both must be bfloat16"
    if q.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "float32; tensor cores take no operand of 32 bits that lies as the values do"
    if q.shape[2] > ROWS:
        return f"{q.shape[2]} heads; {ROWS} at most"
    if _widths(q.shape[3], value_dim)[0] > 576:
        return f"latents of {q.shape[3]} columns; shared memory holds 576"
    return None


def forward(static, q, latents, topk, *, interpret=False):
    """As `ref.forward`."""
    (b, s, x), (t, n) = latents.shape, q.shape[1:3]
    x, y = _widths(x, static.value_dim)
    pad = [(0, 0)] * 2 + [(0, x - latents.shape[-1])]
    blocks = _Blocks(b, t, n)
    union = unite(topk, s, blocks.queries, TILE)
    rows = (union.rows + s * jnp.arange(b, dtype=jnp.int32)[:, None, None]).reshape(
        blocks.count, -1
    )
    out, lse, top = _attend(
        blocks.stack(q, x),
        jnp.pad(latents, pad).reshape(b * s, x),
        rows,
        union.members.reshape(blocks.count, -1),
        union.count.reshape(-1),
        blocks.bits(),
        scale=static.scale,
        value_dim=y,
        interpret=interpret,
    )
    out, lse, top = (blocks.unstack(each) for each in (out, lse[..., None], top[..., None]))
    return out[..., : static.value_dim], lse[..., 0], jnp.max(top)


class _Blocks:
    """How b x t queries of n heads lie in blocks of ROWS rows."""

    def __init__(self, b: int, t: int, n: int):
        self.b, self.t, self.n = b, t, n
        self.queries = min(ROWS // n, MOST_QUERIES)
        self.count = b * -(-t // self.queries)

    def stack(self, a, width: int):
        """[b t n w] as [count ROWS width], zeros where there is none."""
        short = self.count // self.b * self.queries - self.t
        a = jnp.pad(a, [(0, 0), (0, short), (0, 0), (0, width - a.shape[-1])])
        a = a.reshape(self.count, self.queries * self.n, width)
        return jnp.pad(a, [(0, 0), (0, ROWS - a.shape[1]), (0, 0)])

    def unstack(self, a):
        """[count ROWS w] as [b t n w]."""
        a = a[:, : self.queries * self.n]
        return a.reshape(self.b, -1, self.n, a.shape[-1])[:, : self.t]

    def bits(self):
        """int32[ROWS]: the bit of a row's query in the members of a union."""
        row = jnp.arange(ROWS, dtype=jnp.int32)
        return jnp.where(row < self.queries * self.n, jnp.left_shift(1, row // self.n), 0)


def _parts(width: int) -> int:
    """How many warpgroups share the sums of so many columns: a tensor core instruction has 256."""
    return -(-width // 256)


def _widths(x: int, y: int) -> tuple[int, int]:
    """Columns of latents and of values, padded so that each warpgroup has whole pieces of 64."""

    def padded(width: int) -> int:
        step = 64 * _parts(width)
        return step * -(-width // step)

    return padded(max(x, padded(y))), padded(y)


def _attend(q, latents, rows, members, count, bits, *, scale, value_dim, interpret):
    """(out [g r y], lse float32[g r], largest logit float32[g r]) of g blocks of r = ROWS rows.

    q [g r x]; latents [s x]; rows int32[g c] of them for a block, members int32[g c] with the bits of the
    queries that chose it, count int32[g] of those in use; bits int32[r].

    One warpgroup gathers tiles into a ring of two, one makes their probabilities, and the others each sum
    their own columns of the values: products of one tile run beside the softmax of the next.
    """
    blocks, _, x = q.shape
    parts = _parts(value_dim)
    part = value_dim // parts
    softmax, loader = parts, parts + 1
    row_of = hopper.WGMMA.reduce(1)  # a number per row of a tile in registers
    column_of = hopper.WGMMA.reduce(0)
    ops = hopper.Ops(interpret)

    def body(
        q_ref, latents_ref, rows_ref, members_ref, count_ref, bits_ref, out_ref, lse_ref, top_ref,
        queries, keys, weights, factors, picked, queries_in, full, free, weighed, taken, picked_in,
    ):  # fmt: skip
        block, role = lax.axis_index("block"), lax.axis_index("role")
        tiles = lax.div(count_ref[block] + (TILE - 1), TILE)

        def load():
            plgpu.set_max_registers(48, action="decrease")

            def pick(i):
                @pl.when(i < tiles)
                def _():
                    slot = lax.rem(i, AHEAD + 1)
                    source = rows_ref.at[block, pl.ds(i * TILE, TILE)]
                    plgpu.copy_gmem_to_smem(source, picked.at[slot], picked_in.at[slot])

            for i in range(AHEAD):
                pick(jnp.int32(i))

            @pl.loop(0, tiles)
            def _(i):
                pick(i + AHEAD)
                slot = lax.rem(i, AHEAD + 1)
                plgpu.barrier_wait(picked_in.at[slot])
                stage = lax.rem(i, 2)

                @pl.when(i >= 2)
                def _():
                    plgpu.barrier_wait(free.at[stage])

                gather(ops, latents_ref, picked.at[slot], keys.at[stage])
                plgpu.barrier_arrive(full.at[stage])

            # A barrier must be seen complete by all who wait for it.
            @pl.loop(0, jnp.minimum(tiles, 2))
            def _(stage):
                plgpu.barrier_wait(free.at[stage])

        def weigh():
            plgpu.set_max_registers(96, action="decrease")
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, queries_in)
            own = ops.load(bits_ref, layout=row_of)
            plgpu.barrier_wait(queries_in)

            def step(i, carry):
                top, total = carry
                chosen = ops.load(members_ref, (block, pl.ds(i * TILE, TILE)), layout=column_of)
                stage = lax.rem(i, 2)
                plgpu.barrier_wait(full.at[stage])
                shape = (ROWS, TILE)
                logits = ops.dot(ops.zeros(shape), queries, keys.at[stage], b_transposed=True)
                shared = lax.broadcast_in_dim(own, shape, [0]) & lax.broadcast_in_dim(
                    chosen, shape, [1]
                )
                logits = jnp.where(shared != 0, logits * scale, HIDDEN)
                new = jnp.maximum(top, jnp.max(logits, axis=1))
                p = jnp.exp2((logits - lax.broadcast_in_dim(new, shape, [0])) * LOG2E)
                factor = jnp.exp2((top - new) * LOG2E)
                total = total * factor + jnp.sum(p, axis=1)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(taken)

                weights[...] = p.astype(weights.dtype)
                factors[...] = factor
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighed)
                return new, total

            start = ops.full((ROWS,), HIDDEN, layout=row_of), ops.zeros((ROWS,), layout=row_of)
            top, total = lax.fori_loop(0, tiles, step, start)
            seen = top > HIDDEN / 2

            @pl.when(tiles > 0)
            def _():
                plgpu.barrier_wait(taken)

            factors[...] = jnp.where(seen, 1 / total, 0.0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighed)
            lse_ref[block, :] = jnp.where(seen, top + jnp.log(total), jnp.inf)
            top_ref[block, :] = top

        def sum_values():
            plgpu.set_max_registers(184, action="increase")
            columns = pl.ds(role * part, part)

            def step(i, acc):
                plgpu.barrier_wait(weighed)
                factor = ops.load(factors, layout=row_of)
                acc = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
                stage = lax.rem(i, 2)
                acc = ops.dot(acc, weights, keys.at[stage, :, columns], most=128)
                plgpu.barrier_arrive(taken)
                plgpu.barrier_arrive(free.at[stage])
                return acc

            acc = lax.fori_loop(0, tiles, step, ops.zeros((ROWS, part)))
            plgpu.barrier_wait(weighed)
            factor = ops.load(factors, layout=row_of)
            # All logits are made: the queries' place holds the outcome on its way out.
            outcome = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(q.dtype)
            queries[:, columns] = outcome
            plgpu.commit_smem()
            for row in range(0, ROWS, 8):  # a copy takes memory without gaps: one row of pieces
                place = pl.ds(row, 8), columns
                plgpu.copy_smem_to_gmem(queries.at[place], out_ref.at[block, *place])
            plgpu.wait_smem_to_gmem(0)

        # One branch of one choice each, or the compiler gives every role the same registers.
        lax.cond(role == loader, load, lambda: lax.cond(role == softmax, weigh, sum_values))

    tiled = hopper.tiled(q.dtype)
    kernel = hopper.kernel(
        body,
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((blocks, ROWS, value_dim), q.dtype),
            jax.ShapeDtypeStruct((blocks, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((blocks, ROWS), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=parts + 2,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types=[
            plgpu.SMEM((ROWS, x), q.dtype, transforms=tiled),
            plgpu.SMEM((2, TILE, x), q.dtype, transforms=tiled),
            plgpu.SMEM((ROWS, TILE), q.dtype, transforms=tiled),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((AHEAD + 1, TILE), jnp.int32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=parts),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=parts),
            plgpu.Barrier(num_barriers=AHEAD + 1),
        ],
    )
    return kernel(q, latents, rows, members, count, bits)


def backward(static, saved, dout, *, interpret=False):
    """As `ref.backward`, which it is."""
    return ref.backward(static, saved, dout)
