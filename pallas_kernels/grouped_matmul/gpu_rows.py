"""The kernel of rows times their groups' weights, and what the kernels of grouped products share.

One block per multiprocessor goes through the tiles of the results, row tiles outside, column tiles inside: those
that run at the same time read the same few groups' weights. Of its warpgroups one feeds a ring of
shared memory, also ahead into the next tile, and two multiply 64 rows each.

A tile of rows belongs to one group and begins where the group does, down to a multiple of 8 rows, from which
copies must start: rows that are its neighbours' are multiplied too, and not stored.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper

# Timed on an H200 (2026-11-26, experiments/kernels_h200.jsonl), other sizes were not: 48 KB of operands for each 128 x 256 x 64, four times, leave 32 KB for results on their way.
HALF = 64  # rows of one warpgroup
ROWS = 2 * HALF
COLUMNS = 256
DEPTH = 64  # of a step of the ring: a row of 128 bytes of bfloat16
PIECE = 64  # columns that leave together
EMULATED = 2  # blocks in the emulator, where each costs time
ALIGNED = 8  # rows of which copies take multiples
LOADER = 2  # the warpgroup that feeds the others


class Work(NamedTuple):
    """Tiles of rows in their order: `count` int32[1] of the groups, `all` with those of rows behind them.

    group int32[n]: whose weights; e: nobody's rows, which become zero. first: the row where the tile
    begins, a multiple of ALIGNED. begin, end: which of its rows are the group's.
    """

    count: jax.Array
    all: jax.Array
    group: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array


def work_of(group_sizes, rows: int) -> Work:
    """The tiles of groups int32[e] of `rows` rows."""
    num_groups = group_sizes.shape[0]
    starts, ends = bounds_of(group_sizes, rows)
    starts = jnp.append(starts, ends[-1])
    ends = jnp.append(ends, rows)
    firsts = starts // ALIGNED * ALIGNED
    spans = jnp.where(ends > starts, -(-(ends - firsts) // ROWS), 0)
    stops = jnp.cumsum(spans, dtype=jnp.int32)
    most = (rows + (num_groups + 1) * (ROWS + ALIGNED)) // ROWS
    entry = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(stops <= entry[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups)
    start, end, first, before = jnp.stack([starts, ends, firsts, stops - spans])[:, group]
    first = first + ROWS * (entry - before)
    begin, end = (jnp.clip(x - first, 0, ROWS) for x in (start, end))
    return Work(stops[-2:-1], stops[-1:], group, first, begin, end)


def bounds_of(group_sizes, rows: int):
    """(starts, ends) int32[e] of the groups."""
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]), ends


class Ring(NamedTuple):
    """Operands on their way, a stage for each step: refs of shared memory."""

    a: Any
    b: Any
    full: Any  # a barrier per stage: they are there
    free: Any  # a barrier per stage: both readers are done with them

    def stage(self, i):
        """The place of step i."""
        return lax.rem(i, jnp.int32(self.a.shape[0]))

    def fill(self, i, copies):
        """Copies operands to the place of step i, when it is free: copies(stage) gives (from, to)."""
        stage = self.stage(i)

        @pl.when(i >= self.a.shape[0])
        def _():
            plgpu.barrier_wait(self.free.at[stage])

        for source, target in copies(stage):
            plgpu.copy_gmem_to_smem(source, target, self.full.at[stage])

    def wait(self, i):
        """The place of step i, when its operands are there."""
        stage = self.stage(i)
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, i):
        """Says that this warpgroup has read the operands of step i."""
        plgpu.barrier_arrive(self.free.at[self.stage(i)])

    def drain(self, count):
        """Waits for the readers of the last of `count` steps: who waits for a barrier must see all of it."""

        @pl.loop(0, jnp.minimum(count, self.a.shape[0]))
        def _(i):
            plgpu.barrier_wait(self.free.at[self.stage(i)])


def ring(stages: int, a, b, copies: int, dtype) -> Ring:
    """The scratch types of a ring of tiles of the shapes a and b, filled by so many copies a step."""
    tiled = hopper.tiled(dtype)
    return Ring(
        plgpu.SMEM((stages, *a), dtype, transforms=tiled),
        plgpu.SMEM((stages, *b), dtype, transforms=tiled),
        plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        plgpu.Barrier(num_barriers=stages, num_arrivals=2),
    )


def exits(dtype):
    """The scratch type for results on their way: two tiles for each of the two warpgroups."""
    return plgpu.SMEM((4, HALF, PIECE), dtype, transforms=hopper.tiled(dtype))


def column_tile(n: int, most: int = COLUMNS) -> int:
    """Columns of a tile of n, which is a multiple of PIECE."""
    return next(c for c in (256, 128, PIECE) if c <= most and n % c == 0)


def multiply(
    work,
    pairs,
    finish=lambda sums: sums,
    outputs: int = 1,
    inputs=(),
    *,
    fill=False,
    joint=False,
    transposed=False,
    interpret,
):
    """Tuple of so many outputs [m n]: finish(float32 sums of products, *inputs [m n]), piece by piece.

    pairs: (x [m k], w [e k n], or [e n k] if transposed), whose products are added up to one sum; joint:
    all have the same x, and each has a sum of its own. fill: rows behind the groups become zero, which
    otherwise are not written.
    """
    xs, ws = zip(*pairs)
    (m, k), num_groups = xs[0].shape, ws[0].shape[0]
    n, dtype = ws[0].shape[1 if transposed else 2], xs[0].dtype
    parts = len(pairs) if joint else 1
    terms = [(xs[0], ws)] if joint else [(x, (w,)) for x, w in pairs]
    columns = column_tile(n, COLUMNS // parts)
    tiles = n // columns
    steps = k // DEPTH
    most = work.group.shape[0] * tiles
    blocks = min(EMULATED if interpret else hopper.MULTIPROCESSORS, most)
    stages = 3 if inputs else 4
    ops = hopper.Ops(interpret)
    read = *(x for x, _ in terms), *inputs
    read = [reachable(x) for x in read] if interpret else read
    num_terms, num_inputs = len(terms), len(inputs)

    def body(
        count, groups, firsts, begins, ends, *refs,
        operands, leaving, entering=None, entered=None,
    ):  # fmt: skip
        x_refs, refs = refs[:num_terms], refs[num_terms:]
        input_refs, refs = refs[:num_inputs], refs[num_inputs:]
        w_refs, out_refs = refs[: num_terms * parts], refs[num_terms * parts :]
        block, role = lax.axis_index("block"), lax.axis_index("role")
        mine = lax.div(count[0] * tiles - block + (blocks - 1), blocks)

        def place(i):
            """(group, first row, entry, first column, steps) of this block's tile i."""
            tile = block + i * blocks
            entry = lax.div(tile, tiles)
            group = groups[entry]
            length = jnp.where(group < num_groups, jnp.int32(num_terms * steps), 0)
            return group, firsts[entry], entry, lax.rem(tile, tiles) * columns, length

        def feed(term, at, group, rows, across):
            own = w_refs[term * parts : (term + 1) * parts]

            @pl.loop(0, steps)
            def _(step):
                deep = pl.ds(step * DEPTH, DEPTH)
                some = (group, across, deep) if transposed else (group, deep, across)

                def copies(stage):
                    yield x_refs[term].at[rows, deep], operands.a.at[stage]
                    for part, w in enumerate(own):
                        yield w.at[some], operands.b.at[stage, part]

                operands.fill(at + step, copies)

        def load():
            plgpu.set_max_registers(40, action="decrease")

            def one(i, at):
                group, first, _, column, length = place(i)
                rows, across = pl.ds(pl.multiple_of(first, ALIGNED), ROWS), pl.ds(column, columns)

                @pl.when(length > 0)
                def _():
                    for term in range(num_terms):
                        feed(term, at + term * steps, group, rows, across)

                return at + length

            operands.drain(lax.fori_loop(0, mine, one, jnp.int32(0)))

        def add():
            plgpu.set_max_registers(232, action="increase")
            half = pl.ds(role * HALF, HALF)

            def one(i, at):
                _, first, entry, column, length = place(i)
                first = pl.multiple_of(first + role * HALF, ALIGNED)
                begin, end = (jnp.clip(x[entry] - role * HALF, 0, HALF) for x in (begins, ends))

                def bring(piece):
                    for n, ref in enumerate(input_refs):
                        source = ref.at[pl.ds(first, HALF), pl.ds(column + piece * PIECE, PIECE)]
                        slot = role * num_inputs + n
                        plgpu.copy_gmem_to_smem(source, entering.at[slot], entered.at[role])

                bring(0)

                def ready(step):
                    stage = operands.wait(at + step)
                    weights = [operands.b.at[stage, part] for part in range(parts)]
                    return operands.a.at[stage, half], weights

                sums = ops.sum_products(
                    [(HALF, columns)] * parts,
                    length,
                    ready,
                    lambda step: operands.release(at + step),
                    b_transposed=transposed,
                )
                for piece in range(columns // PIECE):
                    given = []
                    if num_inputs:
                        plgpu.barrier_wait(entered.at[role])
                        for n in range(num_inputs):
                            given.append(ops.load(entering.at[role * num_inputs + n]))
                        # They are in registers: the next may come.
                        if piece + 1 < columns // PIECE:
                            plgpu.commit_smem()
                            bring(piece + 1)
                    some = (0, piece * PIECE), (HALF, (piece + 1) * PIECE)
                    values = finish([lax.slice(s, *some) for s in sums], *given)
                    for n, (ref, value) in enumerate(zip(out_refs, values)):
                        send(
                            ops,
                            leaving,
                            piece * outputs + n,
                            value.astype(dtype),
                            ref.at[pl.ds(first, HALF), pl.ds(column + piece * PIECE, PIECE)],
                            (begin, end),
                        )
                return at + length

            lax.fori_loop(0, mine, one, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == LOADER, load, add)

    b = (columns, DEPTH) if transposed else (DEPTH, columns)
    scratch = {
        "operands": ring(stages, (ROWS, DEPTH), (parts, *b), 1 + parts, dtype),
        "leaving": exits(dtype),
    }
    if inputs:
        scratch |= {
            "entering": plgpu.SMEM(
                (2 * num_inputs, HALF, PIECE), dtype, transforms=hopper.tiled(dtype)
            ),
            "entered": plgpu.Barrier(num_barriers=2, num_arrivals=num_inputs),
        }
    kernel = hopper.kernel(
        body,
        kernel_name="grouped_matmul",
        interpret=interpret,
        out_type=tuple(jax.ShapeDtypeStruct((m, n), dtype) for _ in range(outputs)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True),
        scratch_types=scratch,
    )
    return kernel(
        work.all if fill else work.count,
        *work[2:],
        *read,
        *(w for _, several in terms for w in several),
    )


def widened(x, width: int):
    """x [... n] with zeros up to a multiple of width."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)]
    return jnp.pad(x, pad) if x.shape[-1] % width else x


def reachable(x):
    """x with a tile of rows behind it: the chip's copies give zeros beyond the last row, the emulator's fail."""
    return jnp.pad(x, ((0, ROWS), (0, 0)), constant_values=jnp.nan)


def send(ops, leaving, turn: int, value, to, own=None):
    """to = value [HALF PIECE], or those rows of it between the two of own; turn counts those of a tile.

    On its way it is in one of this warpgroup's two shared tiles (see `exits`), taken in turn.
    """
    plgpu.wait_smem_to_gmem(int(turn > 0), wait_read_only=True)
    tile = leaving.at[2 * lax.axis_index("role") + turn % 2]
    tile[...] = value
    plgpu.commit_smem()
    if own is None:
        return plgpu.copy_smem_to_gmem(tile, to)
    begin, end = own
    whole = (begin == 0) & (end == HALF)
    inner = lax.div(begin + (ALIGNED - 1), ALIGNED), lax.div(end, ALIGNED)

    @pl.when(whole)
    def _():
        plgpu.copy_smem_to_gmem(tile, to, commit_group=False)

    @pl.when(jnp.logical_not(whole))
    def _():
        @pl.loop(*inner)
        def _(i):
            rows = pl.ds(pl.multiple_of(i * ALIGNED, ALIGNED), ALIGNED)
            plgpu.copy_smem_to_gmem(tile.at[rows], to.at[rows], commit_group=False)

    plgpu.commit_smem_to_gmem_group()

    @pl.when(lax.rem(begin, ALIGNED) + lax.rem(end, ALIGNED) > 0)
    def _():
        ops.store_rows(to, value, begin, end, [ALIGNED * i for i in inner])
