"""Index scores and their gradients on Hopper: per-head scores stay in registers in all three kernels.

All have a loader and two compute warpgroups. Sizes in shared memory are for 32 heads of 128 in bfloat16.

`scores`: grid (batch, tile of 8 queries, part of their keys). Keys lie along the rows of the products and (head, query)
along their columns, eight queries wide, as in `lightning_indexer`: a thread holds all heads of its queries, and sums
them without communication. Shared memory: the queries of all heads [256 128] (64 KiB), and a ring of four tiles of 128
keys (128 KiB). The compute warpgroups have 64 keys each and take turns at the tensor cores.

`sum_keys`: grid (batch, tile of 64 queries, pair of heads), one head per compute warpgroup. It loops over the keys of
the query tile and sums e (see `xla.gradients_keys_first`), float32[64 128] in registers. Shared memory: the queries (32
KiB), rings of three tiles of 128 keys (96 KiB) and of dI (48 KiB).

`sum_queries`: grid (batch, tile of 128 keys), 64 per compute warpgroup. It loops over the queries of the key tile and
their heads, and sums dk, float32[64 128] in registers. Shared memory: the keys (32 KiB), a ring of six tiles of 64
queries (96 KiB), and two tiles of dI (32 KiB).

Both sums of the backward have one order, at the cost of one product of queries and keys in addition to the three
required ones. Computing dk in the same pass as e would move float32[s j] through memory for every tile of queries.

dI is rounded to the dtype of the queries before it is read, as each head's part of it is anyway. It is stored
both with queries first and with keys first: at GLM-5's block of 512 queries over 32,768 keys this is 134 MB
more memory traffic, a hundredth of the products' time.

Padding, by zeros: queries to full tiles, keys to multiples of 128, columns to multiples of 64, heads of `sum_keys` to
an even number.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import backends, hopper
from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.index_scores.xla import head_weights
from pallas_kernels.summed_attention_probs.tiles import pad_to_multiple, tile_spans

# Only these sizes are timed, on an H200 (2026-11-26, experiments/kernels_h200.jsonl). They follow from shared
# memory, registers and the number of processors.
QUERIES = 8  # of a tile of the forward: the width of the tensor cores' smallest product
KEYS = 128  # of a tile: 64 for each of two warpgroups of the forward and of `sum_queries`
HEADS = 32  # of a product of the forward: 256 columns, 128 registers of each thread
ROWS = 64  # queries of a tile of the backward
RING = 4  # tiles in flight at most
MAX_WIDTH = 128  # columns of a head: 64 rows of 128 float32 take 64 registers of each thread
BUDGET = hopper.SMEM_BYTES - 1024  # bytes of tiles, without barriers and alignment


def unsupported_reason(
    idx_q: Float[Array, "b t i j"], idx_w: Float[Array, "b t i"], idx_k: Float[Array, "b s j"]
) -> str | None:
    """Returns the reason why the inputs are not supported, or None."""
    if idx_q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"idx_q is {idx_q.dtype}; use bfloat16"
    if idx_q.dtype != idx_k.dtype:
        return f"idx_q is {idx_q.dtype} and idx_k {idx_k.dtype}"
    if (
        idx_q.dtype == jnp.float32
        and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu"
    ):
        return "tensor cores take no float32 in the memory order of idx_q and idx_k"
    if idx_w.dtype == jnp.float64:
        return "idx_w is float64"
    if idx_q.shape[-1] > MAX_WIDTH:
        return f"index heads of {idx_q.shape[-1]} columns; at most {MAX_WIDTH}"
    if idx_q.shape[2] > 2 * HEADS:
        return f"{idx_q.shape[2]} index heads; at most {2 * HEADS}"
    return None


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    interpret: object = False,
) -> Float[Array, "b t s"]:
    """Returns [b t s] for idx_q [b t i j], idx_w [b t i], idx_k [b s j]."""
    q, w, k = pad_to_tiles(idx_q, idx_w, idx_k, QUERIES)
    all_tiles = jnp.array([0, k.shape[1] // KEYS], jnp.int32)
    all_spans = jnp.broadcast_to(all_tiles, (q.shape[0], q.shape[1] // QUERIES, 2))
    out = scores(q, w, k, all_spans, interpret)
    return out[:, : idx_q.shape[1], : idx_k.shape[1]]


def backward(
    static, saved: tuple, dscores: Float[Array, "b t s"], interpret: object = False
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]]:
    """Returns (dq, dw, dk) for the inputs of `forward` and the gradient of its result."""
    idx_q, idx_w, idx_k = saved
    k = pad_to_multiple(idx_k, 1, KEYS)
    visible = jnp.ones((len(k), -(-idx_q.shape[1] // ROWS), k.shape[1] // KEYS), bool)
    dq, dw, dk = gradients(idx_q, idx_w, k, pad_to_multiple(dscores, 2, KEYS), visible, interpret)
    return dq, dw, dk[:, : idx_k.shape[1]].astype(idx_k.dtype)


def pad_to_tiles(
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    rows: int,
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]]:
    """Pads the inputs with zeros to full tiles, of `rows` rows of queries.

    Returns (q [b t i j], w float32[b t i] with the scale of the dot products, k [b s j]).
    """
    w = pad_to_multiple(head_weights(idx_q, idx_w), 1, rows)
    q = pad_to_multiple(pad_to_multiple(idx_q, 1, rows), 3, 64)
    return q, w, pad_to_multiple(pad_to_multiple(idx_k, 1, KEYS), 2, 64)


def gradients(
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    dscores: Float[Array, "b t s"],
    visible: Bool[Array, "b query_tiles key_tiles"],
    interpret: object,
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]]:
    """Returns (dq, dw, float32 dk) for the gradient of the scores.

    s is a multiple of KEYS. visible bool[b t/ROWS s/KEYS]: only these tiles are read.
    """
    q, w, k = pad_to_tiles(idx_q, idx_w, idx_k, ROWS)
    dscores = pad_to_multiple(dscores.astype(q.dtype), 1, ROWS)
    e = sum_keys(q, k, dscores, tile_spans(visible), interpret)
    dk = sum_queries(q, w, k, dscores.swapaxes(1, 2), tile_spans(visible.swapaxes(1, 2)), interpret)
    _, t, i, j = idx_q.shape
    e = e[:, :i, :t, :j].swapaxes(1, 2)
    dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * j**-0.5
    dq = e * head_weights(idx_q, idx_w)[..., None]
    return dq.astype(idx_q.dtype), dw.astype(idx_w.dtype), dk[..., :j]


def scores(
    q: Float[Array, "b t i j"],
    w: Float[Array, "b t i"],
    k: Float[Array, "b s j"],
    tile_spans: Int32[Array, "b query_tiles 2"],
    interpret: object,
) -> Float[Array, "b t s"]:
    """Returns float32[b t s] of `pad_to_tiles`; key tiles outside tile_spans int32[b t/QUERIES 2] are not written."""
    # Split heads into passes, and keys into parts, so that all multiprocessors have work.
    (b, t, i, j), s = q.shape, k.shape[1]
    passes = next(n for n in range(-(-i // HEADS), i + 1) if i % n == 0)
    heads = i // passes
    columns = heads * QUERIES
    tiles = t // QUERIES
    # The weights of a tile are in the order of its products' columns.
    w = w.reshape(b, tiles, QUERIES, i).swapaxes(2, 3).reshape(b, tiles, i * QUERIES)
    parts = max(1, min(MULTIPROCESSORS // (b * tiles), s // KEYS))
    size = q.dtype.itemsize
    ring = max(2, min(RING, (BUDGET - i * QUERIES * j * size) // (KEYS * j * size)))
    ops = hopper.Ops(interpret)

    def body(q_ref, w_ref, k_ref, spans_ref, out_ref, q_tile, k_ring, q_ready, full, free, turn):
        batch, tile, part = (lax.axis_index(name) for name in ("batch", "tile", "part"))
        role = lax.axis_index("role")
        first, last = spans_ref[batch, tile, 0], spans_ref[batch, tile, 1]
        begin = first + lax.div((last - first) * part, parts)
        count = first + lax.div((last - first) * (part + 1), parts) - begin
        queries = pl.ds(tile * QUERIES, QUERIES)

        # Loader warpgroup: the queries once, then tiles of keys.
        @pl.when((role == 2) & (count > 0))
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")
            for head in range(i):
                target = q_tile.at[pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], target, q_ready)

            @pl.loop(0, count)
            def _(n):
                slot = lax.rem(n, ring)
                pl.when(n >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                keys = pl.ds((begin + n) * KEYS, KEYS)
                plgpu.copy_gmem_to_smem(k_ref.at[batch, keys], k_ring.at[slot], full.at[slot])

            pl.loop(0, jnp.minimum(count, ring))(lambda slot: plgpu.barrier_wait(free.at[slot]))

        # Compute warpgroups: scores of 64 keys each.
        @pl.when((role < 2) & (count > 0))
        def _sum():
            plgpu.set_max_registers(232, action="increase")
            along_columns = hopper.COLUMN_OF
            weights = [
                ops.load(w_ref.at[batch, tile, pl.ds(n * columns, columns)], (), along_columns)
                for n in range(passes)
            ]
            # The warpgroups take turns: one sums during the products of the other.
            pl.when(role == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            plgpu.barrier_wait(q_ready)

            # Scores of one tile of keys: the heads' products, weighted and summed in registers.
            @pl.loop(0, count)
            def _(n):
                slot = lax.rem(n, ring)
                plgpu.barrier_wait(full.at[slot])
                key_tile = k_ring.at[slot, pl.ds(role * 64, 64)]
                sums = [ops.zeros((64, QUERIES))] * 2  # two chains hide the latency of adding
                for group in range(passes):
                    plgpu.barrier_wait(turn.at[role])
                    dots = ops.dot(
                        ops.zeros((64, columns)),
                        key_tile,
                        q_tile.at[pl.ds(group * columns, columns)],
                        b_transposed=True,
                        on_issued=lambda: plgpu.barrier_arrive(turn.at[1 - role]),
                    )
                    weighted = jnp.maximum(dots, 0)
                    weighted *= hopper.broadcast_columns(weights[group], dots.shape)
                    for head in range(heads):
                        bounds = head * QUERIES, (head + 1) * QUERIES
                        head_scores = lax.slice(weighted, (0, bounds[0]), (64, bounds[1]))
                        sums[head % 2] = sums[head % 2] + head_scores
                plgpu.barrier_arrive(free.at[slot])
                keys = pl.ds((begin + n) * KEYS + role * 64, 64)
                ops.store_transposed(out_ref.at[batch, queries, keys], sums[0] + sums[1])

            # A warpgroup that waits for a barrier must wait for all of its arrivals.
            pl.when(role == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    # Build and call the kernel.
    tiled = hopper.tile_transforms(q.dtype)
    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="index_scores",
        out_type=jax.ShapeDtypeStruct((b, t, s), jnp.float32),
        grid=(b, tiles, parts),
        grid_names=("batch", "tile", "part"),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((i * QUERIES, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, KEYS, j), q.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=i),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(q, w, k, tile_spans)


def sum_keys(
    q: Float[Array, "b t i j"],
    k: Float[Array, "b s j"],
    dscores: Float[Array, "b t s"],
    tile_spans: Int32[Array, "b query_tiles 2"],
    interpret: object,
) -> Float[Array, "b i t j"]:
    """Returns e float32[b i t j]: per head sum_s [q . k_s > 0] dI_s k_s, over tile_spans int32[b t/ROWS 2] of keys.

    A block is 64 queries of two heads, one per warpgroup; i is padded to an even number.
    """
    q = pad_to_multiple(q, 2, 2)
    b, t, i, j = q.shape
    ring = 3
    ops = hopper.Ops(interpret)

    def body(q_ref, k_ref, d_ref, spans_ref, e_ref, q_tile, k_ring, d_ring, q_ready, full, free):
        batch, tile, pair = (lax.axis_index(name) for name in ("batch", "tile", "pair"))
        role = lax.axis_index("role")
        first, last = spans_ref[batch, tile, 0], spans_ref[batch, tile, 1]
        rows = pl.ds(tile * ROWS, ROWS)

        # Loader warpgroup: the queries once, then keys and dI.
        def load():
            plgpu.set_max_registers(40, action="decrease")
            for n in range(2):
                source = q_ref.at[batch, rows, 2 * pair + n]
                plgpu.copy_gmem_to_smem(source, q_tile.at[n], q_ready.at[n])

            @pl.loop(0, last - first)
            def _(n):
                slot = lax.rem(n, ring)
                pl.when(n >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                keys = pl.ds((first + n) * KEYS, KEYS)
                plgpu.copy_gmem_to_smem(k_ref.at[batch, keys], k_ring.at[slot], full.at[slot])
                source = d_ref.at[batch, rows, keys]
                plgpu.copy_gmem_to_smem(source, d_ring.at[slot], full.at[slot])

            pl.loop(0, jnp.minimum(last - first, ring))(
                lambda slot: plgpu.barrier_wait(free.at[slot])
            )

        # Compute warpgroups: one head each.
        def add():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(q_ready.at[role])

            def step(n, e):
                slot = lax.rem(n, ring)
                plgpu.barrier_wait(full.at[slot])
                shape = ROWS, KEYS
                dots = ops.dot(
                    ops.zeros(shape), q_tile.at[role], k_ring.at[slot], b_transposed=True
                )
                dscores_tile = ops.load(d_ring.at[slot])
                masked = jnp.where(dots > 0, dscores_tile, ops.zeros(shape, q.dtype))
                e = ops.dot(e, masked, k_ring.at[slot])
                plgpu.barrier_arrive(free.at[slot])
                return e

            e_ref[batch, 2 * pair + role, rows, :] = lax.fori_loop(
                0, last - first, step, ops.zeros((ROWS, j))
            )

        lax.cond(role == 2, load, add)

    # Build and call the kernel.
    tiled = hopper.tile_transforms(q.dtype)
    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="index_scores_sum_keys",
        out_type=jax.ShapeDtypeStruct((b, i, t, j), jnp.float32),
        grid=(b, t // ROWS, i // 2),
        grid_names=("batch", "tile", "pair"),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((2, ROWS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, KEYS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, ROWS, KEYS), q.dtype, transforms=tiled),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
        ],
    )(q, k, dscores, tile_spans)


def sum_queries(
    q: Float[Array, "b t i j"],
    w: Float[Array, "b t i"],
    k: Float[Array, "b s j"],
    dscores: Float[Array, "b s t"],
    tile_spans: Int32[Array, "b key_tiles 2"],
    interpret: object,
) -> Float[Array, "b s j"]:
    """Returns dk float32[b s j]: the sum over queries and heads of [q . k > 0] dI w q.

    tile_spans int32[b s/KEYS 2]: tiles of queries per key tile. dscores [b s t]: keys first.

    A block is 128 keys, 64 per warpgroup. The loader copies a tile of dI and then the tile of queries of each
    head.
    """
    (b, _, i, j), s = q.shape, k.shape[1]
    w = w.swapaxes(1, 2)
    ring = 6
    ops = hopper.Ops(interpret)

    def body(
        q_ref, w_ref, k_ref, d_ref, spans_ref, dk_ref,
        k_tile, q_ring, d_ring, k_ready, full, free, d_full, d_free,
    ):  # fmt: skip
        batch, tile, role = (lax.axis_index(name) for name in ("batch", "tile", "role"))
        first, last = spans_ref[batch, tile, 0], spans_ref[batch, tile, 1]
        count = last - first
        keys = pl.ds(tile * KEYS, KEYS)

        # Loader warpgroup: the keys once, then dI and the queries of each head.
        def load():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(k_ref.at[batch, keys], k_tile, k_ready)

            @pl.loop(0, count)
            def _(n):
                rows, stage = pl.ds((first + n) * ROWS, ROWS), lax.rem(n, 2)
                pl.when(n >= 2)(lambda: plgpu.barrier_wait(d_free.at[stage]))
                source = d_ref.at[batch, keys, rows]
                plgpu.copy_gmem_to_smem(source, d_ring.at[stage], d_full.at[stage])

                @pl.loop(0, i)
                def _(head):
                    step = n * i + head
                    slot = lax.rem(step, ring)
                    pl.when(step >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                    source = q_ref.at[batch, rows, head]
                    plgpu.copy_gmem_to_smem(source, q_ring.at[slot], full.at[slot])

            pl.loop(0, jnp.minimum(count * i, ring))(lambda n: plgpu.barrier_wait(free.at[n]))
            pl.loop(0, jnp.minimum(count, 2))(lambda n: plgpu.barrier_wait(d_free.at[n]))

        # Compute warpgroups: 64 keys each.
        def add():
            plgpu.set_max_registers(232, action="increase")
            row_slice = pl.ds(role * 64, 64)
            shape = 64, ROWS
            plgpu.barrier_wait(k_ready)

            def add_queries(n, dk):
                stage = lax.rem(n, 2)
                plgpu.barrier_wait(d_full.at[stage])
                dscores_tile = ops.load(d_ring.at[stage, row_slice])
                rows = pl.ds((first + n) * ROWS, ROWS)

                def step(head, dk):
                    slot = lax.rem(n * i + head, ring)
                    weights = ops.load(w_ref.at[batch, head, rows], (), hopper.COLUMN_OF)
                    plgpu.barrier_wait(full.at[slot])
                    dots = ops.dot(
                        ops.zeros(shape), k_tile.at[row_slice], q_ring.at[slot], b_transposed=True
                    )
                    masked = jnp.where(dots > 0, dscores_tile.astype(jnp.float32), ops.zeros(shape))
                    masked *= hopper.broadcast_columns(weights, shape)
                    dk = ops.dot(dk, masked.astype(q.dtype), q_ring.at[slot])
                    plgpu.barrier_arrive(free.at[slot])
                    return dk

                dk = lax.fori_loop(0, i, step, dk)
                plgpu.barrier_arrive(d_free.at[stage])
                return dk

            target_rows = pl.ds(tile * KEYS + role * 64, 64)
            dk_ref[batch, target_rows, :] = lax.fori_loop(0, count, add_queries, ops.zeros((64, j)))

        lax.cond(role == 2, load, add)

    # Build and call the kernel.
    tiled = hopper.tile_transforms(q.dtype)
    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="index_scores_sum_queries",
        out_type=jax.ShapeDtypeStruct((b, s, j), jnp.float32),
        grid=(b, s // KEYS),
        grid_names=("batch", "tile"),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((KEYS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, ROWS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((2, KEYS, ROWS), q.dtype, transforms=tiled),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
        ],
    )(q, w, k, dscores, tile_spans)
