"""Lightning indexer on TPU (Mosaic): scores and their selection in one pass, without scores in HBM.

Grid: (program,). A program (`tpu_program`) has 8 to 32 rows of queries, in groups of 8, a register's sublanes:

- In prefill they are queries of one sequence, which share its keys.
- Over pages a sequence has 1, 2, 4 or 8 of them, and a program processes sequences with 8 rows in total one by one.

Programs alternate between the beginning and the middle of the list of blocks, because later blocks see more keys.

Blocks, for GLM-5's 32 heads of 128 in bfloat16, 32 rows, 128K keys and k = 2048:

- VMEM, double-buffered by the pipeline: queries [4, 256, 128] (256 KiB; 8 rows times heads per group), weights, result
  int32[32 2048] (256 KiB).
- VMEM, scratch: one int32 per row and key (16 MiB), the ring of 8 steps of 1024 keys (2 MiB), two words per row and 32
  keys (512 KiB each).
- SMEM: the first position or the length of each sequence, and the page table of the program's sequences.

Padding: rows to full programs, whose results are cut off, and keys to full steps. No row sees a key after the last.
"""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32, Num

from pallas_kernels import backends
from pallas_kernels.cost import estimate
from pallas_kernels.lightning_indexer import cost
from pallas_kernels.lightning_indexer.tpu_program import SelectionPlan, run_program
from pallas_kernels.lightning_indexer.tpu_selection import LANES, SUBLANES, TILES

# Not measured, because no TPU was available; chosen by the size of VMEM and memory latency.
STEP_TILES = 8
STEP = STEP_TILES * LANES  # keys that are scored per step
RING = 8  # steps of keys in use or in flight: 2 MiB of bfloat16, more than memory delivers in 1 us
GROUPS = 4  # groups of 8 rows in a program; fewer if scores and results would exceed ROOM
ROOM = 44 << 20
MEMORY = 60 << 20  # with all buffers; v5p and tpu7x have 64 MiB

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def unsupported_reason(
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Num[Array, "b s j"],
    k: int,
    page_table: Int[Array, "b n"] | None = None,
) -> str | None:
    """Returns the reason why the arguments are not supported, or None. With a page_table, idx_k are its pages."""
    if idx_q.dtype != idx_k.dtype or idx_k.dtype.name not in DTYPES:
        return f"queries of {idx_q.dtype} and keys of {idx_k.dtype}; both must be one of {DTYPES}"
    s = idx_k.shape[1] * (1 if page_table is None else page_table.shape[1])
    if _room(1, s, k) > ROOM:
        return f"8 rows of {s} scores and {k} results do not fit VMEM"
    if page_table is None:
        return None
    page, min_page = idx_k.shape[1], 32 // idx_k.dtype.itemsize
    if page < min_page or STEP % page:
        return f"pages of {page} keys; it takes powers of 2 from {min_page} to {STEP}"
    if idx_q.shape[1] > SUBLANES:
        return f"{idx_q.shape[1]} queries per sequence over pages; it takes at most {SUBLANES}"
    return None


def select_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Num[Array, "b s j"],
    k_scale: Float[Array, "b s"] | None,
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    *,
    interpret: object = False,
) -> Int32[Array, "b t k"]:
    """Returns topk int32[b t k] as `ref.select_keys`."""
    # Sizes of a program: as many groups of rows as fit VMEM and the sequence fills.
    b, t = idx_q.shape[:2]
    s = idx_k.shape[1]
    start = jnp.broadcast_to(jnp.int32(start if static.start is None else static.start), b)
    groups = GROUPS
    while groups > 1 and (_room(groups, s, static.k) > ROOM or groups // 2 * SUBLANES >= t):
        groups //= 2
    blocks = -(-t // (groups * SUBLANES))
    plan = SelectionPlan(
        groups=groups,
        sources=1,
        rows=SUBLANES,
        queries=t,
        blocks=blocks,
        s=s,
        k=static.k,
        page=STEP,
        paged=False,
        unroll=interpret is False,
        step_tiles=STEP_TILES,
        ring=RING,
    )

    # Under vmap the calls run one after the other: an operand in HBM takes no batch axis.
    @sequential_vmap
    def run(idx_q, idx_w, idx_k, start, k_scale, q_segments, k_segments):
        b, pad = idx_q.shape[0], blocks * groups * SUBLANES - t
        q, w = (_pad(x, 1, pad).reshape(-1, SUBLANES, *x.shape[2:]) for x in (idx_q, idx_w))
        q_ids = None
        if q_segments is not None:
            q_ids = _pad(q_segments.astype(jnp.int32), 1, pad).reshape(b * blocks, -1, 1)
            k_segments = k_segments.astype(jnp.int32)
        keys = _pad(idx_k, 1, -s % STEP)
        cost_estimate = _estimate(plan, b, idx_q, static.start, k_scale)
        out = _call(
            plan, cost_estimate, interpret, (start,), q, w, keys, None, k_scale, q_ids, k_segments
        )
        return out.reshape(b, -1, plan.places)[:, :t, : min(static.k, s)]

    return run(idx_q, idx_w, idx_k, start, k_scale, q_segments, k_segments)


def select_paged_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    pages: Num[Array, "p z j"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    page_scales: Float[Array, "p z"] | None,
    *,
    interpret: object = False,
) -> Int32[Array, "b t k"]:
    """Returns topk int32[b t k] as `ref.select_paged_keys`."""
    # Sizes of a program: rows of a sequence fill registers together with those of other sequences.
    t = idx_q.shape[1]
    rows = 1
    while rows < t or rows * idx_q.shape[2] % SUBLANES:
        rows *= 2
    sources, s = SUBLANES // rows, pages.shape[1] * page_table.shape[1]
    plan = SelectionPlan(
        groups=1,
        sources=sources,
        rows=rows,
        queries=t,
        blocks=1,
        s=s,
        k=static.k,
        page=pages.shape[1],
        paged=True,
        unroll=interpret is False,
        step_tiles=STEP_TILES,
        ring=RING,
    )

    # Entries of the table after the used pages may be anything, so they are clipped.
    @sequential_vmap
    def run(idx_q, idx_w, page_table, lengths, pages, page_scales):
        b = idx_q.shape[0]
        table = jnp.clip(page_table.astype(jnp.int32), 0, pages.shape[0] - 1)
        k_scale = None if page_scales is None else page_scales[table].reshape(b, s)
        padding = -b % sources
        q, w = (_pad(_pad(x, 1, rows - t), 0, padding) for x in (idx_q, idx_w))
        table, lengths, k_scale = (_pad(x, 0, padding) for x in (table, lengths, k_scale))
        table = table.reshape(-1, 1, sources * table.shape[1])
        scalars = (lengths.astype(jnp.int32),)
        cost_estimate = _estimate(plan, b, idx_q, None, k_scale)
        out = _call(
            plan, cost_estimate, interpret, scalars, q, w, pages, table, k_scale, None, None
        )
        return out.reshape(-1, rows, plan.places)[:b, :t, : min(static.k, s)]

    return run(idx_q, idx_w, page_table, lengths, pages, page_scales)


def _room(groups, s, k):
    """Returns the bytes of a program's scores and of its results, which are double-buffered."""
    return groups * SUBLANES * 4 * (s + 2 * min(k, s))


def _pad(x: Any, axis: int, amount: int) -> Any:
    """Pads x with zeros at the end, or returns None for None."""
    if x is None or not amount:
        return x
    return jnp.pad(x, [(0, amount if d == axis else 0) for d in range(x.ndim)])


def _estimate(plan, b, idx_q, start, k_scale):
    (t, i, j), dtype = idx_q.shape[1:], idx_q.dtype.name.partition("_")[0]
    sizes = b, t, plan.s, i, j, min(plan.k, plan.s)
    return estimate(cost.select(*sizes, start, dtype, k_scale is not None))


def _call(plan, cost_estimate, interpret, scalars, q, w, keys, table, k_scale, q_ids, k_segments):
    """Returns int32[programs 8*groups places].

    scalars: int32[b], the position of a sequence's first query, or over pages its number of keys. q [m rows i
    j] and w [m rows i], m = programs * groups * sources; keys [b s j] or pages; table int32[programs 1
    sources*pages]; k_scale float32[b s], q_ids int32[programs 8*groups 1] and k_segments int32[b s], or None.
    """
    # Arrange queries and weights as the programs read them.
    m, rows, heads, dim = q.shape
    parts = plan.groups * plan.sources
    programs, registers = m // parts, heads * rows // SUBLANES
    q = q.swapaxes(1, 2).reshape(programs, parts, heads * rows, dim)
    if q.dtype == jnp.float8_e4m3fn and "TPU7" not in backends.device_kind():
        q = q.astype(jnp.bfloat16)  # other chips have no float8 products; these are exact
    w = (w * dim**-0.5).astype(jnp.float32).swapaxes(1, 2)
    w = w.reshape(programs, parts, registers, SUBLANES).swapaxes(2, 3)
    per_key = [x for x in (k_scale, k_segments) if x is not None]
    per_key = [
        _pad(x, 1, -plan.s % plan.step).reshape(-1, -(-plan.s // plan.step), plan.step_tiles, LANES)
        for x in per_key
    ]
    block_index = functools.partial(_item, programs)

    # Blocks of the operands.
    def block(x):
        trailing = (0,) * (x.ndim - 1)
        return pl.BlockSpec((1, *x.shape[1:]), lambda p, *_: (block_index(p), *trailing))

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    operands, specs = [q, w], [block(q), block(w)]
    if q_ids is not None:
        operands, specs = [*operands, q_ids], [*specs, block(q_ids)]
    hbm_operands = [keys, *per_key] + ([] if table is None else [table])
    operands, specs = [*operands, *hbm_operands], [*specs, *[hbm] * len(hbm_operands)]
    # Result and scratch memory.
    width = SUBLANES * plan.groups
    out = jax.ShapeDtypeStruct((programs, width, plan.places), jnp.int32)
    registers_of = pltpu.VMEM((plan.groups, plan.chunks, SUBLANES, LANES), jnp.int32)
    scratch = {
        "ring": pltpu.VMEM((plan.ring, plan.step // plan.page, plan.page, dim), keys.dtype),
        "arrived": pltpu.SemaphoreType.DMA((plan.ring,)),
        "weights": pltpu.VMEM((parts, registers, SUBLANES, LANES), jnp.float32),
        "scores": pltpu.VMEM((plan.groups, plan.chunks * TILES, SUBLANES, LANES), jnp.int32),
        "bounds": pltpu.VMEM((plan.groups, 3, SUBLANES, LANES), jnp.int32),
        "words": registers_of,
        "before": registers_of,
        "ends": pltpu.VMEM((plan.groups, SUBLANES, LANES), jnp.int32),
    }
    if k_scale is not None:
        scratch["scale"] = pltpu.VMEM((plan.ring, plan.step_tiles, LANES), jnp.float32)
    if k_segments is not None:
        scratch["segments"] = pltpu.VMEM((plan.ring, plan.step_tiles, LANES), jnp.int32)
    if table is not None:
        scratch["pages"] = pltpu.SMEM((1, table.shape[2]), jnp.int32)
    # The kernel gets its refs by name.
    names = ["q", "w", *["q_ids"] * (q_ids is not None), "keys"]
    names += ["all_scale"] * (k_scale is not None) + ["all_segments"] * (k_segments is not None)
    names += [*["table"] * (table is not None), "out", *scratch]

    def body(scalars, *refs):
        refs = types.SimpleNamespace(scalars=scalars, **dict(zip(names, refs)))
        run_program(plan, block_index(pl.program_id(0)), refs)

    # Call the kernel.
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(programs,),
            in_specs=specs,
            out_specs=block(out),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=MEMORY, disable_bounds_checks=True
        ),
        cost_estimate=cost_estimate,
        interpret=interpret,
        name="lightning_indexer",
    )(*scalars, *operands)


def _item(programs, p):
    """Returns the block of the p-th program: every second one.

    The two cores of a v5p get half of the programs each, and later blocks see more keys.
    """
    half = (programs + 1) // 2
    return jnp.where(p < half, 2 * p, 2 * (p - half) + 1)
