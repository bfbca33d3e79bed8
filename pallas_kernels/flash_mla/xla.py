"""Softmax attention over all keys in query blocks, with an exact recomputing backward.

Memory is linear in the length: neither pass keeps probabilities, the backward rebuilds them from the log-sum-exp.
Causality cuts the keys at each run's end where the first query's index is known. A window cuts them before each
block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.blocks import join, offsets, query_runs, split
from pallas_kernels.mask import HIDDEN, visible
from pallas_kernels.numerics import accum_dtype, as_matmul_operand

FEW_QUERIES = 32  # heads times positions per key, below which logits have the keys first


def forward(
    static,
    q: Float[Array, "b m g t x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    topk: Int32[Array, "b t k"] | None,
) -> tuple[Float[Array, "b m g t y"], Float[Array, "b m g t"], Float[Array, ""]]:
    """Returns (out, lse, largest logit); lse has the accumulation dtype."""
    scale, block = static.scale, static.block
    t, s = q.shape[3], k.shape[2]
    first = start if static.start is None else static.start
    outs, lses, tops = [], [], []
    # Few queries: a transposed copy of the keys, or of the cache, would cost more than their product.
    # Many queries: the keys are transposed once; otherwise XLA:CPU would do it for every run.
    keys_first = min(block, t) * q.shape[2] < FEW_QUERIES
    spec, axis = ("bmsgt,bmsy->bmgty", 2) if keys_first else ("bmgts,bmsy->bmgty", -1)
    k = k if keys_first else lax.optimization_barrier(k.swapaxes(2, 3))
    for run in query_runs(t, s, first, block):
        visible_keys = _visible_keys(run, static.window)
        all_keys = lax.slice_in_dim(k, 0, run.keys, axis=2 if keys_first else 3)
        all_values = v[:, :, : run.keys]

        def attend_block(
            args, run=run, visible_keys=visible_keys, all_keys=all_keys, all_values=all_values
        ):
            q, mask_args, offset = args
            begin = visible_keys.begin(first + offset)
            keys = visible_keys.cut(all_keys, begin, 2 if keys_first else 3)
            values = visible_keys.cut(all_values, begin, 2)
            mask = _mask(visible_keys, first + offset, begin, run.size, mask_args, k_segments)
            logits = _logits(q, keys, scale, mask, keys_first)
            # Without the barrier XLA:CPU computes the maximum again for every element.
            top = lax.optimization_barrier(jnp.max(logits, axis=axis))
            p = jnp.exp(logits - jnp.expand_dims(top, axis))
            total = jnp.sum(p, axis=axis)
            out = jnp.einsum(spec, p.astype(v.dtype), values, preferred_element_type=p.dtype)
            any_key = top > HIDDEN / 2
            out = out * jnp.where(any_key, 1 / total, 0)[..., None]
            lse = jnp.where(any_key, top + jnp.log(total), jnp.inf)
            return out.astype(q.dtype), lse, jnp.max(top)

        out, lse, top = _map(attend_block, _blocks(run, q, q_segments, topk))
        outs.append(join(out, 3))
        lses.append(join(lse, 3))
        tops.append(jnp.max(top))
    # Join the runs.
    out, lse = jnp.concatenate(outs, axis=3), jnp.concatenate(lses, axis=3)
    return out, lse, jnp.max(jnp.stack(tops))


def backward(
    static, saved: tuple, dout: Float[Array, "b m g t y"]
) -> tuple[Float[Array, "b m g t x"], Float[Array, "b m s x"], Float[Array, "b m s y"]]:
    """Returns (dq, dk, dv) for the inputs of `forward`, its out and lse, and the gradient of out."""
    q, k, v, start, q_segments, k_segments, topk, out, lse = saved
    scale, block = static.scale, static.block
    t, s = q.shape[3], k.shape[2]
    first = start if static.start is None else static.start
    dtype = accum_dtype(q.dtype)
    # The part of the softmax gradient that is common to a row.
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)
    dk, dv = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
    dqs = []
    for run in query_runs(t, s, first, block):
        visible_keys = _visible_keys(run, static.window)
        run_keys_values = k[:, :, : run.keys], v[:, :, : run.keys]

        def add_block(
            carry, args, run=run, visible_keys=visible_keys, run_keys_values=run_keys_values
        ):
            (q, mask_args, offset), dout, lse, delta = args
            begin = visible_keys.begin(first + offset)
            keys, values = (visible_keys.cut(x, begin, 2) for x in run_keys_values)
            dk, dv = (visible_keys.cut(x, begin, 2) for x in carry)
            # Keys first: every product of a full block then reads its operands in memory order, and only
            # arrays of the size of q are transposed.
            mask = _mask(visible_keys, first + offset, begin, run.size, mask_args, k_segments)
            logits = _logits(q, keys, scale, mask, True)
            p = jnp.exp(logits - _keys_first(lse))
            dv += jnp.einsum(
                "bmsgt,bmgty->bmsy", p.astype(v.dtype), dout, preferred_element_type=dtype
            )
            dp = jnp.einsum("bmsy,bmgty->bmsgt", values, dout, preferred_element_type=dtype)
            ds = (p * (dp - _keys_first(delta)) * scale).astype(q.dtype)
            operands = as_matmul_operand(keys), as_matmul_operand(ds)
            dq = jnp.einsum("bmsx,bmsgt->bmxgt", *operands, preferred_element_type=dtype)
            dq = dq.transpose(0, 1, 3, 4, 2)
            dk += jnp.einsum("bmsgt,bmgtx->bmsx", ds, q, preferred_element_type=dtype)
            carry = (visible_keys.put(*x, begin, 2) for x in zip(carry, (dk, dv), strict=True))
            return tuple(carry), dq.astype(q.dtype)

        rest = [split(x, run, 3) for x in (dout, lse, delta)]
        args = (_blocks(run, q, q_segments, topk), *rest)
        part = (dk[:, :, : run.keys], dv[:, :, : run.keys])
        part, dq = _scan(add_block, part, args)
        # Not `.at[].set`: it is a scatter with an empty index array, and jax 0.11's partitioner crashes on
        # it inside a manual region.
        dk, dv = (
            lax.dynamic_update_slice_in_dim(total, part_sum, 0, axis=2)
            for total, part_sum in zip((dk, dv), part, strict=True)
        )
        dqs.append(join(dq, 3))
    dq = jnp.concatenate(dqs, axis=3)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def _blocks(run, q, q_segments, topk):
    firsts, q_segments = offsets(run, q, q_segments)
    return split(q, run, 3), (split(q_segments, run, 1), split(topk, run, 1)), firsts


class _VisibleKeys(NamedTuple):
    """The `count` of a run's `end` keys that the queries of one block may see."""

    end: int
    count: int
    window: int | None

    def begin(self, query):
        """Returns the index of the first visible key for a block whose query 0 has key index `query`."""
        if self.count == self.end:
            return 0
        return jnp.clip(query + 1 - self.window, 0, self.end - self.count)

    def cut(self, x, begin, axis: int):
        """Returns the visible part of an array whose axis counts the run's keys."""
        if self.count == self.end:
            return x
        return lax.dynamic_slice_in_dim(x, begin, self.count, axis=axis)

    def put(self, x, part, begin, axis: int):
        """Returns x with a new part at the position of `cut`."""
        if self.count == self.end:
            return part
        return lax.dynamic_update_slice_in_dim(x, part, begin, axis=axis)


def _visible_keys(run, window: int | None) -> _VisibleKeys:
    count = run.keys if window is None else min(run.keys, run.size + window - 1)
    return _VisibleKeys(run.keys, count, window)


def _mask(visible_keys, first, begin, size: int, mask_args, k_segments):
    """Returns bool[b or 1, t, s] of a block of `size` queries from key index `first`, over keys from `begin`."""
    q_segments, topk = mask_args
    query_index = first + jnp.arange(size, dtype=jnp.int32)
    key_index = begin + jnp.arange(visible_keys.count, dtype=jnp.int32)
    segments = (
        None
        if k_segments is None
        else visible_keys.cut(k_segments[:, : visible_keys.end], begin, 1)
    )
    mask = visible(query_index, key_index, q_segments, segments, visible_keys.window)
    return mask if topk is None else mask & selection_mask(topk - begin, visible_keys.count)


def _logits(q, keys, scale, mask, keys_first: bool):
    """Returns masked logits [b m g t s] of one block, in the accumulation dtype.

    keys [b m x s]; with keys_first, keys [b m s x] give [b m s g t].
    """
    dtype = accum_dtype(q.dtype)
    # The barrier keeps the comparisons out of the loop over heads.
    if keys_first:
        bias = lax.optimization_barrier(jnp.where(mask.swapaxes(1, 2), 0, HIDDEN).astype(dtype))
        logits = jnp.einsum("bmsx,bmgtx->bmsgt", keys, q, preferred_element_type=dtype)
        return scale * logits + bias[:, None, :, None]
    bias = lax.optimization_barrier(jnp.where(mask, 0, HIDDEN).astype(dtype))
    logits = jnp.einsum("bmgtx,bmxs->bmgts", q, keys, preferred_element_type=dtype)
    return scale * logits + bias[:, None, None]


def _keys_first(x):
    """Adds an axis to [b m g t] for logits [b m s g t]."""
    return x[:, :, None]


def selection_mask(topk: Int32[Array, "b t k"], s: int) -> Bool[Array, "b t s"]:
    """Returns bool[b t s]: which of s keys topk int32[b t k] holds (-1: none).

    The scatter is one-dimensional, because XLA writes out the indices of a scatter coordinate by coordinate.
    """
    b, t, k = topk.shape
    row = jnp.arange(b * t, dtype=jnp.int32)[:, None]
    flat = topk.reshape(b * t, k)
    place = jnp.where((flat < 0) | (flat >= s), b * t * s, row * s + flat).reshape(-1)
    return jnp.zeros(b * t * s, bool).at[place].set(True, mode="drop").reshape(b, t, s)


def _map(function, args):
    """`lax.map` over the leading blocks, without a loop for a single block."""
    if jax.tree.leaves(args)[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda x: x[0], args)))
    return lax.map(function, args)


def _scan(function, carry, args):
    if jax.tree.leaves(args)[0].shape[0] == 1:
        carry, out = function(carry, jax.tree.map(lambda x: x[0], args))
        return carry, out[None]
    return lax.scan(function, carry, args)
