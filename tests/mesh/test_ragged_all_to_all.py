"""Tests of the ragged exchange of rows between all devices or within groups, and of its gradient."""

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

DEVICES, WIDTH, ROWS, CAPACITY = 8, 5, 24, 40
PEERS = {
    "all": Peers(("expert",), DEVICES),
    "across": two_levels("expert", DEVICES, 2)[0],
    "inside": two_levels("expert", DEVICES, 2)[1],
    "across four": two_levels("expert", DEVICES, 4)[0],
}


def members(peers):
    return peers.groups or (tuple(range(DEVICES)),)


def reference_ragged_all_to_all(operands, outputs, plans):
    """Implements the documentation of `lax.ragged_all_to_all` on lists with one entry per device."""
    results = [out.copy() for out in outputs]
    for sender, plan in enumerate(plans):
        for receiver in range(len(plans)):
            size = plan["send_sizes"][receiver]
            assert size == plans[receiver]["recv_sizes"][sender]
            source = plan["input_offsets"][receiver]
            target = plan["output_offsets"][receiver]
            results[receiver][target : target + size] = operands[sender][source : source + size]
    return results


def reference_in_groups(peers, operands, outputs, plans):
    """Applies the reference within each group of devices."""
    results = [None] * DEVICES
    for group in members(peers):
        group_results = reference_ragged_all_to_all(
            *([values[i] for i in group] for values in (operands, outputs, plans))
        )
        for device, result in zip(group, group_results):
            results[device] = result
    return np.concatenate(results)


def random_plans(sizes, draw):
    """Returns plans with random offsets and gaps for sizes [sender, receiver]."""
    plans = [{"send_sizes": sizes[i], "recv_sizes": sizes[:, i]} for i in range(len(sizes))]
    for name, capacity, per_device in (
        ("input_offsets", ROWS, sizes),
        ("output_offsets", CAPACITY, sizes.T),
    ):
        offsets = np.zeros_like(sizes)
        for device, chunks in enumerate(per_device):
            gap = draw.integers(0, capacity - chunks.sum() + 1)
            order = draw.permutation(len(chunks))
            offsets[device, order] = gap + np.cumsum(chunks[order]) - chunks[order]
        if name == "output_offsets":
            offsets = offsets.T
        for plan, offset in zip(plans, offsets):
            plan[name] = offset
    return plans


def on_devices(function):
    """Compiles a function of each device's shard of arrays that are sharded along their first dimension."""
    mesh, cut = make_mesh(expert=DEVICES), P("expert")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))


def sizes_of(kind, draw, count):
    sizes = draw.integers(0, ROWS // count + 1, (count, count))
    if kind == "one receiver":
        sizes[:] = 0
        sizes[:, -1] = CAPACITY // count  # fills its buffer to the last row
    elif kind == "nothing":
        sizes[:] = 0
    return sizes


@pytest.mark.parametrize("among", PEERS)
def test_dense_exchange_equals_documented_ragged_all_to_all(among):
    peers = PEERS[among]
    run = on_devices(
        lambda *args: dense_exchange(*args, axis_name="expert", axis_index_groups=peers.groups)
    )
    for kind in ("mixed", "one receiver", "nothing"):
        draw, plans = np.random.default_rng(0), [None] * DEVICES
        for group in members(peers):
            for device, plan in zip(group, random_plans(sizes_of(kind, draw, peers.size), draw)):
                plans[device] = plan
        operands = [draw.standard_normal((ROWS, WIDTH), np.float32) for _ in plans]
        outputs = [draw.standard_normal((CAPACITY, WIDTH), np.float32) for _ in plans]
        names = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
        stacked = [np.concatenate([plan[n] for plan in plans]).astype(np.int32) for n in names]
        got = run(np.concatenate(operands), np.concatenate(outputs), *stacked)
        want = reference_in_groups(peers, operands, outputs, plans)
        np.testing.assert_array_equal(got, want, err_msg=kind)


def test_dense_exchange_has_signature_of_ragged_all_to_all():
    ragged = list(inspect.signature(lax.ragged_all_to_all).parameters)
    assert list(inspect.signature(dense_exchange).parameters) == ragged[:8]


@pytest.mark.parametrize("among", PEERS)
def test_exchanges_rows_in_sender_order_with_gradients(among):
    draw, peers = np.random.default_rng(1), PEERS[among]
    count = peers.size
    counts = draw.integers(0, ROWS // count // 2 + 1, (DEVICES, count, 2))
    x = draw.standard_normal((DEVICES, ROWS, WIDTH), np.float32)
    pull = draw.standard_normal((DEVICES, CAPACITY, WIDTH), np.float32)
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
        got, transpose = jax.vjp(lambda x: ragged_all_to_all(x, CAPACITY, route, peers), x)
        return got, transpose(pull)[0], received

    flat = (a.reshape(-1, *a.shape[2:]) for a in (x, counts.astype(np.int32), pull))
    got, gradient, received = on_devices(send)(*flat)
    np.testing.assert_array_equal(got, want.reshape(-1, WIDTH))
    np.testing.assert_array_equal(gradient, back.reshape(-1, WIDTH))
    np.testing.assert_array_equal(received, want_counts.reshape(-1, 2))


def test_two_levels_group_across_and_inside_slices():
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
