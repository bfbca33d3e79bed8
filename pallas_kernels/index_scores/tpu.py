"""Index scores and their gradients by Mosaic: the sum over heads, and a tile's gradients, stay on chip.

Keys lie along sublanes and queries along lanes, so that a head's weights are a row.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate
from pallas_kernels.head_probs.tiles import padded
from pallas_kernels.head_probs.tpu import dot, nearest, span, tiling
from pallas_kernels.index_scores import cost
from pallas_kernels.index_scores.ref import head_weights

# Not measured. The backward keeps 32 heads' queries (2 MiB in bfloat16) and their sums (4 MiB) for a
# tile of 256 queries on chip, twice buffered, beside tiles of 0.5 MiB of scores and their gradient.
QUERIES = (256, 128)
KEYS = (512, 256, 128)
VMEM = 48 * 2**20


def refuse(idx_q, idx_w, idx_k):
    """Why idx_q [b t i j] with idx_w [b t i] over idx_k [b s j] cannot run here, or None."""
    if idx_q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"idx_q is {idx_q.dtype}; bfloat16 and float32 are taken"
    if idx_q.dtype != idx_k.dtype:
        return f"idx_q is {idx_q.dtype} and idx_k {idx_k.dtype}"
    if idx_w.dtype == jnp.float64:
        return "idx_w is float64"
    if idx_q.shape[-1] % 8:
        return f"{idx_q.shape[-1]} columns are no multiple of 8"
    return None


def forward(static, idx_q, idx_w, idx_k, interpret=False):
    """wide[b t s] of idx_q [b t i j], idx_w [b t i], idx_k [b s j]."""
    t, s = idx_q.shape[1], idx_k.shape[1]
    q, w = lanes(idx_q, idx_w)
    k = padded(idx_k, 1, 128)
    sizes = tiling(q.shape[-1], k.shape[1], QUERIES, KEYS)

    def kernel(q, w, k, out):
        out[...] = jnp.zeros(out.shape, out.dtype)
        add_scores(q, w, k, out)

    (b, i, j, t_), s_ = q.shape, k.shape[1]
    queries, keys = sizes
    scores = pl.pallas_call(
        kernel,
        grid=(b, t_ // queries, s_ // keys),
        in_specs=[
            *query_specs(i, j, queries),
            pl.BlockSpec((1, keys, j), lambda b, t, s: (b, s, 0)),
        ],
        out_specs=pl.BlockSpec((1, keys, queries), lambda b, t, s: (b, s, t)),
        out_shape=jax.ShapeDtypeStruct((b, s_, t_), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=VMEM
        ),
        cost_estimate=estimate(cost.forward(b, t, s, i, j, idx_q.dtype.itemsize)),
        interpret=interpret,
        name="index_scores",
    )(q, w, k)
    return scores[:, :s, :t].swapaxes(1, 2)


def backward(static, saved, dscores, interpret=False):
    """(dq, dw, dk) for what `forward` took and the gradient of what it gave."""
    idx_q, idx_w, idx_k = saved
    q, w = lanes(idx_q, idx_w)
    k = padded(idx_k, 1, 128)
    dscores = padded(padded(dscores.swapaxes(1, 2), 1, 128), 2, 128)
    queries, keys = sizes = tiling(q.shape[-1], k.shape[1], QUERIES, KEYS)
    everything = jnp.asarray([0, k.shape[1] // keys], jnp.int32)
    tiles = jnp.tile(everything, q.shape[0] * q.shape[-1] // queries)

    def read(dscores, scratch):
        scratch[...] = dscores[0]

    pairs = idx_q.shape[1] * idx_k.shape[1]
    e, dk = gradients(
        "index_scores_backward", read, (dscores,), (), tiles, q, w, k, sizes, pairs, interpret
    )
    return *of_queries(e, idx_q, idx_w), dk[:, : idx_k.shape[1]].astype(idx_k.dtype)


def lanes(idx_q, idx_w):
    """(q [b i j t], w float32[b i t] with the scale of the dot products), padded to whole tiles."""
    q = padded(idx_q, 1, 128).transpose(0, 2, 3, 1)
    return q, padded(head_weights(idx_q, idx_w), 1, 128).swapaxes(1, 2)


def query_specs(i: int, j: int, queries: int):
    """Blocks of q [b i j t] and w [b i t] for a grid of (b, query tiles, key tiles)."""
    return (
        pl.BlockSpec((1, i, j, queries), lambda b, t, *_: (b, 0, 0, t)),
        pl.BlockSpec((1, i, queries), lambda b, t, *_: (b, 0, t)),
    )


def add_scores(q, w, k, out):
    """Adds the scores of a tile to out [1 keys queries]; inside a kernel."""

    @pl.loop(0, q.shape[1])
    def _(head):
        dots = dot(k[0], q[0, head])
        out[0] += w[0, pl.ds(head, 1), :] * jnp.maximum(dots, 0)


def gradients(name, read, pairs, rows, tiles, q, w, k, sizes, seen: float, interpret):
    """(e float32[b i j t], dk float32[b s j]): a head's e is sum_s [q . k_s > 0] dI_s k_s (see ref).

    read(*blocks, scratch) writes a tile's dI [keys queries] into scratch, from blocks of `pairs` [b s t]
    and `rows` [b r t]. Only the tiles of `head_probs.tpu.Place.tiles` count; seen: pairs of a query and a key in
    them, as far as that is known.
    """
    (b, i, j, t), s = q.shape, k.shape[1]
    queries, keys = sizes
    query_tiles = t // queries

    def near(b, t, s, tiles):
        return nearest(s, *span(tiles, b * query_tiles + t))

    def kernel(tiles, q, w, k, flat, *rest):
        *blocks, e, dk, scores = rest
        low, high = span(tiles, pl.program_id(0) * query_tiles + pl.program_id(1))
        tile = pl.program_id(2)

        @pl.when(tile == 0)
        def _():
            e[...] = jnp.zeros(e.shape, e.dtype)

        dk[...] = jnp.zeros(dk.shape, dk.dtype)

        @pl.when((low <= tile) & (tile < high))
        def _():
            read(*blocks, scores)

            @pl.loop(0, i)
            def _(head):
                one = q[0, head]
                passed = jnp.where(dot(k[0], one) > 0, scores[...], 0).astype(k.dtype)
                weighted = (one * w[0, pl.ds(head, 1), :]).astype(k.dtype)
                dk[0, 0] += dot(passed, weighted, ((1,), (1,)))
                e[0, head] += dot(flat[0], passed)

    e, dk = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, query_tiles, s // keys),
            in_specs=[
                *query_specs(i, j, queries),
                pl.BlockSpec((1, keys, j), lambda b, t, s, tiles: (b, near(b, t, s, tiles), 0)),
                pl.BlockSpec((1, j, keys), lambda b, t, s, tiles: (b, 0, near(b, t, s, tiles))),
                *(
                    pl.BlockSpec(
                        (1, keys, queries), lambda b, t, s, tiles: (b, near(b, t, s, tiles), t)
                    )
                    for _ in pairs
                ),
                *(pl.BlockSpec((1, x.shape[1], queries), lambda b, t, *_: (b, 0, t)) for x in rows),
            ],
            out_specs=[
                pl.BlockSpec((1, i, j, queries), lambda b, t, *_: (b, 0, 0, t)),
                pl.BlockSpec((1, 1, keys, j), lambda b, t, s, _: (b, t, s, 0)),
            ],
            scratch_shapes=[pltpu.VMEM((keys, queries), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((b, i, j, t), jnp.float32),
            jax.ShapeDtypeStruct((b, query_tiles, s, j), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=estimate(cost.gradients(b, t, s, i, j, seen, len(pairs), q.dtype.itemsize)),
        interpret=interpret,
        name=name,
    )(tiles, q, w, k, k.swapaxes(1, 2), *pairs, *rows)
    return e, jnp.sum(dk, axis=1)


def of_queries(e, idx_q, idx_w):
    """(dq, dw) from e [b i j t] (see ref)."""
    e = e[..., : idx_q.shape[1]].transpose(0, 3, 1, 2)
    scale = idx_q.shape[-1] ** -0.5
    dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * scale
    dq = e * head_weights(idx_q, idx_w)[..., None]
    return dq.astype(idx_q.dtype), dw.astype(idx_w.dtype)
