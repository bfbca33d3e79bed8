"""Int8 rows times int4 weights on Hopper: weight columns are the left operand, unpacked in registers.

Weights are loaded packed, half a byte each, and become left operands of tensor cores in registers (see
`int4_layout`). Rows of activations are the right operand in shared memory, so that few rows waste little: the
minimum is 8.

Grid: (multiprocessor,). A block of 256 columns, or of 64 if there are few, is paired with a tile of up to 128 rows of
one expert. Each multiprocessor processes its share of the (block, tile) pairs, an expert's pairs one after another.

Shared memory, for 128 rows in bfloat16 results and groups of 128: a ring of four stages of rows int8[128 128], packed
weights int8[64 256] and scales float32[256] (132 KiB), and results [2 128 128] (64 KiB). Registers: two sums float32[64
128] per compute warpgroup, 128 per thread, and one product of the same size in flight.

- A loader warpgroup fills the ring, also ahead into the next pairs.
- One or two compute warpgroups, with separate columns: unpack a group, multiply, scale by column and add. Then scale by
  row, reorder the columns and store.

Within a weight group sums are integers, sixteenfold as in `tpu`; the groups are added in float32 in their order.

Padding: columns to full blocks at every call, and rows to a multiple of 8; a tile stores only its expert's rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int8, Int32

from pallas_kernels import compat, hopper
from pallas_kernels.w4a8_matmul import int4_layout

# Only these sizes are timed, on an H200 (2026-11-26, experiments/kernels_h200.jsonl). They follow from registers,
# shared memory and the number of multiprocessors.
STEP = 2 * int4_layout.ROWS  # weight rows per step
MIN_ROWS, MAX_ROWS = 8, 128  # activation rows in a tile: 128 take 128 registers of sums
# With fewer weight columns, blocks have the minimum width.
FEW_COLUMNS = 128 * hopper.MULTIPROCESSORS
SUMS = 384  # numbers that fit the registers of two threads: totals, and products in flight
MAX_GROUPS = 4  # maximum number of groups whose products are in flight
BUDGET = hopper.SMEM_BYTES - 2048  # bytes of tiles, without barriers and alignment
RING = 16  # maximum number of steps in flight


def unsupported_reason(
    x: Int8[Array, "m k"], w: Int8[Array, "..."], w_scale: Float[Array, "..."]
) -> str | None:
    """Returns the reason why these rows and weights are not supported, or None."""
    k, groups = x.shape[1], w_scale.shape[-2]
    group = k // groups
    if group % STEP or group > 1024:
        return f"groups of {group} rows of weights; it takes 128 to 1024, in steps of 128"
    return None


class W4A8Plan(NamedTuple):
    """Sizes of a call."""

    rows: int  # activation rows in a tile
    vector: int  # columns of a thread
    readers: int  # warpgroups, each with separate columns
    products_in_flight: int
    groups_per_step: int  # groups that are unpacked in one loop iteration
    group: int
    groups: int
    ring: int
    experts: int
    blocks: int  # of columns

    @property
    def width(self) -> int:
        """Columns of a warpgroup."""
        return int4_layout.WIDTHS[self.vector]

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.readers * self.width

    @property
    def pieces(self) -> int:
        """Copies of a step's activations: those of the low integers and of the high ones may be apart."""
        return 1 if self.group == STEP else 2


def forward(
    static,
    x: Int8[Array, "m k"],
    x_scale: Float[Array, " m"],
    w: Int8[Array, "..."],
    w_scale: Float[Array, "..."],
    group_sizes: Int[Array, " e"] | None,
    *,
    interpret: object = False,
) -> Float[Array, "m n"]:
    """Returns [m n]; group_sizes None: weights without a leading expert axis."""
    if group_sizes is None:
        w, w_scale = w[None], w_scale[None]
        group_sizes = jnp.full(1, x.shape[0], jnp.int32)
    return _multiply(static, interpret)(x, x_scale, w, w_scale, group_sizes)


def _multiply(static, interpret):
    # Sequential, because a list of tiles cannot have a batch dimension.
    @jax.custom_batching.sequential_vmap
    def multiply(x, x_scale, w, w_scale, group_sizes):
        m, n = x.shape[0], w.shape[2]
        plan = make_plan(x, w_scale, static)
        rows, columns = max(-(-m // 8) * 8, plan.rows), plan.blocks * plan.columns
        entries = _entries(group_sizes, m, plan.rows)
        filled = jnp.arange(m) < jnp.sum(group_sizes)
        x_scale = jnp.where(filled, x_scale / 16, 0)
        x = jnp.pad(x, [(0, rows - m), (0, 0)])
        x_scale = jnp.pad(x_scale, (0, rows - m))
        w, w_scale = (jnp.pad(a, [(0, 0), (0, 0), (0, columns - n)]) for a in (w, w_scale))
        out = _call(plan, static.out_dtype, interpret)(x, x_scale, w, w_scale, *entries)
        return out[:m, :n]

    return multiply


def make_plan(x: Int8[Array, "m k"], w_scale: Float[Array, "e groups n"], static) -> W4A8Plan:
    """Returns the tile sizes of a call."""
    # Rows of a tile.
    m, k, (experts, groups, n) = static.expected_rows, x.shape[1], w_scale.shape
    group = k // groups
    if experts == 1:  # for int8, tensor cores take no odd multiple of 8 above 24
        rows = -(-m // 8) * 8 if m <= 24 else -(-m // 16) * 16
    else:  # above the mean, and the first row may be the last of eight
        rows = -(-m * 5 // (4 * experts) // 16) * 16 + 16
    # In longer groups the integer sums of all columns exist at the same time.
    rows = min(max(rows, MIN_ROWS), MAX_ROWS if group == STEP else MAX_ROWS // 2)
    # With few rows the weights' bandwidth grows with the number of multiprocessors that load: hence narrow blocks.
    vector, readers = (2, 1) if n * experts * -(-m // MAX_ROWS) < FEW_COLUMNS else (4, 2)
    columns = readers * int4_layout.WIDTHS[vector]
    # Products in flight, limited by registers.
    operands = vector // 2
    products_in_flight = SUMS // rows - operands
    groups_per_step = min(max(1, products_in_flight // operands), MAX_GROUPS)
    groups_per_step = (
        1 if group > STEP else next(u for u in range(groups_per_step, 0, -1) if groups % u == 0)
    )
    products_in_flight = min(products_in_flight, groups_per_step * operands)
    # Stages of the ring, limited by shared memory.
    step = int4_layout.ROWS * columns + rows * STEP + 4 * columns
    ring = (BUDGET - rows * columns * static.out_dtype.itemsize) // step
    ring = min(ring, RING)
    blocks = -(-n // columns)
    return W4A8Plan(
        rows=rows,
        vector=vector,
        readers=readers,
        products_in_flight=products_in_flight,
        groups_per_step=groups_per_step,
        group=group,
        groups=groups,
        ring=ring,
        experts=experts,
        blocks=blocks,
    )


class RowTileEntries(NamedTuple):
    """Tiles of rows, expert by expert, followed by tiles of the rows that no expert has.

    Tiles start at a multiple of 8 rows, where copies can start.

    Attributes, int32 per tile:
      expert: expert of the tile.
      first: first tile of the same expert.
      several: number of tiles of the same expert.
      begin, end: range of the expert's rows.
      count: int32[1], number of tiles.
    """

    expert: jax.Array
    first: jax.Array
    several: jax.Array
    begin: jax.Array
    end: jax.Array
    count: jax.Array


def _entries(group_sizes, m: int, rows: int) -> RowTileEntries:
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), m)
    ends = jnp.append(ends, m)
    begins = jnp.append(0, ends[:-1])
    several = jnp.where(ends > begins, -(-(ends - begins // 8 * 8) // rows), 0)
    stops = jnp.cumsum(several, dtype=jnp.int32)
    groups = ends.shape[0]
    tile = jnp.arange((m + 7 * groups) // rows + groups, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(stops <= tile[:, None], axis=1, dtype=jnp.int32), groups - 1)
    return RowTileEntries(
        expert=expert,
        first=(stops - several)[expert],
        several=several[expert],
        begin=begins[expert],
        end=ends[expert],
        count=stops[-1:],
    )


def _call(plan: W4A8Plan, out_dtype, interpret):
    ops = hopper.Ops(interpret)
    steps = plan.groups * plan.group // STEP
    along_columns = hopper.COLUMN_OF

    def body(
        x, x_scale, w, w_scale, expert, first, several, begin, end, count, out,
        *, x_tiles, w_tiles, scales, full, free, tiles,
    ):  # fmt: skip
        role, processor = lax.axis_index("role"), lax.axis_index("processor")
        pairs = count[0] * plan.blocks

        # Pairs of this processor.
        def for_each_pair(action, carry):
            """Calls action(block of columns, expert, bounds, carry) for this processor's pairs.

            bounds: (start, begin, end) of the expert's rows.
            """

            def run_pair(i, carry):
                pair = processor + i * lax.axis_size("processor")
                entry = lax.div(pair, plan.blocks)
                number = pair - first[entry] * plan.blocks
                block = lax.div(number, several[entry])
                tile = lax.rem(number, several[entry])
                start = lax.div(begin[entry], 8) * 8 + tile * plan.rows
                bounds = (
                    jnp.minimum(start, x.shape[0] - plan.rows),
                    jnp.maximum(start, begin[entry]),
                    jnp.minimum(start + plan.rows, end[entry]),
                )
                return action(block, expert[entry], bounds, carry)

            size = lax.axis_size("processor")
            return lax.fori_loop(0, lax.div(pairs - processor + size - 1, size), run_pair, carry)

        # Loader warpgroup: packed weights, scales and activations.
        def load():
            plgpu.set_max_registers(24, action="decrease")

            def run_pair(block, expert_id, bounds, steps_done):
                columns = pl.ds(block * plan.columns, plan.columns)
                rows = pl.ds(bounds[0], plan.rows)

                # Weights and scales of a step, and the activations that its low and its high integers multiply.
                def step(i, n):
                    slot = lax.rem(n, plan.ring)
                    pl.when(n >= plan.ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                    packed = pl.ds(i * int4_layout.ROWS, int4_layout.ROWS)
                    plgpu.copy_gmem_to_smem(
                        w.at[expert_id, packed, columns], w_tiles.at[slot], full.at[slot]
                    )
                    group = lax.div(i * STEP, plan.group)
                    plgpu.copy_gmem_to_smem(
                        w_scale.at[expert_id, group, columns], scales.at[slot], full.at[slot]
                    )
                    first_column, size = (
                        group * plan.group // 2 + i * int4_layout.ROWS,
                        STEP // plan.pieces,
                    )
                    for piece in range(plan.pieces):
                        source = x.at[rows, pl.ds(first_column + piece * (plan.group // 2), size)]
                        plgpu.copy_gmem_to_smem(source, x_tiles.at[slot, piece], full.at[slot])
                    return n + 1

                return lax.fori_loop(
                    0, jnp.where(expert_id < plan.experts, steps, 0), step, steps_done
                )

            steps_done = for_each_pair(run_pair, jnp.int32(0))

            # A warpgroup that waits for a barrier must wait for all of its arrivals.
            @pl.loop(0, jnp.minimum(steps_done, plan.ring))
            def _(n):
                plgpu.barrier_wait(free.at[lax.rem(steps_done - 1 - n, plan.ring)])

        # Compute warpgroups: unpack, multiply and scale.
        def add():
            plgpu.set_max_registers(240, action="increase")
            my_columns = pl.ds(role * plan.width, plan.width)

            def broadcast(factor):
                return hopper.broadcast_rows(factor, (64, plan.rows))

            def run_pair(block, expert_id, bounds, steps_done):
                def some_groups(_, carry):
                    n, totals = carry
                    products = []  # in the order of the sums: total, operand, slot, factor
                    for _ in range(plan.groups_per_step):
                        slot = lax.rem(n, plan.ring)
                        plgpu.barrier_wait(full.at[slot])
                        operands = int4_layout.unpack(ops, w_tiles.at[slot, :, my_columns])
                        factors = int4_layout.spread_scales(ops, scales.at[slot, my_columns])
                        products += zip(range(len(totals)), operands, [slot] * 2, factors)
                        n += 1
                    for first in range(0, len(products), plan.products_in_flight):
                        batch = products[first : first + plan.products_in_flight]
                        pairs = [(operand, x_tiles.at[slot, 0]) for _, operand, slot, _ in batch]
                        sums = multiply(ops, pairs)
                        for (t, _, _, factor), part in zip(batch, sums):
                            totals[t] += part.astype(jnp.float32) * broadcast(factor)
                    for _, _, slot, _ in products[:: len(totals)]:
                        plgpu.barrier_arrive(free.at[slot])
                    return n, totals

                # Groups longer than a step: integer sums over several steps.
                def long_group(_, carry):
                    n, totals = carry
                    sums = [ops.zeros(total.shape, jnp.int32) for total in totals]
                    for _ in range(plan.group // STEP):
                        slot = lax.rem(n, plan.ring)
                        plgpu.barrier_wait(full.at[slot])
                        operands = int4_layout.unpack(ops, w_tiles.at[slot, :, my_columns])
                        factors = int4_layout.spread_scales(ops, scales.at[slot, my_columns])
                        for t, operand in enumerate(operands):
                            for piece in range(2):
                                batch = slice(
                                    piece * int4_layout.ROWS, (piece + 1) * int4_layout.ROWS
                                )
                                tile = x_tiles.at[slot, piece]
                                sums[t] = ops.dot(
                                    sums[t], operand[:, batch], tile, b_transposed=True
                                )
                        plgpu.barrier_arrive(free.at[slot])
                        n += 1
                    for t, part in enumerate(sums):
                        totals[t] += part.astype(jnp.float32) * broadcast(factors[t])
                    return n, totals

                zeros = [ops.zeros((64, plan.rows))] * (plan.vector // 2)
                batch = some_groups if plan.group == STEP else long_group
                num_steps = jnp.where(
                    expert_id < plan.experts, plan.groups // plan.groups_per_step, 0
                )
                steps_done, totals = lax.fori_loop(0, num_steps, batch, (steps_done, zeros))
                # Scale by row, reorder the columns and store.
                start, begin, end = bounds
                row_scales = ops.load(x_scale.at[pl.ds(start, plan.rows)], (), along_columns)
                totals = [x * hopper.broadcast_columns(row_scales, x.shape) for x in totals]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_tile = tiles.at[role]
                out_tile[...] = int4_layout.join_columns(ops, totals).astype(out_dtype)
                plgpu.commit_smem()
                columns = pl.ds(block * plan.columns + role * plan.width, plan.width)
                copy_rows_by_bits(out_tile, begin - start, end - begin, out, begin, columns)
                return steps_done

            for_each_pair(run_pair, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == plan.readers, load, add)

    columns = plan.blocks * plan.columns

    # Scratch memory and call.
    def call(x, x_scale, w, w_scale, *entries):
        # The emulator runs two processors, because each costs time.
        kernel = hopper.kernel(
            body,
            kernel_name="w4a8_matmul",
            interpret=interpret,
            out_type=jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype),
            grid=(
                min(
                    entries[0].shape[0] * plan.blocks,
                    2 if ops.is_emulated else hopper.MULTIPROCESSORS,
                ),
            ),
            grid_names=("processor",),
            num_threads=plan.readers + 1,
            thread_name="role",
            scratch_types={
                "x_tiles": plgpu.SMEM(
                    (plan.ring, plan.pieces, plan.rows, STEP // plan.pieces),
                    jnp.int8,
                    transforms=hopper.tile_transforms(jnp.int8, STEP // plan.pieces),
                ),
                "w_tiles": plgpu.SMEM(
                    (plan.ring, int4_layout.ROWS, plan.columns),
                    jnp.int8,
                    transforms=hopper.tile_transforms(jnp.int8, plan.width),
                ),
                "scales": plgpu.SMEM((plan.ring, plan.columns), jnp.float32),
                "full": plgpu.Barrier(num_barriers=plan.ring, num_arrivals=2 + plan.pieces),
                "free": plgpu.Barrier(num_barriers=plan.ring, num_arrivals=plan.readers),
                "tiles": plgpu.SMEM((plan.readers, plan.rows, plan.width), out_dtype),
            },
        )
        return kernel(x, x_scale, w, w_scale, *entries)

    return call


def multiply(ops: hopper.Ops, pairs: list[tuple[Array, hopper.Ref]]) -> list[Int32[Array, "64 n"]]:
    """Returns the product of each pair of a left operand [64 k] and a tile [n k].

    All products are in flight together.
    """
    shape = 64, pairs[0][1].shape[0]
    if ops.is_emulated:
        zeros = ops.zeros(shape, jnp.int32)
        return [ops.dot(zeros, a, b, b_transposed=True) for a, b in pairs]

    def run(*sums):
        for (a, b), total in zip(pairs, sums):
            plgpu.wgmma(total, a, compat.transpose_ref(b))
        return [total[...] for total in sums]

    return pl.run_scoped(run, *[hopper.Accumulator(shape, jnp.int32)] * len(pairs))


def copy_rows_by_bits(tile: hopper.Ref, first, count, out: hopper.Ref, target, columns) -> None:
    """Copies tile[first : first + count] to out[target : target + count, columns], one copy per bit of the count."""
    size = 1 << (tile.shape[0].bit_length() - 1)
    while size:
        copied = lax.div(count, 2 * size) * (2 * size)

        @pl.when(lax.rem(lax.div(count, size), 2) == 1)
        def _(size=size, copied=copied):
            source = tile.at[pl.ds(first + copied, size)]
            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(target + copied, size), columns])

        size //= 2
