"""Index scores and their gradients by Mosaic: the sum over heads, and a tile's gradients, stay in VMEM.

Keys lie along sublanes and queries along lanes, so that the weights of a head are a row. Grid of both kernels: (batch,
query tile, key tile). Blocks, for 32 heads of j = 128 in bfloat16, double-buffered by the pipeline:

- Both: queries [32 j 256] (2 MiB), weights float32[32 256], keys [512 j] (128 KiB).
- Forward: scores float32[512 256] (512 KiB), all key tiles in parallel.
- Backward: keys transposed, the arrays that dI is computed from [512 256], e float32[32 j 256] (4 MiB), and dk
  float32[512 j] (256 KiB) of one query tile. Scratch VMEM: dI float32[512 256] (512 KiB).

Forward: a step sums the heads' scores of one tile [keys queries], which it writes once.

Backward, over the key tiles that a query tile sees, in order; per step and head:

1. Recompute the products, and mask the gradient of the scores where they are not positive.
2. Add to e, from which the gradients of queries and weights follow (`xla.gradients_keys_first`). It stays in VMEM
   for all key tiles of a query tile.
3. Add to the gradient of the keys, which XLA sums over the query tiles.

Padding: queries and keys to multiples of 128 with zeros, whose results are cut off. Hidden tiles give zeros, and are
not copied: their block index is that of the nearest visible tile.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.cost import estimate
from pallas_kernels.index_scores import cost
from pallas_kernels.index_scores.xla import head_weights
from pallas_kernels.summed_attention_probs.tiles import pad_to_multiple
from pallas_kernels.summed_attention_probs.tpu import choose_tiles, dot, nearest_tile, tile_span

# Not measured. For a tile of 256 queries the backward holds the queries of 32 heads (2 MiB in bfloat16) and their
# sums (4 MiB) in VMEM, double-buffered, and tiles of 0.5 MiB of scores and of their gradient.
QUERIES = (256, 128)
KEYS = (512, 256, 128)
VMEM = 48 * 2**20


def unsupported_reason(
    idx_q: Float[Array, "b t i j"], idx_w: Float[Array, "b t i"], idx_k: Float[Array, "b s j"]
) -> str | None:
    """Returns the reason why the inputs are not supported, or None."""
    if idx_q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"idx_q is {idx_q.dtype}; use bfloat16 or float32"
    if idx_q.dtype != idx_k.dtype:
        return f"idx_q is {idx_q.dtype} and idx_k {idx_k.dtype}"
    if idx_w.dtype == jnp.float64:
        return "idx_w is float64"
    if idx_q.shape[-1] % 8:
        return f"{idx_q.shape[-1]} columns are not a multiple of 8"
    return None


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    interpret: object = False,
) -> Float[Array, "b t s"]:
    """Returns [b t s] for idx_q [b t i j], idx_w [b t i], idx_k [b s j]."""
    t, s = idx_q.shape[1], idx_k.shape[1]
    q, w = queries_in_lanes(idx_q, idx_w)
    k = pad_to_multiple(idx_k, 1, 128)
    sizes = choose_tiles(q.shape[-1], k.shape[1], QUERIES, KEYS)

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


def backward(
    static, saved: tuple, dscores: Float[Array, "b t s"], interpret: object = False
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]]:
    """Returns (dq, dw, dk) for the inputs of `forward` and the gradient of its result."""
    idx_q, idx_w, idx_k = saved
    q, w = queries_in_lanes(idx_q, idx_w)
    k = pad_to_multiple(idx_k, 1, 128)
    dscores = pad_to_multiple(pad_to_multiple(dscores.swapaxes(1, 2), 1, 128), 2, 128)
    queries, keys = sizes = choose_tiles(q.shape[-1], k.shape[1], QUERIES, KEYS)
    all_tiles = jnp.asarray([0, k.shape[1] // keys], jnp.int32)
    tiles = jnp.tile(all_tiles, q.shape[0] * q.shape[-1] // queries)

    def read(dscores, scratch):
        scratch[...] = dscores[0]

    pairs = idx_q.shape[1] * idx_k.shape[1]
    e, dk = gradients(
        "index_scores_backward", read, (dscores,), (), tiles, q, w, k, sizes, pairs, interpret
    )
    return *query_gradients(e, idx_q, idx_w), dk[:, : idx_k.shape[1]].astype(idx_k.dtype)


def queries_in_lanes(
    idx_q: Float[Array, "b t i j"], idx_w: Float[Array, "b t i"]
) -> tuple[Float[Array, "b i j t"], Float[Array, "b i t"]]:
    """Returns (q, w float32 with the scale of the dot products), padded to full tiles."""
    q = pad_to_multiple(idx_q, 1, 128).transpose(0, 2, 3, 1)
    return q, pad_to_multiple(head_weights(idx_q, idx_w), 1, 128).swapaxes(1, 2)


def query_specs(i: int, j: int, queries: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Returns the blocks of q and w for a grid of (b, query tiles, key tiles).

    q [b i j t], w [b i t].
    """
    return (
        pl.BlockSpec((1, i, j, queries), lambda b, t, *_: (b, 0, 0, t)),
        pl.BlockSpec((1, i, queries), lambda b, t, *_: (b, 0, t)),
    )


def add_scores(q, w, k, out) -> None:
    """Adds the scores of a tile to out; inside a kernel.

    Refs: q [1 i j queries], w [1 i queries], k [1 keys j], out [1 keys queries].
    """

    @pl.loop(0, q.shape[1])
    def _(head):
        dots = dot(k[0], q[0, head])
        out[0] += w[0, pl.ds(head, 1), :] * jnp.maximum(dots, 0)


def gradients(
    name: str,
    read: Callable,
    pairs: tuple[Array, ...],
    rows: tuple[Array, ...],
    tiles: Int32[Array, "..."],
    q: Float[Array, "b i j t"],
    w: Float[Array, "b i t"],
    k: Float[Array, "b s j"],
    sizes: tuple[int, int],
    visible_pairs: float,
    interpret: object,
) -> tuple[Float[Array, "b i j t"], Float[Array, "b s j"]]:
    """Returns (e float32[b i j t], dk float32[b s j]); a head's e is sum_s [q . k_s > 0] dI_s k_s (see xla).

    read(*blocks, scratch) writes a tile's dI [keys queries] into scratch, from blocks of `pairs` [b s t] and
    `rows` [b r t]. Only the tiles of `summed_attention_probs.tpu.TileVisibility.tiles` are read. visible_pairs:
    number of (query, key) pairs in them, as far as it is known.
    """
    (b, i, j, t), s = q.shape, k.shape[1]
    queries, keys = sizes
    query_tiles = t // queries

    def visible_key_tile(b, t, s, tiles):
        return nearest_tile(s, *tile_span(tiles, b * query_tiles + t))

    # One tile of keys for one tile of queries.
    def kernel(tiles, q, w, k, flat, *rest):
        *blocks, e, dk, scores = rest
        low, high = tile_span(tiles, pl.program_id(0) * query_tiles + pl.program_id(1))
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
                q_head = q[0, head]
                masked = jnp.where(dot(k[0], q_head) > 0, scores[...], 0).astype(k.dtype)
                weighted = (q_head * w[0, pl.ds(head, 1), :]).astype(k.dtype)
                dk[0, 0] += dot(masked, weighted, ((1,), (1,)))
                e[0, head] += dot(flat[0], masked)

    # Call the kernel.
    e, dk = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, query_tiles, s // keys),
            in_specs=[
                *query_specs(i, j, queries),
                pl.BlockSpec(
                    (1, keys, j), lambda b, t, s, tiles: (b, visible_key_tile(b, t, s, tiles), 0)
                ),
                pl.BlockSpec(
                    (1, j, keys), lambda b, t, s, tiles: (b, 0, visible_key_tile(b, t, s, tiles))
                ),
                *(
                    pl.BlockSpec(
                        (1, keys, queries),
                        lambda b, t, s, tiles: (b, visible_key_tile(b, t, s, tiles), t),
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
        cost_estimate=estimate(
            cost.gradients(b, t, s, i, j, visible_pairs, len(pairs), q.dtype.itemsize)
        ),
        interpret=interpret,
        name=name,
    )(tiles, q, w, k, k.swapaxes(1, 2), *pairs, *rows)
    # Sum dk over the tiles of queries.
    return e, jnp.sum(dk, axis=1)


def query_gradients(
    e: Float[Array, "b i j t"], idx_q: Float[Array, "b t i j"], idx_w: Float[Array, "b t i"]
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"]]:
    """Returns (dq, dw) for e [b i j t] (see xla)."""
    e = e[..., : idx_q.shape[1]].transpose(0, 3, 1, 2)
    scale = idx_q.shape[-1] ** -0.5
    dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * scale
    dq = e * head_weights(idx_q, idx_w)[..., None]
    return dq.astype(idx_q.dtype), dw.astype(idx_w.dtype)
