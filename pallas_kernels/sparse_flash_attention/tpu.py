"""Attention over selected rows on TPUs: neighbouring queries share one gather of the union of their rows.

Blocks of up to 8 queries are the grid of both kernels (`tpu_forward`, `tpu_backward`). All heads of a block's queries
are the rows of one matrix: 512 for GLM-5. Each row of the block's union is copied from HBM separately
(`tpu_copies`), 1,536 bytes for GLM-5; membership bits mark the rows of each query.

XLA computes outside of the kernels: the unions, rows as words that can be copied one by one (unless the cache already
has that form), and delta, the sum of out * dout.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import backends
from pallas_kernels.sparse_flash_attention.gather_union import GatherUnion, unite
from pallas_kernels.sparse_flash_attention.tpu_backward import SPARE, differentiate
from pallas_kernels.sparse_flash_attention.tpu_copies import BlockPlan, BlockSizes
from pallas_kernels.sparse_flash_attention.tpu_forward import PageTable, attend
from pallas_kernels.sparse_flash_attention.word_rows import RowLayout, WordRows

# Not measured. 8 queries of 64 heads fill the matrix unit, and 128 rows are its depth.
BLOCKS = BlockSizes(queries=8, rows=128)
SMEM_BYTES = 768 << 10  # limit of the indices, of 1 MiB in total
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")  # chips that are one device with two cores


def unsupported_reason(
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
    value_dim: int,
) -> str | None:
    """Returns the reason why the arguments are not supported, or None."""
    del value_dim
    if latents.dtype not in (jnp.bfloat16, jnp.float32) or q.dtype != latents.dtype:
        return f"queries are {q.dtype} and rows {latents.dtype}, not both bfloat16 or both float32"
    queries = min(BLOCKS.queries, topk.shape[1])
    if 2 * 4 * queries * topk.shape[2] > SMEM_BYTES:
        return f"{topk.shape[2]} rows per query do not fit in scalar memory"
    numbered = latents.shape[0] * (latents.shape[1] + SPARE * BLOCKS.rows) * queries
    if numbered > jnp.iinfo(jnp.int32).max:
        return f"latents of shape {latents.shape} have more rows than 32 bits can number"
    return None


def forward(
    static,
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """Returns (out, lse, largest logit) of q over the rows topk of latents; lse is float32."""

    # Under vmap the calls run one after the other: an operand in HBM takes no batch axis.
    @sequential_vmap
    def run(q, latents, topk):
        b, s, x = latents.shape
        union = _unite(topk, s)
        union = union._replace(rows=union.rows + s * jnp.arange(b, dtype=jnp.int32)[:, None, None])
        rows = _copyable(latents.reshape(b * s, x))
        return attend(static, _plan(q, union), q, rows, union, None, topk.shape[2], interpret)

    return run(q, latents, topk)


def paged(
    static,
    q: Float[Array, "b t n x"],
    pages: Float[Array, "p z x"] | WordRows,
    page_table: Int[Array, "b pages"],
    topk: Int32[Array, "b t k"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"]]:
    """Returns (out, lse) of q over positions topk of its sequence; lse is float32.

    page_table maps the positions to pages, an array or `WordRows`.
    """

    @sequential_vmap
    def run(q, pages, page_table, topk):
        slots = pages.shape[1]
        bits = (slots - 1).bit_length()
        # Page and slot in separate bits, so that a shift extracts them: scalar cores have no division.
        page_and_slot = jnp.where(topk < 0, -1, (topk // slots << bits) | (topk % slots))
        union = _unite(page_and_slot, page_table.shape[1] << bits)
        rows = jax.tree.map(lambda a: a.reshape(-1, 1, a.shape[-1]), _copyable(pages))
        # An unused entry may be anything, but the kernel copies rows also for entries without members.
        table = PageTable(jnp.clip(page_table, 0, pages.shape[0] - 1), slots, bits)
        plan = _plan(q, union)
        return attend(static, plan, q, rows, union, table, topk.shape[2], interpret)[:2]

    return run(q, pages, page_table, topk)


def backward(
    static, saved: tuple, dout: Float[Array, "b t n y"], *, interpret: object = False
) -> tuple[Float[Array, "b t n x"], Float[Array, "b s x"]]:
    """Returns (dq, dlatents) for the inputs of `forward`, its out and lse, and the gradient of out."""

    @sequential_vmap
    def run(q, latents, topk, out, lse, dout):
        union = _unite(topk, latents.shape[1])
        arrays = q, latents, union, out, lse, dout
        return differentiate(static, _plan(q, union), *arrays, topk.shape[2], interpret)

    return run(*saved, dout)


def num_parts(blocks: int) -> int:
    """Returns the number of runs of neighbouring blocks: one per core of the device."""
    return 2 if backends.device_kind() in TWO_CORES and blocks % 2 == 0 else 1


def _copyable(rows) -> WordRows:
    """Returns rows [... x] in a form whose rows can be copied separately."""
    if isinstance(rows, WordRows):
        return rows
    return WordRows.encode(rows, RowLayout.exact(rows.shape[-1], rows.dtype))


def _unite(topk, s: int) -> GatherUnion:
    return unite(topk, s, min(BLOCKS.queries, topk.shape[1]), 2 * BLOCKS.rows)


def _plan(q, union: GatherUnion) -> BlockPlan:
    """Returns the blocks of queries q [b t n x] with these unions."""
    b, t, n, _ = q.shape
    groups = union.rows.shape[1]
    return BlockPlan(
        b=b,
        t=t,
        n=n,
        queries=min(BLOCKS.queries, t),
        tile=BLOCKS.rows,
        groups=groups,
        parts=num_parts(b * groups),
    )
