"""K largest of scores in VMEM, as ascending indices: without sorting, and with exact ties.

Scores are int32 that compare like the floats (`ordered`), a tile of 8 queries x 128 keys per register. They stay in
VMEM; the caller's program has 1 to 4 groups of 8 queries.

1. `kth_largest` brackets the k-th largest by bisection: each step counts the keys of a group that reach a bound.
2. `write_words` turns keys that reach it into one bit each, 32 keys per word: a chunk of 32 tiles is one register of
   words. From there on the work is a 32nd.
3. `write_indices` fills the result 256 positions at a time: the first position of a word follows from the number of
   bits before it, and the key at position p from a search for its word and for the bit in the word.

Padding: keys that are not visible are MIN_INT and never reach a bound; positions after the last selected key are -1.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

SUBLANES, LANES = 8, 128
TILES = 32  # tiles of a chunk: as many as a word has bits
CHUNK = TILES * LANES
# The result is filled 256 positions at a time. A shift, because an integer // does not lower without a TPU.
SHIFT = 8
PLACES = 1 << SHIFT
MIN_INT, MAX_INT = -(2**31), 2**31 - 1


def ordered(scores: Float[Array, "8 128"], visible: Bool[Array, "8 128"]) -> Int32[Array, "8 128"]:
    """Returns int32 that compare like scores, with -0.0 equal to 0.0 and NaN to -inf; MIN_INT where not visible."""
    scores = jnp.where(scores != scores, -jnp.inf, scores)
    raw = lax.bitcast_convert_type(scores, jnp.int32)
    bits = raw ^ ((raw >> 31) & MAX_INT)
    return jnp.where(visible, jnp.where(bits == -1, 0, bits), MIN_INT)  # -1 is -0.0


def repeat(count: int, step: Callable, carry, unroll: bool):
    """Runs lax.fori_loop from 0 to a known count. unroll: for compiled code; an interpreter starts sooner without."""
    return lax.fori_loop(0, count, step, carry, unroll=count if unroll else 1)


def kth_largest(
    keys,
    group,
    chunks,
    lowest: Int32[Array, "8 1"],
    highest: Int32[Array, "8 1"],
    count: Int32[Array, "8 1"],
    k: int,
    unroll: bool,
) -> tuple[Int32[Array, "8 1"], ...]:
    """Returns a bracket of the k-th largest of a group of 8 rows: (lower, upper, reach, above, num_wanted).

    keys: ref int32[groups tiles 8 128]. lowest, highest, count: of the keys of each row above MIN_INT.
    `reach` keys are >= lower, at least num_wanted = min(k, count). `above` keys, fewer than num_wanted, are >= upper.
    Either reach = num_wanted, or upper = lower + 1 and too many keys equal lower.
    """
    num_wanted = jnp.minimum(count, k)

    # Counts the keys that reach a bound.
    def count_reaching(bound):
        bound = jnp.broadcast_to(bound, (SUBLANES, LANES))

        def chunk(c, sums):
            def tile(u, sums):
                hits = jnp.where(keys[group, c * TILES + u] >= bound, 1, 0)
                return *sums[1:], sums[0] + hits

            return repeat(TILES, tile, sums, unroll)

        zero = jnp.zeros((SUBLANES, LANES), jnp.int32)
        a, b, c, d = lax.fori_loop(0, chunks, chunk, (zero,) * 4)
        return jnp.sum((a + b) + (c + d), axis=1, keepdims=True)

    # Bisect until the bracket is exact.
    def unfinished(bracket):
        lower, upper, reach, _ = bracket
        return jnp.max(jnp.where((reach != num_wanted) & (lower + 1 != upper), 1, 0)) > 0

    def halve(bracket):
        lower, upper, reach, above = bracket
        middle = (lower & upper) + ((lower ^ upper) >> 1)
        number = count_reaching(middle)
        enough = number >= num_wanted
        return (
            jnp.where(enough, middle, lower),
            jnp.where(enough, upper, middle),
            jnp.where(enough, number, reach),
            jnp.where(enough, above, number),
        )

    start = (lowest, highest + 1, count, jnp.zeros_like(count))
    return *lax.while_loop(unfinished, halve, start), num_wanted


def write_words(
    keys, words, group, chunks, bracket: tuple[Int32[Array, "8 1"], ...], unroll: bool
) -> None:
    """Writes words[group]: one bit per key, set if it is among the first `num_wanted`, in the order of the keys."""
    lower, upper, reach, above, want = (jnp.broadcast_to(x, (SUBLANES, LANES)) for x in bracket)

    def write_chunk(c, _):
        words[group, c] = _words(keys, group, c, lower, unroll)
        return 0

    lax.fori_loop(0, chunks, write_chunk, 0)

    # Of the keys that equal lower only the first count.
    @pl.when(jnp.max(jnp.where(reach > want, 1, 0)) > 0)
    def _():
        table = _prefix_table()

        def chunk(c, num_left):
            high = _words(keys, group, c, upper, unroll)
            at_lower = words[group, c] & ~high
            size = lax.population_count(at_lower)
            before, total = _prefix(size, table)
            num_free = num_left - before
            below = (1 << _nth_bit(at_lower, num_free)) - 1
            retained = jnp.where(
                num_free >= size, at_lower, jnp.where(num_free > 0, at_lower & below, 0)
            )
            words[group, c] = high | retained
            return num_left - total

        lax.fori_loop(0, chunks, chunk, want - above)


def write_indices(words, before, ends, out, chunks, unroll: bool) -> None:
    """Writes to out int32[8*groups places] the indices of the bits set in words[groups chunks 8 128], ascending.

    before and ends [groups 8 128] are scratch. Unfilled positions are -1. The number of positions is a multiple of
    PLACES.
    """
    groups, capacity = words.shape[:2]
    parts = PLACES // LANES
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    # Bits before each word of a chunk.
    sizes = lax.population_count(words[...]).reshape(groups * capacity * SUBLANES, LANES)
    before[...] = _prefix(sizes, _prefix_table())[0].reshape(before.shape)
    ends[...] = jnp.zeros(ends.shape, jnp.int32)

    def make_window(group, position):
        rows = pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), SUBLANES)
        return rows, pl.ds(pl.multiple_of(position, LANES), LANES)

    # Write the indices of one chunk.
    def chunk(c, _):
        def shift(group, reach):
            low, high = reach
            first, within = ends[group], before[group, c]
            last = first + within[:, -1:] + lax.population_count(words[group, c])[:, -1:]
            before[group, c] = first + within
            ends[group] = last
            return jnp.minimum(low, first), jnp.maximum(high, last)

        reach = tuple(jnp.full((SUBLANES, LANES), bound, jnp.int32) for bound in (MAX_INT, 0))
        low, high = repeat(groups, shift, reach, unroll)

        def piece(piece, _):
            def part(n, _):
                group, position = n & (groups - 1), piece * PLACES + (n >> shift_of_groups) * LANES
                index, filled = _index_at(words[group, c], before[group, c], position + lane)
                window = make_window(group, position)
                out[window] = jnp.where(filled, c * CHUNK + index, out[window])
                return 0

            return repeat(groups * parts, part, 0, unroll)

        shift_of_groups = groups.bit_length() - 1
        pieces = jnp.min(low) >> SHIFT, (jnp.max(high) + PLACES - 1) >> SHIFT
        return lax.fori_loop(*pieces, piece, 0)

    lax.fori_loop(0, chunks, chunk, 0)

    # Mark unfilled positions.
    def end(n, _):
        group, position = n & (groups - 1), (n >> (groups.bit_length() - 1)) * LANES
        window = make_window(group, position)
        out[window] = jnp.where(position + lane < ends[group], out[window], -1)
        return 0

    repeat(groups * (out.shape[1] // LANES), end, 0, unroll)


def _index_at(words, before, position):
    """Returns (index in the chunk of the bit at each position, whether this chunk or a later one has it)."""
    word = jnp.zeros_like(position)
    for step in (64, 32, 16, 8, 4, 2, 1):
        word = jnp.where(_take(before, word + step) <= position, word + step, word)
    remainder = position - _take(before, word)
    return word * 32 + _nth_bit(_take(words, word), remainder), remainder >= 0


def _nth_bit(word, n):
    """Returns the index of the n-th set bit, from the lowest, counted from 0."""
    index = jnp.zeros_like(n)
    for half in (16, 8, 4, 2, 1):
        low = lax.shift_right_logical(word, index) & ((1 << half) - 1)
        inside = lax.population_count(low)
        beyond = n >= inside
        n = jnp.where(beyond, n - inside, n)
        index = jnp.where(beyond, index + half, index)
    return index


def _words(keys, group, c, bound, unroll):
    """Returns int32[8 128]: one bit per key of a chunk, set if it is >= bound.

    Lane l has the keys 32 l to 32 l + 31.
    """

    def tile(u, parts):
        bits = jnp.where(keys[group, c * TILES + u] >= bound, jnp.left_shift(1, u), 0)
        return *parts[1:], parts[0] | bits

    zero = jnp.zeros((SUBLANES, LANES), jnp.int32)
    first, second, third, fourth = repeat(TILES, tile, (zero,) * 4, unroll)
    x = (first | second) | (third | fourth)
    # Bit u of lane l is now key 128 u + l. Swap u with the low five bits of l, then order the lanes.
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    for step, low in (
        (16, 0xFFFF),
        (8, 0xFF00FF),
        (4, 0xF0F0F0F),
        (2, 0x33333333),
        (1, 0x55555555),
    ):
        upper = (lane & step) != 0
        other = jnp.where(upper, pltpu.roll(x, step, 1), pltpu.roll(x, LANES - step, 1))
        moved = jnp.where(upper, lax.shift_right_logical(other, step) & low, (other & low) << step)
        x = (x & jnp.where(upper, ~low, low)) | moved
    return _take(x, ((lane & 3) << 5) | (lane >> 2))


def _take(x, lanes):
    """Returns x [8 128] at the lanes given for each row."""
    return jnp.take_along_axis(x, lanes, axis=1, mode="promise_in_bounds")


def _prefix_table():
    """Returns bfloat16[128 256], a matrix that sums a row before each lane, and in total."""
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), d) for d in (0, 1))
    return jnp.where((row < column) | (column >= LANES), 1.0, 0.0).astype(jnp.bfloat16)


def _prefix(sizes, table):
    """Returns (sums before each lane, sums of rows in every lane) of sizes int32[m 128] of at most 256: exact."""
    sums = jnp.dot(
        sizes.astype(jnp.float32).astype(jnp.bfloat16), table, preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    return sums[:, :LANES], sums[:, LANES:]
