"""Exact k largest of long rows on Hopper, reading each row once.

Grid: (row,), one warpgroup per row. Shared memory: two stages of 4096 keys (32 KiB), and candidates with their indices:
8192 of each for k = 2048 (64 KiB), 20,480 for the maximum k.

Phases of a program:

1. Copy a stage; count its keys above a floor, and append them and their indices to the candidates, in the order of
   their indices.
2. If they do not fit, keep the k best: bisect for a bound that k to k + 512 candidates reach, which becomes the floor.
   Of keys that equal it the first stay.
3. After the last stage keep exactly k, and write their indices.

Keys in random order seldom fill the candidates twice. Rising keys, the worst case, fill them after every stage or two.
A later key that equals the floor has a higher index than k keys that are at least as large, so it is left out.

Padding: rows to full stages; only indices within a row's bounds count. Positions after the last index are -1.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels import hopper

# Only these sizes are timed, on an H200 (2026-11-26, experiments/kernels_h200.jsonl). They follow from shared memory
# and occupancy.
STAGE = 4096  # keys read at a time
STAGES = 2  # in flight
SPARE = 512  # candidates in addition to k that may stay until the end
MAX_K = 12288

INVISIBLE = -(2**31)
INFINITY = 0x7F800000


def unsupported_reason(scores: Float[Array, "m s"], k: int) -> str | None:
    """Returns the reason why the arguments are not supported, or None."""
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype}, not float32"
    return unsupported_k(k)


def unsupported_k(k: int) -> str | None:
    """Returns the reason why k is too large, or None."""
    if k > MAX_K:
        return f"the best of a row stay in shared memory, which has room for k = {MAX_K}, not {k}"
    return None


def select(
    static, scores: Float[Array, "m s"], *, interpret: object = False
) -> Int32[Array, "m k"]:
    """Returns int32[m k]: indices of the k largest of each row of scores float32[m s], ascending."""
    m, s = scores.shape
    bounds = jnp.broadcast_to(jnp.array([0, s], jnp.int32), (m, 2))
    rows = jnp.pad(scores, ((0, 0), (0, -s % STAGE)))
    return select_rows(rows, bounds, static.k, interpret=interpret)


def to_ordered_bits(scores: Array) -> Array:
    """Returns int32 that compare like float32 scores, where -0.0 equals 0.0 and NaN is -inf; all above INVISIBLE."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    size = bits & 0x7FFFFFFF
    keys = jnp.where(bits < 0, -size, size)
    # The array comes first: with a constant there, Mosaic GPU treats the result as unsigned.
    return jnp.where(size <= INFINITY, keys, -INFINITY)


def select_rows(
    rows: Num[Array, "r s"],
    bounds: Int32[Array, "r 2"],
    k: int,
    counted_rows: tuple[int, int] = (1, 1),
    *,
    interpret: object = False,
) -> Int32[Array, "m k"]:
    """Returns int32[m k]: indices of the k largest of each row, ascending, -1 at the end where there are fewer.

    rows: float32[r s], or int32[r s] of `to_ordered_bits` and INVISIBLE; INVISIBLE is never selected. s is a
    multiple of STAGE. Equal values go to the lower index.
    bounds: int32[r 2], begin and end (exclusive) of the indices that may be selected; the numbers outside are
    ignored.
    k: at most MAX_K.
    counted_rows: (n, of): only the first n of every `of` consecutive rows count. m is r * n / of.
    """
    r, s = rows.shape
    m = r // counted_rows[1] * counted_rows[0]
    capacity = STAGE * -(-(k + SPARE + STAGE) // STAGE)
    width = 1024 * -(-k // 1024)
    chosen = hopper.kernel(
        functools.partial(_select, hopper.Ops(interpret), k, capacity, counted_rows),
        interpret=interpret,
        kernel_name="select_rows",
        out_type=jax.ShapeDtypeStruct((m, width), jnp.int32),
        grid=(m,),
        grid_names=("row",),
        scratch_types=[
            plgpu.SMEM((STAGES, STAGE // 128, 128), rows.dtype),
            plgpu.SMEM((2 * capacity + 4,), jnp.int32),
            plgpu.Barrier(num_barriers=STAGES),
        ],
    )(bounds, rows.reshape(r, s // 128, 128))
    return chosen[:, :k]


def _select(ops, k, capacity, counted_rows, bounds, rows, chosen, stage, candidates, ready):
    """Selects from one row. candidates: keys, their indices, and the scratch of `warp_ops.running_count`."""
    # The row and its range of stages.
    result = lax.axis_index("row")
    row = lax.div(result, counted_rows[0]) * counted_rows[1] + lax.rem(result, counted_rows[0])
    first, last = bounds[row, 0], bounds[row, 1]
    begin = lax.div(first, STAGE)
    stages = jnp.maximum(lax.div(last + (STAGE - 1), STAGE) - begin, 0)
    totals = candidates.at[pl.ds(2 * capacity, 4)]

    # Load stages of keys.
    def fetch(i):
        slot, lines = lax.rem(i, STAGES), STAGE // 128
        source = rows.at[row, pl.ds((begin + i) * lines, lines)]
        plgpu.copy_gmem_to_smem(source, stage.at[slot], ready.at[slot])

    for i in range(STAGES):
        pl.when(i < stages)(functools.partial(fetch, jnp.int32(i)))

    def add(i, count, floor):
        """Returns a function that writes the candidates of stage i after `count` others, and the new count."""
        stage_keys = ops.load_flat(stage.at[lax.rem(i, STAGES)])
        stage_keys = stage_keys if stage_keys.dtype == jnp.int32 else to_ordered_bits(stage_keys)
        start = (begin + i) * STAGE
        index = start + ops.positions(STAGE)
        stage_keys = lax.cond(
            (start >= first) & (start + STAGE <= last),
            lambda: stage_keys,
            lambda: jnp.where((index >= first) & (index < last), stage_keys, INVISIBLE),
        )
        flags = jnp.where(stage_keys > floor, 1, 0)
        targets, count = ops.running_count(flags, totals, count)
        return lambda: ops.scatter(candidates, targets, [stage_keys, index], flags, capacity), count

    # Add a stage of candidates; compact them if they do not fit.
    def read(i, carry):
        count, floor = carry
        plgpu.barrier_wait(ready.at[lax.rem(i, STAGES)])
        write, new_count = add(i, count, floor)

        def write_directly():
            write()
            return new_count, floor

        def compact_then_write():
            # Reads the stage again: registers that live through the search would be spilled.
            num_retained, new_floor = _keep_best(
                ops, k, SPARE, capacity, count, floor, candidates, totals
            )
            write, new_count = add(i, num_retained, new_floor)
            write()
            return new_count, new_floor

        carry = lax.cond(new_count > capacity, compact_then_write, write_directly)
        # By now every thread has read the stage.
        pl.when(i + STAGES < stages)(lambda: fetch(i + STAGES))
        return carry

    count, floor = lax.fori_loop(0, stages, read, (jnp.int32(0), jnp.int32(INVISIBLE)))

    # Select the final k, and write their indices.
    @pl.when(count > k)
    def _():
        _keep_best(ops, k, 0, capacity, count, floor, candidates, totals)

    width = chosen.shape[1]
    indices = ops.load_flat(candidates.at[pl.ds(capacity, width)])
    chosen[result, :] = jnp.where(ops.positions(width) < jnp.minimum(count, k), indices, -1)


def _keep_best(ops, k, max_extra, capacity, count, floor, candidates, totals):
    """Retains the best of `count` candidates, more than k of which reach the floor: k, or up to `max_extra` more.

    Returns (number of retained candidates, the smallest of them).
    """
    # Candidate keys, and counts of those above a bound.
    position = ops.positions(STAGE)
    blocks = [pl.ds(first, STAGE) for first in range(0, capacity, STAGE)]
    keys = [
        jnp.where(position < count - block.start, ops.load_flat(candidates.at[block]), INVISIBLE)
        for block in blocks
    ]

    def count_at_least(bound):
        return jnp.sum(sum(jnp.where(x >= bound, 1, 0) for x in keys))

    # `among` keys, k or more, reach low; `above`, fewer than k, reach high.
    def middle(low, high):
        return (low & high) + lax.shift_right_arithmetic(low ^ high, 1)

    def is_unfinished(state):
        low, high, among, _ = state
        return (among > k + max_extra) & (middle(low, high) > low)

    def halve(state):
        low, high, among, above = state
        bound = middle(low, high)
        number = count_at_least(bound)
        enough = number >= k
        return (
            jnp.where(enough, bound, low),
            jnp.where(enough, high, bound),
            jnp.where(enough, number, among),
            jnp.where(enough, above, number),
        )

    # Bisect for the bound.
    top = jnp.max(functools.reduce(jnp.maximum, keys))
    low = jnp.maximum(floor, -INFINITY)
    low, _, among, above = lax.while_loop(is_unfinished, halve, (low, top + 1, count, jnp.int32(0)))
    # If too many equal the smallest, the first of them stay.
    tied = among > k + max_extra
    spare, num_retained = k - above, jnp.int32(0)
    for block, x in zip(blocks, keys, strict=True):
        index = ops.load_flat(candidates.at[pl.ds(capacity + block.start, STAGE)])

        def cut_ties(x=x, spare=spare):
            rank, levels = ops.running_count(jnp.where(x == low, 1, 0), totals)
            return jnp.where((x > low) | ((x == low) & (rank < spare)), 1, 0), spare - levels

        def keep_ties(x=x, spare=spare):
            return jnp.where(x >= low, 1, 0), spare

        flags, spare = lax.cond(tied, cut_ties, keep_ties)
        targets, num_retained = ops.running_count(flags, totals, num_retained)
        ops.scatter(candidates, targets, [x, index], flags, capacity)
    return num_retained, low
