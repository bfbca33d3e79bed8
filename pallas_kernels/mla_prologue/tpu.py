"""MLA's projections, norms, rotation and cache write on a TPU, in one pass over the weights.

Grid: (block of 512 tokens, step). The weights stream through VMEM: for GLM-5 12 steps over the width of the model for
q_a and kv_a, then 16 steps of 4 heads each for q_b.

Blocks, for GLM-5 in bfloat16, double-buffered by the pipeline: x [512 512] (512 KiB), q_a [512 2048] (2 MiB), kv_a [512
576] (576 KiB), q_b [2048 1024] (4 MiB), cosines and sines float32[512 128], c_q [512 2048] (2 MiB), queries [512 1024]
(1 MiB), latents [512 576]. A block whose step has not come or is over keeps its index, so that nothing is copied.

Scratch VMEM: float32 sums of both latents [512 2048] and [512 640] (5.25 MiB), and a tile of 16 cache rows for each
token [512 16 576] (9 MiB). Scalar memory: three numbers per token that place its row in the cache.

Phases of a program:

1. First step: reset the sums. Steps over the width: add to both latents' sums.
2. Last of these steps: norms, rotation of the latent, cache write.
3. Steps over heads: project the latent, which stayed on the chip, and rotate the last columns of each head.

A 16-bit cache row is smaller than the chip's addressable unit, so a token's row is written by reading and writing the
tile of rows around it; neighbouring tokens of one tile share a buffer. Padding: tokens to full blocks, without a
place in the cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.cost import estimate
from pallas_kernels.mla_prologue import cost

# Not measured. 512 tokens give 512 FLOP per byte of the weights. With double-buffered weight blocks of 2 and
# 4 MiB, and a tile of the cache for every token, this takes 40 MiB.
TOKENS, WIDTH, COLUMNS = 512, 512, 1024
PIECE = 128  # tokens that are computed together
VMEM_BYTES = 60 << 20
LANES = 128


def unsupported_reason(
    x: Float[Array, "b t d"], w: dict[str, Array], cache: Float[Array, "rows c+r"] | None
) -> str | None:
    """Returns the reason why x [b t d], these weights and a cache or None are not supported, or None."""
    q_a, q_b = w["q_a"], w["q_b"]
    d, q, head, c = q_a.shape[0], q_a.shape[1], q_b.shape[2], w["kv_a_norm"].shape[0]
    r = w["kv_a"].shape[1] - c
    if x.dtype not in (jnp.bfloat16, jnp.float32) or {v.dtype for v in w.values()} != {x.dtype}:
        return f"inputs and weights must all be bfloat16 or all float32, not {x.dtype}"
    if any(size % LANES for size in (d, q, head, c)) or r > LANES // 2 or r % 2:
        return (
            f"width {d}, query latent {q}, head {head} and latent {c} must be multiples of {LANES}, "
            f"and the rotated part {r} at most {LANES // 2}"
        )
    if cache is not None and (cache.dtype != x.dtype or cache.shape[0] % _tile_rows(x.dtype)):
        return f"a cache of {cache.shape[0]} rows of {cache.dtype} does not divide into tiles"
    return None


def forward(
    static,
    x: Float[Array, "b t d"],
    w: dict[str, Array],
    cos: Float[Array, "b t r/2"],
    sin: Float[Array, "b t r/2"],
    cache: Float[Array, "rows c+r"] | None,
    slots: Int[Array, "b t"] | None,
    *,
    interpret: object = False,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns (c_q, q, latent, cache); see the package."""
    # Tile sizes.
    (b, t, d), dtype = x.shape, x.dtype
    q, n, head = w["q_b"].shape
    c, width = w["kv_a_norm"].shape[0], w["kv_a"].shape[1]
    m = b * t
    tokens = min(TOKENS, -(-m // 16) * 16)
    blocks = -(-m // tokens)

    def rows(array):
        """Returns [blocks * tokens, ...] of an array [b t ...]."""
        return jnp.pad(
            array.reshape(m, *array.shape[2:]),
            [(0, blocks * tokens - m)] + [(0, 0)] * (array.ndim - 2),
        )

    # Operands and their blocks.
    step = _divisor(d, WIDTH)
    columns = head * _divisor(n, max(1, COLUMNS // head))
    downs, heads = d // step, n * head // columns
    bias = [w.get(name, jnp.zeros(s, dtype)) for name, s in (("q_a_bias", q), ("kv_a_bias", width))]
    args = [rows(x), w["q_a"], w["kv_a"], w["q_b"].reshape(q, n * head)]
    args += [array[None] for array in (w["q_a_norm"], w["kv_a_norm"], *bias)]
    args += [_lanes(rows(array)) for array in (cos, sin)]
    in_specs = [
        pl.BlockSpec((tokens, step), lambda i, j, *_: (i, jnp.minimum(j, downs - 1))),
        pl.BlockSpec((step, q), lambda i, j, *_: (jnp.minimum(j, downs - 1), 0)),
        pl.BlockSpec((step, width), lambda i, j, *_: (jnp.minimum(j, downs - 1), 0)),
        pl.BlockSpec((q, columns), lambda i, j, *_: (0, jnp.maximum(j - downs, 0))),
        *[pl.BlockSpec((1, array.shape[1]), lambda *_: (0, 0)) for array in args[4:8]],
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
    # The cache is aliased to an output, and its tiles are prefetched scalars.
    aliases, prefetched = {}, []
    if cache is not None and slots is not None:
        tile = _tile_rows(dtype)
        prefetched = _cache_tiles(
            jnp.pad(slots.reshape(m), (0, total - m), constant_values=-1), tile, tokens
        )
        args.append(cache)
        in_specs.append(pl.BlockSpec(memory_space=pltpu.HBM))
        out_specs.append(pl.BlockSpec(memory_space=pltpu.HBM))
        out_shape.append(jax.ShapeDtypeStruct(cache.shape, cache.dtype))
        scratch += [pltpu.VMEM((tokens, tile, width), dtype), pltpu.SemaphoreType.DMA(())]
        aliases = {len(prefetched) + len(args) - 1: 3}
    # Call the kernel.
    results = pl.pallas_call(
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
            # Two blocks may share a tile of the cache.
            dimension_semantics=("parallel" if cache is None else "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        cost_estimate=estimate(
            cost.forward(m, d, q, n * head, width, cache is not None, dtype.itemsize)
        ),
        interpret=interpret,
        name="mla_prologue",
    )(*prefetched, *args)
    c_q, queries, latent = (array[:m].reshape(b, t, -1) for array in results[:3])
    return c_q, queries.reshape(b, t, n, head), latent, results[3] if cache is not None else None


def _tile_rows(dtype) -> int:
    """Returns the number of rows of the smallest part of an array in memory that can be copied separately."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def _divisor(size: int, max_divisor: int) -> int:
    """Returns the largest divisor of size up to max_divisor; a multiple of 128 if size and max_divisor allow it."""
    unit = LANES if size % LANES == 0 and max_divisor >= LANES else 1
    return next(k for k in range(max_divisor // unit * unit, 0, -unit) if size % k == 0)


def _lanes(table):
    """Returns float32[m 128]: cosines or sines [m r/2], one for each of a pair, at both ends of the lanes."""
    pairs = jnp.repeat(table.astype(jnp.float32), 2, axis=1)
    free = LANES - 2 * pairs.shape[1]
    return jnp.concatenate([pairs, jnp.zeros((len(pairs), free), jnp.float32), pairs], axis=1)


def _cache_tiles(slots, tile: int, tokens: int):
    """Returns [tile_numbers, leader, offset], int32[m] per token.

    tile_numbers: tile of the token's row in the cache. leader: token of the block whose buffer holds the tile;
    -1 for a token without a row. offset: row within the tile.
    """
    place = jnp.arange(slots.shape[0], dtype=jnp.int32)
    tile_numbers = jnp.maximum(slots, 0) // tile
    previous_tile = jnp.concatenate([jnp.full(1, -1, jnp.int32), tile_numbers[:-1]])
    unwritten = jnp.concatenate([jnp.ones(1, bool), slots[:-1] < 0])
    is_leader = (tile_numbers != previous_tile) | unwritten | (place % tokens == 0)
    leader = lax.cummax(jnp.where(is_leader, place, 0)) % tokens
    return [tile_numbers, jnp.where(slots < 0, -1, leader), jnp.maximum(slots, 0) % tile]


def _kernel(*refs, eps, downs, head, rope, cached):
    """One step of one block of tokens: `downs` steps of the down-projections, then blocks of heads."""
    # Unpack the refs.
    cache_tiles, refs = (refs[:3], refs[3:]) if cached else (None, refs)
    x, q_a, kv_a, q_b, q_norm, kv_norm, q_bias, kv_bias, cos, sin = refs[:10]
    c_q, queries, latent = refs[10 + cached : 13 + cached]
    acc_q, acc_kv = refs[13 + 2 * cached : 15 + 2 * cached]
    i, j = pl.program_id(0), pl.program_id(1)
    c, width = kv_norm.shape[1], kv_a.shape[1]

    # First step: reset the sums.
    @pl.when(j == 0)
    def _():
        acc_q[...] = jnp.zeros_like(acc_q)
        acc_kv[...] = jnp.zeros_like(acc_kv)

    # Down-projections.
    @pl.when(j < downs)
    def _():
        def add(token_slice):
            acc_q[token_slice] += _dot(x[token_slice], q_a[...])
            acc_kv[token_slice, :width] += _dot(x[token_slice], kv_a[...])

        _in_pieces(x.shape[0], add)

    def rounded(acc, bias):
        return (acc.astype(x.dtype) + bias).astype(jnp.float32)

    def norm(y, weight):
        y = y * lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + eps)
        return weight[...] * y.astype(x.dtype)

    # Last down-projection: norms, rotation and cache write.
    @pl.when(j == downs - 1)
    def _():
        bias = jnp.pad(kv_bias[:, c:], ((0, 0), (0, LANES - rope)))

        def finish(token_slice):
            c_q[token_slice] = norm(rounded(acc_q[token_slice], q_bias[...]), q_norm)
            normed = norm(rounded(acc_kv[token_slice, :c], kv_bias[:, :c]), kv_norm)
            rotated = _rotate(
                rounded(acc_kv[token_slice, c:], bias),
                cos[token_slice],
                sin[token_slice],
                0,
                rope,
                x.dtype,
            )
            latent[token_slice, :c] = normed
            latent[token_slice, c:] = rotated[:, :rope]
            if cached:
                acc_kv[token_slice, :c] = normed.astype(jnp.float32)
                acc_kv[token_slice, c:] = rotated.astype(jnp.float32)

        _in_pieces(x.shape[0], finish)
        if cached:
            _write(i * x.shape[0], cache_tiles, acc_kv, refs[14], *refs[17:])

    # Query heads: project and rotate.
    @pl.when(j >= downs)
    def _():
        def multiply(token_slice):
            y = _dot(c_q[token_slice], q_b[...]).astype(x.dtype)
            for first in range(0, y.shape[1], head):
                last = first + head
                tail = y[:, last - LANES : last].astype(jnp.float32)
                if head > LANES:
                    queries[token_slice, first : last - LANES] = y[:, first : last - LANES]
                queries[token_slice, last - LANES : last] = _rotate(
                    tail, cos[token_slice], sin[token_slice], LANES - rope, rope, x.dtype
                )

        _in_pieces(x.shape[0], multiply)


def _in_pieces(tokens: int, compute):
    """Calls compute(slice) over `tokens` tokens, PIECE at a time, in a loop that keeps the code short."""
    piece = PIECE if tokens % PIECE == 0 else tokens

    def one(i, _):
        compute(pl.ds(pl.multiple_of(i * piece, piece), piece))

    lax.fori_loop(0, tokens // piece, one, None)


def _rotate(y, cos, sin, begin: int, rope: int, dtype):
    """Rotates the pairs of lanes begin .. begin + rope of y float32[m 128], then de-interleaves them."""
    lane = lax.broadcasted_iota(jnp.int32, y.shape, 1)
    inside = (lane >= begin) & (lane < begin + rope)
    even = (lane & 1) == 0
    other = jnp.where(even, -pltpu.roll(y, LANES - 1, 1), pltpu.roll(y, 1, 1))
    rotated = (y * cos + other * sin).astype(dtype)
    y = jnp.where(inside, rotated, y.astype(dtype))
    # An exact product with a permutation, because lanes cannot be moved by different distances otherwise.
    source = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    target = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    pair = source - begin
    new_lane = begin + (pair >> 1) + jnp.where((pair & 1) == 1, rope // 2, 0)
    target_lane = jnp.where((pair >= 0) & (pair < rope), new_lane, source)
    return _dot(y, (target_lane == target).astype(dtype)).astype(dtype)


def _write(base, cache_tiles, rows, cache, tiles, done):
    """Writes the rows [tokens c+r..] of the block whose first token is `base` to their tiles of the cache."""
    tile_numbers, leader, offset = cache_tiles
    tokens, height, width = tiles.shape

    # Copies a tile from or to the cache.
    def copy(i, to_cache: bool):
        first_row = pl.multiple_of(tile_numbers[base + i] * height, height)
        cache_tile = cache.at[pl.ds(first_row, height), :]
        pair = (tiles.at[i], cache_tile) if to_cache else (cache_tile, tiles.at[i])
        return pltpu.make_async_copy(*pair, done)

    def for_each_tile(action):
        def visit(i, _):
            @pl.when(leader[base + i] == i)
            def _():
                action(i)

        lax.fori_loop(0, tokens, visit, None)

    def insert(i, _):
        leader_token = leader[base + i]

        @pl.when(leader_token >= 0)
        def _():
            tile = tiles[leader_token].astype(jnp.float32)
            row = lax.broadcasted_iota(jnp.int32, tile.shape, 0)
            new_row = rows[pl.ds(i, 1), :][:, :width]
            tiles[leader_token] = jnp.where(row == offset[base + i], new_row, tile).astype(
                tiles.dtype
            )

    # Read the tiles, insert the rows, and write the tiles.
    for_each_tile(lambda i: copy(i, False).start())
    for_each_tile(lambda i: copy(i, False).wait())
    lax.fori_loop(0, tokens, insert, None)
    for_each_tile(lambda i: copy(i, True).start())
    for_each_tile(lambda i: copy(i, True).wait())


def _dot(a, b):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
