"""Expert dispatch: sorts tokens by expert, exchanges them over `expert`, computes, and sends results back.

One path serves every mesh (parallel/ragged_all_to_all.py). Receive buffers hold the worst case, so no token is dropped;
`token_chunk` bounds them.

The devices of `expert` may form several slices that are connected by a slow network. A token then crosses
to each slice once, even if several of its experts are there. It goes to the device at the sender's position
in that slice. That device dispatches it inside the slice, as is otherwise done over the whole axis, and sends
one sum back.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from glm5_jax.model.experts import FETCH_SHARE, fetched_swiglu, sorted_swiglu
from glm5_jax.parallel.mesh import Region
from glm5_jax.parallel.ragged_all_to_all import (
    Peers,
    plan_route,
    ragged_all_to_all,
    route_of,
    two_levels,
)
from pallas_kernels import backends


@jax.named_scope("experts")
def routed_experts(
    w: PyTree,
    x: Float[Array, "m d"],
    expert_ids: Int[Array, "m a"],
    combine_weights: Float[Array, "m a"],
    region: Region,
    token_chunk: int | None = None,
    kernels: str | backends.Implementation = "auto",
    slices: int = 1,
) -> Float[Array, "m d"]:
    """Returns sum_a combine_weights * expert(x) for every token.

    Args:
      w: this device's shard of the expert stacks.
      expert_ids: experts of each token. Padding has ids after the last expert: it is not sent, and its
        result is finite.
      token_chunk: maximum tokens that are sent at a time, in parts of equal size; None: all.
      kernels: see `pallas_kernels.backends.select_backend`.
      slices: number of consecutive slices of the axis `expert`; must divide its size.
    """

    rows, parts = x.shape[0], (x, expert_ids, combine_weights)
    sum_axes = region.nontrivial_axes(("tensor",))
    across, inside = two_levels("expert", region.expert, slices)

    def compute(args):
        x, expert_ids, combine_weights = args
        tokens = (x, expert_ids, combine_weights)
        if slices == 1:
            peers = Peers(("expert",), region.expert)
            return _exchange_and_compute(w, *tokens, peers, kernels, sum_axes)
        return _dispatch_by_slice(w, *tokens, across, inside, kernels, sum_axes)

    if token_chunk is None or token_chunk >= rows:
        return compute(parts)
    count = -(-rows // token_chunk)
    if rows % count:
        no_expert = w["gate"].shape[0] * region.expert  # after the last expert
        fill, values = (0, -rows % count), (0, no_expert, 0)
        parts = [
            jnp.pad(part, (fill, (0, 0)), constant_values=value)
            for part, value in zip(parts, values)
        ]
    parts = jax.tree.map(lambda p: p.reshape(count, -1, *p.shape[1:]), tuple(parts))
    return lax.map(jax.checkpoint(compute), parts).reshape(-1, x.shape[1])[:rows]


def _dispatch_by_slice(
    w, x, expert_ids, combine_weights, across: Peers, inside: Peers, kernels, sum_axes
):
    """Runs `routed_experts` so that a token crosses once to each slice with experts of it.

    across: the devices at the same position of each slice; inside: the devices of this slice.
    """
    (m, a), me = expert_ids.shape, across.index()
    slices, slice_experts = across.size, w["gate"].shape[0] * inside.size

    # Cross between slices: ids and weights to all of them, rows to those that need them.
    def gathered(v):
        # Flat, because rows of so few numbers would be mostly padding.
        flat = lax.all_gather(
            v.reshape(-1), across.axes, axis_index_groups=across.groups, tiled=True
        )
        return flat.reshape(slices * m, a)

    ids, weights = gathered(expert_ids), gathered(combine_weights)
    wanted = slices_of(ids, slice_experts, slices)
    route = route_of(wanted.reshape(slices, m, slices).sum(1), across)
    copies = jnp.where(slices_of(expert_ids, slice_experts, slices), jnp.arange(slices), slices)
    order, inverse, _ = sort_by_expert(copies.reshape(-1), slices)
    rows = permute(x, order // slices, inverse.reshape(m, slices))
    received = ragged_all_to_all(rows, slices * m, route, across)
    # Dispatch inside the slice. Received tokens come first, in the order of their senders; the others have
    # no expert in this slice.
    arrived = jnp.argsort(~jnp.take(wanted, me, axis=1), stable=True).astype(jnp.int32)
    ids = ids[arrived] - me * slice_experts
    weights = permute(weights, arrived, invert(arrived)[:, None])
    is_local = (ids >= 0) & (ids < slice_experts)
    ids, weights = jnp.where(is_local, ids, slice_experts), jnp.where(is_local, weights, 0)
    sums = _exchange_and_compute(
        w, received, ids, weights, inside, kernels, sum_axes, expected_rows=m * a
    )
    # Send one sum per token and slice back.
    returned = ragged_all_to_all(sums, slices * m, route.back, across)
    return permute(returned, inverse, order[:, None]).reshape(m, slices, -1).sum(1)


def slices_of(
    expert_ids: Int[Array, "m a"], slice_experts: int, slices: int
) -> Bool[Array, "m slices"]:
    """Marks the slices that hold at least one expert of each token, with slice_experts experts each."""
    return ((expert_ids // slice_experts)[..., None] == jnp.arange(slices)).any(1)


def crossing_share(num_experts: int, chosen: int, slices: int) -> float:
    """Returns the share of tokens with experts in one given slice, if all choices are equally likely."""
    elsewhere = num_experts - num_experts // slices
    return 1 - math.comb(elsewhere, chosen) / math.comb(num_experts, chosen)


def _exchange_and_compute(
    w,
    x,
    expert_ids,
    combine_weights,
    peers: Peers,
    kernels,
    sum_axes,
    expected_rows: int | None = None,
):
    """Runs `routed_experts` with experts spread over peers.

    expected_rows: rows that a device is expected to receive; None: m * a.
    """
    m, a = expert_ids.shape
    local, expected_rows = w["gate"].shape[0], expected_rows or m * a
    kernel = (
        backends.platform() in backends.BACKEND_OF_PLATFORM
    )  # reads none but the experts that have rows
    if peers.size == 1 and not kernel and m * a <= FETCH_SHARE * local:
        return _combine(fetched_swiglu(x, expert_ids, w, sum_axes), combine_weights)
    order, inverse, counts = sort_by_expert(expert_ids.reshape(-1), local * peers.size)
    rows = permute(x, order // a, inverse.reshape(m, a))
    if peers.size == 1:
        out = sorted_swiglu(
            rows, counts, w, expected_rows=expected_rows, kernels=kernels, sum_axes=sum_axes
        )
    else:
        route, received_counts = plan_route(counts.reshape(peers.size, local), peers)
        received = ragged_all_to_all(rows, peers.size * m * min(a, local), route, peers)
        sizes, regroup, back = _regroup(received_counts, received.shape[0])
        local_rows = permute(received, regroup, back[:, None])
        results = sorted_swiglu(
            local_rows, sizes, w, expected_rows=expected_rows, kernels=kernels, sum_axes=sum_axes
        )
        returned = permute(results, back, regroup[:, None])
        out = ragged_all_to_all(returned, m * a, route.back, peers)
    out = permute(out, inverse, order[:, None]).reshape(m, a, -1)
    return _combine(out, combine_weights)


def _combine(out, weights):
    return jnp.einsum("mad,ma->md", out, weights.astype(out.dtype))


def sort_by_expert(
    expert_ids: Int[Array, " m"], num_experts: int
) -> tuple[Int[Array, " m"], Int[Array, " m"], Int[Array, " e"]]:
    """Sorts tokens by expert, stably; returns (order, inverse order, rows per expert)."""
    order = jnp.argsort(expert_ids, stable=True).astype(jnp.int32)
    counts = jnp.sum(jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.int32), axis=0)
    return order, invert(order), counts


def invert(order: Int[Array, " m"]) -> Int[Array, " m"]:
    """Returns the inverse of a permutation."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))


@jax.custom_vjp
def permute(
    x: Shaped[Array, "m d"], source: Int[Array, " n"], targets: Int[Array, "m g"]
) -> Shaped[Array, "n d"]:
    """Returns x[source]. targets lists the rows of the result that read each row of x.

    The gradient gathers by targets: a scatter-add would be serial on CPU and unordered on GPU.
    """
    return jnp.take(x, source, axis=0, mode="clip")


def _permute_backward(targets, dy):
    return jnp.take(dy, targets, axis=0, mode="clip").sum(1).astype(dy.dtype), None, None


permute.defvjp(lambda x, source, targets: (permute(x, source, targets), targets), _permute_backward)


def _regroup(received_counts, rows: int):
    """Returns (rows per expert, order, inverse order) that turn chunks by sender into rows by expert."""
    shards, local = received_counts.shape
    ends = jnp.cumsum(received_counts.reshape(-1))
    chunk = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    expert = jnp.where(chunk < shards * local, chunk % local, local)  # empty rows last
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    return received_counts.sum(0), order, invert(order)
