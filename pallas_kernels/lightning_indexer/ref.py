"""Index scores and their exact selection in XLA, in blocks of queries: memory is linear in the length."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import Run, join, offsets, query_runs, split
from pallas_kernels.mask import visible
from pallas_kernels.numerics import wide


def select_keys(static, idx_q, idx_w, idx_k, k_scale, start, q_segments, k_segments):
    """topk int32[b t k] of idx_q [b t i j], idx_w [b t i] over idx_k [b s j]."""
    s, k, block = idx_k.shape[1], static.k, static.block
    start = start if static.start is None else static.start
    width = min(k, s)
    # Transposed once, or XLA:CPU does it for every block.
    columns = lax.optimization_barrier(_columns(idx_k))
    parts = []
    for run in query_runs(idx_q.shape[1], s, start, block):
        keys = columns[:, :, : run.keys]
        segments = None if k_segments is None else k_segments[:, : run.keys]
        scale = None if k_scale is None else k_scale[:, : run.keys]

        def rank(args, keys=keys, segments=segments, scale=scale, length=run.keys):
            q, w, own, first = args
            query_index = start + first + jnp.arange(q.shape[1], dtype=jnp.int32)
            mask = visible(query_index, jnp.arange(length, dtype=jnp.int32), own, segments)
            return _ordered_bits(_scale(_index_scores(q, w, keys), scale), mask)

        def one(args, run=run, rank=rank):
            q, w, own, offset = args
            # A loop's results are in memory: XLA:CPU computes all else again for each of its uses.
            part = _score_rows(run, idx_q.shape[2])
            pieces = Run(0, run.size // part, part, run.keys)
            firsts = offset + part * jnp.arange(pieces.count, dtype=jnp.int32)
            split_args = (split(q, pieces, 1), split(w, pieces, 1), split(own, pieces, 1), firsts)
            picked = _best(join(lax.map(rank, split_args), 1), k)
            missing = width - picked.shape[-1]
            return jnp.pad(picked, ((0, 0), (0, 0), (0, missing)), constant_values=-1)

        firsts, own = offsets(run, idx_q, q_segments)
        args = (split(idx_q, run, 1), split(idx_w, run, 1), split(own, run, 1), firsts)
        parts.append(join(lax.map(one, args), 1))
    return jnp.concatenate(parts, axis=1)


CACHED = 2**20  # scores of all heads that are made at a time (measured on CPU)


def _score_rows(run, heads: int) -> int:
    """How many of a block's queries are scored at a time: a divisor of the block."""
    rows = max(1, min(run.size, CACHED // (heads * run.keys)))
    return next(n for n in range(rows, 0, -1) if run.size % n == 0)


def select_paged_keys(static, idx_q, idx_w, pages, page_table, lengths, page_scales):
    """topk int32[b t k] of the last t tokens of sequences of `lengths` keys in pages [p z j], one after the other."""
    t = idx_q.shape[1]
    s = page_table.shape[1] * pages.shape[1]

    def one(args):
        q, w, table, length = args
        table = jnp.clip(table, 0, pages.shape[0] - 1)
        scale = None if page_scales is None else page_scales[table].reshape(1, s)
        columns = _columns(pages[table].reshape(1, s, -1))
        scores = _scale(_index_scores(q[None], w[None], columns), scale)
        position = length - t + jnp.arange(t, dtype=jnp.int32)
        return _ordered_bits(scores, visible(position, jnp.arange(s, dtype=jnp.int32)))[0]

    # Scores of one sequence at a time, which hold a number for every head; the choice for all at once.
    return _best(lax.map(one, (idx_q, idx_w, page_table, lengths)), static.k)


def _scale(scores, scale):
    """scores [b t s] times scale [b s] or None."""
    return scores if scale is None else scores * scale[:, None]


def _columns(idx_k):
    """[b j s] of index keys [b s j], of a type to multiply in."""
    return _multiplied(idx_k).swapaxes(1, 2)


def _multiplied(x):
    # float32 holds the products of bytes exactly, and CPUs have no better unit for them.
    return x.astype(jnp.float32) if x.dtype.itemsize == 1 else x


def _index_scores(idx_q, idx_w, columns):
    """wide[b t s] scores of idx_q [b t i j], idx_w [b t i] against index keys [b j s], unmasked."""
    idx_q = _multiplied(idx_q)
    inner = wide(idx_q.dtype)
    dots = jnp.einsum("btij,bjs->btis", idx_q, columns, preferred_element_type=inner)
    return jnp.einsum("btis,bti->bts", jnp.maximum(dots, 0), idx_w * idx_q.shape[-1] ** -0.5)


def select(scores, visible, k: int):
    """topk int32[b t k]: the k best visible keys, ascending, -1 at the end where fewer are visible.

    scores [b t s], visible bool broadcastable to it. Equal scores (-0.0 equals 0.0, NaN is -inf) go
    to the lower index. Exact, and without sorting: see `_choose`.

    Long rows are filtered first. Of 2k groups of keys the k-th largest maximum is a lower bound of the k-th
    largest key, and seldom far below, nor are its first 16 bits: what reaches them mostly fits into 2k places,
    among which the choice is cheap. Where it does not, the choice is made among all.
    """
    return _best(_ordered_bits(scores, visible), k)


def _best(keys, k: int):
    """`select` of integers that compare like the scores, the smallest one where a key is not visible."""
    s, shape = keys.shape[-1], keys.shape[:-1]
    k = min(k, s)
    keys = keys.reshape(-1, s)
    if s < LONG * k:
        return _choose(keys, k).reshape(*shape, k)
    lowest = jnp.iinfo(keys.dtype).min
    padded = jnp.pad(keys, ((0, 0), (0, -s % (2 * k))), constant_values=lowest)
    # A group's keys lie 2k apart: neighbours score alike, and any 2k consecutive visible keys meet all groups.
    best = jnp.max(padded.reshape(keys.shape[0], -1, 2 * k), axis=1)
    bound = _kth_largest(best, k, passes=16)
    above = _words(keys > bound)
    level = _words((keys == bound) & (keys > lowest))
    # Of what equals the bound only the first matter: whole words until k are reached.
    sizes = lax.population_count(level).astype(jnp.int32)
    spare = k - jnp.sum(lax.population_count(above), axis=-1, keepdims=True).astype(jnp.int32)
    likely = above | jnp.where(_running_sum(sizes) - sizes < spare, level, 0)
    room = 2 * k + 32
    fits = jnp.max(jnp.sum(lax.population_count(likely), axis=-1)) <= room

    def among_likely():
        ids = _places(likely, room)
        own = jnp.take_along_axis(keys, ids, axis=1, mode="clip")
        best = _choose(jnp.where(ids >= 0, own, lowest), k)
        return jnp.where(best >= 0, jnp.take_along_axis(ids, best, axis=1, mode="clip"), -1)

    topk = lax.cond(fits, among_likely, lambda: _choose(keys, k))
    return topk.reshape(*shape, k)


LONG = 4  # rows of so many times k keys are filtered (measured on CPU)


def _choose(keys, k: int):
    """int32[m k]: places of the k largest of integers keys [m s] above the smallest integer, ascending, then
    -1; equal ones by the lower place. The k-th value is found bit by bit from counts."""
    cut = _kth_largest(keys, k)
    above, level = keys > cut, (keys == cut) & (keys > jnp.iinfo(keys.dtype).min)
    spare = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    tied = jnp.any(jnp.sum(level, axis=-1, keepdims=True, dtype=jnp.int32) > spare)
    first = lax.cond(tied, lambda: level & (_running_sum(level) <= spare), lambda: level)
    return _places(_words(above | first), k)


def _words(mask):
    """uint32[m w]: mask [m s] in words of 32 bits, the first place in the lowest bit."""
    rows, s = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, -s % 32))).reshape(rows, -1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _places(words, k: int):
    """int32[m k]: where the mask in words uint32[m w] is true, ascending, the first k, then -1.

    The word of the n-th true place follows from where the words before it end, its bit by halving. A
    scatter of every place is six times slower on CPU, where it is one loop over all of them.
    """
    rows = words.shape[0]
    sizes = lax.population_count(words).astype(jnp.int32)
    ends = _running_sum(sizes)
    # How many words end at or before place n. In one dimension: XLA writes the indices of a scatter out,
    # coordinate by coordinate.
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    end = jnp.where(ends < k, row * k + ends, rows * k).reshape(-1)
    ended = jnp.zeros(rows * k, jnp.int32).at[end].add(1, mode="drop").reshape(rows, k)
    word = jnp.minimum(_running_sum(ended), words.shape[1] - 1)
    left = jnp.take_along_axis(words, word, axis=1, mode="clip")
    n = jnp.arange(k, dtype=jnp.int32)
    skip = n - jnp.take_along_axis(ends - sizes, word, axis=1, mode="clip")
    bit = jnp.zeros_like(skip)
    for half in (16, 8, 4, 2, 1):
        low = left & jnp.uint32((1 << half) - 1)
        inside = lax.population_count(low).astype(jnp.int32)
        beyond = skip >= inside
        skip = jnp.where(beyond, skip - inside, skip)
        left = jnp.where(beyond, left >> half, low)
        bit = jnp.where(beyond, bit + half, bit)
    return jnp.where(n < ends[:, -1:], word * 32 + bit, -1)


def _running_sum(x):
    """Sums of integers x [... s] up to each place, exact below 2^24. Two small triangular products are several
    times faster than a cumulative sum, on any platform."""
    s = x.shape[-1]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -s % 64)]
    tiles = jnp.pad(x, pad).reshape(*x.shape[:-1], -1, 64).astype(jnp.float32)
    within = tiles @ jnp.triu(jnp.ones((64, 64), jnp.float32))
    totals = within[..., -1]
    before = totals @ jnp.triu(jnp.ones((totals.shape[-1],) * 2, jnp.float32), 1)
    total = (within + before[..., None]).reshape(*x.shape[:-1], -1)
    return total[..., :s].astype(jnp.int32)


def _ordered_bits(scores, visible):
    """Signed integers that compare like the scores; the smallest integer for what is not visible."""
    bits = {4: jnp.int32, 8: jnp.int64}[scores.dtype.itemsize]
    # -0.0 becomes 0.0 (not by adding 0.0, which XLA folds away).
    scores = jnp.where(scores == 0, 0, jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    raw = lax.bitcast_convert_type(scores, bits)
    ordered = jnp.where(raw < 0, raw ^ jnp.iinfo(bits).max, raw)
    return jnp.where(visible, ordered, jnp.iinfo(bits).min)


def _kth_largest(keys, k: int, passes: int | None = None):
    """The k-th largest of integers [... s], as [... 1], from the highest bit down; after fewer passes than
    it has bits, what its first bits are worth, which is not above it."""
    info = jnp.iinfo(keys.dtype)

    def bit(i, found):
        # Wraps for the sign bit, as it should.
        candidate = found + jnp.left_shift(
            jnp.ones((), keys.dtype), jnp.asarray(info.bits - 1 - i, keys.dtype)
        )
        # Counted in float32, exact below 2^24 keys: integer sums do not vectorise on CPU.
        count = jnp.sum((keys >= candidate).astype(jnp.float32), axis=-1, keepdims=True)
        return jnp.where(count >= k, candidate, found)

    lowest = jnp.full((*keys.shape[:-1], 1), info.min, keys.dtype)
    return lax.fori_loop(0, passes or info.bits, bit, lowest, unroll=8)
