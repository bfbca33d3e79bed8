"""KL over selected keys by Mosaic: everything about one query happens in VMEM, from its gathered rows.

Grid: (batch, query), all in parallel. XLA gathers the rows of a block of queries and adds the gradients of the index
keys. Keys lie along lanes, so that scores and probabilities of a query are rows, and a sum over heads is one over
sublanes.

Blocks, for k = 2048 rows of GLM-5 in bfloat16, double-buffered by the pipeline: latents [2048 576] (2.25 MiB), index
keys [2048 128] (512 KiB), queries [64 576], index queries [32 128], their weights, log-sum-exp and selection; kl
float32[1 128], and with gradients e float32[32 128] and the gradients of the index keys float32[2048 128] (1 MiB). The
logits of the attention float32[64 2048] take 512 KiB, those of the indexer half of it.

Phases of a program: (1) target, summed over heads; (2) scores and their log-softmax; (3) KL; (4) gradients.

Padding: none; an entry of topk below 0 has a target of 0 and the score HIDDEN.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.cost import estimate
from pallas_kernels.index_scores.xla import head_weights
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_indexer_kl import cost
from pallas_kernels.sparse_indexer_kl.xla import add_rows, gather_rows
from pallas_kernels.summed_attention_probs.tpu import dot

# Not measured. 2048 rows of 576 and 128 columns in bfloat16 take 2.75 MiB, logits of 64 heads 0.5 MiB,
# gradients of the rows 1 MiB; double-buffered this is less than 12 MiB.
VMEM = 48 * 2**20


def unsupported_reason(
    idx_q: Float[Array, "b t i j"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    topk: Int32[Array, "b t k"],
) -> str | None:
    """Returns the reason why idx_q, idx_k or q, latents are not supported, or None."""
    dtypes = {str(x.dtype) for x in (idx_q, idx_k, q, latents)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        return f"inputs are {', '.join(sorted(dtypes))}; use bfloat16 or float32 for all"
    for x in (idx_q, q):
        if x.shape[-1] % 8:
            return f"{x.shape[-1]} columns are not a multiple of 8"
    if topk.shape[-1] % 128:
        return f"{topk.shape[-1]} keys per query are not a multiple of 128"
    return None


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    lse: Float[Array, "b t n"],
    topk: Int32[Array, "b t k"],
    interpret: object = False,
) -> Float[Array, "b t"]:
    """Returns kl [b t]."""
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, None, topk, interpret)


def forward_and_gradients(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    lse: Float[Array, "b t n"],
    weight: Float[Array, "b t"],
    topk: Int32[Array, "b t k"],
    interpret: object = False,
) -> tuple[
    Float[Array, "b t"], Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]
]:
    """Returns (kl [b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret)


def _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret) -> Any:
    def run_block(dk, args):
        idx_q, idx_w, q, lse, weight, topk = args
        w = head_weights(idx_q, idx_w)
        rows, key_rows = gather_rows(latents, topk), gather_rows(idx_k, topk)
        kl, *rest = _queries(
            static.scale, idx_q, w, key_rows, q, rows, lse, weight, topk, interpret
        )
        if weight is None:
            return dk, kl
        e, drows = rest
        dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * idx_q.shape[-1] ** -0.5
        dq = (e * w[..., None]).astype(idx_q.dtype)
        return add_rows(dk, topk, drows), (kl, dq, dw.astype(idx_w.dtype))

    dk = jnp.zeros(idx_k.shape, jnp.float32)
    outs = []
    for run in query_runs(idx_q.shape[1], idx_k.shape[1], None, static.block):
        args = tuple(split(x, run, 1) for x in (idx_q, idx_w, q, lse, weight, topk))
        dk, out = lax.scan(run_block, dk, args)
        outs.append(jax.tree.map(lambda x: join(x, 1), out))
    out = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outs)
    return out if weight is None else (*out, dk.astype(idx_k.dtype))


def _queries(scale, idx_q, w, key_rows, q, rows, lse, weight, topk, interpret) -> Any:
    """Returns kl [b t], and with weight also e [b t i j] and the gradients of key_rows.

    Inputs: idx_q [b t i j], w [b t i], key_rows [b t k j], q [b t n x], rows [b t k x], lse [b t n], weight [b
    t], topk [b t k]. All results are float32.
    """
    (b, t, i, j), k = idx_q.shape, topk.shape[2]
    gradients = weight is not None

    # One query.
    def kernel(idx_q, w, key_rows, q, rows, lse, weight, topk, kl, *outs):
        # Target.
        logits = dot(q[0, 0], rows[0, 0], ((1,), (1,)))
        p = jnp.exp2(scale * LOG2E * logits - lse[0, 0])
        chosen = topk[0, 0] >= 0
        p = jnp.where(chosen, jnp.sum(p, axis=0, keepdims=True), 0)
        # Scores and their log-softmax.
        dots = dot(idx_q[0, 0], key_rows[0, 0], ((1,), (1,)))
        scores = jnp.sum(w[0, 0] * jnp.maximum(dots, 0), axis=0, keepdims=True)
        scores = jnp.where(chosen, scores, HIDDEN)
        top = jnp.max(scores, axis=1, keepdims=True)
        log_softmax = scores - top - jnp.log(jnp.sum(jnp.exp(scores - top), axis=1, keepdims=True))
        # KL.
        total = jnp.sum(p, axis=1, keepdims=True)
        p = p / jnp.where(total > 0, total, 1)
        kl_terms = jnp.where(p > 0, p * (jnp.log(p) - log_softmax), 0)
        kl[0, 0] = jnp.broadcast_to(jnp.sum(kl_terms, axis=1, keepdims=True), (1, 128))
        # Gradients.
        if gradients:
            e, drows = outs
            row_weight = jnp.where(total > 0, weight[0, 0, :, :1], 0)
            dscores = (jnp.exp(log_softmax) - p) * row_weight
            masked = jnp.where(dots > 0, dscores, 0).astype(key_rows.dtype)
            weighted = (idx_q[0, 0] * w[0, 0]).astype(key_rows.dtype)
            e[0, 0] = dot(masked, key_rows[0, 0])
            drows[0, 0] = dot(masked, weighted, ((0,), (0,)))

    weight = jnp.ones((b, t)) if weight is None else weight
    # Operands and their blocks.
    operands = (idx_q, w[..., None], key_rows, q, rows, LOG2E * lse.astype(jnp.float32)[..., None])
    operands += (jnp.broadcast_to(weight[..., None, None], (b, t, 1, 128)), topk[:, :, None])
    shapes = [(1, 128), *([(i, j), (k, j)] if gradients else [])]

    (n, x), item = q.shape[2:], q.dtype.itemsize

    def full_block(shape):
        return pl.BlockSpec((1, 1, *shape), lambda b, t: (b, t, 0, 0))

    # Call the kernel.
    kl, *rest = pl.pallas_call(
        kernel,
        grid=(b, t),
        in_specs=[full_block(x.shape[2:]) for x in operands],
        out_specs=[full_block(shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct((b, t, *shape), jnp.float32) for shape in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=estimate(cost.queries(b, t, k, n, x, i, j, gradients, item)),
        interpret=interpret,
        name="sparse_indexer_kl",
    )(*operands)
    return kl[:, :, 0, 0], *rest
