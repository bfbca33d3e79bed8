"""Kernel of rows times their groups' weights, and the shared parts of the grouped kernels.

Grid: (block,), one per multiprocessor, which goes through the tiles of the results: row tiles outside, column tiles
inside. Tiles that run at the same time read the same few groups' weights.

Shared memory, in bfloat16: a ring of four stages of rows [128 64] and weights [64 256] (192 KiB), or of three stages if
elementwise inputs take tiles too; two output tiles [64 64] per compute warpgroup (32 KiB). Registers: sums
float32[64 256] of each compute warpgroup, 128 per thread, split between the weights if several share the rows.

Phases of a program:

- Loader warpgroup: fills the ring along the contraction, also ahead into the next tile.
- Two compute warpgroups, 64 rows each: multiply, apply `finish` and store, 64 columns at a time.

A tile of rows belongs to one group. It begins where the group does, rounded down to a multiple of 8 rows, at which
copies must start. Rows of neighbouring groups in the tile are multiplied too, and not stored. No sum crosses tiles.

Padding: `gpu` pads rows to multiples of 8 and both widths to multiples of 64; copies beyond the last row give zeros.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import hopper

# Only these sizes are timed, on an H200 (2026-11-26, experiments/kernels_h200.jsonl). Four stages of 48 KB of operands
# (128 x 256 x 64) leave 32 KB for results.
HALF = 64  # rows of one warpgroup
ROWS = 2 * HALF
COLUMNS = 256
DEPTH = 64  # contraction per step of the ring: a row of 128 bytes of bfloat16
PIECE = 64  # columns that are stored together
EMULATED = 2  # blocks in the emulator, where each costs time
ALIGNED = 8  # copies take multiples of 8 rows
LOADER = 2  # the warpgroup that loads for the others


class RowTiles(NamedTuple):
    """Tiles of rows in their order.

    Attributes:
      count: int32[1], number of tiles of the groups.
      count_with_padding: int32[1], count and the tiles of the rows after the groups.
      group: int32[n], the group whose weights apply; e: rows without a group, which become zero.
      first: int32[n], first row of the tile, a multiple of ALIGNED.
      begin, end: int32[n], range of the group's rows within the tile.
    """

    count: jax.Array
    count_with_padding: jax.Array
    group: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array


def schedule_row_tiles(group_sizes: Int[Array, " e"], rows: int) -> RowTiles:
    """Returns the tiles of groups int32[e] of `rows` rows."""
    num_groups = group_sizes.shape[0]
    starts, ends = group_bounds(group_sizes, rows)
    starts = jnp.append(starts, ends[-1])
    ends = jnp.append(ends, rows)
    firsts = starts // ALIGNED * ALIGNED
    spans = jnp.where(ends > starts, -(-(ends - firsts) // ROWS), 0)
    stops = jnp.cumsum(spans, dtype=jnp.int32)
    max_entries = (rows + (num_groups + 1) * (ROWS + ALIGNED)) // ROWS
    entry = jnp.arange(max_entries, dtype=jnp.int32)
    group = jnp.sum(stops <= entry[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups)
    start, end, first, first_entry = jnp.stack([starts, ends, firsts, stops - spans])[:, group]
    first = first + ROWS * (entry - first_entry)
    begin, end = (jnp.clip(x - first, 0, ROWS) for x in (start, end))
    return RowTiles(
        count=stops[-2:-1],
        count_with_padding=stops[-1:],
        group=group,
        first=first,
        begin=begin,
        end=end,
    )


def group_bounds(
    group_sizes: Int[Array, " e"], rows: int
) -> tuple[Int32[Array, " e"], Int32[Array, " e"]]:
    """Returns (starts, ends) int32[e] of the groups."""
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]), ends


class OperandRing(NamedTuple):
    """Ring of operands in shared memory, one stage per step."""

    a: Any
    b: Any
    full: Any  # a barrier per stage: the operands have arrived
    free: Any  # a barrier per stage: both readers have finished

    def stage(self, i):
        """Returns the stage of step i."""
        return lax.rem(i, jnp.int32(self.a.shape[0]))

    def fill(self, i, copies: Callable) -> None:
        """Waits until the stage of step i is free, then copies the operands.

        copies(stage) yields (source, target).
        """
        stage = self.stage(i)

        @pl.when(i >= self.a.shape[0])
        def _():
            plgpu.barrier_wait(self.free.at[stage])

        for source, target in copies(stage):
            plgpu.copy_gmem_to_smem(source, target, self.full.at[stage])

    def wait(self, i):
        """Waits for the operands of step i and returns their stage."""
        stage = self.stage(i)
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, i) -> None:
        """Signals that this warpgroup has read the operands of step i."""
        plgpu.barrier_arrive(self.free.at[self.stage(i)])

    def drain(self, count) -> None:
        """Waits for the readers of the last of `count` steps; a waiting warpgroup must wait for all arrivals."""

        @pl.loop(0, jnp.minimum(count, self.a.shape[0]))
        def _(i):
            plgpu.barrier_wait(self.free.at[self.stage(i)])


def ring(
    stages: int, a: tuple[int, ...], b: tuple[int, ...], copies: int, dtype: DTypeLike
) -> OperandRing:
    """Returns the scratch types of a ring of tiles of the shapes a and b.

    copies: number of copies per step.
    """
    tiled = hopper.tile_transforms(dtype)
    return OperandRing(
        a=plgpu.SMEM((stages, *a), dtype, transforms=tiled),
        b=plgpu.SMEM((stages, *b), dtype, transforms=tiled),
        full=plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
    )


def output_tiles(dtype: DTypeLike):
    """Returns the scratch type of results that are being stored: two tiles per warpgroup."""
    return plgpu.SMEM((4, HALF, PIECE), dtype, transforms=hopper.tile_transforms(dtype))


def column_tile(n: int, max_columns: int = COLUMNS) -> int:
    """Returns the columns of a tile of n, which is a multiple of PIECE."""
    return next(c for c in (256, 128, PIECE) if c <= max_columns and n % c == 0)


def multiply(
    schedule: RowTiles,
    pairs: list[tuple[Array, Array]],
    finish: Callable = lambda sums: sums,
    outputs: int = 1,
    inputs: tuple[Array, ...] = (),
    *,
    fill: bool = False,
    joint: bool = False,
    transposed: bool = False,
    interpret: object,
) -> tuple[Float[Array, "m n"], ...]:
    """Returns a tuple of `outputs` arrays [m n]: finish(float32 sums of products, *inputs [m n]), piece by piece.

    pairs: (x [m k], w [e k n], or [e n k] if transposed). Their products are added to one sum.
    joint: all pairs have the same x, and each has its own sum.
    fill: rows after the groups become zero; otherwise they are not written.
    """
    # Sizes of the problem and of the launch.
    xs, ws = zip(*pairs)
    (m, k), num_groups = xs[0].shape, ws[0].shape[0]
    n, dtype = ws[0].shape[1 if transposed else 2], xs[0].dtype
    parts = len(pairs) if joint else 1
    terms = [(xs[0], ws)] if joint else [(x, (w,)) for x, w in pairs]
    columns = column_tile(n, COLUMNS // parts)
    tiles = n // columns
    steps = k // DEPTH
    num_tiles = schedule.group.shape[0] * tiles
    blocks = min(EMULATED if interpret else hopper.MULTIPROCESSORS, num_tiles)
    stages = 3 if inputs else 4
    ops = hopper.Ops(interpret)
    inputs_read = *(x for x, _ in terms), *inputs
    inputs_read = [pad_for_emulator(x) for x in inputs_read] if interpret else inputs_read
    num_terms, num_inputs = len(terms), len(inputs)

    def body(
        count, groups, firsts, begins, ends, *refs,
        operands, out_tiles, in_tiles: Any = None, in_ready: Any = None,
    ):  # fmt: skip
        x_refs, refs = refs[:num_terms], refs[num_terms:]
        input_refs, refs = refs[:num_inputs], refs[num_inputs:]
        w_refs, out_refs = refs[: num_terms * parts], refs[num_terms * parts :]
        block, role = lax.axis_index("block"), lax.axis_index("role")
        num_mine = lax.div(count[0] * tiles - block + (blocks - 1), blocks)

        # Tiles of this block.
        def tile_position(i):
            """Returns (group, first row, entry, first column, steps) of this block's tile i."""
            tile = block + i * blocks
            entry = lax.div(tile, tiles)
            group = groups[entry]
            length = jnp.where(group < num_groups, jnp.int32(num_terms * steps), 0)
            return group, firsts[entry], entry, lax.rem(tile, tiles) * columns, length

        # Copies the operands of one term of a tile.
        def feed(term, first_step, group, rows, column_slice):
            term_weights = w_refs[term * parts : (term + 1) * parts]

            @pl.loop(0, steps)
            def _(step):
                depth_slice = pl.ds(step * DEPTH, DEPTH)
                weight_slice = (
                    (group, column_slice, depth_slice)
                    if transposed
                    else (group, depth_slice, column_slice)
                )

                def copies(stage):
                    yield x_refs[term].at[rows, depth_slice], operands.a.at[stage]
                    for part, w in enumerate(term_weights):
                        yield w.at[weight_slice], operands.b.at[stage, part]

                operands.fill(first_step + step, copies)

        # Loader warpgroup: operands of all tiles.
        def load():
            plgpu.set_max_registers(40, action="decrease")

            def run_tile(i, first_step):
                group, first, _entry, column, length = tile_position(i)
                rows, column_slice = (
                    pl.ds(pl.multiple_of(first, ALIGNED), ROWS),
                    pl.ds(column, columns),
                )

                @pl.when(length > 0)
                def _():
                    for term in range(num_terms):
                        feed(term, first_step + term * steps, group, rows, column_slice)

                return first_step + length

            operands.drain(lax.fori_loop(0, num_mine, run_tile, jnp.int32(0)))

        # Compute warpgroups: multiply, finish and store piece by piece.
        def add():
            plgpu.set_max_registers(232, action="increase")
            half = pl.ds(role * HALF, HALF)

            def run_tile(i, first_step):
                _, first, entry, column, length = tile_position(i)
                first = pl.multiple_of(first + role * HALF, ALIGNED)
                begin, end = (jnp.clip(x[entry] - role * HALF, 0, HALF) for x in (begins, ends))

                def fetch_inputs(piece):
                    for n, ref in enumerate(input_refs):
                        source = ref.at[pl.ds(first, HALF), pl.ds(column + piece * PIECE, PIECE)]
                        slot = role * num_inputs + n
                        plgpu.copy_gmem_to_smem(source, in_tiles.at[slot], in_ready.at[role])

                fetch_inputs(0)  # arrives during the products

                # Products over the full contraction, in registers.
                def ready(step):
                    stage = operands.wait(first_step + step)
                    weights = [operands.b.at[stage, part] for part in range(parts)]
                    return operands.a.at[stage, half], weights

                sums = ops.sum_products(
                    [(HALF, columns)] * parts,
                    length,
                    ready,
                    lambda step: operands.release(first_step + step),
                    b_transposed=transposed,
                )
                # Finish and store 64 columns at a time, because registers are few.
                for piece in range(columns // PIECE):
                    input_values = []
                    if num_inputs:
                        plgpu.barrier_wait(in_ready.at[role])
                        for n in range(num_inputs):
                            input_values.append(ops.load(in_tiles.at[role * num_inputs + n]))
                        # The inputs are in registers, so the next ones can be fetched.
                        if piece + 1 < columns // PIECE:
                            plgpu.commit_smem()
                            fetch_inputs(piece + 1)
                    weight_slice = (0, piece * PIECE), (HALF, (piece + 1) * PIECE)
                    values = finish([lax.slice(s, *weight_slice) for s in sums], *input_values)
                    for n, (ref, value) in enumerate(zip(out_refs, values)):
                        store_piece(
                            ops,
                            out_tiles,
                            piece * outputs + n,
                            value.astype(dtype),
                            ref.at[pl.ds(first, HALF), pl.ds(column + piece * PIECE, PIECE)],
                            (begin, end),
                        )
                return first_step + length

            lax.fori_loop(0, num_mine, run_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == LOADER, load, add)

    # Scratch memory and call.
    b = (columns, DEPTH) if transposed else (DEPTH, columns)
    scratch = {
        "operands": ring(stages, (ROWS, DEPTH), (parts, *b), 1 + parts, dtype),
        "out_tiles": output_tiles(dtype),
    }
    if inputs:
        scratch |= {
            "in_tiles": plgpu.SMEM(
                (2 * num_inputs, HALF, PIECE), dtype, transforms=hopper.tile_transforms(dtype)
            ),
            "in_ready": plgpu.Barrier(num_barriers=2, num_arrivals=num_inputs),
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
        schedule.count_with_padding if fill else schedule.count,
        *schedule[2:],
        *inputs_read,
        *(w for _, several in terms for w in several),
    )


def pad_columns(x: Float[Array, "... n"], width: int) -> Float[Array, "... n"]:
    """Pads x [... n] with zeros to a multiple of width."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)]
    return jnp.pad(x, pad) if x.shape[-1] % width else x


def pad_for_emulator(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Appends a tile of rows to x.

    Copies beyond the last row give zeros on the chip, but fail in the emulator.
    """
    return jnp.pad(x, ((0, ROWS), (0, 0)), constant_values=jnp.nan)


def store_piece(
    ops: hopper.Ops,
    out_tiles: hopper.Ref,
    number: int,
    value: Float[Array, "half piece"],
    target: hopper.Ref,
    bounds: tuple | None = None,
) -> None:
    """Stores value [HALF PIECE] to target, or only the rows between the two `bounds`.

    It passes through this warpgroup's two shared tiles (see `output_tiles`) alternately; `number` counts the
    pieces of a
    tile.
    """
    plgpu.wait_smem_to_gmem(int(number > 0), wait_read_only=True)
    tile = out_tiles.at[2 * lax.axis_index("role") + number % 2]
    tile[...] = value
    plgpu.commit_smem()
    if bounds is None:
        return plgpu.copy_smem_to_gmem(tile, target)
    begin, end = bounds
    is_full = (begin == 0) & (end == HALF)
    aligned_rows = lax.div(begin + (ALIGNED - 1), ALIGNED), lax.div(end, ALIGNED)

    @pl.when(is_full)
    def _():
        plgpu.copy_smem_to_gmem(tile, target, commit_group=False)

    @pl.when(jnp.logical_not(is_full))
    def _():
        @pl.loop(*aligned_rows)
        def _(i):
            rows = pl.ds(pl.multiple_of(i * ALIGNED, ALIGNED), ALIGNED)
            plgpu.copy_smem_to_gmem(tile.at[rows], target.at[rows], commit_group=False)

    plgpu.commit_smem_to_gmem_group()

    @pl.when(lax.rem(begin, ALIGNED) + lax.rem(end, ALIGNED) > 0)
    def _():
        ops.store_rows(target, value, begin, end, [ALIGNED * i for i in aligned_rows])
