"""KL over selected keys by Mosaic: everything about one query happens on chip, from its gathered rows.

XLA gathers the rows of a block of queries and adds the gradients of the index keys. Keys lie along
lanes, so that scores and probabilities of a query are rows and a sum over heads is one over sublanes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.cost import estimate
from pallas_kernels.head_probs.tpu import dot
from pallas_kernels.index_scores.ref import head_weights
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_indexer_kl import cost
from pallas_kernels.sparse_indexer_kl.ref import added, taken

# Not measured. 2048 rows of 576 and 128 columns in bfloat16 are 2.75 MiB, logits of 64 heads 0.5 MiB,
# gradients of the rows 1 MiB; twice buffered below 12 MiB.
VMEM = 48 * 2**20


def refuse(idx_q, idx_k, q, latents, topk):
    """Why the scores of idx_q, idx_k and the probabilities of q, latents cannot run here, or None."""
    dtypes = {str(x.dtype) for x in (idx_q, idx_k, q, latents)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        return f"inputs are {', '.join(sorted(dtypes))}; all bfloat16 or all float32 are taken"
    for x in (idx_q, q):
        if x.shape[-1] % 8:
            return f"{x.shape[-1]} columns are no multiple of 8"
    if topk.shape[-1] % 128:
        return f"{topk.shape[-1]} keys a query are no multiple of 128"
    return None


def forward(static, idx_q, idx_w, idx_k, q, latents, lse, topk, interpret=False):
    """kl wide[b t]."""
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, None, topk, interpret)


def forward_and_gradients(
    static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret=False
):
    """(kl wide[b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    return _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret)


def _over_blocks(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret):
    def one(dk, args):
        idx_q, idx_w, q, lse, weight, topk = args
        w = head_weights(idx_q, idx_w)
        rows, own = taken(latents, topk), taken(idx_k, topk)
        kl, *rest = _queries(static.scale, idx_q, w, own, q, rows, lse, weight, topk, interpret)
        if weight is None:
            return dk, kl
        e, drows = rest
        dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * idx_q.shape[-1] ** -0.5
        dq = (e * w[..., None]).astype(idx_q.dtype)
        return added(dk, topk, drows), (kl, dq, dw.astype(idx_w.dtype))

    dk = jnp.zeros(idx_k.shape, jnp.float32)
    outs = []
    for run in query_runs(idx_q.shape[1], idx_k.shape[1], None, static.block):
        args = tuple(split(x, run, 1) for x in (idx_q, idx_w, q, lse, weight, topk))
        dk, out = lax.scan(one, dk, args)
        outs.append(jax.tree.map(lambda x: join(x, 1), out))
    out = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outs)
    return out if weight is None else (*out, dk.astype(idx_k.dtype))


def _queries(scale, idx_q, w, own, q, rows, lse, weight, topk, interpret):
    """kl [b t] of idx_q [b t i j], w [b t i], own [b t k j] beside q [b t n x], rows [b t k x], lse [b t n],
    topk [b t k]; with weight [b t] also e [b t i j] and the gradients of own, float32 all."""
    (b, t, i, j), k = idx_q.shape, topk.shape[2]
    gradients = weight is not None

    def kernel(idx_q, w, own, q, rows, lse, weight, topk, kl, *outs):
        logits = dot(q[0, 0], rows[0, 0], ((1,), (1,)))
        p = jnp.exp2(scale * LOG2E * logits - lse[0, 0])
        chosen = topk[0, 0] >= 0
        p = jnp.where(chosen, jnp.sum(p, axis=0, keepdims=True), 0)
        dots = dot(idx_q[0, 0], own[0, 0], ((1,), (1,)))
        scores = jnp.sum(w[0, 0] * jnp.maximum(dots, 0), axis=0, keepdims=True)
        scores = jnp.where(chosen, scores, HIDDEN)
        top = jnp.max(scores, axis=1, keepdims=True)
        logs = scores - top - jnp.log(jnp.sum(jnp.exp(scores - top), axis=1, keepdims=True))
        total = jnp.sum(p, axis=1, keepdims=True)
        p = p / jnp.where(total > 0, total, 1)
        each = jnp.where(p > 0, p * (jnp.log(p) - logs), 0)
        kl[0, 0] = jnp.broadcast_to(jnp.sum(each, axis=1, keepdims=True), (1, 128))
        if gradients:
            e, drows = outs
            share = jnp.where(total > 0, weight[0, 0, :, :1], 0)
            dscores = (jnp.exp(logs) - p) * share
            passed = jnp.where(dots > 0, dscores, 0).astype(own.dtype)
            weighted = (idx_q[0, 0] * w[0, 0]).astype(own.dtype)
            e[0, 0] = dot(passed, own[0, 0])
            drows[0, 0] = dot(passed, weighted, ((0,), (0,)))

    weight = jnp.ones((b, t)) if weight is None else weight
    rows_of = (idx_q, w[..., None], own, q, rows, LOG2E * lse.astype(jnp.float32)[..., None])
    rows_of += (jnp.broadcast_to(weight[..., None, None], (b, t, 1, 128)), topk[:, :, None])
    shapes = [(1, 128), *([(i, j), (k, j)] if gradients else [])]

    (n, x), item = q.shape[2:], q.dtype.itemsize

    def whole(shape):
        return pl.BlockSpec((1, 1, *shape), lambda b, t: (b, t, 0, 0))

    kl, *rest = pl.pallas_call(
        kernel,
        grid=(b, t),
        in_specs=[whole(x.shape[2:]) for x in rows_of],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct((b, t, *shape), jnp.float32) for shape in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=estimate(cost.queries(b, t, k, n, x, i, j, gradients, item)),
        interpret=interpret,
        name="sparse_indexer_kl",
    )(*rows_of)
    return kl[:, :, 0, 0], *rest
