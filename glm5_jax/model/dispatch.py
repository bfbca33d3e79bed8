"""Tokens to experts and back: sort by expert, exchange over `expert`, compute, exchange back.

One path for every mesh (core/exchange.py). Receive buffers hold the worst case, so no token is ever
dropped; `token_chunk` bounds them. Where the devices of `expert` are several slices far from each other, a
token crosses to each of them once, however many of its experts are there: it goes to the device at its own
position of the slice, which does for the slice what is done for the whole axis otherwise, and sends one sum back.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.core.exchange import Peers, exchange, plan, route_of, two_levels
from glm5_jax.model.experts import FETCH_SHARE, fetched_swiglu, sorted_swiglu
from pallas_kernels import dispatch


@jax.named_scope("experts")
def routed_experts(
    w,
    x,
    expert_ids,
    combine_weights,
    region,
    token_chunk: int | None = None,
    kernels="auto",
    slices: int = 1,
):
    """sum_a combine_weights * expert(x) for tokens x [m d], expert_ids int32[m a] -> [m d].

    w holds this device's slice of the expert stacks. A token that is none has ids beyond the last expert: it is
    not sent, and what comes back for it is finite. token_chunk tokens at most (default: all) travel at a
    time, in parts of one size. kernels: see `pallas_kernels.dispatch.choose`. slices: of the axis `expert`, one after
    another; must divide it.
    """

    def compute(args):
        if slices == 1:
            everyone = Peers(("expert",), region.expert)
            return _exchange_and_compute(w, *args, everyone, kernels, cut)
        return _by_slice(w, *args, *levels, kernels, cut)

    rows, parts, cut = x.shape[0], (x, expert_ids, combine_weights), region.live(("tensor",))
    levels = two_levels("expert", region.expert, slices)
    if token_chunk is None or token_chunk >= rows:
        return compute(parts)
    count = -(-rows // token_chunk)
    if rows % count:
        none = w["gate"].shape[0] * region.expert  # behind the last expert
        fill, values = (0, -rows % count), (0, none, 0)
        parts = [
            jnp.pad(part, (fill, (0, 0)), constant_values=value)
            for part, value in zip(parts, values)
        ]
    parts = jax.tree.map(lambda p: p.reshape(count, -1, *p.shape[1:]), tuple(parts))
    return lax.map(jax.checkpoint(compute), parts).reshape(-1, x.shape[1])[:rows]


def _by_slice(w, x, expert_ids, combine_weights, across: Peers, inside: Peers, kernels, cut):
    """`routed_experts` where a token crosses once to each slice that has experts of it, and one sum comes back."""
    (m, a), me = expert_ids.shape, across.index()
    slices, own = across.size, w["gate"].shape[0] * inside.size  # experts of a slice

    def gathered(v):
        # Flat: beside a token's row, which this saves, a row of so few numbers would be mostly padding.
        flat = lax.all_gather(
            v.reshape(-1), across.axes, axis_index_groups=across.groups, tiled=True
        )
        return flat.reshape(slices * m, a)

    ids, weights = gathered(expert_ids), gathered(combine_weights)
    wanted = slices_of(ids, own, slices)
    route = route_of(wanted.reshape(slices, m, slices).sum(1), across)
    copies = jnp.where(slices_of(expert_ids, own, slices), jnp.arange(slices), slices)
    order, inverse, _ = sort_by_expert(copies.reshape(-1), slices)
    rows = permute(x, order // slices, inverse.reshape(m, slices))
    received = exchange(rows, slices * m, route, across)
    # Those that are received, in the order of their senders; the rest has no expert here.
    arrived = jnp.argsort(~jnp.take(wanted, me, axis=1), stable=True).astype(jnp.int32)
    ids = ids[arrived] - me * own
    weights = permute(weights, arrived, invert(arrived)[:, None])
    mine = (ids >= 0) & (ids < own)
    ids, weights = jnp.where(mine, ids, own), jnp.where(mine, weights, 0)
    sums = _exchange_and_compute(
        w, received, ids, weights, inside, kernels, cut, expected_rows=m * a
    )
    returned = exchange(sums, slices * m, route.back, across)
    return permute(returned, inverse, order[:, None]).reshape(m, slices, -1).sum(1)


def slices_of(expert_ids, own: int, slices: int):
    """bool[m slices]: which slices of `own` experts each have some of int32[m a]."""
    return ((expert_ids // own)[..., None] == jnp.arange(slices)).any(1)


def crossing_share(num_experts: int, chosen: int, slices: int) -> float:
    """Of all tokens, those that have some of their experts in a given slice, if every choice is as likely."""
    elsewhere = num_experts - num_experts // slices
    return 1 - math.comb(elsewhere, chosen) / math.comb(num_experts, chosen)


def _exchange_and_compute(
    w, x, expert_ids, combine_weights, peers: Peers, kernels, cut, expected_rows: int | None = None
):
    """`routed_experts` of experts that peers have; expected_rows (default m * a): likely to reach a device."""
    m, a = expert_ids.shape
    local, expected_rows = w["gate"].shape[0], expected_rows or m * a
    kernel = (
        dispatch.platform() in dispatch.OF_PLATFORM
    )  # reads none but the experts that have rows
    if peers.size == 1 and not kernel and m * a <= FETCH_SHARE * local:
        return _combine(fetched_swiglu(x, expert_ids, w, cut), combine_weights)
    order, inverse, counts = sort_by_expert(expert_ids.reshape(-1), local * peers.size)
    rows = permute(x, order // a, inverse.reshape(m, a))
    if peers.size == 1:
        out = sorted_swiglu(rows, counts, w, expected_rows=expected_rows, kernels=kernels, cut=cut)
    else:
        route, received_counts = plan(counts.reshape(peers.size, local), peers)
        received = exchange(rows, peers.size * m * min(a, local), route, peers)
        sizes, regroup, back = _regroup(received_counts, received.shape[0])
        mine = permute(received, regroup, back[:, None])
        done = sorted_swiglu(mine, sizes, w, expected_rows=expected_rows, kernels=kernels, cut=cut)
        returned = permute(done, back, regroup[:, None])
        out = exchange(returned, m * a, route.back, peers)
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


def _regroup(received_counts, rows: int):
    """From chunks by sender to rows by expert: (rows per expert, order, its inverse)."""
    shards, local = received_counts.shape
    ends = jnp.cumsum(received_counts.reshape(-1))
    chunk = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    expert = jnp.where(chunk < shards * local, chunk % local, local)  # empty rows last
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    return received_counts.sum(0), order, invert(order)
