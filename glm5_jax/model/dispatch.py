"""Tokens to experts and back: sort by expert, exchange over `expert`, compute, exchange back.

One path for every mesh. The exchange is `lax.ragged_all_to_all`; where the platform lacks it (CPU) a
twin with the same arguments pads its chunks to one size. Receive buffers hold the worst case, so no
token is ever dropped; `token_chunk` bounds them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.model.experts import FETCH_SHARE, fetched_swiglu, sorted_swiglu
from pallas_kernels import dispatch


def routed_experts(
    w, x, expert_ids, combine_weights, region, token_chunk: int | None = None, kernels="auto"
):
    """sum_a combine_weights * expert(x) for tokens x [m d], expert_ids int32[m a] -> [m d].

    w holds this device's slice of the expert stacks. A token that is none has ids beyond the last expert: it is
    not sent, and what comes back for it is finite. token_chunk tokens (default: all) travel at a
    time; it must divide m. kernels: see `pallas_kernels.dispatch.choose`.
    """
    rows = x.shape[0]
    if token_chunk is None or token_chunk >= rows:
        return _exchange_and_compute(w, x, expert_ids, combine_weights, region, kernels)
    if rows % token_chunk:
        raise ValueError(f"token_chunk {token_chunk} does not divide the {rows} tokens of a device")

    @jax.checkpoint
    def chunk(args):
        return _exchange_and_compute(w, *args, region, kernels)

    parts = (x, expert_ids, combine_weights)
    parts = jax.tree.map(lambda p: p.reshape(-1, token_chunk, *p.shape[1:]), parts)
    return lax.map(chunk, parts).reshape(x.shape)


def _exchange_and_compute(w, x, expert_ids, combine_weights, region, kernels):
    m, a = expert_ids.shape
    local = w["gate"].shape[0]
    shards, cut = region.expert, region.live(("tensor",))
    kernel = (
        dispatch.platform() in dispatch.OF_PLATFORM
    )  # reads none but the experts that have rows
    if shards == 1 and not kernel and m * a <= FETCH_SHARE * local:
        return _combine(fetched_swiglu(x, expert_ids, w, cut), combine_weights)
    order, inverse, counts = sort_by_expert(expert_ids.reshape(-1), local * shards)
    rows = permute(x, order // a, inverse.reshape(m, a))
    if shards == 1:
        out = sorted_swiglu(rows, counts, w, kernels=kernels, cut=cut)
    else:
        plan = _plan(counts, shards, local)
        received = _exchange(rows, shards * m * min(a, local), plan)
        sizes, regroup, back = _regroup(plan["received_counts"], received.shape[0])
        mine = permute(received, regroup, back[:, None])
        done = sorted_swiglu(mine, sizes, w, expected_rows=m * a, kernels=kernels, cut=cut)
        returned = permute(done, back, regroup[:, None])
        out = _exchange(returned, m * a, _reversed(plan))
    out = permute(out, inverse, order[:, None]).reshape(m, a, -1)
    return _combine(out, combine_weights)


def _combine(out, weights):
    return jnp.einsum("mad,ma->md", out, weights.astype(out.dtype))


def sort_by_expert(expert_ids, num_experts: int):
    """(order, its inverse, rows per expert), stable, of int32[m] ids."""
    order = jnp.argsort(expert_ids, stable=True).astype(jnp.int32)
    counts = jnp.sum(jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.int32), axis=0)
    return order, invert(order), counts


def invert(order):
    """Inverse of a permutation int32[m]."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))


@jax.custom_vjp
def permute(x, source, targets):
    """x[source] for x [m d], source int32[n]; targets int32[m g] lists the n rows that read each row.

    The gradient gathers by targets: a scatter-add would be serial on CPU and unordered on GPU.
    """
    return jnp.take(x, source, axis=0, mode="clip")


def _permute_backward(targets, dy):
    return jnp.take(dy, targets, axis=0, mode="clip").sum(1).astype(dy.dtype), None, None


permute.defvjp(lambda x, source, targets: (permute(x, source, targets), targets), _permute_backward)


def _plan(counts, shards: int, local: int):
    """Offsets and sizes of the exchange, as `lax.ragged_all_to_all` wants them."""
    everyone = lax.all_gather(counts, "expert").reshape(shards, shards, local)
    sent = everyone.sum(-1)  # [from, to]
    me = lax.axis_index("expert")
    before_in_source = jnp.cumsum(sent, axis=1) - sent
    before_in_target = jnp.cumsum(sent, axis=0) - sent
    return {
        "input_offsets": before_in_source[me],
        "send_sizes": sent[me],
        "output_offsets": before_in_target[me],
        "recv_sizes": sent[:, me],
        "back_offsets": before_in_source[:, me],
        "recv_offsets": before_in_target[:, me],
        "received_counts": everyone[:, me],  # [from, my expert]
    }


def _reversed(plan):
    return {
        "input_offsets": plan["recv_offsets"],
        "send_sizes": plan["recv_sizes"],
        "output_offsets": plan["back_offsets"],
        "recv_sizes": plan["send_sizes"],
    }


def _regroup(received_counts, rows: int):
    """From chunks by sender to rows by expert: (rows per expert, order, its inverse)."""
    shards, local = received_counts.shape
    ends = jnp.cumsum(received_counts.reshape(-1))
    chunk = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    expert = jnp.where(chunk < shards * local, chunk % local, local)  # empty rows last
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    return received_counts.sum(0), order, invert(order)


def _exchange(x, out_rows: int, plan):
    out = jnp.zeros((out_rows, x.shape[1]), x.dtype)
    args = [
        plan[k].astype(jnp.int32)
        for k in ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
    ]
    return lax.platform_dependent(
        x,
        out,
        *args,
        cpu=functools.partial(dense_exchange, axis_name="expert"),
        default=functools.partial(lax.ragged_all_to_all, axis_name="expert"),
    )


def dense_exchange(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`lax.ragged_all_to_all` for platforms without it: same arguments, same result.

    Every chunk travels in as many rows as the longest possible one has.
    """
    del send_sizes  # what is sent beyond them, the receiver drops
    row = jnp.arange(min(operand.shape[0], output.shape[0]))[None]
    chunks = jnp.take(operand, input_offsets[:, None] + row, axis=0, mode="clip")  # [to, row, d]
    chunks = lax.all_to_all(chunks, axis_name, 0, 0)  # [from, row, d]
    starts = lax.all_to_all(output_offsets, axis_name, 0, 0)
    target = jnp.where(row < recv_sizes[:, None], starts[:, None] + row, output.shape[0])
    return output.at[target].set(chunks, mode="drop")
