"""Rows that go from each device to each, as many as there are: `lax.ragged_all_to_all`, and its twin on CPU.

A device's rows for one peer lie together, a chunk. Who sends how much is known at run time alone, so what may arrive
has room for the worst case, and nothing is ever left out.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Peers:
    """Devices that exchange rows: the `size` ones along mesh axes, or, of more devices, those of a group.

    groups: their positions along the axes (the first axis slowest), each group of `size`; None: all are one.
    """

    axes: tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...] | None = None

    def index(self):
        """Position of this device among its peers."""
        position = lax.axis_index(self.axes)
        if self.groups is None:
            return position
        places = np.zeros(np.size(self.groups), np.int32)
        for group in self.groups:
            places[list(group)] = range(self.size)
        return jnp.asarray(places)[position]


def two_levels(axis: str, size: int, slices: int) -> tuple[Peers, Peers]:
    """(across, inside) of a mesh axis whose `size` devices are that many slices, one after another: the devices at one
    position of all slices, and those of one slice. ValueError if they do not divide."""
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
    """int32[peers] each. starts, sizes: of a peer's chunk among this device's rows; theirs: its start among the peer's."""

    starts: jax.Array
    sizes: jax.Array
    theirs: jax.Array


class Route(NamedTuple):
    """What this device sends to each peer, and what it receives; back, the two change places."""

    sent: Chunks
    received: Chunks

    @property
    def back(self) -> "Route":
        return Route(self.received, self.sent)


def plan(counts, peers: Peers) -> tuple[Route, jax.Array]:
    """(Route, received int32[peers k]) of counts int32[peers k]: this device's rows for each peer, of k kinds.

    Rows lie in the order of peers, at the sender and at the receiver.
    """
    everyone = lax.all_gather(counts, peers.axes, axis_index_groups=peers.groups)
    return route_of(everyone.sum(-1), peers), everyone[:, peers.index()]


def route_of(sizes, peers: Peers) -> Route:
    """The Route of `plan` where all peers know what each sends to each, [from to]."""
    me = peers.index()
    in_source = jnp.cumsum(sizes, axis=1) - sizes
    in_target = jnp.cumsum(sizes, axis=0) - sizes
    sent = Chunks(in_source[me], sizes[me], in_target[me])
    received = Chunks(in_target[:, me], sizes[:, me], in_source[:, me])
    return jax.tree.map(lambda x: x.astype(jnp.int32), Route(sent, received))


def exchange(x, rows: int, route: Route, peers: Peers):
    """[rows d]: what peers send of their x [m d], zeros elsewhere. The gradient goes the way back."""
    return _exchange(rows, x.shape[0], peers, x, route)


# Of groups, lax's own gradient of `ragged_all_to_all` forgets (jax 0.10, 0.11), and it asks the peers for offsets
# that are known here.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchange(rows, own_rows, peers, x, route):
    del own_rows
    sent, received = route
    # Zeros that are known beforehand XLA:GPU writes for all layers at once, where they are not in a loop.
    zero = (jnp.sum(received.sizes) < 0).astype(x.dtype)
    out = jnp.broadcast_to(zero, (rows, *x.shape[1:]))
    named = {"axis_name": peers.axes, "axis_index_groups": peers.groups}
    return lax.platform_dependent(
        x,
        out,
        sent.starts,
        sent.sizes,
        sent.theirs,
        received.sizes,
        cpu=functools.partial(dense_exchange, **named),
        default=functools.partial(lax.ragged_all_to_all, **named),
    )


def _backward(rows, own_rows, peers, route, dy):
    return _exchange(own_rows, rows, peers, dy, route.back), None


_exchange.defvjp(lambda *args: (_exchange(*args), args[-1]), _backward)


def dense_exchange(
    operand,
    output,
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    *,
    axis_name,
    axis_index_groups=None,
):
    """`lax.ragged_all_to_all` for platforms without it: same arguments, same result.

    Every chunk travels in as many rows as the longest possible one has.
    """
    del send_sizes  # what is sent beyond them, the receiver drops
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
