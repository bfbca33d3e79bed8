"""Rows that go from each device to each, among all or within groups, and the way back of their gradient."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.ragged_all_to_all import (
    Peers,
    dense_exchange,
    plan_route,
    ragged_all_to_all,
    two_levels,
)

DEVICES, WIDTH, ROWS, ROOM = 8, 5, 24, 40
PEERS = {
    "all": Peers(("expert",), DEVICES),
    "across": two_levels("expert", DEVICES, 2)[0],
    "inside": two_levels("expert", DEVICES, 2)[1],
    "across four": two_levels("expert", DEVICES, 4)[0],
}


def members(peers):
    return peers.groups or (tuple(range(DEVICES)),)


def reference_ragged_all_to_all(operands, outputs, plans):
    """What `lax.ragged_all_to_all` documents, on lists with one entry per device."""
    results = [out.copy() for out in outputs]
    for sender, own in enumerate(plans):
        for receiver in range(len(plans)):
            size = own["send_sizes"][receiver]
            assert size == plans[receiver]["recv_sizes"][sender]
            source = own["input_offsets"][receiver]
            target = own["output_offsets"][receiver]
            results[receiver][target : target + size] = operands[sender][source : source + size]
    return results


def in_groups(peers, operands, outputs, plans):
    """The same where only the devices of a group exchange anything."""
    results = [None] * DEVICES
    for group in members(peers):
        own = reference_ragged_all_to_all(
            *([values[i] for i in group] for values in (operands, outputs, plans))
        )
        for device, result in zip(group, own):
            results[device] = result
    return np.concatenate(results)


def random_plans(sizes, draw):
    """Offsets that leave gaps on both sides, for sizes [from, to]."""
    plans = [{"send_sizes": sizes[i], "recv_sizes": sizes[:, i]} for i in range(len(sizes))]
    for name, room, per_device in (
        ("input_offsets", ROWS, sizes),
        ("output_offsets", ROOM, sizes.T),
    ):
        offsets = np.zeros_like(sizes)
        for device, chunks in enumerate(per_device):
            gap = draw.integers(0, room - chunks.sum() + 1)
            order = draw.permutation(len(chunks))
            offsets[device, order] = gap + np.cumsum(chunks[order]) - chunks[order]
        if name == "output_offsets":
            offsets = offsets.T
        for own, found in zip(plans, offsets):
            own[name] = found
    return plans


def on_devices(function):
    """The compiled function on each device's part of arrays that are cut along their first dimension."""
    mesh, cut = make_mesh(expert=DEVICES), P("expert")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))


def sizes_of(kind, draw, count):
    sizes = draw.integers(0, ROWS // count + 1, (count, count))
    if kind == "one receiver":
        sizes[:] = 0
        sizes[:, -1] = ROOM // count  # fills its buffer to the last row
    elif kind == "nothing":
        sizes[:] = 0
    return sizes


@pytest.mark.parametrize("among", PEERS)
def test_dense_exchange_does_what_ragged_all_to_all_documents(among):
    peers = PEERS[among]
    run = on_devices(
        lambda *args: dense_exchange(*args, axis_name="expert", axis_index_groups=peers.groups)
    )
    for kind in ("mixed", "one receiver", "nothing"):
        draw, plans = np.random.default_rng(0), [None] * DEVICES
        for group in members(peers):
            for device, own in zip(group, random_plans(sizes_of(kind, draw, peers.size), draw)):
                plans[device] = own
        operands = [draw.standard_normal((ROWS, WIDTH), np.float32) for _ in plans]
        outputs = [draw.standard_normal((ROOM, WIDTH), np.float32) for _ in plans]
        names = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
        stacked = [np.concatenate([own[n] for own in plans]).astype(np.int32) for n in names]
        got = run(np.concatenate(operands), np.concatenate(outputs), *stacked)
        want = in_groups(peers, operands, outputs, plans)
        np.testing.assert_array_equal(got, want, err_msg=kind)


def test_dense_exchange_takes_the_arguments_of_the_ragged_one():
    ragged = list(inspect.signature(lax.ragged_all_to_all).parameters)
    assert list(inspect.signature(dense_exchange).parameters) == ragged[:8]


@pytest.mark.parametrize("among", PEERS)
def test_rows_arrive_in_the_order_of_their_senders_and_gradients_go_back(among):
    draw, peers = np.random.default_rng(1), PEERS[among]
    count = peers.size
    counts = draw.integers(0, ROWS // count // 2 + 1, (DEVICES, count, 2))
    x = draw.standard_normal((DEVICES, ROWS, WIDTH), np.float32)
    pull = draw.standard_normal((DEVICES, ROOM, WIDTH), np.float32)
    want, back = np.zeros_like(pull), np.zeros_like(x)
    want_counts = np.zeros_like(counts)
    for group in members(peers):
        for to, receiver in enumerate(group):
            end = 0
            for of, sender in enumerate(group):
                size = counts[sender, to].sum()
                start = counts[sender, :to].sum()
                want[receiver, end : end + size] = x[sender, start : start + size]
                back[sender, start : start + size] = pull[receiver, end : end + size]
                want_counts[receiver, of] = counts[sender, to]
                end += size

    def send(x, counts, pull):
        route, received = plan_route(counts, peers)
        got, transpose = jax.vjp(lambda x: ragged_all_to_all(x, ROOM, route, peers), x)
        return got, transpose(pull)[0], received

    flat = (a.reshape(-1, *a.shape[2:]) for a in (x, counts.astype(np.int32), pull))
    got, gradient, received = on_devices(send)(*flat)
    np.testing.assert_array_equal(got, want.reshape(-1, WIDTH))
    np.testing.assert_array_equal(gradient, back.reshape(-1, WIDTH))
    np.testing.assert_array_equal(received, want_counts.reshape(-1, 2))


def test_two_levels_are_positions_across_slices_and_the_devices_of_one():
    across, inside = two_levels("expert", 8, 2)
    assert across.groups == ((0, 4), (1, 5), (2, 6), (3, 7)) and across.size == 2
    assert inside.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and inside.size == 4
    places = on_devices(lambda _: jnp.stack([across.index(), inside.index()])[None])(np.zeros(8))
    np.testing.assert_array_equal(places, [[i // 4, i % 4] for i in range(8)])
    for slices in (3, 0):
        with pytest.raises(
            ValueError, match=f"{slices} slices do not divide the mesh axis expert=8"
        ):
            two_levels("expert", 8, slices)
