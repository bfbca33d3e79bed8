"""Int8 rows times int4 weights on Hopper: columns are the left operand's rows, taken apart in registers.

Weights come from memory as they are packed, half a byte each, and become left operands of tensor cores in
registers (see `weave`); rows of activations are the right operand in shared memory, so that few rows
waste little: 8 are the least. A block of 256 columns, or of 64 where there are few, meets a tile of rows of
one expert, and columns that make no whole block are padded at every call. Each multiprocessor takes its
share of the pairs of blocks and tiles, an expert's one after another, and the loader runs ahead across
them. Within a group of weights sums are integers, sixteenfold as in `tpu`; the groups are added in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, hopper
from pallas_kernels.w4a8_matmul import weave

# Timed on an H200 (2026-11-26, experiments/kernels_h200.jsonl), other sizes were not; chosen by registers,
# shared memory and the number of multiprocessors.
STEP = 2 * weave.ROWS  # rows of weights at a time
LEAST_ROWS, MOST_ROWS = 8, 128  # of activations in a tile: 128 are 128 registers of sums
# Below so many columns of weights, blocks are as narrow as they can be.
FEW_COLUMNS = 128 * hopper.MULTIPROCESSORS
SUMS = 384  # numbers that two threads have registers for: totals, and products under way
TOGETHER = 4  # groups at most whose products are under way
BUDGET = hopper.SMEM_BYTES - 2048  # bytes of tiles: barriers and alignment take some
RING = 16  # steps in flight at most


def refuse(x, w, w_scale):
    """Why these rows and weights cannot be taken, or None."""
    k, groups = x.shape[1], w_scale.shape[-2]
    group = k // groups
    if group % STEP or group > 1024:
        return f"groups of {group} rows of weights; it takes 128 to 1024, in steps of 128"
    return None


class Plan(NamedTuple):
    """Sizes of a call."""

    rows: int  # of activations in a tile
    vector: int  # columns of a thread
    readers: int  # warpgroups, each with columns of its own
    at_once: int  # products under way
    together: int  # groups that are taken apart in a row
    group: int
    groups: int
    ring: int
    experts: int
    blocks: int  # of columns

    @property
    def width(self):
        """Columns of a warpgroup."""
        return weave.WIDTHS[self.vector]

    @property
    def columns(self):
        """Columns of a block."""
        return self.readers * self.width

    @property
    def pieces(self):
        """Copies that bring a step's activations: the low integers' and the high ones' may be apart."""
        return 1 if self.group == STEP else 2


def forward(static, x, x_scale, w, w_scale, group_sizes, *, interpret=False):
    """[m n]; group_sizes None: weights without a leading expert."""
    if group_sizes is None:
        w, w_scale = w[None], w_scale[None]
        group_sizes = jnp.full(1, x.shape[0], jnp.int32)
    return _multiply(static, interpret)(x, x_scale, w, w_scale, group_sizes)


def _multiply(static, interpret):
    # In sequence, as a batch cannot be a dimension of a list of tiles.
    @jax.custom_batching.sequential_vmap
    def multiply(x, x_scale, w, w_scale, group_sizes):
        m, n = x.shape[0], w.shape[2]
        plan = plan_of(x, w_scale, static)
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


def plan_of(x, w_scale, static) -> Plan:
    """Returns the tile sizes of a call."""
    m, k, (experts, groups, n) = static.expected_rows, x.shape[1], w_scale.shape
    group = k // groups
    if experts == 1:  # tensor cores take no odd number of eights of int8 above 24
        rows = -(-m // 8) * 8 if m <= 24 else -(-m // 16) * 16
    else:  # some more than the mean, and the first may be the last of eight
        rows = -(-m * 5 // (4 * experts) // 16) * 16 + 16
    # In longer groups the integer sums of all columns live at the same time.
    rows = min(max(rows, LEAST_ROWS), MOST_ROWS if group == STEP else MOST_ROWS // 2)
    # Weights for few rows come as fast as multiprocessors ask for them: the narrower blocks are, the more ask.
    vector, readers = (2, 1) if n * experts * -(-m // MOST_ROWS) < FEW_COLUMNS else (4, 2)
    columns = readers * weave.WIDTHS[vector]
    operands = vector // 2
    at_once = SUMS // rows - operands
    together = min(max(1, at_once // operands), TOGETHER)
    together = 1 if group > STEP else next(u for u in range(together, 0, -1) if groups % u == 0)
    at_once = min(at_once, together * operands)
    step = weave.ROWS * columns + rows * STEP + 4 * columns
    ring = (BUDGET - rows * columns * static.out_dtype.itemsize) // step
    ring = min(ring, RING)
    blocks = -(-n // columns)
    return Plan(rows, vector, readers, at_once, together, group, groups, ring, experts, blocks)


class Entries(NamedTuple):
    """Tiles of rows, expert by expert, and behind them tiles of the rows that no expert has.

    int32 of each tile: expert, the first tile of the same expert and their number, and where the expert's
    rows begin and end. Tiles start at a multiple of 8 rows, where copies can. count int32[1]: tiles there are.
    """

    expert: jax.Array
    first: jax.Array
    several: jax.Array
    begin: jax.Array
    end: jax.Array
    count: jax.Array


def _entries(group_sizes, m: int, rows: int) -> Entries:
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), m)
    ends = jnp.append(ends, m)
    begins = jnp.append(0, ends[:-1])
    several = jnp.where(ends > begins, -(-(ends - begins // 8 * 8) // rows), 0)
    stops = jnp.cumsum(several, dtype=jnp.int32)
    groups = ends.shape[0]
    tile = jnp.arange((m + 7 * groups) // rows + groups, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(stops <= tile[:, None], axis=1, dtype=jnp.int32), groups - 1)
    of_tile = (x[expert] for x in (stops - several, several, begins, ends))
    return Entries(expert, *of_tile, stops[-1:])


def _call(plan: Plan, out_dtype, interpret):
    ops = hopper.Ops(interpret)
    steps = plan.groups * plan.group // STEP
    along_columns = hopper.WGMMA.reduce(0)

    def body(
        x, x_scale, w, w_scale, expert, first, several, begin, end, count, out,
        *, x_tiles, w_tiles, scales, full, free, tiles,
    ):  # fmt: skip
        role, processor = lax.axis_index("role"), lax.axis_index("processor")
        pairs = count[0] * plan.blocks

        def each_pair(act, carry):
            """act(block of columns, expert, (start, begin, end) of its rows, carry) in this processor's turn."""

            def one(i, carry):
                pair = processor + i * lax.axis_size("processor")
                some = lax.div(pair, plan.blocks)
                number = pair - first[some] * plan.blocks
                block = lax.div(number, several[some])
                tile = lax.rem(number, several[some])
                start = lax.div(begin[some], 8) * 8 + tile * plan.rows
                bounds = (
                    jnp.minimum(start, x.shape[0] - plan.rows),
                    jnp.maximum(start, begin[some]),
                    jnp.minimum(start + plan.rows, end[some]),
                )
                return act(block, expert[some], bounds, carry)

            size = lax.axis_size("processor")
            return lax.fori_loop(0, lax.div(pairs - processor + size - 1, size), one, carry)

        def load():
            plgpu.set_max_registers(24, action="decrease")

            def one(block, own, bounds, done):
                columns = pl.ds(block * plan.columns, plan.columns)
                rows = pl.ds(bounds[0], plan.rows)

                def step(i, n):
                    slot = lax.rem(n, plan.ring)
                    pl.when(n >= plan.ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                    packed = pl.ds(i * weave.ROWS, weave.ROWS)
                    plgpu.copy_gmem_to_smem(
                        w.at[own, packed, columns], w_tiles.at[slot], full.at[slot]
                    )
                    group = lax.div(i * STEP, plan.group)
                    plgpu.copy_gmem_to_smem(
                        w_scale.at[own, group, columns], scales.at[slot], full.at[slot]
                    )
                    at, size = group * plan.group // 2 + i * weave.ROWS, STEP // plan.pieces
                    for piece in range(plan.pieces):
                        source = x.at[rows, pl.ds(at + piece * (plan.group // 2), size)]
                        plgpu.copy_gmem_to_smem(source, x_tiles.at[slot, piece], full.at[slot])
                    return n + 1

                return lax.fori_loop(0, jnp.where(own < plan.experts, steps, 0), step, done)

            done = each_pair(one, jnp.int32(0))

            @pl.loop(0, jnp.minimum(done, plan.ring))
            def _(n):
                plgpu.barrier_wait(free.at[lax.rem(done - 1 - n, plan.ring)])

        def add():
            plgpu.set_max_registers(240, action="increase")
            here = pl.ds(role * plan.width, plan.width)

            def over(factor):
                return hopper.over_rows(factor, (64, plan.rows))

            def one(block, own, bounds, done):
                def some_groups(_, carry):
                    n, totals = carry
                    products = []  # in the order of the sums: total, operand, slot, factor
                    for _ in range(plan.together):
                        slot = lax.rem(n, plan.ring)
                        plgpu.barrier_wait(full.at[slot])
                        operands = weave.unpack(ops, w_tiles.at[slot, :, here])
                        factors = weave.spread(ops, scales.at[slot, here])
                        products += zip(range(len(totals)), operands, [slot] * 2, factors)
                        n += 1
                    for first in range(0, len(products), plan.at_once):
                        some = products[first : first + plan.at_once]
                        pairs = [(operand, x_tiles.at[slot, 0]) for _, operand, slot, _ in some]
                        sums = multiply(ops, pairs)
                        for (t, _, _, factor), part in zip(some, sums):
                            totals[t] += part.astype(jnp.float32) * over(factor)
                    for _, _, slot, _ in products[:: len(totals)]:
                        plgpu.barrier_arrive(free.at[slot])
                    return n, totals

                def long_group(_, carry):
                    n, totals = carry
                    sums = [ops.zeros(total.shape, jnp.int32) for total in totals]
                    for _ in range(plan.group // STEP):
                        slot = lax.rem(n, plan.ring)
                        plgpu.barrier_wait(full.at[slot])
                        operands = weave.unpack(ops, w_tiles.at[slot, :, here])
                        factors = weave.spread(ops, scales.at[slot, here])
                        for t, operand in enumerate(operands):
                            for piece in range(2):
                                some = slice(piece * weave.ROWS, (piece + 1) * weave.ROWS)
                                tile = x_tiles.at[slot, piece]
                                sums[t] = ops.dot(
                                    sums[t], operand[:, some], tile, b_transposed=True
                                )
                        plgpu.barrier_arrive(free.at[slot])
                        n += 1
                    for t, part in enumerate(sums):
                        totals[t] += part.astype(jnp.float32) * over(factors[t])
                    return n, totals

                zeros = [ops.zeros((64, plan.rows))] * (plan.vector // 2)
                some = some_groups if plan.group == STEP else long_group
                most = jnp.where(own < plan.experts, plan.groups // plan.together, 0)
                done, totals = lax.fori_loop(0, most, some, (done, zeros))
                start, begin, end = bounds
                by_row = ops.load(x_scale.at[pl.ds(start, plan.rows)], (), along_columns)
                totals = [x * hopper.over_columns(by_row, x.shape) for x in totals]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                own_tile = tiles.at[role]
                own_tile[...] = weave.join(ops, totals).astype(out_dtype)
                plgpu.commit_smem()
                columns = pl.ds(block * plan.columns + role * plan.width, plan.width)
                send(own_tile, begin - start, end - begin, out, begin, columns)
                return done

            each_pair(one, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == plan.readers, load, add)

    columns = plan.blocks * plan.columns

    def call(x, x_scale, w, w_scale, *entries):
        kernel = hopper.kernel(
            body,
            kernel_name="w4a8_matmul",
            interpret=interpret,
            out_type=jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype),
            grid=(
                min(
                    entries[0].shape[0] * plan.blocks, 2 if ops.emulated else hopper.MULTIPROCESSORS
                ),
            ),
            grid_names=("processor",),
            num_threads=plan.readers + 1,
            thread_name="role",
            scratch_types={
                "x_tiles": plgpu.SMEM(
                    (plan.ring, plan.pieces, plan.rows, STEP // plan.pieces),
                    jnp.int8,
                    transforms=hopper.tiled(jnp.int8, STEP // plan.pieces),
                ),
                "w_tiles": plgpu.SMEM(
                    (plan.ring, weave.ROWS, plan.columns),
                    jnp.int8,
                    transforms=hopper.tiled(jnp.int8, plan.width),
                ),
                "scales": plgpu.SMEM((plan.ring, plan.columns), jnp.float32),
                "full": plgpu.Barrier(num_barriers=plan.ring, num_arrivals=2 + plan.pieces),
                "free": plgpu.Barrier(num_barriers=plan.ring, num_arrivals=plan.readers),
                "tiles": plgpu.SMEM((plan.readers, plan.rows, plan.width), out_dtype),
            },
        )
        return kernel(x, x_scale, w, w_scale, *entries)

    return call


def multiply(ops, pairs):
    """int32[64 n] of each pair of a left operand and a tile [n k], all under way at the same time."""
    shape = 64, pairs[0][1].shape[0]
    if ops.emulated:
        zeros = ops.zeros(shape, jnp.int32)
        return [ops.dot(zeros, a, b, b_transposed=True) for a, b in pairs]

    def run(*sums):
        for (a, b), total in zip(pairs, sums):
            plgpu.wgmma(total, a, compat.transposed(b))
        return [total[...] for total in sums]

    return pl.run_scoped(run, *[plgpu.ACC(shape, jnp.int32)] * len(pairs))


def send(tile, at, count, out, to, columns):
    """out[to : to + count, columns] = tile[at : at + count]: one copy for each bit of the count."""
    size = 1 << (tile.shape[0].bit_length() - 1)
    while size:
        done = lax.div(count, 2 * size) * (2 * size)

        @pl.when(lax.rem(lax.div(count, size), 2) == 1)
        def _(size=size, done=done):
            source = tile.at[pl.ds(at + done, size)]
            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(to + done, size), columns])

        size //= 2
