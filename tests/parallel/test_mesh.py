"""Tests of meshes, which have five axes and use all devices, and of regions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.parallel.mesh import (
    AXES,
    Region,
    device_grid,
    disjoint_parts,
    make_mesh,
    resolve,
    row_group,
)


def test_missing_axes_have_size_one():
    mesh = make_mesh(fsdp=2, expert=4)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 1}
    assert make_mesh({"fsdp": 2, "expert": 4}) == mesh
    one = make_mesh(devices=jax.devices()[:1])
    assert tuple(one.shape) == AXES and one.size == 1


def test_minus_one_takes_remaining_devices():
    assert resolve({"expert": 4, "fsdp": -1}, 64) == (1, 16, 4, 1, 1)
    assert resolve({"data": -1}, 1) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    "axes,message",
    [
        (dict(fsdp=3), "mesh fsdp=3 does not divide the 8 devices; the axes must multiply to 8"),
        (dict(), "mesh all 1 does not divide the 8 devices"),
        (dict(fsdp=16), "multiply to 8"),
        (dict(fsdp=-1, data=-1), "at most one may be -1"),
        (dict(fsdp=0), "sizes must be >= 1"),
        (dict(fsdp=-1, expert=3), "does not divide the 8 devices"),
        (dict(model=8), "unknown mesh axis .'model'.; the axes are data, fsdp"),
    ],
)
def test_rejects_invalid_mesh(axes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(axes, devices=jax.devices()[:8])


def test_region_of_one_device_changes_nothing():
    region, x = Region(), jnp.arange(6.0).reshape(2, 3)
    assert region.nontrivial_axes(AXES) == () and region.size(AXES) == 1 and region.index(AXES) == 0
    for y in (
        region.all_gather(x, AXES, 0),
        region.gather_sequence(x),
        region.psum_scatter(x, AXES, 1),
        region.psum(x, AXES),
        region.pmax(x, AXES),
    ):
        assert y is x


def test_region_lists_token_axes():
    region = Region.of(make_mesh(data=2, context=2, tensor=2))
    assert region.token_axes == ("data", "context", "tensor")
    assert region.sequence_axes == ("context", "tensor")
    unsharded = Region.of(make_mesh(data=2, context=2, tensor=2), shard_sequence=False)
    assert unsharded.token_axes == ("data",) and unsharded.sequence_axes == ()


def test_assigns_rows_to_processes():
    assert row_group(make_mesh(data=4, context=2)) == (0, 1)
    assert disjoint_parts([{2, 3}, {1, 0}], 4) == [[0, 1], [2, 3]]
    # Processes that share a row have the same part.
    assert disjoint_parts([{0}, {0}, {1}, {1}], 2) == [[0], [1]]


@pytest.mark.parametrize(
    "rows_of_processes",
    [[{0, 1}, {1, 2}], [{0}, {1, 2}], [{0}, {1}]],
    ids=["overlap", "unequal", "missing"],
)
def test_rejects_rows_that_do_not_partition_batch(rows_of_processes):
    assert disjoint_parts(rows_of_processes, 3) is None


def test_expert_slices_are_outermost():
    """A slice of 8 of 16 devices holds the same half of the expert axis at all other coordinates."""
    sizes, devices = (1, 2, 4, 2, 1), list(range(16))
    plain, two = (device_grid(devices, sizes, slices)[0, ..., 0] for slices in (1, 2))
    np.testing.assert_array_equal(plain.reshape(-1), devices)
    np.testing.assert_array_equal(two // 8, np.broadcast_to([[0], [0], [1], [1]], (2, 4, 2)))
    np.testing.assert_array_equal(two[0, :2], [[0, 2], [1, 3]])
    assert make_mesh(fsdp=2, expert=4, expert_slices=2).devices[0, 1, 0, 0, 0] == jax.devices()[2]
    with pytest.raises(ValueError, match="expert_slices 3 does not divide the mesh axis expert=4"):
        make_mesh(fsdp=2, expert=4, expert_slices=3)
