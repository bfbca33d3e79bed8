"""The exact k largest of long rows on Hopper, in one reading of each row.

A warpgroup per row. Candidates, which are the keys above a floor, gather in shared memory in the order of
their places; when they fill it, the k-th largest of them becomes the floor and the k best stay. Keys in random
order seldom fill it twice; rising ones, the worst case, do every time a stage or two has been read. What equals
the floor later on has a higher place than k keys that are as large, so it is left out rightly.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper

# Timed on an H200 (2026-11-26, experiments/kernels_h200.jsonl), other sizes were not; chosen by shared memory
# and occupancy.
STAGE = 4096  # keys read at a time
STAGES = 2  # in flight
SLACK = 512  # candidates more than k that may stay until the end
LARGEST_K = 12288

INVISIBLE = -(2**31)
INFINITY = 0x7F800000


def refuse(scores, k):
    """Why this form cannot take such arguments, or None."""
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype}, not float32"
    return too_many(k)


def too_many(k):
    """Why so many cannot be chosen, or None."""
    if k > LARGEST_K:
        return (
            f"the best of a row stay in shared memory, which has room for k = {LARGEST_K}, not {k}"
        )
    return None


def select(static, scores, *, interpret=False):
    """int32[m k]: places of the k largest of each row of scores float32[m s], ascending."""
    m, s = scores.shape
    bounds = jnp.broadcast_to(jnp.array([0, s], jnp.int32), (m, 2))
    rows = jnp.pad(scores, ((0, 0), (0, -s % STAGE)))
    return select_rows(rows, bounds, static.k, interpret=interpret)


def ordered(scores):
    """int32 that compare like float32 scores, where -0.0 equals 0.0 and NaN is -inf; above INVISIBLE."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    size = bits & 0x7FFFFFFF
    keys = jnp.where(bits < 0, -size, size)
    # The array first: with a constant there, Mosaic GPU takes the result for unsigned.
    return jnp.where(size <= INFINITY, keys, -INFINITY)


def select_rows(rows, bounds, k: int, used=(1, 1), *, interpret=False):
    """int32[m k]: places of the k largest of each row, ascending, -1 at the end where there are fewer.

    rows: float32[r s], or int32[r s] of `ordered` and INVISIBLE ones, which are never chosen; s is a multiple
    of STAGE. bounds int32[r 2]: the first and the last (excluded) place that may be chosen; what lies outside
    may be anything. Equal ones go to the lower place. k: at most LARGEST_K. used: how many of how many
    consecutive rows count, the others are left out: m is r * used[0] / used[1].
    """
    r, s = rows.shape
    m = r // used[1] * used[0]
    room = STAGE * -(-(k + SLACK + STAGE) // STAGE)
    width = 1024 * -(-k // 1024)
    chosen = hopper.kernel(
        functools.partial(_select, hopper.Ops(interpret), k, room, used),
        interpret=interpret,
        kernel_name="select_rows",
        out_type=jax.ShapeDtypeStruct((m, width), jnp.int32),
        grid=(m,),
        grid_names=("row",),
        scratch_types=[
            plgpu.SMEM((STAGES, STAGE // 128, 128), rows.dtype),
            plgpu.SMEM((2 * room + 4,), jnp.int32),
            plgpu.Barrier(num_barriers=STAGES),
        ],
    )(bounds, rows.reshape(r, s // 128, 128))
    return chosen[:, :k]


def _select(ops, k, room, used, bounds, rows, chosen, stage, held, ready):
    """held: keys, their places, and what `lanes.running_count` needs."""
    result = lax.axis_index("row")
    row = lax.div(result, used[0]) * used[1] + lax.rem(result, used[0])
    first, last = bounds[row, 0], bounds[row, 1]
    begin = lax.div(first, STAGE)
    stages = jnp.maximum(lax.div(last + (STAGE - 1), STAGE) - begin, 0)
    totals = held.at[pl.ds(2 * room, 4)]

    def fetch(i):
        slot, lines = lax.rem(i, STAGES), STAGE // 128
        source = rows.at[row, pl.ds((begin + i) * lines, lines)]
        plgpu.copy_gmem_to_smem(source, stage.at[slot], ready.at[slot])

    for i in range(STAGES):
        pl.when(i < stages)(functools.partial(fetch, jnp.int32(i)))

    def add(i, count, floor):
        """Candidates of stage i, to be written behind `count` others, and how many there are then."""
        own = ops.flat(stage.at[lax.rem(i, STAGES)])
        own = own if own.dtype == jnp.int32 else ordered(own)
        start = (begin + i) * STAGE
        place = start + ops.places(STAGE)
        own = lax.cond(
            (start >= first) & (start + STAGE <= last),
            lambda: own,
            lambda: jnp.where((place >= first) & (place < last), own, INVISIBLE),
        )
        flags = jnp.where(own > floor, 1, 0)
        to, count = ops.running_count(flags, totals, count)
        return lambda: ops.scatter(held, to, [own, place], flags, room), count

    def read(i, carry):
        count, floor = carry
        plgpu.barrier_wait(ready.at[lax.rem(i, STAGES)])
        write, more = add(i, count, floor)

        def fits():
            write()
            return more, floor

        def does_not():
            # Reads the stage again: registers that outlived the search would be spilled.
            left, higher = _keep_best(ops, k, SLACK, room, count, floor, held, totals)
            write, more = add(i, left, higher)
            write()
            return more, higher

        carry = lax.cond(more > room, does_not, fits)
        # Every thread has read the stage by now.
        pl.when(i + STAGES < stages)(lambda: fetch(i + STAGES))
        return carry

    count, floor = lax.fori_loop(0, stages, read, (jnp.int32(0), jnp.int32(INVISIBLE)))

    @pl.when(count > k)
    def _():
        _keep_best(ops, k, 0, room, count, floor, held, totals)

    width = chosen.shape[1]
    found = ops.flat(held.at[pl.ds(room, width)])
    chosen[result, :] = jnp.where(ops.places(width) < jnp.minimum(count, k), found, -1)


def _keep_best(ops, k, slack, room, count, floor, held, totals):
    """Leaves the best of `count` candidates, of which more than k reach the floor: k, or up to `slack` more.

    Returns how many, and the least of them.
    """
    at = ops.places(STAGE)
    blocks = [pl.ds(first, STAGE) for first in range(0, room, STAGE)]
    own = [
        jnp.where(at < count - block.start, ops.flat(held.at[block]), INVISIBLE) for block in blocks
    ]

    def reach(cut):
        return jnp.sum(sum(jnp.where(x >= cut, 1, 0) for x in own))

    # `among` keys, k or more, reach low; `above`, fewer than k, reach high.
    def middle(low, high):
        return (low & high) + lax.shift_right_arithmetic(low ^ high, 1)

    def goes_on(state):
        low, high, among, _ = state
        return (among > k + slack) & (middle(low, high) > low)

    def halve(state):
        low, high, among, above = state
        cut = middle(low, high)
        number = reach(cut)
        enough = number >= k
        return (
            jnp.where(enough, cut, low),
            jnp.where(enough, high, cut),
            jnp.where(enough, number, among),
            jnp.where(enough, above, number),
        )

    top = jnp.max(functools.reduce(jnp.maximum, own))
    low = jnp.maximum(floor, -INFINITY)
    low, _, among, above = lax.while_loop(goes_on, halve, (low, top + 1, count, jnp.int32(0)))
    # Of too many that equal the least, the first stay.
    tied = among > k + slack
    spare, left = k - above, jnp.int32(0)
    for block, x in zip(blocks, own, strict=True):
        place = ops.flat(held.at[pl.ds(room + block.start, STAGE)])

        def cut_ties(x=x, spare=spare):
            rank, levels = ops.running_count(jnp.where(x == low, 1, 0), totals)
            return jnp.where((x > low) | ((x == low) & (rank < spare)), 1, 0), spare - levels

        def keep_ties(x=x, spare=spare):
            return jnp.where(x >= low, 1, 0), spare

        flags, spare = lax.cond(tied, cut_ties, keep_ties)
        to, left = ops.running_count(flags, totals, left)
        ops.scatter(held, to, [x, place], flags, room)
    return left, low
