"""MLA's projections, norms, rotation and cache write on a TPU, in one pass over the weights.

For a block of tokens the weights stream by: first q_a and kv_a along the width of the model, then, with both
latents normed and kept on the chip, q_b head by head. A row of a cache in 16-bit numbers is less than
what the chip can address, so a token's row is written by reading and writing the tile of rows around it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate
from pallas_kernels.mla_prologue import cost

# Not measured. 512 tokens make 512 FLOPs of every byte of the weights; with blocks of the weights of 2 and
# 4 MiB, twice, and a tile of the cache for every token, that is 40 MiB.
TOKENS, WIDTH, COLUMNS = 512, 512, 1024
PIECE = 128  # tokens that are computed together
VMEM_BYTES = 60 << 20
LANES = 128


def refuse(x, w, cache):
    """Why it cannot take x [b t d], these weights and a cache or None, or None."""
    q_a, q_b = w["q_a"], w["q_b"]
    d, q, head, c = q_a.shape[0], q_a.shape[1], q_b.shape[2], w["kv_a_norm"].shape[0]
    r = w["kv_a"].shape[1] - c
    if x.dtype not in (jnp.bfloat16, jnp.float32) or {v.dtype for v in w.values()} != {x.dtype}:
        return f"it takes inputs and weights all in bfloat16 or all in float32, not {x.dtype}"
    if any(size % LANES for size in (d, q, head, c)) or r > LANES // 2 or r % 2:
        return (
            f"width {d}, query latent {q}, head {head} and latent {c} must be multiples of {LANES}, "
            f"and the rotated part {r} at most {LANES // 2}"
        )
    if cache is not None and (cache.dtype != x.dtype or cache.shape[0] % _tile_rows(x.dtype)):
        return f"a cache of {cache.shape[0]} rows of {cache.dtype} does not divide into tiles"
    return None


def forward(static, x, w, cos, sin, cache, slots, *, interpret=False):
    """(c_q, q, latent, cache); see the package."""
    (b, t, d), dtype = x.shape, x.dtype
    q, n, head = w["q_b"].shape
    c, width = w["kv_a_norm"].shape[0], w["kv_a"].shape[1]
    m = b * t
    tokens = min(TOKENS, -(-m // 16) * 16)
    blocks = -(-m // tokens)

    def rows(a):
        """[blocks * tokens, ...] of an array [b t ...]."""
        return jnp.pad(
            a.reshape(m, *a.shape[2:]), [(0, blocks * tokens - m)] + [(0, 0)] * (a.ndim - 2)
        )

    step = _divisor(d, WIDTH)
    columns = head * _divisor(n, max(1, COLUMNS // head))
    downs, heads = d // step, n * head // columns
    bias = [w.get(name, jnp.zeros(s, dtype)) for name, s in (("q_a_bias", q), ("kv_a_bias", width))]
    args = [rows(x), w["q_a"], w["kv_a"], w["q_b"].reshape(q, n * head)]
    args += [a[None] for a in (w["q_a_norm"], w["kv_a_norm"], *bias)]
    args += [_lanes(rows(a)) for a in (cos, sin)]
    in_specs = [
        pl.BlockSpec((tokens, step), lambda i, j, *_: (i, jnp.minimum(j, downs - 1))),
        pl.BlockSpec((step, q), lambda i, j, *_: (jnp.minimum(j, downs - 1), 0)),
        pl.BlockSpec((step, width), lambda i, j, *_: (jnp.minimum(j, downs - 1), 0)),
        pl.BlockSpec((q, columns), lambda i, j, *_: (0, jnp.maximum(j - downs, 0))),
        *[pl.BlockSpec((1, a.shape[1]), lambda *_: (0, 0)) for a in args[4:8]],
        *[pl.BlockSpec((tokens, LANES), lambda i, j, *_: (i, 0))] * 2,
    ]
    out_specs = [
        pl.BlockSpec((tokens, q), lambda i, j, *_: (i, 0)),
        pl.BlockSpec((tokens, columns), lambda i, j, *_: (i, jnp.maximum(j - downs, 0))),
        pl.BlockSpec((tokens, width), lambda i, j, *_: (i, 0)),
    ]
    total = blocks * tokens
    out_shape = [jax.ShapeDtypeStruct((total, s), dtype) for s in (q, n * head, width)]
    scratch = [
        pltpu.VMEM((tokens, q), jnp.float32),
        pltpu.VMEM((tokens, c + LANES), jnp.float32),
    ]
    aliases, prefetched = {}, []
    if cache is not None:
        tile = _tile_rows(dtype)
        prefetched = _visits(
            jnp.pad(slots.reshape(m), (0, total - m), constant_values=-1), tile, tokens
        )
        args.append(cache)
        in_specs.append(pl.BlockSpec(memory_space=pltpu.HBM))
        out_specs.append(pl.BlockSpec(memory_space=pltpu.HBM))
        out_shape.append(jax.ShapeDtypeStruct(cache.shape, cache.dtype))
        scratch += [pltpu.VMEM((tokens, tile, width), dtype), pltpu.SemaphoreType.DMA(())]
        aliases = {len(prefetched) + len(args) - 1: 3}
    done = pl.pallas_call(
        functools.partial(
            _kernel,
            eps=static.eps,
            downs=downs,
            head=head,
            rope=2 * cos.shape[-1],
            cached=cache is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(blocks, downs + heads),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            # Two blocks may meet in one tile of the cache.
            dimension_semantics=("parallel" if cache is None else "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        cost_estimate=estimate(
            cost.forward(m, d, q, n * head, width, cache is not None, dtype.itemsize)
        ),
        interpret=interpret,
        name="mla_prologue",
    )(*prefetched, *args)
    c_q, queries, latent = (a[:m].reshape(b, t, -1) for a in done[:3])
    return c_q, queries.reshape(b, t, n, head), latent, done[3] if cache is not None else None


def _tile_rows(dtype) -> int:
    """Rows of the smallest part of an array in memory that can be copied alone."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def _divisor(size: int, most: int) -> int:
    """The largest divisor of size up to most; a multiple of 128 where size is one and most is not less."""
    unit = LANES if size % LANES == 0 and most >= LANES else 1
    return next(k for k in range(most // unit * unit, 0, -unit) if size % k == 0)


def _lanes(table):
    """float32[m 128]: cosines or sines [m r/2], one for each of a pair, at both ends of the lanes."""
    pairs = jnp.repeat(table.astype(jnp.float32), 2, axis=1)
    free = LANES - 2 * pairs.shape[1]
    return jnp.concatenate([pairs, jnp.zeros((len(pairs), free), jnp.float32), pairs], axis=1)


def _visits(slots, tile: int, tokens: int):
    """[where of every token, its row's tile in the cache; leader, the token of its block whose buffer holds it;
    offset, its row in the tile]: int32[m], leader -1 for a token without a row."""
    place = jnp.arange(slots.shape[0], dtype=jnp.int32)
    where = jnp.maximum(slots, 0) // tile
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), where[:-1]])
    unwritten = jnp.concatenate([jnp.ones(1, bool), slots[:-1] < 0])
    first = (where != before) | unwritten | (place % tokens == 0)
    leader = lax.cummax(jnp.where(first, place, 0)) % tokens
    return [where, jnp.where(slots < 0, -1, leader), jnp.maximum(slots, 0) % tile]


def _kernel(*refs, eps, downs, head, rope, cached):
    """One step of one block of tokens: `downs` steps of the down-projections, then blocks of heads."""
    visits, refs = (refs[:3], refs[3:]) if cached else (None, refs)
    x, q_a, kv_a, q_b, q_norm, kv_norm, q_bias, kv_bias, cos, sin = refs[:10]
    c_q, queries, latent = refs[10 + cached : 13 + cached]
    acc_q, acc_kv = refs[13 + 2 * cached : 15 + 2 * cached]
    i, j = pl.program_id(0), pl.program_id(1)
    c, width = kv_norm.shape[1], kv_a.shape[1]

    @pl.when(j == 0)
    def _():
        acc_q[...] = jnp.zeros_like(acc_q)
        acc_kv[...] = jnp.zeros_like(acc_kv)

    @pl.when(j < downs)
    def _():
        def add(at):
            acc_q[at] += _dot(x[at], q_a[...])
            acc_kv[at, :width] += _dot(x[at], kv_a[...])

        _in_pieces(x.shape[0], add)

    def rounded(acc, bias):
        return (acc.astype(x.dtype) + bias).astype(jnp.float32)

    def norm(y, weight):
        y = y * lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + eps)
        return weight[...] * y.astype(x.dtype)

    @pl.when(j == downs - 1)
    def _():
        bias = jnp.pad(kv_bias[:, c:], ((0, 0), (0, LANES - rope)))

        def finish(at):
            c_q[at] = norm(rounded(acc_q[at], q_bias[...]), q_norm)
            normed = norm(rounded(acc_kv[at, :c], kv_bias[:, :c]), kv_norm)
            turned = _rotate(rounded(acc_kv[at, c:], bias), cos[at], sin[at], 0, rope, x.dtype)
            latent[at, :c] = normed
            latent[at, c:] = turned[:, :rope]
            if cached:
                acc_kv[at, :c] = normed.astype(jnp.float32)
                acc_kv[at, c:] = turned.astype(jnp.float32)

        _in_pieces(x.shape[0], finish)
        if cached:
            _write(i * x.shape[0], visits, acc_kv, refs[14], *refs[17:])

    @pl.when(j >= downs)
    def _():
        def multiply(at):
            y = _dot(c_q[at], q_b[...]).astype(x.dtype)
            for first in range(0, y.shape[1], head):
                last = first + head
                tail = y[:, last - LANES : last].astype(jnp.float32)
                if head > LANES:
                    queries[at, first : last - LANES] = y[:, first : last - LANES]
                queries[at, last - LANES : last] = _rotate(
                    tail, cos[at], sin[at], LANES - rope, rope, x.dtype
                )

        _in_pieces(x.shape[0], multiply)


def _in_pieces(tokens: int, compute):
    """compute(slice) over so many tokens, PIECE at a time, in a loop that keeps the code short."""
    piece = PIECE if tokens % PIECE == 0 else tokens

    def one(i, _):
        compute(pl.ds(pl.multiple_of(i * piece, piece), piece))

    lax.fori_loop(0, tokens // piece, one, None)


def _rotate(y, cos, sin, begin: int, rope: int, dtype):
    """y float32[m 128] with the pairs of its lanes begin .. begin + rope rotated, then de-interleaved."""
    lane = lax.broadcasted_iota(jnp.int32, y.shape, 1)
    inside = (lane >= begin) & (lane < begin + rope)
    even = (lane & 1) == 0
    other = jnp.where(even, -pltpu.roll(y, LANES - 1, 1), pltpu.roll(y, 1, 1))
    turned = (y * cos + other * sin).astype(dtype)
    y = jnp.where(inside, turned, y.astype(dtype))
    # By a product with a permutation, which is exact: a lane cannot be moved by an odd number of others.
    source = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    target = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    pair = source - begin
    moved = begin + (pair >> 1) + jnp.where((pair & 1) == 1, rope // 2, 0)
    goal = jnp.where((pair >= 0) & (pair < rope), moved, source)
    return _dot(y, (goal == target).astype(dtype)).astype(dtype)


def _write(base, visits, rows, cache, tiles, done):
    """Puts the rows [tokens c+r..] of the block whose first token is `base` into their tiles of the cache."""
    where, leader, offset = visits
    tokens, height, width = tiles.shape

    def copy(i, back: bool):
        at = pl.multiple_of(where[base + i] * height, height)
        there = cache.at[pl.ds(at, height), :]
        pair = (tiles.at[i], there) if back else (there, tiles.at[i])
        return pltpu.make_async_copy(*pair, done)

    def each_tile(act):
        def one(i, _):
            @pl.when(leader[base + i] == i)
            def _():
                act(i)

        lax.fori_loop(0, tokens, one, None)

    def insert(i, _):
        mine = leader[base + i]

        @pl.when(mine >= 0)
        def _():
            tile = tiles[mine].astype(jnp.float32)
            row = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
            new = rows[pl.ds(i, 1), :][:, :width]
            tiles[mine] = jnp.where(row == offset[base + i], new, tile).astype(tiles.dtype)

    each_tile(lambda i: copy(i, False).start())
    each_tile(lambda i: copy(i, False).wait())
    lax.fori_loop(0, tokens, insert, None)
    each_tile(lambda i: copy(i, True).start())
    each_tile(lambda i: copy(i, True).wait())


def _dot(a, b):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
