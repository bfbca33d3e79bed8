"""Exchanges rows between devices, in numbers known at run time: `lax.ragged_all_to_all`, and its equivalent on CPU.

A device's rows for one peer are contiguous, a chunk. Since the sizes of chunks are known at run time only, the receive
buffer has room for the worst case, and no row is ever dropped.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.custom_gradients import custom_vjp


@dataclasses.dataclass(frozen=True)
class Peers:
    """Devices that exchange rows: all devices along mesh axes, or those of one group of them.

    Attributes:
      axes: mesh axes.
      size: number of devices that exchange rows.
      groups: positions along the axes (first axis slowest) of each group of `size` devices; None: one group of all.
    """

    axes: tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...] | None = None

    def index(self) -> jax.Array:
        """Returns the position of this device among its peers."""
        position = lax.axis_index(self.axes)
        if self.groups is None:
            return position
        index_in_group = np.zeros(np.size(self.groups), np.int32)
        for group in self.groups:
            index_in_group[list(group)] = range(self.size)
        return jnp.asarray(index_in_group)[position]


def two_levels(axis: str, size: int, slices: int) -> tuple[Peers, Peers]:
    """Returns the `Peers` (across, inside) of a mesh axis whose `size` devices form equal, consecutive slices.

    `across` are the devices at one position of all slices, `inside` those of one slice. Raises ValueError if the
    number of slices does not divide the size.
    """
    if slices < 1 or size % slices:
        raise ValueError(
            f"{slices} slices do not divide the mesh axis {axis}={size}; choose a divisor of it"
        )
    positions = np.arange(size).reshape(slices, -1)
    across, inside = (
        Peers((axis,), groups.shape[1], tuple(map(tuple, groups.tolist())))
        for groups in (positions.T, positions)
    )
    return across, inside


class Chunks(NamedTuple):
    """Chunks of rows, one per peer.

    Attributes:
      starts: start of each peer's chunk in this device's rows, int32[peers].
      sizes: rows of each chunk, int32[peers].
      peer_starts: start of each chunk in the peer's rows, int32[peers].
    """

    starts: jax.Array
    sizes: jax.Array
    peer_starts: jax.Array


class Route(NamedTuple):
    """Chunks that this device sends to each peer and receives from it; `back` swaps the two."""

    sent: Chunks
    received: Chunks

    @property
    def back(self) -> "Route":
        """The route of the way back."""
        return Route(self.received, self.sent)


def plan_route(counts: jax.Array, peers: Peers) -> tuple[Route, jax.Array]:
    """Returns (Route, received int32[peers k]) of counts int32[peers k], this device's rows of k kinds for each peer.

    Sender and receiver both hold the rows in the order of peers.
    """
    everyone = lax.all_gather(counts, peers.axes, axis_index_groups=peers.groups)
    return route_of(everyone.sum(-1), peers), everyone[:, peers.index()]


def route_of(sizes: jax.Array, peers: Peers) -> Route:
    """Returns the Route for sizes [from to], where every peer knows the size of every chunk."""
    me = peers.index()
    in_source = jnp.cumsum(sizes, axis=1) - sizes
    in_target = jnp.cumsum(sizes, axis=0) - sizes
    sent = Chunks(in_source[me], sizes[me], in_target[me])
    received = Chunks(in_target[:, me], sizes[:, me], in_source[:, me])
    return jax.tree.map(lambda x: x.astype(jnp.int32), Route(sent, received))


def ragged_all_to_all(x: jax.Array, rows: int, route: Route, peers: Peers) -> jax.Array:
    """Returns [rows d]: the rows that peers send from their x [m d], zeros elsewhere.

    rows: size of the receive buffer. The gradient is exchanged along `route.back`.
    """
    return _exchange(rows, x.shape[0], peers, x, route)


# The gradient of `lax.ragged_all_to_all` ignores groups (jax 0.10, 0.11) and requests offsets from the peers, which the
# route already holds.
@custom_vjp(3)
def _exchange(rows, num_source_rows, peers, x, route):
    del num_source_rows
    sent, received = route
    # Outside of loops XLA:GPU would write constant zeros for all layers at once, so these depend on the sizes.
    zero = (jnp.sum(received.sizes) < 0).astype(x.dtype)
    out = jnp.broadcast_to(zero, (rows, *x.shape[1:]))
    axis_options = {"axis_name": peers.axes, "axis_index_groups": peers.groups}
    return lax.platform_dependent(
        x,
        out,
        sent.starts,
        sent.sizes,
        sent.peer_starts,
        received.sizes,
        cpu=functools.partial(dense_exchange, **axis_options),
        default=functools.partial(lax.ragged_all_to_all, **axis_options),
    )


def _backward(rows, num_source_rows, peers, route, dy):
    return _exchange(num_source_rows, rows, peers, dy, route.back), None


_exchange.defvjp(lambda *args: (_exchange(*args), args[-1]), _backward)


def dense_exchange(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
    """Computes `lax.ragged_all_to_all` on platforms without it: same arguments, same result.

    Every chunk is padded to the longest possible one.
    """
    del send_sizes  # the receiver drops the padding
    swap = functools.partial(
        lax.all_to_all,
        axis_name=axis_name,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=axis_index_groups,
    )
    row = jnp.arange(min(operand.shape[0], output.shape[0]))[None]
    chunks = jnp.take(operand, input_offsets[:, None] + row, axis=0, mode="clip")  # [to, row, d]
    chunks = swap(chunks)  # [from, row, d]
    target = jnp.where(row < recv_sizes[:, None], swap(output_offsets)[:, None] + row, len(output))
    return output.at[target].set(chunks, mode="drop")
