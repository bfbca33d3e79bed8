"""Index scores and their exact selection in XLA, in blocks of queries: memory is linear in the length."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Num

from pallas_kernels.blocks import QueryRun, join, offsets, query_runs, split
from pallas_kernels.mask import visible
from pallas_kernels.numerics import accum_dtype


def select_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Num[Array, "b s j"],
    k_scale: Float[Array, "b s"] | None,
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
) -> Int32[Array, "b t k"]:
    """Returns topk int32[b t k] of idx_q [b t i j], idx_w [b t i] over idx_k [b s j]."""
    s, k, block = idx_k.shape[1], static.k, static.block
    start = start if static.start is None else static.start
    width = min(k, s)
    # Transposed once; otherwise XLA:CPU would do it for every block.
    columns = lax.optimization_barrier(_columns(idx_k))
    parts = []
    for run in query_runs(idx_q.shape[1], s, start, block):
        keys = columns[:, :, : run.keys]
        k_ids = None if k_segments is None else k_segments[:, : run.keys]
        scale = None if k_scale is None else k_scale[:, : run.keys]

        # Scores a few queries, as ordered integers.
        def rank(args, keys=keys, k_ids=k_ids, scale=scale, length=run.keys):
            q, w, q_ids, first = args
            query_index = start + first + jnp.arange(q.shape[1], dtype=jnp.int32)
            mask = visible(query_index, jnp.arange(length, dtype=jnp.int32), q_ids, k_ids)
            return _ordered_bits(_scale(_index_scores(q, w, keys), scale), mask)

        # Selects for one block of queries.
        def select_block(args, run=run, rank=rank):
            q, w, q_ids, offset = args
            # A loop's results are stored in memory; other values XLA:CPU recomputes at each use.
            part = _score_rows(run, idx_q.shape[2])
            pieces = QueryRun(first=0, count=run.size // part, size=part, keys=run.keys)
            firsts = offset + part * jnp.arange(pieces.count, dtype=jnp.int32)
            split_args = (split(q, pieces, 1), split(w, pieces, 1), split(q_ids, pieces, 1), firsts)
            picked = _best(join(lax.map(rank, split_args), 1), k)
            missing = width - picked.shape[-1]
            return jnp.pad(picked, ((0, 0), (0, 0), (0, missing)), constant_values=-1)

        firsts, q_ids = offsets(run, idx_q, q_segments)
        args = (split(idx_q, run, 1), split(idx_w, run, 1), split(q_ids, run, 1), firsts)
        parts.append(join(lax.map(select_block, args), 1))
    return jnp.concatenate(parts, axis=1)


CACHED = 2**20  # scores of all heads that are computed per step (measured on CPU)


def _score_rows(run, heads: int) -> int:
    """Returns how many of a block's queries are scored per step: a divisor of the block."""
    rows = max(1, min(run.size, CACHED // (heads * run.keys)))
    return next(n for n in range(rows, 0, -1) if run.size % n == 0)


def select_paged_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    pages: Num[Array, "p z j"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    page_scales: Float[Array, "p z"] | None,
) -> Int32[Array, "b t k"]:
    """Returns topk int32[b t k] of the last t tokens of sequences of `lengths` keys in pages, one by one."""
    t = idx_q.shape[1]
    s = page_table.shape[1] * pages.shape[1]

    def score_sequence(args):
        q, w, table, length = args
        table = jnp.clip(table, 0, pages.shape[0] - 1)
        scale = None if page_scales is None else page_scales[table].reshape(1, s)
        columns = _columns(pages[table].reshape(1, s, -1))
        scores = _scale(_index_scores(q[None], w[None], columns), scale)
        position = length - t + jnp.arange(t, dtype=jnp.int32)
        return _ordered_bits(scores, visible(position, jnp.arange(s, dtype=jnp.int32)))[0]

    # One sequence per scoring step, because the scores hold a number for every head; then one selection for all.
    return _best(lax.map(score_sequence, (idx_q, idx_w, page_table, lengths)), static.k)


def _scale(scores, scale):
    """Returns scores [b t s] times scale [b s] or None."""
    return scores if scale is None else scores * scale[:, None]


def _columns(idx_k):
    """Returns index keys [b s j] as [b j s], in a dtype for products."""
    return _to_matmul_dtype(idx_k).swapaxes(1, 2)


def _to_matmul_dtype(x):
    # float32 holds the products of bytes exactly, and CPUs have no better unit for them.
    return x.astype(jnp.float32) if x.dtype.itemsize == 1 else x


def _index_scores(idx_q, idx_w, columns):
    """Returns unmasked scores [b t s] for columns: index keys [b j s]."""
    idx_q = _to_matmul_dtype(idx_q)
    dtype = accum_dtype(idx_q.dtype)
    dots = jnp.einsum("btij,bjs->btis", idx_q, columns, preferred_element_type=dtype)
    return jnp.einsum("btis,bti->bts", jnp.maximum(dots, 0), idx_w * idx_q.shape[-1] ** -0.5)


def select(
    scores: Float[Array, "b t s"], visible: Bool[Array, "..."], k: int
) -> Int32[Array, "b t k"]:
    """Returns topk: the k best visible keys, ascending, -1 at the end if fewer are visible.

    visible: bool that broadcasts to scores. Equal scores (-0.0 equals 0.0, NaN is -inf) go to the lower index.
    Exact, and without sorting: see `_choose_exact`.

    Long rows are filtered first. Of 2k groups of keys, the k-th largest maximum is a lower bound of the k-th
    largest key, usually a close one, and so are its first 16 bits. The keys that reach it mostly fit into 2k
    places, where the selection is cheap. If they do not fit, all keys are searched.
    """
    return _best(_ordered_bits(scores, visible), k)


def _best(keys, k: int):
    """`select` for integers that compare like the scores, the smallest one where a key is not visible."""
    s, shape = keys.shape[-1], keys.shape[:-1]
    k = min(k, s)
    keys = keys.reshape(-1, s)
    if s < LONG * k:
        return _choose_exact(keys, k).reshape(*shape, k)
    lowest = jnp.iinfo(keys.dtype).min
    padded = jnp.pad(keys, ((0, 0), (0, -s % (2 * k))), constant_values=lowest)
    # The keys of a group are 2k apart: neighbours have similar scores, and any 2k consecutive keys cover all groups.
    best = jnp.max(padded.reshape(keys.shape[0], -1, 2 * k), axis=1)
    bound = _kth_largest(best, k, passes=16)
    above = _words(keys > bound)
    at_bound = _words((keys == bound) & (keys > lowest))
    # Of the keys that equal the bound only the first count: full words until k keys are reached.
    sizes = lax.population_count(at_bound).astype(jnp.int32)
    num_level = k - jnp.sum(lax.population_count(above), axis=-1, keepdims=True).astype(jnp.int32)
    is_candidate = above | jnp.where(_running_sum(sizes) - sizes < num_level, at_bound, 0)
    room = 2 * k + 32
    fits = jnp.max(jnp.sum(lax.population_count(is_candidate), axis=-1)) <= room

    def among_likely():
        candidate_ids = _places(is_candidate, room)
        candidates = jnp.take_along_axis(keys, candidate_ids, axis=1, mode="clip")
        best = _choose_exact(jnp.where(candidate_ids >= 0, candidates, lowest), k)
        return jnp.where(
            best >= 0, jnp.take_along_axis(candidate_ids, best, axis=1, mode="clip"), -1
        )

    topk = lax.cond(fits, among_likely, lambda: _choose_exact(keys, k))
    return topk.reshape(*shape, k)


LONG = 4  # rows of at least LONG * k keys are filtered (measured on CPU)


def _choose_exact(keys, k: int):
    """Returns the indices of the k largest of integers keys [m s], ascending: int32[m k].

    The smallest integer is not selected; -1 fills the end. Equal keys go to the lower index. The k-th value is
    determined bit by bit from counts.
    """
    cut = _kth_largest(keys, k)
    above, at_bound = keys > cut, (keys == cut) & (keys > jnp.iinfo(keys.dtype).min)
    num_level = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    tied = jnp.any(jnp.sum(at_bound, axis=-1, keepdims=True, dtype=jnp.int32) > num_level)
    first = lax.cond(
        tied, lambda: at_bound & (_running_sum(at_bound) <= num_level), lambda: at_bound
    )
    return _places(_words(above | first), k)


def _words(mask):
    """Returns uint32[m w]: mask [m s] in words of 32 bits, the first position in the lowest bit."""
    rows, s = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, -s % 32))).reshape(rows, -1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _places(words, k: int):
    """Returns int32[m k]: the first k true positions of the mask in words uint32[m w], ascending, then -1.

    The word of the n-th true position follows from the counts before each word, its bit by bisection. A scatter
    of every position is six times slower on CPU, where it is one loop over all of them.
    """
    rows = words.shape[0]
    sizes = lax.population_count(words).astype(jnp.int32)
    ends = _running_sum(sizes)
    # Number of words that end at or before position n. One-dimensional, because XLA writes out the indices of
    # a scatter coordinate by coordinate.
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    end = jnp.where(ends < k, row * k + ends, rows * k).reshape(-1)
    ended = jnp.zeros(rows * k, jnp.int32).at[end].add(1, mode="drop").reshape(rows, k)
    word = jnp.minimum(_running_sum(ended), words.shape[1] - 1)
    remaining = jnp.take_along_axis(words, word, axis=1, mode="clip")
    n = jnp.arange(k, dtype=jnp.int32)
    skip = n - jnp.take_along_axis(ends - sizes, word, axis=1, mode="clip")
    bit = jnp.zeros_like(skip)
    for half in (16, 8, 4, 2, 1):
        low = remaining & jnp.uint32((1 << half) - 1)
        inside = lax.population_count(low).astype(jnp.int32)
        beyond = skip >= inside
        skip = jnp.where(beyond, skip - inside, skip)
        remaining = jnp.where(beyond, remaining >> half, low)
        bit = jnp.where(beyond, bit + half, bit)
    return jnp.where(n < ends[:, -1:], word * 32 + bit, -1)


def _running_sum(x):
    """Returns cumulative sums of integers x [... s], exact below 2^24.

    Two small triangular products are several times faster than a cumulative sum, on any platform. At default
    precision a TPU or GPU would round their operands to 8 or 11 bits.
    """
    exact = lax.Precision.HIGHEST
    s = x.shape[-1]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -s % 64)]
    tiles = jnp.pad(x, pad).reshape(*x.shape[:-1], -1, 64).astype(jnp.float32)
    within = jnp.matmul(tiles, jnp.triu(jnp.ones((64, 64), jnp.float32)), precision=exact)
    totals = within[..., -1]
    earlier = jnp.triu(jnp.ones((totals.shape[-1],) * 2, jnp.float32), 1)
    before = jnp.matmul(totals, earlier, precision=exact)
    total = (within + before[..., None]).reshape(*x.shape[:-1], -1)
    return total[..., :s].astype(jnp.int32)


def _ordered_bits(scores, visible):
    """Returns signed integers that compare like the scores; the smallest integer where not visible."""
    bits = {4: jnp.int32, 8: jnp.int64}[scores.dtype.itemsize]
    # -0.0 becomes 0.0 (not by adding 0.0, which XLA folds away).
    scores = jnp.where(scores == 0, 0, jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    raw = lax.bitcast_convert_type(scores, bits)
    ordered = jnp.where(raw < 0, raw ^ jnp.iinfo(bits).max, raw)
    return jnp.where(visible, ordered, jnp.iinfo(bits).min)


def _kth_largest(keys, k: int, passes: int | None = None):
    """Returns the k-th largest of integers [... s], as [... 1], from the highest bit down.

    With fewer passes than bits, only the first bits of the result are set, so it is a lower bound.
    """
    info = jnp.iinfo(keys.dtype)

    def bit(i, bound):
        # Wraps for the sign bit, as it should.
        candidate = bound + jnp.left_shift(
            jnp.ones((), keys.dtype), jnp.asarray(info.bits - 1 - i, keys.dtype)
        )
        # Counted in float32, exact below 2^24 keys: integer sums do not vectorise on CPU.
        count = jnp.sum((keys >= candidate).astype(jnp.float32), axis=-1, keepdims=True)
        return jnp.where(count >= k, candidate, bound)

    lowest = jnp.full((*keys.shape[:-1], 1), info.min, keys.dtype)
    return lax.fori_loop(0, passes or info.bits, bit, lowest, unroll=8)
